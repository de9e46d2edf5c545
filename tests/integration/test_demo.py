"""The demo, a twentieth of its preparation and one step: what ``make demo`` prepares, runs and writes."""

import json
import math
from pathlib import Path

import pytest

from forked import run_forked

ROOT = Path(__file__).parents[2]
PROMPTS = 32
SHORT = ["--max-steps", "1", "--effort", "0.05", "--eval-prompts", str(PROMPTS)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_prepares_trains_and_writes_its_summary(tmp_path):
    done = run_forked(ROOT / "examples/demo/run.py", "--directory", tmp_path, *SHORT, cwd=ROOT, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"tasks", "wall_s", "guard_events", "seed"}
    assert set(summary["tasks"]) == {"preference", "code", "safe", "arithmetic"}
    for figures in summary["tasks"].values():
        for side in ("before", "after"):
            assert set(figures[side]) == {"mean", "low", "high", "n"}
            assert figures[side]["low"] <= figures[side]["mean"] <= figures[side]["high"]
            assert figures[side]["n"] == PROMPTS
    assert "held-out prompts, before and after 1 steps" in done.stdout
    assert f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/mlflow.db" in done.stdout
    assert (tmp_path / "mlflow.db").exists()
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    graded = [r["breakdown"]["code_evaluator"]["components"] for r in rollouts if r["task"] == "code"]
    assert graded
    assert all(math.isfinite(g["tests"]) and math.isfinite(g["codebleu"]) for g in graded)
    evaluated = [json.loads(line) for line in (tmp_path / "run/evaluations.jsonl").read_text().splitlines()]
    passed = [share for row in evaluated if row["task"] == "code" for share in row["values"]]
    assert len(passed) == 2 * PROMPTS
    assert len(set(passed)) > 1, "programs ran: some pass more tests than others"
