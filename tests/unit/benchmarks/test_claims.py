"""The claims' harness: nothing is run twice, nothing is rounded away, the tables are what the files say."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from claims import constraints, suite  # noqa: E402
from claims.base import (  # noqa: E402
    Claim,
    Options,
    differences_of_files,
    dump_numbers,
    load_numbers,
    run_claim,
)
from claims.scheduler import summarise  # noqa: E402
from claims.shares import WINDOW, largest_errors  # noqa: E402
from multitask import CLAIMS  # noqa: E402

import claim_example  # noqa: E402


def test_an_interrupted_claim_goes_on_where_it_was(tmp_path: Path) -> None:
    def run(seeds: range) -> dict[str, object]:
        options = Options(seeds=seeds, steps=3, directory=tmp_path)
        return run_claim(claim_example.CLAIM, options, arms=[], processes=1)

    run(range(2))
    options = Options(seeds=range(1, 3), steps=3, directory=tmp_path)
    partial = run_claim(claim_example.CLAIM, options, arms=["a"], processes=0)
    assert partial["arms"]["a"]["level"] == pytest.approx([0.1, math.nan], nan_ok=True)
    result = run(range(3))
    calls = (tmp_path / "calls").read_text().split("\n")[:-1]
    assert sorted(calls) == sorted(f"{a} {s}" for a in "ab" for s in range(3)), "each once"
    assert result["arms"]["a"]["level"] == [0.0, 0.1, 0.2]
    assert result["arms"]["b"]["level"] == [0.5, 0.6, 0.7]
    assert claim_example.CLAIM.render(result["arms"]) == "+0.50"


def test_two_files_are_compared_by_the_seeds_that_both_have() -> None:
    before = {"seeds": [0, 1, 2, 3], "arms": {"old": {"worst": [9.0, 0.1, 0.2, 0.3], "mean": [0.0] * 4}}}
    now = {"seeds": [3, 2, 1], "arms": {"new": {"worst": [0.5, 0.3, 0.2], "auc_mean": [1.0] * 3}}}
    header, _, row = differences_of_files(now, before).splitlines()
    assert header.startswith("| 3 seeds | worst |")
    # differences 0.1, 0.1, 0.2: mean 0.1333, standard error 0.0333, t quantile 4.303
    assert row == "| old of the other file -> new | +0.133 [-0.010, +0.277] | - | - | - |"


def test_a_run_that_fails_ends_the_claim_and_what_was_under_way_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An error in a thread of the pool fails the test, too."""
    claim = replace(claim_example.CLAIM, run=claim_example.fail_at_1, runs_per_process=1)
    options = Options(seeds=range(9), steps=3, directory=tmp_path)
    with pytest.raises(ValueError, match="seed 1 is broken"):
        run_claim(claim, options, arms=["a"], processes=2)
    assert "a seed 1: failed" in capfd.readouterr().err
    calls = {line.split()[1] for line in (tmp_path / "calls").read_text().splitlines()}
    kept = {file.stem for file in tmp_path.glob("example/*/*.json")}
    assert kept == calls - {"1"} <= {"0", "2"}, "what had not begun does not begin"


def test_a_killed_claim_leaves_no_run_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, str(Path(claim_example.__file__)), str(tmp_path)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            while not (file := tmp_path / "pid").is_file() or not file.read_text().endswith("\n"):
                assert process.poll() is None
                time.sleep(0.05)
            run = psutil.Process(int(file.read_text()))
        finally:
            process.kill()
    try:
        run.wait(timeout=30)
    finally:
        if run.is_running():
            run.kill()


def test_what_did_not_happen_survives_the_file() -> None:
    text = dump_numbers({"steps": [1.0, math.nan], "name": "x"})
    json.loads(text, parse_constant=pytest.fail)
    first, second = load_numbers(text)["steps"]
    assert first == 1.0
    assert math.isnan(second)


def test_steps_to_a_target_wait_for_the_last_task() -> None:
    history = {
        step: {"early": 1.0, "late": level} for step, level in ((0, 0.0), (50, 0.9), (100, 0.9), (150, 0.9))
    }
    metrics = summarise(history)
    assert metrics["worst"] == pytest.approx(0.9)
    assert metrics["mean"] == pytest.approx(0.95)
    # means of up to three evaluations: 0, .45, .6, .9
    assert metrics["steps_to_0.5"] == 100
    assert metrics["steps_to_0.7"] == 150
    assert math.isnan(summarise({0: {"t": 0.1}})["steps_to_0.5"])


def test_final_levels_are_measured_on_prompts_that_no_evaluation_has_seen(tmp_path: Path) -> None:
    run = suite.SuiteRun(seed=3, steps=1, directory=tmp_path, name="run", num_train=10, num_held_out=256)
    unseen = replace(run, name="unseen", num_held_out=400, skip_held_out=256)
    for name, entry in suite.TASKS.items():
        seen, other = (
            [json.loads(line)["prompt"] for line in _held_out(name, entry, own).read_text().splitlines()]
            for own in (run, unseen)
        )
        assert len(seen) == len(set(seen)) == 256
        assert len(other) == 400
        assert len(set(other)) > 100
        assert set(seen).isdisjoint(other)


def _held_out(name: str, entry: Any, run: Any) -> Path:
    folder = run.directory / run.name
    folder.mkdir(exist_ok=True)
    return Path(suite._task(name, entry, run, folder)["eval_dataset"])


def test_the_largest_error_of_a_share_is_found_in_the_window_where_it_is() -> None:
    def row(trained: float) -> dict[str, float]:
        return {
            "task/a/weight": 0.5,
            "task/b/weight": 0.5,
            "task/a/share_trained": trained,
            "task/b/share_trained": 1 - trained,
        }

    rows = [row(0.5)] * WINDOW + [row(0.7)] * WINDOW + [row(0.5)] * WINDOW
    assert largest_errors(rows, ["a", "b"])["max_error"] == pytest.approx(0.2)
    alternating = [row(0.4), row(0.6)] * WINDOW
    assert largest_errors(alternating, ["a", "b"])["max_error"] == pytest.approx(0.0)


@pytest.mark.parametrize("name", sorted(CLAIMS))
def test_the_table_beside_a_result_is_computed_from_it(name: str) -> None:
    file = BENCHMARKS / "results" / f"{name}.json"
    if not file.is_file():
        pytest.skip("no result of this claim is kept")
    claim: Claim = importlib.import_module(CLAIMS[name]).CLAIM
    result = load_numbers(file.read_text(encoding="utf-8"))
    for arm, metrics in result["arms"].items():
        for metric, values in metrics.items():
            assert len(values) == len(result["seeds"]), f"{arm} {metric}: one value per seed"
    assert claim.render(result["arms"]) in file.with_suffix(".md").read_text(encoding="utf-8")


def test_a_constraint_holds_by_its_pooled_bound_and_only_with_help_kept() -> None:
    def arm(violations: list[float], refusals: list[float], helpful: list[float]) -> dict[str, list[float]]:
        return {
            "violations": violations,
            "violations_of": [500.0, 500.0],
            "benign_refusals": refusals,
            "benign_refusals_of": [500.0, 500.0],
            "helpful_benign": helpful,
            "youden_j": [0.9, 0.9],
            "served_violation_rate": [0.0, 0.0],
        }

    arms = {
        "unconstrained": arm([480.0, 490.0], [5.0, 5.0], [0.9, 0.9]),
        "good": arm([10.0, 28.0], [20.0, 20.0], [0.88, 0.88]),  # 38 of 1000: at most 0.0495
        "close": arm([10.0, 29.0], [20.0, 20.0], [0.88, 0.88]),  # 39 of 1000: at most 0.0506
        "refuses": arm([0.0, 0.0], [400.0, 400.0], [0.88, 0.88]),
        "mute": arm([10.0, 28.0], [20.0, 20.0], [0.8, 0.8]),  # keeps 0.889
    }
    lines = constraints.CLAIM.render(arms).splitlines()
    verdicts = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in lines[2:7]}
    assert verdicts == {"unconstrained": "no", "good": "yes", "close": "no", "refuses": "no", "mute": "no"}
    assert "| 1 of 2 |" in lines[3], "28 of 500 alone are at most 0.076"
