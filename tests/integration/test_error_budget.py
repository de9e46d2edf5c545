"""A task whose rewards fail too often stops the run: exit code 1 and a report."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from multitask_rl.cli import main
from multitask_rl.config.run import EvalConfig, ScoringConfig
from multitask_rl.trainer import Trainer
from run_builders import run_config, write_run

TASKS = """
tasks:
  copy: {dataset: copy.jsonl, rewards: ["rewards.py:starts_right"]}
  digit: {dataset: digit.jsonl, rewards: ["broken.py:broken"]}
"""
BROKEN = """
def broken(response):
    raise ValueError("the grader is gone")
"""


def test_a_spent_budget_ends_the_run_with_exit_code_1_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, TASKS)
    (tmp_path / "broken.py").write_text(BROKEN)
    settings = "model.name_or_path=actor output_dir=run max_steps=100 num_threads=1 rollout.max_new_tokens=3"
    small = "batch.prompts_per_step=4 batch.group_size=2 scoring.num_workers=1 tracking.trackers=[jsonl]"
    assert main(["train", "tasks_file=tasks.yaml", *settings.split(), *small.split()]) == 1
    told = capsys.readouterr().err
    assert "error: task 'digit': 100% of its last " in told
    assert "samples could not be scored, allowed are 50% (scoring.max_failure_rate)" in told
    assert "broken grader (last: raised ValueError: the grader is gone (broken.py:3))" in told
    assert "copy" not in told.partition("error: ")[2]
    assert re.search(r"The last: prompt '\S+', response '.+'\. Failed samples are never", told)


@pytest.mark.parametrize("reward", ["text", "lists", "dies"])
def test_a_short_run_without_one_scored_sample_of_a_task_is_a_failure_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reward: str
) -> None:
    """The budget needs 20 samples; a run may end before."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, TASKS.replace("broken.py:broken", f"broken.py:{reward}"))
    (tmp_path / "broken.py").write_text(
        "import os\ndef text(response):\n    return 'good'\ndef lists(response):\n    return [1.0]\n"
        "def dies(response):\n    os._exit(3)\n"
    )
    settings = "model.name_or_path=actor output_dir=run max_steps=1 num_threads=1 rollout.max_new_tokens=3"
    small = (
        "batch.prompts_per_step=2 batch.group_size=2 scoring.num_workers=1 tracking.trackers=[jsonl] "
        "eval.num_prompts=3"
    )
    command = ["tasks_file=tasks.yaml", *settings.split(), *small.split()]
    reason = {"text": "'good', not a number", "lists": "[1.0], not a number", "dies": "ended with code 3"}
    assert main(["train", *command]) == 1
    told = capsys.readouterr().err.partition("error: ")[2]
    assert "task 'digit': not one of its " in told
    assert reason[reward] in told
    assert re.search(r"The last: prompt '\S+', response '.+'\. Mend", told)
    assert "copy" not in told


def test_what_an_evaluation_says_of_the_budget_is_told_with_it(tmp_path: Path) -> None:
    """A run that is killed before its next step goes on from a checkpoint that holds it as told."""
    write_run(
        tmp_path, "tasks:\n  digit: {dataset: digit.jsonl, rewards: ['broken.py:half']}\n", num_rows=400
    )
    (tmp_path / "broken.py").write_text(
        "def half(response, id):\n    if id % 3:\n        raise ValueError('gone')\n    return 1.0\n"
    )
    settings = {"eval": EvalConfig(every=1, num_prompts=24), "scoring": ScoringConfig(max_failure_rate=0.9)}
    with Trainer.from_config(run_config(tmp_path, "out", 1, **settings)) as trainer:
        trainer._open().supervisor.inspect()
        told = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
        assert (tmp_path / "out" / "checkpoints" / "step_00000000").exists()
    (event,) = (e for line in told if (e := json.loads(line))["source"] == "rewards")
    assert (event["step"], event["task"]) == (0, "digit")
    assert "of the last 24 samples could not be scored" in event["reason"]
