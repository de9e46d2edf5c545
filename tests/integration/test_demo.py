"""The demo, a tenth of its preparation and two steps: what ``make demo`` prepares, runs and writes."""

import json
import math
from pathlib import Path

import pytest

from forked import run_forked

ROOT = Path(__file__).parents[2]
SHORT = ["--max-steps", "2", "--effort", "0.1"]


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
            assert figures[side]["n"] == 256
    assert "held-out prompts, before and after 2 steps" in done.stdout
    assert "mlflow ui" in done.stdout
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text().splitlines()]
    graded = [r["breakdown"]["code_evaluator"]["components"] for r in rollouts if r["task"] == "code"]
    assert graded
    assert all(math.isfinite(g["tests"]) and math.isfinite(g["codebleu"]) for g in graded)
    assert len({g["tests"] for g in graded}) > 1, "programs ran: some pass more tests than others"
