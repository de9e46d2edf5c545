"""A few random kills, damages and histories; many: ``benchmarks/`` (docs/checkpoints.md)."""

import json
import os
from pathlib import Path

from forked import run_forked

ROOT = Path(__file__).parents[2]


def result_of(script, place, *arguments):
    file = place / "found.json"
    ended = run_forked(
        ROOT / "benchmarks" / script,
        *(*arguments, "--json", file),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return json.loads(file.read_text())


def test_kills_leave_the_run_as_if_undisturbed_and_damage_is_never_silent(tmp_path):
    killed, damaged = result_of("chaos.py", tmp_path, "--kills", 2, "--damage", 8, "--seed", 2)
    assert (killed["kills"], damaged["damages"]) == (2, 8)
    assert killed["wrong"] == damaged["wrong"] == []
    assert {"previous", "newest"} <= damaged["outcomes"].keys()


def test_a_run_whose_tasks_change_is_the_same_when_it_is_stopped_at_random_moments(tmp_path):
    """The run goes back, then is forked; each time a task goes and another comes."""
    found = result_of("histories.py", tmp_path, "--histories", 1, "--seed", 69)
    assert (found["same"], found["refused"], found["wrong"]) == (1, 0, [])
    assert found["interrupts"] == 1
    assert found["kills"] >= 1  # one of the two may come after the end of a part
