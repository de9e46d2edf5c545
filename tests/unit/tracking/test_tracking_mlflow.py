"""MLflow receives every number, survives bad ones, and continues its run."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import threading
import time
import types
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import ConfigError, MissingExtraError
from multitask_rl.records import DatasetRecord, Event, Scored, Turn
from multitask_rl.testing import make_rollout
from multitask_rl.tracking import mlflow as adapter
from multitask_rl.tracking.background import BackgroundWriter
from multitask_rl.tracking.base import Trackers
from multitask_rl.tracking.jsonl import JsonlTracker
from multitask_rl.tracking.mlflow import MLflowTracker, flatten_parameters, legal_name
from multitask_rl.tracking.reading import read_run
from reward_builders import rollout

pytestmark = [
    pytest.mark.skipif(find_spec("mlflow") is None, reason="needs the extra mlflow"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize("name", ["task/math/reward_mean", "time/samples_per_s", "a b/c-d.e"])
def test_legal_names_stay(name: str) -> None:
    assert legal_name(name) == name


def test_illegal_names_become_legal_and_stay_apart() -> None:
    bad = ["a:b", "a=b", "/a", "a//b", "a/../b", "a/./b", "x" * 300, "x" * 299 + "y", "", "é"]
    legal = [legal_name(name) for name in bad]
    assert len(set(legal)) == len(bad)
    assert all(len(name) <= 250 and ".." not in name and not name.startswith("/") for name in legal)


def test_parameters_are_flattened_and_cut() -> None:
    nested = {"a": {"b": 1, "empty": {}}, "l": [1, "x"], "s": "y" * 900, "n": None}
    flat = dict(flatten_parameters(nested))
    assert flat["a.b"] == "1"
    assert flat["a.empty"] == "{}"
    assert flat["l"] == '[1, "x"]'
    assert flat["n"] == "null"
    assert len(flat["s"]) == 500


@pytest.mark.parametrize("is_configured", [False, True])
def test_the_store_of_the_environment_is_used_where_the_configuration_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_configured: bool
) -> None:
    from mlflow import MlflowClient

    stores = [f"sqlite:///{tmp_path / name}.db" for name in ("of_environment", "configured")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", stores[0])
    config = TrackingConfig(trackers=["mlflow"], uri=stores[1] if is_configured else "")
    trackers = Trackers(tmp_path / "run", config, None)
    trackers.start({"seed": 3})
    trackers.finish("finished")
    run_id = json.loads(str(trackers.run_id))["mlflow"]
    assert MlflowClient(tracking_uri=stores[is_configured]).get_run(run_id).info.status == "FINISHED"
    assert not (tmp_path / "mlflow.db").exists()


def test_run_is_logged_and_resumed_under_its_id(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    config = TrackingConfig(trackers=["mlflow"], run_name="first")
    first = Trackers(tmp_path / "run", config, None)
    first.start({"seed": 3, "optimizer": {"learning_rate": 0.1}})
    for step in range(1, 4):
        metrics = {"task/math/reward_mean": step / 10, "task/m:x/kl": 1.0, "bad": math.nan, "worse": math.inf}
        first.log_metrics({**metrics, "train/loss": 1.0 / step}, step)
    for step in (1, 3):
        first.log_event(Event(step=step, source="guard", kind="alarm", reason=f"fell {step}"))
    first.finish("failed")
    identity = first.run_id
    assert identity is not None

    second = Trackers(tmp_path / "run", config, identity)
    second.start({"seed": 3, "optimizer": {"learning_rate": 0.2}, "new": 1}, resume_step=3)
    second.log_metrics({"task/math/reward_mean": 0.9}, 4)
    second.log_event(Event(step=4, source="guard", kind="alarm", reason="fell 4"))
    second.finish("finished")
    assert second.run_id == identity
    assert not first.failures
    assert not second.failures

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    run_id = json.loads(identity)["mlflow"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert run.data.params == {"seed": "3", "optimizer.learning_rate": "0.1", "new": "1"}
    history = client.get_metric_history(run_id, "task/math/reward_mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    losses = client.get_metric_history(run_id, "train/loss")
    assert [(point.step, point.value) for point in losses] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    assert "bad" not in run.data.metrics
    assert legal_name("task/m:x/kl") in run.data.metrics
    assert run.data.tags["metrics_not_finite"] == "6"
    assert run.data.tags["event.guard.alarm"] == "3 x, last at step 4: fell 4"
    artifacts = tmp_path / "mlartifacts" / run_id / "artifacts"
    events = [json.loads(line) for line in (artifacts / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [1, 3, 4]
    assert json.loads((artifacts / "config.resumed.json").read_text()) == {"optimizer.learning_rate": "0.2"}
    assert run.data.tags["resumed_with"] == "optimizer.learning_rate=0.2"

    third = Trackers(tmp_path / "run", config, identity)
    third.start({"seed": 3, "optimizer": {"learning_rate": 0.1}, "new": 1}, resume_step=4)
    third.finish("finished")
    assert not third.failures
    assert "resumed_with" not in client.get_run(run_id).data.tags, "the change was taken back"
    assert json.loads((artifacts / "config.resumed.json").read_text()) == {}


def test_an_event_that_a_resumed_run_makes_at_once_is_counted_once(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    config, run = TrackingConfig(trackers=["mlflow", "jsonl"]), tmp_path / "run"
    first = Trackers(run, config, None)
    first.start({"seed": 3})
    first.log_event(Event(step=1, source="guard", kind="alarm", reason="fell"))
    first.finish("failed")
    second = Trackers(run, config, first.run_id)
    second.start({"seed": 3}, resume_step=1)
    second.log_event(Event(step=1, source="run", kind="changed", reason="other settings"))
    second.finish("finished")
    assert second.run_id is not None
    run_id = json.loads(second.run_id)["mlflow"]
    tags = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(run_id).data.tags
    assert tags["event.run.changed"].startswith("1 x")
    assert tags["event.guard.alarm"].startswith("1 x")
    artifacts = tmp_path / "mlartifacts" / run_id / "artifacts"
    assert len((artifacts / "events.jsonl").read_text().splitlines()) == 2


def test_the_page_of_a_run_is_an_artifact_that_its_note_links_once(tmp_path: Path) -> None:
    run_id = None
    for page in ("<p>failed", "<p>ended"):
        tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), run_id)
        tracker.start({"model": {"name_or_path": "tiny"}}, None if run_id is None else 0)
        tracker.log_page(page)
        tracker.finish("finished")
        run_id = tracker.run_id
    artifacts = tmp_path / "mlartifacts" / str(run_id) / "artifacts"
    assert (artifacts / "report.html").read_text() == "<p>ended"
    note = tracker._client.get_run(str(run_id)).data.tags["mlflow.note.content"]
    assert note.startswith("tiny on 0 tasks")
    assert note.count(f"[report.html](#/experiments/1/runs/{run_id}/artifacts/report.html)") == 1
    assert note.count("report.html](") == 1


def test_a_server_that_goes_away_costs_numbers_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})
    tracker._client.delete_run(tracker.run_id)  # the store now refuses every write to it
    for step in range(20):
        tracker.log_metrics({"x": 1.0}, step)
        tracker.log_event(Event(step=step, source="run", kind="note", reason="."))
    tracker.finish("finished")
    messages = [record.getMessage() for record in caplog.records if "tracking" in record.name]
    assert any("refused a write" in message for message in messages)
    assert any("writes lost" in message for message in messages)
    assert len(messages) <= 3


def test_a_database_without_room_is_told_in_lines_not_in_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        for step in range(20):
            tracker.log_metrics({f"task/of_a_long_name_{k}/reward_mean": step / 7 for k in range(20)}, step)
        tracker.finish("finished")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "refused a write" in caplog.text
    assert max(map(len, caplog.text.splitlines())) < 700
    assert "Traceback" not in caplog.text


def _wait_for(caplog: pytest.LogCaptureFixture, text: str) -> None:
    until = time.monotonic() + 30.0
    while text not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    assert text in caplog.text


def test_what_a_server_that_was_away_has_missed_is_sent_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "_GATHER_S", 0.0)
    # the run began while MLflow was away: it has no identity there
    record = JsonlTracker(tmp_path / "run", TrackingConfig(), None)
    record.log_metrics({"x": 1.0, "bad": math.nan}, 1)
    run = Trackers(tmp_path / "run", TrackingConfig(trackers=["mlflow"]), None, {"own": record})
    run.start({}, resume_step=1)
    run_id = json.loads(str(run.run_id))["mlflow"]
    client = MLflowTracker(tmp_path / "run", TrackingConfig(), run_id)
    client.start({})
    client.finish("finished")
    client._client.delete_run(run_id)  # away
    for step in range(2, 9):
        run.log_metrics({"x": float(step)}, step)
        run.log_event(Event(step=step, source="guard", kind="alarm", reason="fell"))
    _wait_for(caplog, "refused 5 writes in a row; one is tried every 60 s")
    client._client.restore_run(run_id)  # and back
    run.log_metrics({"x": 9.0}, 9)
    run.finish("finished")
    assert _points(tmp_path, run_id, "x") == [(step, float(step)) for step in range(1, 10)]
    found = client._client.get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.tags["event.guard.alarm"].startswith("7 x, last at step 8")
    assert found.data.tags["metrics_not_finite"] == "1"
    assert "sent again at the end" in caplog.text
    assert "lost" not in caplog.text


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_store_that_opens_after_the_start_gets_the_whole_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    monkeypatch.setattr(adapter, "_GATHER_S", 0.0)
    from mlflow import MlflowClient

    known = None
    record = JsonlTracker(tmp_path / "run", TrackingConfig(), None)
    if is_resumed:
        before = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
        before.start({"seed": 3})
        for step in (1, 2, 3):
            before.log_metrics({"x": float(step)}, step)
        before.finish("failed")
        known = json.dumps({"mlflow": before.run_id})
        for step in (1, 2):
            record.log_metrics({"x": float(step)}, step)

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("away")

    with monkeypatch.context() as away:
        away.setattr(MlflowClient, "search_runs", refuse)
        away.setattr(MlflowClient, "update_run", refuse)
        run = Trackers(tmp_path / "run", TrackingConfig(trackers=["mlflow"]), known, {"own": record})
        run.start({"seed": 3}, resume_step=2 if is_resumed else None)
        run.log_datasets([DatasetRecord("t", False, "rows.jsonl", 1, lambda: "0123")])
        for step in range(3 if is_resumed else 1, 6):
            run.log_metrics({"x": float(step)}, step)
            run.log_event(Event(step=step, source="guard", kind="alarm", reason="fell"))
    run.log_metrics({"x": 6.0}, 6)
    run.finish("finished")
    run_id = json.loads(str(run.run_id))["mlflow"]
    assert known in (None, json.dumps({"mlflow": run_id}))
    assert _points(tmp_path, run_id, "x") == [(step, float(step)) for step in range(1, 7)]
    found = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").get_run(run_id)
    assert found.info.status == "FINISHED"
    assert found.data.params["seed"] == "3"
    assert [own.dataset.name for own in found.inputs.dataset_inputs] == ["t (train)"]
    assert found.data.tags["event.guard.alarm"].startswith(f"{3 if is_resumed else 5} x, last at step 5")
    assert "cannot be opened; the run goes on" in caplog.text
    assert "lost" not in caplog.text


def test_a_server_that_is_away_as_a_resumed_run_asks_it_for_its_points_gets_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    first = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    first.start({})
    for step in (1, 2, 3):
        first.log_metrics({"x": step}, step)
    first.finish("failed")
    answers, histories = iter([False, True, True]), MlflowClient.get_metric_history

    def ask(client: MlflowClient, run_id: str, key: str) -> object:
        if not next(answers):
            raise ConnectionError("away")
        return histories(client, run_id, key)

    second = MLflowTracker(tmp_path / "run", TrackingConfig(), first.run_id)
    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, "get_metric_history", ask)
        second.start({}, resume_step=1)
        for step in (2, 3, 4):
            second.log_metrics({"x": step}, step)
        second.finish("finished")
    assert _points(tmp_path, second.run_id, "x") == [(step, float(step)) for step in range(1, 5)]


def test_a_resumed_run_that_the_store_lacks_is_made_there_with_its_whole_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The database was deleted, or ``tracking.uri`` names another one."""
    known = None
    for uri, steps in (("", (1, 2)), (f"sqlite:///{tmp_path / 'other' / 'mlflow.db'}", (3, 4))):
        config = TrackingConfig(trackers=["mlflow"], uri=uri)
        record = JsonlTracker(tmp_path / "run", config, None)
        run = Trackers(tmp_path / "run", config, known, {"own": record})
        (tmp_path / "other").mkdir(exist_ok=True)
        run.start({}, resume_step=None if known is None else 2)
        for step in steps:
            run.log_metrics({"x": float(step)}, step)
            run.log_event(Event(step=step, source="guard", kind="alarm", reason="fell"))
        run.finish("stopped")
        former, known = known, run.run_id
    assert former != known
    run_id = json.loads(str(known))["mlflow"]
    assert _points(tmp_path / "other", run_id, "x") == [(step, float(step)) for step in range(1, 5)]
    found = adapter._client(uri).get_run(run_id)
    assert found.data.tags["event.guard.alarm"].startswith("4 x, last at step 4")
    assert "has no such run" in caplog.text
    assert "lost" not in caplog.text


def test_a_long_curve_keeps_points_in_proportion_to_the_logarithm_of_its_steps(tmp_path: Path) -> None:
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    for name, first, number in (("at_a_glance/held_out", 99, 454), ("train/loss", 19, 102), ("x", 19, 102)):
        kept = [step for step in range(1, 100_001) if tracker._keeps(name, step)]
        assert kept[:first] == list(range(1, first + 1))
        assert kept[first] == first + 2
        assert len(kept) == number


def test_missing_mlflow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"multitask-rl\[mlflow\]"):
        Trackers(tmp_path, TrackingConfig(trackers=["mlflow"]), None)


def _points(directory: Path, run_id: str | None, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{directory / 'mlflow.db'}")
    assert run_id is not None
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


@pytest.mark.parametrize("has_record", [True, False])
def test_a_resumed_run_has_every_point_once(tmp_path: Path, has_record: bool) -> None:
    """Killed: steps 3 and 4, made after the checkpoint, are there; 2 is lost where a record can tell."""
    config = TrackingConfig()
    first, record = (
        MLflowTracker(tmp_path / "run", config, None),
        JsonlTracker(tmp_path / "run", config, None),
    )
    first.start({})
    for step in (1, 2, 3, 4):
        if step <= 2 and has_record:
            record.log_metrics({"x": step, "late": 1.0, "bad": math.nan}, step)
        if step != 2 or not has_record:
            first.log_metrics({"x": step}, step)
    kept, undone = (Event(step=s, source="guard", kind=k, reason="r") for s, k in ((1, "warn"), (4, "stop")))
    for event in (kept, undone):
        first.log_event(event)
    if has_record:
        record.log_event(kept)
    first.finish("failed")
    if has_record:
        for name in ("metrics", "events"):  # as a machine leaves it that loses its power
            with (tmp_path / "run" / f"{name}.jsonl").open("ab") as broken:
                broken.write(b'{"step": 2, "x\n5\n')
    second = MLflowTracker(tmp_path / "run", config, first.run_id)
    second.start({}, resume_step=2)
    for step in (3, 4, 5):
        second.log_metrics({"x": step}, step)
    second.finish("finished")
    assert _points(tmp_path, second.run_id, "x") == [(step, float(step)) for step in range(1, 6)]
    tags = second._client.get_run(str(second.run_id)).data.tags
    assert [name for name in tags if name.startswith("event.")] == ["event.guard.warn"]
    if has_record:
        assert _points(tmp_path, second.run_id, "late") == [(1, 1.0), (2, 1.0)]
        assert tags["metrics_not_finite"] == "2", "those that were not finite before the checkpoint"


@pytest.mark.parametrize("is_own", [True, False])
def test_a_resumed_run_that_no_checkpoint_names_is_found_by_its_directory_and_record(
    tmp_path: Path, is_own: bool
) -> None:
    """MLflow came back, and a kill came before a checkpoint; or a finished copy made no step."""
    first = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    record = JsonlTracker(tmp_path / "run", TrackingConfig(), None)
    first.start({})
    for step in (0, 1, 2):
        numbers = {"x": float(step), "time/step_s": 0.5 + step}
        first.log_metrics(numbers, step)
        record.log_metrics(numbers if is_own else {**numbers, "time/step_s": 0.25}, step)
    first.finish("failed")
    first._client.update_run(str(first.run_id), status="RUNNING")
    second = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    second.start({}, resume_step=2)
    second.log_metrics({"x": 3.0}, 3)
    second.finish("finished")
    assert (second.run_id == first.run_id) == is_own, "else it is of a former run in the directory"
    assert _points(tmp_path, second.run_id, "x") == [(step, float(step)) for step in range(4)]
    own = second._client.search_runs(["1"])
    statuses = {run.info.run_id: run.info.status for run in own}
    assert statuses == {first.run_id: "KILLED", second.run_id: "FINISHED"}


def test_runs_that_a_kill_left_are_ended_or_if_they_made_no_step_deleted(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    config = TrackingConfig()
    ids = []
    for step in (0, 3, 0):
        killed = MLflowTracker(tmp_path / "run", config, None)
        killed.start({})
        killed.log_metrics({"x": 1.0}, step)
        killed.finish("failed")
        killed._client.update_run(str(killed.run_id), status="RUNNING")
        ids.append(killed.run_id)
    last = MLflowTracker(tmp_path / "run", config, None)
    last.start({})
    last.finish("finished")
    client = MlflowClient(tracking_uri=last.uri)
    found = {run.info.run_id: run.info.status for run in client.search_runs(["1"])}
    assert found == {ids[1]: "KILLED", last.run_id: "FINISHED"}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_while_the_schema_is_made_leaves_a_database_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its n-th statement, for some n; the next run makes the schema, the one after copies it."""
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(adapter, "_MADE_WITHIN_S", -1.0)
    for number in (45, 120):
        if (child := os.fork()) == 0:
            left = [number]

            def count(*_: object, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            event.listen(Engine, "before_cursor_execute", count)
            try:
                MLflowTracker(tmp_path / "run", TrackingConfig(), None).start({})
            finally:
                os._exit(0)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    statements: list[str] = []
    num_made = []

    def note(*given: object) -> None:
        statements.append(str(given[2]))

    event.listen(Engine, "before_cursor_execute", note)
    for directory in (tmp_path, tmp_path / "next"):
        statements.clear()
        tracker = MLflowTracker(directory / "run", TrackingConfig(experiment="Default"), None)
        tracker.start({})
        tracker.log_metrics({"x": 1.0}, 1)
        tracker.finish("finished")
        assert _points(directory, tracker.run_id, "x") == [(1, 1.0)]
        assert not list(directory.glob(".making_*"))
        num_made.append(sum("CREATE TABLE" in text for text in statements))
    event.remove(Engine, "before_cursor_execute", note)
    assert num_made[0] > 20
    assert num_made[1] == 0
    assert len(list((tmp_path / "cache" / "multitask_rl").iterdir())) == 1


def test_a_database_for_which_the_disk_has_no_room_leaves_no_part_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for cache in ("empty", "filled"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        if cache == "filled":
            MLflowTracker(tmp_path / "first" / "run", TrackingConfig(), None).start({})
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        try:
            with pytest.raises(Exception, match=r"disk|File too large"):
                adapter._make_database(tmp_path / "mlflow.db")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_runs_that_start_at_once_beside_each_other_make_one_database(tmp_path: Path) -> None:
    gone = tmp_path / ".making_mlflow.db.gone"  # of a run that has made its own meanwhile
    gone.symlink_to(tmp_path / "nowhere")
    other = tmp_path / f".making_mlflow.db.{os.getpid()}"  # of a process of the same number elsewhere
    other.mkdir()
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})
    tracker.log_metrics({"x": 1.0}, 1)
    tracker.finish("finished")
    assert _points(tmp_path, tracker.run_id, "x") == [(1, 1.0)]
    assert set(tmp_path.glob(".making_*")) == {gone, other}


def test_an_experiment_that_another_run_makes_meanwhile_is_that_of_both(tmp_path: Path) -> None:
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    MLflowTracker(tmp_path / "first", TrackingConfig(experiment="another"), None).start({})
    runs = [MLflowTracker(tmp_path / name, TrackingConfig(), None) for name in ("one", "two")]
    begun: list[bool] = []

    def meanwhile(*given: object) -> None:
        if "INSERT INTO experiments" in str(given[2]) and not begun:
            begun.append(True)
            runs[1].start({})

    event.listen(Engine, "before_cursor_execute", meanwhile)
    runs[0].start({})
    event.remove(Engine, "before_cursor_execute", meanwhile)
    for run in runs:
        run.log_metrics({"x": 1.0}, 1)
        run.finish("finished")
        assert _points(tmp_path, run.run_id, "x") == [(1, 1.0)]


def test_runs_of_a_sweep_that_start_at_once_have_one_parent(tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    MLflowTracker(tmp_path / "first", TrackingConfig(), None).start({})
    runs = [MLflowTracker(tmp_path / "sweep" / name, TrackingConfig(), None) for name in "01"]
    second = threading.Thread(target=runs[1].start, args=({},))

    def meanwhile(*given: object) -> None:
        if "INSERT INTO runs" in str(given[2]) and second.ident is None:
            second.start()
            second.join(3.0)  # it waits for the first

    event.listen(Engine, "before_cursor_execute", meanwhile)
    runs[0].start({})
    second.join()
    event.remove(Engine, "before_cursor_execute", meanwhile)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    tags = [client.get_run(str(run.run_id)).data.tags for run in runs]
    assert len({own["mlflow.parentRunId"] for own in tags}) == 1
    for run in runs:
        run.finish("finished")


def test_what_was_not_sent_in_time_is_counted() -> None:
    started, done = threading.Event(), threading.Event()

    def hangs(points: list[object]) -> None:
        started.set()
        done.wait(60)

    writer = BackgroundWriter("a server", hangs)
    writer.start()
    writer.put([1, 2])
    started.wait(60)
    for _ in range(3):
        writer.put([1, 2])
    writer.close(timeout_s=0.05)
    assert writer.num_failed == 1 + 6
    done.set()


def test_a_server_that_refuses_some_of_the_calls_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise ConnectionError("away")

    writer = BackgroundWriter("a server", lambda points: None)
    writer.start()
    for call in [refuse, lambda: None] * 10:
        writer.put(call)
    writer.close(10.0)
    assert writer.num_failed == 10
    assert caplog.text.count("refused a write") == 1


def test_a_full_queue_and_the_writes_share_the_time_of_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    started, room, done = threading.Event(), threading.Event(), threading.Event()
    clock = iter((100.0, 120.0))  # at the begin of the close, and when there is room
    waits: list[float | None] = []

    class Watched(BackgroundWriter):
        def join(self, timeout: float | None = None) -> None:
            waits.append(timeout)

    def read_clock() -> float:
        if threading.current_thread() is writer:
            return 0.0
        room.set()
        return next(clock)

    def first() -> None:
        started.set()
        room.wait(60)

    writer = Watched("a server", lambda points: None, max_queued=1)
    monkeypatch.setattr("multitask_rl.tracking.background.time", types.SimpleNamespace(monotonic=read_clock))
    writer.start()
    writer.put(first)
    started.wait(60)
    writer.put(lambda: done.wait(60) and None)
    writer.close(timeout_s=30.0)
    assert waits == [10.0], "20 s of the 30 passed while it waited for room"
    done.set()


def test_artifacts_of_a_database_elsewhere_lie_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    from mlflow import MlflowClient

    config = TrackingConfig(uri=f"sqlite:///{tmp_path / 'store' / 'all.db'}", experiment="x")
    (tmp_path / "store").mkdir()
    tracker = MLflowTracker(tmp_path / "run", config, None)
    tracker.start({})
    tracker.finish("finished")
    experiment = MlflowClient(tracking_uri=config.uri).get_experiment_by_name("x")
    assert experiment is not None
    assert experiment.artifact_location == (tmp_path / "store" / "mlartifacts").as_uri()
    assert list((tmp_path / "here").iterdir()) == [], "no mlruns in the working directory"


def test_runs_beside_each_other_share_a_store_and_a_sweep_stands_above_its_runs(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    for name in ("a", "sweep/0", "sweep/1"):
        tracker = MLflowTracker(tmp_path / "runs" / name, TrackingConfig(run_name=name), None)
        tracker.start(
            {"scheduler": {"policy": "uniform"}, "tasks": {"t": {"type": "ppo", "dataset": "t.jsonl"}}}
        )
        metrics = {"task/t/reward/x": 0.1, "task/t/eval": 0.5, "macro/eval": 0.5, "train/loss": 1.0}
        metrics["eval/score"] = -9.0  # it counts tasks without a range, too
        tracker.log_metrics({**metrics, "task/t/weight": 1.0, "task/t/kl": 0.1}, 1)
        tracker.finish("finished")
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    found = {run.info.run_name: run for run in client.search_runs(["1"])}
    assert set(found) == {"a", "sweep/0", "sweep/1", "sweep"}
    parents = {name: run.data.tags.get("mlflow.parentRunId") for name, run in found.items()}
    assert parents == {
        "a": None,
        "sweep": None,
        **dict.fromkeys(("sweep/0", "sweep/1"), found["sweep"].info.run_id),
    }
    run = found["a"].data
    headlines = [f"at_a_glance/{name}" for name in ("held_out", "held_out.t", "share.t")]
    headlines += [f"at_a_glance_training/{name}" for name in ("kl.t", "loss")]
    assert sorted(n for n in run.metrics if n.startswith("at_a_glance")) == headlines, "as MLflow orders"
    assert sorted(list(run.metrics)[:5]) == headlines, "before 350 others"
    assert run.metrics["at_a_glance/held_out"] == 0.5
    assert run.tags["mlflow.user"]
    assert (run.tags["scheduler"], run.tags["algorithms"]) == ("uniform", "ppo")
    assert "- **t**: ppo, t.jsonl" in run.tags["mlflow.note.content"]


def test_rows_weights_and_rollouts_are_what_mlflow_calls_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(run_name="x"), None)
    tracker.start({})
    rows = [
        DatasetRecord(task="t", is_held_out=h, source="t.jsonl", num_rows=n, digest=lambda h=h: f"digest{h}")
        for h, n in ((False, 90), (True, 10))
    ]
    tracker.log_datasets(rows)
    for step, is_best, judged_good in ((2, True, True), (4, False, True), (6, False, False), (8, True, True)):
        tracker.log_checkpoint(tmp_path / f"{step}", step, is_best=is_best, judged_good=judged_good)
    scored = [
        Scored(rollout=replace(rollout("an answer"), sample=i), reward=reward)
        for i, reward in enumerate((0.2, 0.9, 0.4))
    ]
    for _ in range(2):  # at most once a minute
        tracker.log_rollouts(scored, 3)
    tracker.finish("finished")
    identity = str(tracker.run_id)
    again = MLflowTracker(tmp_path / "run", TrackingConfig(run_name="x"), identity)
    again.start({}, resume_step=2)
    again.log_datasets([*rows, replace(rows[0], task="added")])  # at the resume
    again.log_rollouts(scored, 3)  # the step is made again
    again.finish("finished")
    other = MLflowTracker(tmp_path / "fork", TrackingConfig(run_name="x"), None)
    other.start({})
    for step in (10, 12):
        other.log_checkpoint(tmp_path / f"{step}", step, is_best=True, judged_good=True)
    other.finish("finished")

    client = MlflowClient(tracking_uri=tracker.uri)
    inputs = client.get_run(identity).inputs.dataset_inputs
    assert {(i.dataset.name, i.dataset.digest, i.tags[0].value) for i in inputs} == {
        ("t (train)", "digestFalse", "training"),
        ("t (held out)", "digestTrue", "evaluation"),
        ("added (train)", "digestFalse", "training"),
    }
    model, second = sorted(client.search_registered_models(), key=lambda model: str(model.name))
    assert (model.name, second.name) == ("multitask-rl x", f"multitask-rl x {str(other.run_id)[:8]}")
    assert client.get_model_version_by_alias(second.name, "best").tags["step"] == "12"
    versions = {
        alias: client.get_model_version_by_alias(model.name, alias) for alias in ("best", "last_good")
    }
    assert {alias: version.tags["step"] for alias, version in versions.items()} == {
        "best": "8",
        "last_good": "8",
    }
    assert len(client.search_model_versions(f"name = '{model.name}'")) == 1, "others are gone"
    traces = client.search_traces(locations=["1"], run_id=identity)
    rewards = sorted(next(a.value for a in t.info.assessments if a.name == "reward") for t in traces)
    assert rewards == [0.2, 0.9], "the worst and the best, once"
    (trace,) = [t for t in traces if t.info.tags["mlflow.traceName"] == "t"][:1]
    assert [span.name for span in trace.data.spans] == ["t", "turn 1"]
    assert trace.data.spans[1].inputs == {
        "messages": [{"role": "user", "content": scored[0].rollout.prompt.text}]
    }
    assert not [r.getMessage() for r in caplog.records if "takes no" in r.getMessage()]


def test_what_a_rollback_past_a_renaming_undid_is_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text('tasks: {new: {former_names: ["old"]}}')
    line = {"step": 0, "task": "new", "metric": "reward", "values": [1.0], "direction": "higher"}
    (tmp_path / "run" / "evaluations.jsonl").write_text(f"{json.dumps(line)}\n")
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})
    for task, steps, weight in (("old", (1, 2, 3), 0.1), ("new", (4, 5), 0.2), ("new", (2,), 0.3)):
        for step in steps:
            tracker.log_metrics({f"task/{task}/weight": weight, "task/other/weight": 1.0 - weight}, step)
            time.sleep(0.002)  # points have milliseconds
    tracker.finish("finished")
    (tmp_path / "fetched").mkdir()
    adapter.fetch_run(tracker.uri, str(tracker.run_id), tmp_path / "fetched")
    found = read_run(tmp_path / "fetched").weights
    assert found["new"] == {1: 0.1, 2: 0.3}
    assert found["other"] == {1: 0.9, 2: 0.7}


def test_a_run_without_a_name_is_told_apart_by_its_directory(tmp_path: Path) -> None:
    tracker = MLflowTracker(tmp_path / "uniform", TrackingConfig(), None)
    tracker.start({"seed": 3})
    tracker.finish("finished")
    name = tracker._client.get_run(str(tracker.run_id)).info.run_name
    assert re.fullmatch(r"uniform-\d{8}-\d{6}-seed3", str(name))


def test_a_trace_of_an_episode_shows_the_whole_conversation(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    def turn(said: list[str], answer: str) -> Turn:
        messages = [{"role": "user", "content": text} for text in said]
        return Turn(num_tokens=1, messages=messages, response=answer, finish_reason="stop")

    episode = replace(rollout("right"), turns=[turn([], "wrong"), turn(["no", "again"], "right")])
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})
    tracker.log_rollouts([Scored(rollout=episode, reward=1.0)], 1)
    tracker.finish("finished")
    (trace,) = MlflowClient(tracking_uri=tracker.uri).search_traces(locations=["1"])
    root, first, second = trace.data.spans
    said = [message["content"] for message in root.inputs["messages"]]
    assert said == [episode.prompt.text, "wrong", "no", "again"]
    assert root.outputs["choices"][0]["message"]["content"] == "right"
    assert [m["content"] for m in first.inputs["messages"]] == said[:1]
    assert second.inputs == root.inputs


def test_tasks_take_turns_with_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace takes 30 ms: with a thousand tasks, two of each at a time would be minutes."""
    from mlflow import MlflowClient

    monkeypatch.setattr(adapter, "SAMPLES_EVERY_S", 0.0)
    monkeypatch.setattr(adapter, "_TRACE_RESOLUTION", 10**9)
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})

    def of(tasks: str) -> list[Scored]:
        made = [(task, sample) for task in tasks for sample in range(3)]
        return [Scored(rollout=make_rollout("x", task=t, sample=i), reward=float(i)) for t, i in made]

    for step, tasks in enumerate(("abc", "abc", "ac", "d", "abcd"), start=1):
        tracker.log_rollouts(of(tasks), step)
    tracker.finish("finished")
    found = MlflowClient(tracking_uri=tracker.uri).search_traces(locations=["1"])
    seen = sorted((int(trace.info.tags["step"]), trace.info.tags["task"]) for trace in found)
    assert seen == sorted(
        2 * [(1, "a"), (1, "b"), (2, "c"), (2, "a"), (3, "c"), (3, "a"), (4, "d"), (5, "b"), (5, "a")]
    )


def test_what_a_store_lacks_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = MLflowTracker(tmp_path / "run", TrackingConfig(), None)
    tracker.start({})

    def lacks(*_: object) -> None:
        raise NotImplementedError("no such thing here")

    for step in range(9):
        tracker._offer("models", lacks)
        tracker.log_metrics({"x": 1.0}, step)
    tracker.finish("finished")
    assert len(_points(tmp_path, tracker.run_id, "x")) == 9
    assert [r.getMessage() for r in caplog.records if "takes no models" in r.getMessage()]


def test_points_of_short_steps_are_written_together_but_not_later_than_said() -> None:
    writes: list[list[int]] = []
    written = threading.Event()

    def write(points: list[int]) -> None:
        writes.append(points)
        written.set()

    writer = BackgroundWriter("a server", write, gather_s=60.0)
    writer.start()
    for point in range(3):
        writer.put([point])
        assert not written.wait(0.02)
    writer.put(lambda: writes.append([]))  # a call keeps its place
    writer.put([3])
    writer.close(timeout_s=10.0)
    assert writes == [[0, 1, 2], [], [3]]
    written.clear()
    soon = BackgroundWriter("a server", write, gather_s=0.01)
    soon.start()
    soon.put([4])
    assert written.wait(10.0)
    soon.close(timeout_s=10.0)


def test_the_store_of_a_directory_that_is_a_link_lies_beside_the_link(tmp_path):
    (tmp_path / "disk" / "first").mkdir(parents=True)
    (tmp_path / "first").symlink_to(tmp_path / "disk" / "first")
    assert MLflowTracker(tmp_path / "first", TrackingConfig(), None).uri == f"sqlite:///{tmp_path}/mlflow.db"


@pytest.mark.parametrize("name", ["a?b=c", "50%20x"])
def test_a_path_that_mlflow_reads_as_another_one_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"MLflow cannot open .*tracking\.uri"):
        MLflowTracker(tmp_path / name / "run", TrackingConfig(), None)
    kept = TrackingConfig(uri=f"sqlite:///{tmp_path}/x.db")
    assert MLflowTracker(tmp_path / name / "run", kept, None).uri == kept.uri
    assert MLflowTracker(tmp_path / "100%" / "run", TrackingConfig(), None)
