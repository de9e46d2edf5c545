"""Tracker that writes to MLflow (extra ``mlflow``): a server, or SQLite in the output directory.

A background thread does all writes after ``start``; a failing server costs numbers, never the run. Of each
metric MLflow gets every point before step 200, then one per hundredth of the steps made: its database grows
with the logarithm of the steps. It cannot delete points: a resumed run sends the points that MLflow lacks
and leaves out those that it has of repeated steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.boundary.printable import redact_text
from multitask_rl.config.run import TrackingConfig, dotted
from multitask_rl.errors import ConfigError, MissingExtraError
from multitask_rl.records import Event
from multitask_rl.tracking.background import MAX_PER_BATCH, BackgroundWriter
from multitask_rl.tracking.base import Tracker
from multitask_rl.tracking.jsonl import dump_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_LOG = logging.getLogger(__name__)
_MAX_NAME = 250
_MAX_PARAMETER = 500
"""Characters of a parameter's value; newer servers allow 6000, this one passes everywhere."""
_MAX_TAG = 5000
_MAX_PARAMETERS_PER_BATCH = 100
_EVENTS_EVERY_S = 60.0
_RESOLUTION = 100
"""Kept points of a metric lie at least this part of the steps made so far apart."""
_DIRECTORY_TAG = "multitask_rl.output_dir"
_KEPT_FILES = ("evaluations.jsonl", "config.yaml")
"""What ``fetch_run`` needs beside metrics and events, from the output directory."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


def legal_name(name: str) -> str:
    """Return ``name`` as MLflow accepts it: ``[A-Za-z0-9_. /-]``, a relative path without dots, <= 250 long.

    A name that had to change gets four hex digits of its hash, so that two names never become one.
    """
    parts = [re.sub(r"[^\w\-. ]", "_", part, flags=re.ASCII) for part in name.split("/")]
    legal = "/".join(part if part.strip(".") else "_" for part in parts if part) or "_"
    if legal == name and len(legal) <= _MAX_NAME:
        return legal
    return f"{legal[: _MAX_NAME - 5]}_{hashlib.blake2b(name.encode(), digest_size=2).hexdigest()}"


def flatten_parameters(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield dotted legal names and values cut to MLflow's limit; lists are written as JSON."""
    for key, value in dotted(parameters):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield legal_name(key), text if len(text) <= _MAX_PARAMETER else text[: _MAX_PARAMETER - 3] + "..."


def _require_mlflow() -> None:
    if find_spec("mlflow") is None:
        raise MissingExtraError(
            "MLflow is not installed: pip install 'multitask-rl[mlflow]', or track without it: "
            "tracking.trackers=[console,jsonl]."
        )


def _client(uri: str) -> MlflowClient:
    _require_mlflow()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    for noisy in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return MlflowClient(tracking_uri=uri or None)


def _make_database(path: Path) -> None:
    """Make an empty database of MLflow's schema aside and rename it: a kill must not leave half of one.

    MLflow needs seconds for its schema: a database of each version is kept in the user's cache directory.
    """
    if path.exists():
        return
    aside = path.with_name(f".making_{path.name}")
    for left in path.parent.glob(f"{aside.name}*"):
        left.unlink()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multitask_rl"
    template = cache / f"mlflow-{version('mlflow')}.db"
    try:
        shutil.copyfile(template, aside)
    except OSError:
        _client(f"sqlite:///{aside}").search_experiments(max_results=1)
        with contextlib.closing(sqlite3.connect(aside, isolation_level=None)) as database:
            database.execute("DELETE FROM experiments")  # the default one, whose artifacts would lie here
        with contextlib.suppress(OSError):  # a cache that cannot be written saves no time
            cache.mkdir(parents=True, exist_ok=True)
            copy = template.with_name(f"{template.name}.{os.getpid()}")
            copy.write_bytes(aside.read_bytes())
            with copy.open("rb+") as stream:
                os.fsync(stream.fileno())
            copy.replace(template)
    aside.replace(path)


@contextlib.contextmanager
def _asking_briefly() -> Iterator[None]:
    """Wait for a server half a minute at most, where MLflow waits several; settings of the user hold."""
    ours = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    ours = {name: value for name, value in ours.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def fetch_run(uri: str, run_id: str, directory: Path) -> None:
    """Write what MLflow holds of a run into ``directory`` as the run's own output directory has it.

    These are ``evaluations.jsonl``, ``config.yaml``, ``events.jsonl`` and the tasks' weights in
    ``metrics.jsonl``, as far as the run has them. An empty ``uri`` is ``MLFLOW_TRACKING_URI`` or its default.

    Raises:
        MissingExtraError: MLflow is not installed.
        ConfigError: there is no such run.
    """
    client = _client(uri)
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        place = redact_text(uri) or "its default URI"
        raise ConfigError(f"MLflow at {place} has no run {run_id!r}: {error}") from error
    present = {entry.path for entry in client.list_artifacts(run_id)}
    for name in ("events.jsonl", *_KEPT_FILES):
        if name in present:
            client.download_artifacts(run_id, name, str(directory))
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as stream:
        for name in run.data.metrics:
            if name.startswith("task/") and name.endswith("/weight"):
                for point in client.get_metric_history(run_id, name):
                    stream.write(dump_line({"step": point.step, name: point.value}))


class MLflowTracker(Tracker):
    """One MLflow run; a resumed run continues it under its ``run_id``. MissingExtraError without MLflow."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        _require_mlflow()
        self.run_id = run_id
        self.num_dropped = 0
        """Metric values left out because they were not finite numbers."""
        self._directory = output_dir.resolve()
        self.uri = config.uri or f"sqlite:///{self._directory / 'mlflow.db'}"
        self._config = config
        self._last_kept: dict[str, int] = {}
        """Metric -> step of its newest point that was kept."""
        self._stored: Counter[tuple[str, int]] = Counter()
        """Points that MLflow has and that come again: name and step -> how often."""
        self._client: MlflowClient
        self._run: str
        """``run_id``, once the run is open."""
        self._worker: BackgroundWriter | None = None
        self._events: list[dict[str, Any]] = []
        self._event_counts: Counter[str] = Counter()
        self._events_written_s = time.monotonic()

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Create the run, or reopen ``run_id``. Takes seconds the first time (SQLite schema, then cached)."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if not self._config.uri:
            _make_database(self._directory / "mlflow.db")
        self._client = _client(self.uri)
        former = self.run_id
        with _asking_briefly():
            if former is None:
                self.run_id = self._create_run(parameters)
            else:
                self._client.update_run(former, status="RUNNING")
        self._run = str(self.run_id)
        self._worker = BackgroundWriter(f"MLflow at {redact_text(self.uri)}", self._send_metrics)
        self._worker.start()
        self._worker.put(partial(self._send_parameters, parameters))
        if resume_step is not None and former is not None:
            self._worker.put(partial(self._load_events, resume_step))
            record = self._directory / "metrics.jsonl"
            num_bytes = record.stat().st_size if record.exists() else None
            self._worker.put(partial(self._meet_record, resume_step, record, num_bytes))

    def _create_run(self, parameters: Mapping[str, Any]) -> str:
        """Create a run; end earlier runs of the directory that a kill left open, delete those without a step.

        No other run goes on in the directory: it is locked.
        """
        experiment, place = self._client.get_experiment_by_name(self._config.experiment), None
        if self.uri.startswith("sqlite:///"):
            # without a place, MLflow keeps the artifacts of a database in the working directory
            place = (Path(self.uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
        if experiment is not None:
            number = str(experiment.experiment_id)
        else:
            number = str(self._client.create_experiment(self._config.experiment, artifact_location=place))
        # machine and directory, as a filter can ask for them
        tag = f"{socket.gethostname()}:{self._directory}".replace("'", "_")[:_MAX_TAG]
        ours = f"tags.`{_DIRECTORY_TAG}` = '{tag}'" if self._config.uri else ""
        for run in self._client.search_runs([number], ours):
            run_id = run.info.run_id
            histories = (self._client.get_metric_history(run_id, name) for name in run.data.metrics)
            if not any(point.step > 0 for history in histories for point in history):
                self._client.delete_run(run_id)
            elif run.info.status == "RUNNING":
                self._client.set_terminated(run_id, "KILLED")
        name = self._config.run_name or f"{datetime.now():%Y%m%d-%H%M%S}-seed{parameters.get('seed', 0)}"
        created = self._client.create_run(number, run_name=name, tags={_DIRECTORY_TAG: tag})
        return str(created.info.run_id)

    def _meet_record(self, resume_step: int, record: Path, num_bytes: int | None) -> None:
        """Send the points of ``metrics.jsonl`` that MLflow lacks; without it, it has all up to the resume."""
        for name in self._client.get_run(self._run).data.metrics:
            steps = [point.step for point in self._client.get_metric_history(self._run, name)]
            self._stored.update((name, step) for step in steps if num_bytes is not None or step > resume_step)
        if num_bytes is None:
            return
        points = []
        with record.open("rb") as stream:
            for line in stream.read(num_bytes).splitlines():
                row = json.loads(line)
                step = int(row.pop("step"))
                values = {name: math.nan if value is None else value for name, value in row.items()}
                points += self._points(values, step)
        self._send_metrics(points)

    def _load_events(self, resume_step: int) -> None:
        path = self._directory / "events.jsonl"  # cut to the checkpoint
        with tempfile.TemporaryDirectory() as directory:
            if not path.exists():
                if not any(entry.path == path.name for entry in self._client.list_artifacts(self._run)):
                    return
                path = Path(self._client.download_artifacts(self._run, path.name, directory))
            events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for event in events:
            if event["step"] <= resume_step:
                self._send_event(event)

    def _send_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Log parameters that the run lacks; changed values go to ``config.resumed.json``."""
        from mlflow.entities import Param

        present = self._client.get_run(self._run).data.params
        wanted = dict(flatten_parameters(parameters))
        new = [Param(key, value) for key, value in wanted.items() if key not in present]
        for index in range(0, len(new), _MAX_PARAMETERS_PER_BATCH):
            batch = new[index : index + _MAX_PARAMETERS_PER_BATCH]
            self._client.log_batch(self._run, params=batch, synchronous=True)
        changed = {key: value for key, value in wanted.items() if present.get(key, value) != value}
        if changed:
            self._client.log_dict(self._run, changed, "config.resumed.json")

    def _send_metrics(self, points: Sequence[Metric]) -> None:
        """Send the kept points that MLflow lacks."""
        new = []
        for point in points:
            if self._keeps(point.key, point.step):
                if self._stored[point.key, point.step] > 0:
                    self._stored[point.key, point.step] -= 1
                else:
                    new.append(point)
        for index in range(0, len(new), MAX_PER_BATCH):
            batch = new[index : index + MAX_PER_BATCH]
            self._client.log_batch(self._run, metrics=batch, synchronous=True)

    def _keeps(self, name: str, step: int) -> bool:
        """Whether a point is kept: no kept one is near before it; only earlier points decide."""
        last = self._last_kept.get(name, step)
        if last < step < last + step // _RESOLUTION:
            return False
        self._last_kept[name] = step
        return True

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the finite values under legal names."""
        if (points := self._points(metrics, step)) and self._worker is not None:
            self._worker.put(points)

    def _points(self, metrics: Mapping[str, float], step: int) -> list[Metric]:
        """Return the finite values under legal names; count the others."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        finite = {legal_name(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
        self.num_dropped += len(metrics) - len(finite)
        return [Metric(name, value, now_ms, step) for name, value in finite.items()]

    def log_event(self, event: Event) -> None:
        """Queue the event: counted and quoted in a tag, kept whole in the artifact ``events.jsonl``."""
        if self._worker is not None:
            self._worker.put(partial(self._send_event, asdict(event)))

    def _send_event(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        key = f"{event['source']}.{event['kind']}"
        self._event_counts[key] += 1
        text = f"{self._event_counts[key]} x, last at step {event['step']}: {event['reason']}"
        self._client.set_tag(self._run, legal_name(f"event.{key}"), text[:_MAX_TAG])
        if time.monotonic() - self._events_written_s > _EVENTS_EVERY_S:
            self._send_events()

    def _send_events(self) -> None:
        if self._events:
            self._client.log_text(self._run, "".join(map(dump_line, self._events)), "events.jsonl")
            self._events_written_s = time.monotonic()

    def finish(self, status: str) -> None:
        """Send what is queued (at most a minute) and close the run. A second call does nothing."""
        worker, self._worker = self._worker, None
        if worker is None:
            return

        def tag_dropped() -> None:
            # in the worker's turn: it counts the values of the record first
            if self.num_dropped:
                self._client.set_tag(self._run, "metrics_not_finite", str(self.num_dropped))

        worker.put(self._send_events)
        for path in (self._directory / name for name in _KEPT_FILES):
            if path.is_file():
                worker.put(partial(self._client.log_artifact, self._run, str(path)))
        worker.put(tag_dropped)
        worker.put(partial(self._client.set_terminated, self._run, _STATUS.get(status, "FAILED")))
        worker.close(timeout_s=60.0)
        if worker.num_failed:
            _LOG.warning("%s did not take everything: %d writes lost", worker.name, worker.num_failed)
