"""The claim on a chat model, with a tiny actor: what is paired, what is planted, what a run leaves behind."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from claims import smollm2
from claims.base import Arm, Options

from run_builders import write_run

SMALL = {
    "model": {"autocast": False},
    "batch": {"prompts_per_step": 4, "group_size": 4},
    "rollout": {"max_new_tokens": 4},
    "optimizer": {"learning_rate": 1e-3},
    "eval": {"num_prompts": 6},
}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    """Two tasks, a constraint and an anchor as ``prepare`` leaves them."""
    write_run(tmp_path)
    for name in ("copy", "digit"):
        file = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        splits = ["train"] * 80 + ["validation"] * 20 + ["test"] * 20
        rows = [{**row, "split": split} for row, split in zip(rows, splits, strict=True)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    constraint = {"plugin": f"{tmp_path}/rewards.py:has_no_digit", "mode": "lagrangian", "limit": 0.1}
    reward = f"{tmp_path}/rewards.py:starts_right"
    found = {
        "actor": str(tmp_path / "actor"),
        "tasks": {
            "math": {"dataset": str(tmp_path / "copy.jsonl"), "rewards": [reward]},
            "safety": {
                "dataset": str(tmp_path / "digit.jsonl"),
                "rewards": [reward],
                "constraints": [constraint],
            },
        },
        "anchors": {"prose": {"type": "anchor", "dataset": str(tmp_path / "copy.jsonl")}},
    }
    prepared = tmp_path / "smollm2" / "prepared"
    prepared.mkdir(parents=True)
    (prepared / "claim.json").write_text(json.dumps(found))
    return Options(seeds=[0], steps=12, directory=tmp_path, extra=SMALL)


def _arm(name: str) -> Arm:
    (arm,) = (arm for arm in smollm2.CLAIM.arms if arm.name == name)
    return arm


def test_a_fault_goes_on_from_shared_steps_and_is_not_seen_before_it(options: Options) -> None:
    found = smollm2.run_arm(_arm("fault_no_guard"), 0, options)
    assert found["detected"] == 0.0
    assert found["false_alarms"] == 0.0
    runs = options.directory / "runs"
    before, after = (
        [json.loads(line) for line in (runs / name / "0/run/evaluations.jsonl").read_text().splitlines()]
        for name in ("smollm2-claim-shared-12", "smollm2-claim-fault_no_guard-12")
    )
    assert after[: len(before)] == before, "the same run up to the plant"
    assert {row["step"] for row in before} == {0, 4, 8}
    assert {row["step"] for row in after} == {0, 4, 8, 12}
    assert not (runs / "smollm2-claim-fault_no_guard-12/0/run/checkpoints").exists(), (
        "they would fill the disk"
    )


def test_arms_are_compared_on_the_same_test_prompts_of_the_untrained_model(options: Options) -> None:
    base = smollm2.run_arm(_arm("base"), 0, options)
    (options.directory / "actor").rename(options.directory / "moved")
    file = options.directory / "smollm2" / "base" / "claim" / "0-6.json"
    values = json.loads(file.read_text())
    assert {name: len(own) for name, own in values.items()} == {"math": 6, "safety": 6, "flagged": 6}
    assert base["change/math"] == base["change_error/math"] == 0.0
    assert base["worst"] == min(base["level/math"], base["level/safety"])
    shutil.move(options.directory / "moved", options.directory / "actor")
    free = smollm2.run_arm(_arm("no_constraint"), 0, options)
    assert not [key for key in free if key.endswith("multiplier/has_no_digit") and free[key]]
    assert free["level/math"] == pytest.approx(base["level/math"] + free["change/math"])
    assert free["kl/prose"] > 0.0


def test_no_least_share_of_the_example_decides_shares_in_a_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, split in (("nq_open", "test"), ("sft_dolly", "train")):
        row = {"prompt": "?", "reference": "!", "answers": ["!"], "split": split}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "smollm2" / "prepared" / "data").mkdir(parents=True)
    tasks = Path(__file__).parents[3] / "examples" / "smollm2" / "tasks.yaml"
    assert "min_share" in tasks.read_text()
    made = SimpleNamespace(tasks_file=tasks, actor="actor", figures={})
    monkeypatch.setattr(smollm2, "prepare_example", lambda *_: (made, {"source": str(tmp_path)}))
    smollm2.prepare(Options(seeds=[0], steps=1, directory=tmp_path))
    found = json.loads((tmp_path / "smollm2" / "prepared" / "claim.json").read_text())["tasks"]
    assert set(found) == set(smollm2.TASKS)
    assert not any("min_share" in task for task in found.values())


def test_changes_are_paired_by_prompt() -> None:
    found = smollm2.summarise({"math": [0.0, 1.0, 0.0, 0.0]}, {"math": [1.0, 1.0, 0.0, 1.0]})
    assert found["level/math"] == 0.75
    assert found["change/math"] == 0.5
    assert found["change_error/math"] == pytest.approx(math.sqrt(1 / 3 / 4))


def test_the_tables_tell_what_has_run() -> None:
    def arm(worst: list[float]) -> dict[str, list[float]]:
        return {
            "worst": worst,
            "mean": worst,
            "change/math": [0.1, 0.1],
            "change_error/math": [0.03, 0.04],
            "false_alarms": [0.0, 0.0],
        }

    arms: dict[str, dict[str, list[float]]] = {
        "uniform": arm([0.2, 0.3]),
        "default": arm([0.3, 0.35]),
        "fault": {**arm([0.1, 0.1]), "detected": [1.0, math.nan], "delay": [1.0, math.nan]},
    }
    arms["fault"] |= {"rollbacks": [1.0, math.nan], "stopped": [0.0, math.nan]}
    text = smollm2.render(arms)
    assert "| default | 2 | 0.325 | 0.325 |" in text
    assert "| default | +0.100 [+0.051, +0.149] |" in text
    assert "| uniform -> default | +0.075 [" in text
    assert "within 2 evaluations in 1 of 1 runs, after 1 evaluations; 1.0 rollbacks a run, 0% stopped" in text
