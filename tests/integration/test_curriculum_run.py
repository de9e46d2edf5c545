"""A curriculum inside a task in whole runs: off it changes nothing, on it resumes bitwise and is recorded."""

import json

import pytest

from multitask_rl.config.run import BatchConfig, EvalConfig
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.trainer import Trainer
from run_builders import lines, run_config, train, undocumented, weights_hash, write_run

PLAIN = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]CURRICULUM}
  digit: {type: grpo, dataset: digit.jsonl, rewards: [rewards.py:starts_right]}
"""

FEW = EvalConfig(every=2, num_prompts=4)


def with_curriculum(text: str) -> str:
    return PLAIN.replace("CURRICULUM", f", curriculum: {text}" if text else "")


def start(directory, text):
    directory.mkdir()
    write_run(directory, with_curriculum(text), num_rows=40)
    return directory


def test_without_a_curriculum_nothing_changes(tmp_path) -> None:
    plain = train(run_config(start(tmp_path / "a", ""), "run", 2, eval=FEW))
    off = train(run_config(start(tmp_path / "b", "{pools: 7}"), "run", 2, eval=FEW))
    assert weights_hash(plain) == weights_hash(off)
    assert lines(tmp_path / "a" / "run", "rollouts.jsonl") == lines(tmp_path / "b" / "run", "rollouts.jsonl")
    assert "pool/" not in (tmp_path / "a" / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("text", ["{by: reference}", "{by: pass_rate, pools: 3, floor: 0.3}"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path, text) -> None:
    directory = start(tmp_path / "a", text)
    whole = train(run_config(directory, "whole", 4, eval=FEW))
    train(run_config(directory, "parts", 2, eval=FEW))
    resumed = train(run_config(directory, "parts", 4, eval=FEW))
    assert weights_hash(resumed) == weights_hash(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl", "events.jsonl"):
        # a resumed run states the scheduler's shares once more
        parts, uninterrupted = (
            [line for line in lines(directory / run, name) if '"initial shares' not in line]
            for run in ("parts", "whole")
        )
        assert parts == uninterrupted
    rows = [json.loads(line) for line in (directory / "whole" / "metrics.jsonl").read_text().splitlines()]
    shares = [{k: v for k, v in row.items() if k.endswith("/share") and "/pool/" in k} for row in rows]
    shares = [found for found in shares if found]
    assert len(shares) == 4
    assert undocumented(directory / "whole") == set()
    assert all(sum(found.values()) == pytest.approx(1.0) for found in shares)


def test_a_step_without_a_group_of_the_task_has_no_number_of_its_pools(tmp_path) -> None:
    directory = start(tmp_path / "a", "{by: reference}")
    batch = BatchConfig(prompts_per_step=1, group_size=4, refill_rounds=0)
    train(run_config(directory, "run", 2, eval=FEW, batch=batch))
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    drawn = [row["task/copy/share_sampled"] > 0 for row in steps]
    assert sorted(drawn) == [False, True]
    assert [any("/pool/" in name for name in row) for row in steps] == drawn


def test_a_curriculum_that_cannot_be_is_refused_before_the_model_loads(tmp_path) -> None:
    directory = start(tmp_path / "a", "{by: levle}")
    (directory / "actor" / "model.safetensors").unlink()
    with pytest.raises(
        DataError,
        match=r"tasks.yaml:\d+: tasks.copy.curriculum.by: it is 'levle'.*it has: id, prompt, reference",
    ):
        Trainer.from_config(run_config(directory, "run", 1))
    write_run(directory, with_curriculum("{by: reference, floor: 1.5}"))
    with pytest.raises(ConfigError, match=r"curriculum\.floor must be in \[0, 1\], got 1\.5"):
        Trainer.from_config(run_config(directory, "run", 1))
