"""MLflow receives every number, survives bad ones, and continues its run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import MissingExtraError
from multitask_rl.records import Event
from multitask_rl.tracking import mlflow as adapter
from multitask_rl.tracking.fanout import Trackers
from multitask_rl.tracking.mlflow import MLflowTracker, flatten_parameters, legal_name

pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


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


def test_run_is_logged_and_resumed_under_its_id(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    config = TrackingConfig(trackers=["mlflow"], run_name="first")
    first = Trackers(tmp_path, config, None)
    first.start({"seed": 3, "optimizer": {"learning_rate": 0.1}})
    for step in range(1, 4):
        metrics = {"task/math/reward_mean": step / 10, "task/m:x/kl": 1.0, "bad": math.nan, "worse": math.inf}
        first.log_metrics(metrics, step)
    for step in (1, 3):
        first.log_event(Event(step=step, source="guard", kind="alarm", reason=f"fell {step}"))
    (tmp_path / "note.txt").write_text("kept")
    first.log_artifact(tmp_path / "note.txt")
    first.finish("failed")
    identity = first.run_id
    assert identity is not None

    second = Trackers(tmp_path, config, identity)
    second.start({"seed": 3, "optimizer": {"learning_rate": 0.2}, "new": 1}, resume_step=2)
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
    assert "bad" not in run.data.metrics
    assert legal_name("task/m:x/kl") in run.data.metrics
    assert run.data.tags["metrics_not_finite"] == "6"
    assert run.data.tags["event.guard.alarm"] == "2 x, last at step 4: fell 4"
    artifacts = tmp_path / "mlartifacts" / run_id / "artifacts"
    events = [json.loads(line) for line in (artifacts / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [1, 4]
    assert (artifacts / "note.txt").read_text() == "kept"
    assert json.loads((artifacts / "config.resumed.json").read_text()) == {"optimizer.learning_rate": "0.2"}


def test_a_server_that_goes_away_costs_numbers_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = MLflowTracker(tmp_path, TrackingConfig(), None)
    tracker.start({})
    tracker._client.delete_run(tracker.run_id)  # the store now refuses every write to it
    for step in range(20):
        tracker.log_metrics({"x": 1.0}, step)
        tracker.log_event(Event(step=step, source="run", kind="note", reason="."))
    tracker.finish("finished")
    messages = [record.getMessage() for record in caplog.records if record.name == adapter.__name__]
    assert any("refused a write" in message for message in messages)
    assert any("writes lost" in message for message in messages)
    assert len(messages) <= 3


def test_missing_mlflow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"multitask-rl\[mlflow\]"):
        Trackers(tmp_path, TrackingConfig(trackers=["mlflow"]), None)
