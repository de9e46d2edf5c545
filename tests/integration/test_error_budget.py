"""A task whose rewards fail too often stops the run: exit code 1 and a report."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_builders import write_run

from multitask_rl.cli import main

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
    assert "broken grader (last: raised ValueError: the grader is gone)" in told
    assert "copy" not in told.partition("error: ")[2]
