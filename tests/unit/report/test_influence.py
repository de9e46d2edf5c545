"""What training on one task changed in others: planted effects, no effects, shares that tell nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multitask_rl.cli import main
from multitask_rl.records import Direction
from multitask_rl.report.influence import influence, turnover
from multitask_rl.tracking.reading import Evaluation, RunRecord
from record_builders import write_records

LENGTH = 4


def _evaluation(step: int, task: str, values: list[float]) -> Evaluation:
    return Evaluation(
        step=step, task=task, metric="m", values=values, direction=Direction.higher, prompts=task
    )


def _run(
    shares: np.ndarray, level: Callable[[str, np.ndarray], float], noise: float = 0.0, seed: int = 0
) -> RunRecord:
    """Return a run of the tasks ``a``, ``b``, ... with ``shares`` [tasks, steps].

    ``level`` maps the task and the shares so far to the true level.
    """
    rng, tasks = np.random.default_rng(seed), "abcd"[: len(shares)]
    steps = range(0, shares.shape[1] + 1, LENGTH)
    histories = {
        task: [
            _evaluation(step, task, [level(task, shares[:, :step]) + rng.normal(0, noise)]) for step in steps
        ]
        for task in tasks
    }
    recorded = {t: {i + 1: float(s) for i, s in enumerate(own)} for t, own in zip(tasks, shares, strict=True)}
    return RunRecord(name="r", config={}, evaluations=histories, shares=recorded)


def _wandering(num_tasks: int, num_intervals: int, seed: int) -> np.ndarray:
    """Return shares that wander independently, constant within an interval."""
    logits = np.random.default_rng(seed).normal(0, 1, (num_tasks, num_intervals)).cumsum(1)
    shares = np.exp(logits) / np.exp(logits).sum(0)
    return np.repeat(shares, LENGTH, axis=1)


def test_planted_effects_are_found_with_their_signs() -> None:
    def level(task: str, shares: np.ndarray) -> float:
        done = shares.sum(1) / LENGTH  # intervals with prompts of that task alone
        return float({"a": 0.05 * done[0], "b": 0.02 * done[1] - 0.03 * done[0]}[task])

    found = influence(_run(_wandering(2, 12, 1), level, noise=0.002))
    effects = {(row["trained"], row["task"]): row for row in found["effects"]}
    for key, effect in {("a", "a"): 0.05, ("a", "b"): -0.03, ("b", "b"): 0.02, ("b", "a"): 0.0}.items():
        assert effects[key]["low"] <= effect <= effects[key]["high"]
    assert [effects[k]["verdict"] for k in (("a", "a"), ("a", "b"))] == ["better", "worse"]
    assert effects["b", "a"]["verdict"] == "not told apart"
    assert found["intervals"][0]["steps"] == [0, 4]
    assert sum(found["intervals"][0]["shares"].values()) == pytest.approx(1.0)


def test_without_effects_on_others_few_intervals_leave_out_zero() -> None:
    def level(task: str, shares: np.ndarray) -> float:
        own = shares["abc".index(task)].sum() / LENGTH
        return float(0.2 + 0.6 * (1 - math.exp(-0.3 * own)))  # learning slows

    covered, wrong = [], 0
    for seed in range(60):
        effects = influence(_run(_wandering(3, 12, seed), level, noise=0.03, seed=seed))["effects"]
        others = [row for row in effects if row["trained"] != row["task"]]
        covered += [row["low"] <= 0.0 <= row["high"] for row in others]
        wrong += any(row["verdict"] in ("better", "worse") for row in others)
    assert np.mean(covered) > 0.93
    assert wrong <= 8, "of 60 runs: where learning saturates, effects are no constants"


@pytest.mark.parametrize(
    ("shares", "reason"),
    [
        (np.full((2, 40), 0.5), "the shares of the tasks moved together or not at all"),
        (_wandering(2, 5, 0), "6 intervals between evaluations are needed, there are 5"),
        (np.ones((1, 40)), "one task was trained, so all changes are its own"),
    ],
    ids=["constant", "few", "one task"],
)
def test_why_no_effects_are_told(shares: np.ndarray, reason: str) -> None:
    found = influence(_run(shares, lambda task, shares: 0.5))
    assert (found["effects"], found["reason"]) == ([], reason)


def test_many_evaluations_are_joined_to_few_rows() -> None:
    intervals = influence(_run(_wandering(2, 30, 0), lambda task, shares: 0.5))["intervals"]
    assert [own["steps"] for own in intervals][::9] == [[0, 12], [108, 120]]


def test_turnover_counts_prompts_that_change_sides() -> None:
    first, last = [1.0, 1.0, 0.0, 0.0, math.nan], [1.0, 0.0, 1.0, 0.0, 1.0]
    histories = {t: [_evaluation(0, t, first), _evaluation(8, t, last)] for t in ("binary", "lower")}
    for one in histories["lower"]:
        one.direction = Direction.lower
    graded = [_evaluation(0, "graded", [0.7, 0.2]), _evaluation(8, "graded", [0.4, 0.9])]
    histories |= {"graded": graded, "unknown": graded}
    new = [replace(_evaluation(at, "new", values), prompts="now") for at, values in ((4, first), (8, last))]
    histories["new"] = [_evaluation(0, "new", last), *new]  # a resume brought other prompts
    config = {"tasks": {"graded": {"solved_at": 0.5}, "unknown": {"solved_at": None}}}
    found = turnover(RunRecord(name="r", config=config, evaluations=histories))
    quarter = {"n": 4, "kept": 0.25, "lost": 0.25, "gained": 0.25}
    assert found == {
        "binary": quarter,
        "lower": quarter,
        "new": quarter,
        "graded": {"n": 2, "kept": 0.0, "lost": 0.5, "gained": 0.5},
    }


def test_report_says_of_a_removed_task_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = {"metric": "m", "direction": "higher", "prompts": "p", "values": [0.0, 1.0] * 4}
    evaluations = [{"step": step, "task": task, **kind} for step in (0, 4) for task in ("a", "b")]
    evaluations.append({"step": 8, "task": "a", **kind})
    write_records(tmp_path, evaluations=evaluations)
    (tmp_path / "config.yaml").write_text("tasks: {a: {}}")
    assert main(["report", str(tmp_path)]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "removed from the run" in line]
    assert len(told) == 1
    assert "b" in told[0]
    assert "after step 4" in told[0]


def test_report_prints_shares_changes_effects_and_turnover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    kind = {"metric": "m", "direction": "higher", "prompts": "p"}
    evaluations: list[dict[str, Any]] = []
    for index in range(7):
        solved = [float(at < index) for at in range(8)]
        evaluations += [{"step": 2 * index, "task": task, "values": solved, **kind} for task in ("a", "b")]
    metrics = [
        {"step": step, "task/a/share_trained": 0.3 + 0.1 * (step // 3 % 3), "task/b/share_trained": 0.4}
        for step in range(1, 13)
    ]
    write_records(tmp_path, evaluations=evaluations, metrics=metrics)
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "prompts solved  at first and now  at first, not now  now, not at first  n" in text
    assert "a                           0.0%               0.0%              75.0%  8" in text
    assert "0 to 2   " in text
    assert "+0.125 ±" in text
    assert "training on a task (row) changed a held-out result (column)" in text
    assert "a wide interval says that they do" in text
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "0 to 2   " not in text, "a table that is wider than the terminal"
    assert "shares and changes of 2 tasks between evaluations: --html FILE, --json" in text
    assert main(["report", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert {(row["trained"], row["task"]) for row in result["influence"]["effects"]} == {
        (a, b) for a in "ab" for b in "ab"
    }
