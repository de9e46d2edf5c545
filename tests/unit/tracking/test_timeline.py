import json
import math
import time

import pytest

from multitask_rl.errors import CheckpointError
from multitask_rl.tracking.timeline import Timeline, busy_seconds, summarise


def line(stage, start, end, task="", step=1):
    return {"stage": stage, "task": task, "start": start, "end": end, "step": step}


def test_the_report_counts_overlapping_work_once_and_only_within_steps():
    lines = [
        line("step", 0, 10),
        line("rollout", 0, 4),
        line("rewards", 1, 6, "a"),
        line("rewards", 2, 8, "b"),
        line("wait/rewards", 4, 8, "b"),
        line("wait/rollout", 0, 4),
        line("update", 8, 10),
        line("step", 20, 30, step=2),
        line("rollout", 15, 25, step=2),
    ]
    expected = {
        "rollout": {"busy": 9 / 20, "waited": 4 / 20},
        "rewards": {"busy": 7 / 20, "waited": 4 / 20},
        "rewards/a": {"busy": 5 / 20, "waited": 0.0},
        "rewards/b": {"busy": 6 / 20, "waited": 4 / 20},
        "update": {"busy": 2 / 20, "waited": 0.0},
    }
    assert list(summarise(lines).items()) == list(expected.items())
    assert summarise([]) == {}


def test_shares_of_a_step_lie_within_it_and_every_span_is_written_once(tmp_path):
    timeline = Timeline(tmp_path / "timeline.jsonl")
    timeline.begin_step()
    began = time.monotonic()
    time.sleep(0.001)
    timeline.add("update", (began, time.monotonic()), step=0)
    timeline.add("rollout", (0.0, math.inf), step=1)
    seconds, numbers = timeline.end_step(0, [("rewards", (0.0, math.inf))])
    assert numbers["utilisation/rollout"] == pytest.approx(1.0)
    assert numbers["utilisation/rewards"] == pytest.approx(1.0)
    assert numbers["utilisation/update"] == pytest.approx(seconds["update"] / seconds["step"], rel=1e-9)
    timeline.begin_step()
    seconds, numbers = timeline.end_step(1)
    assert seconds["rollout"] == math.inf, "the work was done in the step before"
    assert numbers["utilisation/update"] == 0.0, "a stage that stood still has a share too"
    timeline.close()
    rows = [json.loads(row) for row in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(r["stage"], r["step"]) for r in rows] == [
        ("update", 1),
        ("rollout", 2),
        ("step", 1),
        ("step", 2),
    ]


def test_a_resumed_run_goes_on_where_the_clock_stopped(tmp_path):
    for _ in range(2):
        timeline = Timeline(tmp_path / "timeline.jsonl")
        timeline.begin_step()
        timeline.end_step(0)
        timeline.close()
    first, second = (json.loads(row) for row in (tmp_path / "timeline.jsonl").read_text().splitlines())
    assert second["start"] == pytest.approx(first["end"], abs=1e-5)


def test_busy_seconds_of_a_union():
    assert busy_seconds([(0, 2), (1, 3), (5, 6)]) == 4
    assert busy_seconds([]) == 0


def test_a_timeline_that_cannot_be_written_ends_the_run(tmp_path):
    (tmp_path / "file").touch()
    timeline = Timeline(tmp_path / "file" / "timeline.jsonl")
    timeline.begin_step()
    with pytest.raises(CheckpointError, match=r"cannot write .*timeline\.jsonl"):
        timeline.end_step(0)
