"""Tracker that writes to MLflow (extra ``mlflow``): a server, or SQLite beside the directories of runs.

A background thread makes all writes after ``start``. A failing server costs numbers, never the run. If it
cannot be reached at the start, the run begins without it. At its end, or when it is resumed, the run sends
from its own records what MLflow missed.

- Points: each costs MLflow 0.1 to 0.2 ms of a processor. So it gets every point of the first steps, later
  one of several (``_RESOLUTION``): its database grows with the logarithm of the steps. It cannot delete
  points, so a resumed run sends only points that it lacks.
- The most important curves have a second name in ``at_a_glance``, the group that MLflow shows first.
- Data sets are inputs of the run. Some stored rollouts are traces.
- Saved weights are versions of a registered model. It has the run's name and the aliases ``best`` and
  ``last_good``.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache, partial
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from filelock import FileLock

from multitask_rl.boundary.printable import counted, cut_off, redact_text
from multitask_rl.config.run import TrackingConfig, dotted
from multitask_rl.errors import ConfigError, require_extra
from multitask_rl.records import DatasetRecord, Event, Scored
from multitask_rl.tracking.background import MAX_PER_BATCH, BackgroundWriter
from multitask_rl.tracking.base import SAMPLES_EVERY_S, Tracker, best_and_worst
from multitask_rl.tracking.jsonl import dump_line, scored_to_dict, whole_records

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_LOG = logging.getLogger(__name__)
_MAX_NAME = 250
_MAX_PARAMETER = 500
"""Most characters of a parameter's value on any server; newer ones allow 6000."""
_MAX_TAG = 5000
_RUN_TAG = "multitask_rl.run"
"""Tag of a registered model: the run whose weights it has."""
_EVENTS_EVERY_S = 60.0
_RESOLUTION, _HEADLINE_RESOLUTION = 10, 50
"""Kept points of a curve lie at least a 10th (a 50th) of the steps made so far apart: all are kept before
step 20, and before step 100 those of the curves to look at first."""
_TRACE_RESOLUTION = 20
"""The same for traces, by seconds instead of steps."""
_TRACED = 2
"""Tasks that get traces at a time. A trace takes 30 ms: those of hundreds of tasks would slow the run."""
_NOTE = "mlflow.note.content"
_PAGE = "report.html"
_PAGE_LINE = f"Page of the run: [{_PAGE}]"
_GATHER_S = 15.0
"""Seconds between two writes of points, later a minute: each write looks up the newest point of every
metric."""
_GATHERED = 10 * MAX_PER_BATCH
"""This many waiting points are written at once; most of them are not kept."""
_DIRECTORY_TAG = "multitask_rl.output_dir"
_SWEEP_TAG = "multitask_rl.sweep"
_RESUMED_TAG = "resumed_with"
_KEPT_FILES = ("evaluations.jsonl", "config.yaml")
"""Files of the output directory that ``fetch_run`` needs beside metrics and events."""
_MADE_WITHIN_S = 600.0
"""An unfinished database that is older, in seconds, was left by a killed process."""
_AT_A_GLANCE, _NEXT = "at_a_glance/", "at_a_glance_training/"
_HEADLINES = {
    r"task/([^/]+)/eval": rf"{_AT_A_GLANCE}held_out.\1",
    r"macro/eval": f"{_AT_A_GLANCE}held_out",
    r"worst/eval": f"{_AT_A_GLANCE}held_out_worst",
    r"task/([^/]+)/reward_mean": rf"{_AT_A_GLANCE}reward.\1",
    r"task/([^/]+)/weight": rf"{_AT_A_GLANCE}share.\1",
    r"train/loss": f"{_NEXT}loss",
    r"task/([^/]+)/kl": rf"{_NEXT}kl.\1",
    r"task/([^/]+)/entropy": rf"{_NEXT}entropy.\1",
    r"time/step_s": f"{_NEXT}seconds_per_step",
}
"""The most important metrics -> their second names, in the groups that MLflow shows first.

MLflow orders the curves of a group by name: held out, reward, share; eight of two tasks. The second group
says how the training goes.
"""
_Point = tuple[str, float, int, int]
"""Metric, value, milliseconds since 1970, step."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


@cache
def legal_name(name: str) -> str:
    """Return ``name`` as MLflow accepts it: ``[A-Za-z0-9_. /-]``, a relative path without dots, <= 250 long.

    A name that had to change gets four hex digits of its hash, so that two names never become one.
    """
    parts = [re.sub(r"[^\w\-. ]", "_", part, flags=re.ASCII) for part in name.split("/")]
    legal = "/".join(part if part.strip(".") else "_" for part in parts if part) or "_"
    if legal == name and len(legal) <= _MAX_NAME:
        return legal
    return f"{legal[: _MAX_NAME - 5]}_{hashlib.blake2b(name.encode(), digest_size=2).hexdigest()}"


@cache
def _headlines(name: str) -> list[str]:
    """Return the second names of a metric: one, or none."""
    found = ((re.fullmatch(pattern, name), again) for pattern, again in _HEADLINES.items())
    return [match.expand(again) for match, again in found if match]


def flatten_parameters(parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield dotted legal names and values cut to MLflow's limit; lists are written as JSON."""
    for key, value in dotted(parameters):
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield legal_name(key), cut_off(text, _MAX_PARAMETER)


def _describe(parameters: Mapping[str, Any], directory: Path) -> dict[str, str]:
    """Return the tags of a new run: what it trains, from which code, and a note on how to look at it."""
    model = str(parameters.get("model", {}).get("name_or_path", ""))
    tasks = {n: t for n, t in parameters.get("tasks", {}).items() if isinstance(t, Mapping)}
    tags = {
        "model": model,
        "scheduler": str(parameters.get("scheduler", {}).get("policy", "")),
        "algorithms": ", ".join(sorted({str(task.get("type", "")) for task in tasks.values()})),
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": "multitask-rl train",
    }
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    git = ["git", "-C", str(Path(str(parameters.get("tasks_file") or ".")).resolve().parent)]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = [*git, "rev-parse", "HEAD"]
        tags["mlflow.source.git.commit"] = subprocess.run(
            asked, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    lines = [f"- **{name}**: {task.get('type')}, {task.get('dataset')}" for name, task in tasks.items()]
    tags[_NOTE] = "\n".join(
        [
            f"{model} on {counted(len(tasks), 'task')}, in `{directory}`.",
            "",
            *lines,
            "",
            "The group `at_a_glance` has held-out value, reward and share of each task. Some stored "
            "responses, with their rewards, are under Traces.",
            "",
            f"    multitask-rl report {shlex.quote(str(directory))} --html report.html --open",
        ]
    )
    return {key: value[:_MAX_TAG] for key, value in tags.items() if value}


def _require_mlflow() -> None:
    otherwise = ", or track without it: tracking.trackers=[console,jsonl]"
    require_extra("mlflow", "mlflow", "the tracker mlflow needs MLflow", otherwise)


def _client(uri: str) -> MlflowClient:
    _require_mlflow()
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    from mlflow import MlflowClient

    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # the tracker tells of errors
    return MlflowClient(tracking_uri=uri or None)


def _make_database(path: Path) -> None:
    """Make an empty database with MLflow's schema under another name, then rename it: a kill leaves no half.

    MLflow takes seconds to make its schema, so the user's cache directory keeps a database per version.
    """
    if path.exists():
        return
    # not named by the process id, which processes in two containers may share
    aside = path.with_name(f".making_{path.name}.{uuid.uuid4().hex}")
    for left in path.parent.glob(f".making_{path.name}*"):
        with contextlib.suppress(FileNotFoundError):  # another run has made its own meanwhile
            if time.time() - left.stat().st_mtime > _MADE_WITHIN_S:  # of a process that was killed
                left.unlink()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multitask_rl"
    template = cache / f"mlflow-{version('mlflow')}.db"
    try:
        try:
            shutil.copyfile(template, aside)
        except OSError:
            aside.unlink(missing_ok=True)  # a part of a copy
            _client(f"sqlite:///{aside}").search_experiments(max_results=1)
            with contextlib.closing(sqlite3.connect(aside, isolation_level=None)) as database:
                database.execute("DELETE FROM experiments")  # the default one, whose artifacts would lie here
            with contextlib.suppress(OSError):  # a cache that cannot be written saves no time
                cache.mkdir(parents=True, exist_ok=True)
                copy = template.with_name(f"{template.name}.{uuid.uuid4().hex}")
                copy.write_bytes(aside.read_bytes())
                with copy.open("rb+") as stream:
                    os.fsync(stream.fileno())
                copy.replace(template)
        with contextlib.suppress(FileExistsError):  # another run has made it meanwhile
            os.link(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def _asking_briefly() -> Iterator[None]:
    """Wait at most half a minute for a server, not minutes as MLflow does, unless the user has set it."""
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
    _require_mlflow()
    import mlflow

    hint = "" if uri else "; name its store with --tracking-uri sqlite:///runs/mlflow.db or an address"
    store = uri or mlflow.get_tracking_uri()
    database = Path(store.removeprefix("sqlite:///"))
    if store.startswith("sqlite:///") and not database.is_file():  # MLflow would make an empty one
        raise ConfigError(f"MLflow run {run_id!r}: there is no database {database}{hint}")
    client = _client(uri)
    try:
        run = client.get_run(run_id)
    except mlflow.MlflowException as error:
        raise ConfigError(f"MLflow at {redact_text(store)} has no run {run_id!r}: {error}{hint}") from error
    present = {entry.path for entry in client.list_artifacts(run_id)}
    for name in ("events.jsonl", *_KEPT_FILES):
        if name in present:
            client.download_artifacts(run_id, name, str(directory))
    points = [
        (point.timestamp, point.step, name, point.value)
        for name in run.data.metrics
        if name.startswith("task/") and name.endswith("/weight")
        for point in client.get_metric_history(run_id, name)
    ]
    rows: dict[int, dict[str, float]] = {}
    for (_, step), own in groupby(sorted(points), key=itemgetter(0, 1)):
        if rows and step <= max(rows):  # a rollback undid these; tasks may have had other names then
            rows = {at: row for at, row in rows.items() if at < step}
        rows[step] = {name: value for *_, name, value in own}
    lines = (dump_line({"step": step, **row}) for step, row in rows.items())
    (directory / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def _answer(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


class MLflowTracker(Tracker):
    """One MLflow run; a resumed run continues it under its ``run_id``. MissingExtraError without MLflow."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        _require_mlflow()
        self.run_id = run_id
        self.num_dropped = 0
        """Metric values left out because they were not finite numbers."""
        self._directory = Path(os.path.abspath(output_dir))  # a link stays: runs beside it share a store
        self._sweep = self._directory.parent if self._directory.name.isdigit() else None
        """Directory of this run's sweep, in which runs have numbers as names; None = no sweep."""
        self._store = (self._sweep or self._directory).parent / "mlflow.db"
        """Database that runs in neighbouring directories share."""
        given = config.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if not given and ("?" in str(self._store) or unquote(str(self._store)) != str(self._store)):
            raise ConfigError(
                f"tracking.trackers: MLflow cannot open {str(self._store)!r}, as ? and %20 have a meaning in "
                "its addresses; name another store with tracking.uri=sqlite:////PATH/mlflow.db, choose an "
                "output_dir without them, or leave mlflow out"
            )
        self.uri = given or f"sqlite:///{self._store}"
        self._makes_store = not given
        self._config = config
        self._last_kept: dict[str, int] = {}
        """Metric -> step of its newest kept point."""
        self._stored: Counter[tuple[str, int]] = Counter()
        """(metric, step) -> how many of its points MLflow has already and this tracker gets again."""
        self._unmet: tuple[int, int | None] | None = None
        """Step of the resume and bytes of ``metrics.jsonl``, until MLflow's points are compared with it."""
        self._is_resumed = False
        self._parameters: Mapping[str, Any] = {}
        self._num_sent_again = 0
        """Writes that MLflow refused, and whose content was sent again at the end."""
        self._client: MlflowClient
        self._run: str
        """``run_id``, once the run is open."""
        self._worker: BackgroundWriter | None = None
        self._events: list[dict[str, Any]] = []
        self._event_counts: Counter[str] = Counter()
        self._events_written_s = time.monotonic()
        self._started_s = time.monotonic()
        self._traced_s = -math.inf
        self._traced: dict[str, float] = {}
        """Task -> time of its last traces."""
        self._refused: set[str] = set()
        """Kinds of calls that the store refused (``_offer``)."""
        self._inputs: set[str] = set()
        """Names of the data sets that MLflow has of the run; ``_send_inputs`` sends the others."""
        self._send_inputs: Callable[[], None] = lambda: None
        self._experiment = ""
        self._model_name = ""

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Create the run, or reopen ``run_id``. Takes seconds the first time (SQLite schema, then cached)."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._is_resumed = resume_step is not None
        target, opens = f"MLflow at {redact_text(self.uri)}", None
        try:
            self._open(parameters)
        except Exception as error:  # noqa: BLE001 - numbers are worth less than the run
            text = (
                "%s cannot be opened; the run goes on, tries again each minute, and at its end sends what "
                "MLflow missed: %.300r"
            )
            _LOG.warning(text, target, error)
            opens = partial(self._open, parameters)
        self._worker = BackgroundWriter(
            target,
            self._send_metrics,
            max_per_batch=_GATHERED,
            gather_s=_GATHER_S,
            is_local=self.uri.startswith("sqlite:///"),
            opens=opens,
        )
        self._worker.start()
        self._parameters = parameters
        self._worker.put(partial(self._send_parameters, parameters))
        if resume_step is not None:  # without a former identity, the run began while MLflow was away
            # the worker reads them later, when the run has written more, which it also sends itself
            self._worker.put(partial(self._load_events, resume_step, self._num_bytes("events.jsonl")))
            self._unmet = resume_step, self._num_bytes("metrics.jsonl")
            self._worker.put(self._meet_record)

    def _open(self, parameters: Mapping[str, Any]) -> None:
        """Connect, and create the run or reopen ``run_id``; one that the store lacks is made anew."""
        from mlflow.exceptions import MlflowException

        if self._makes_store:
            _make_database(self._store)
        self._client = _client(self.uri)
        with _asking_briefly():
            if self.run_id is not None:
                try:
                    self._client.update_run(self.run_id, status="RUNNING")
                except MlflowException as error:
                    if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                        raise
                    text = "MLflow at %s has no such run as %s any more: a new one gets the whole record"
                    _LOG.warning(text, redact_text(self.uri), self.run_id)
                    self.run_id = None
            if self.run_id is None:
                self.run_id = self._find_or_create_run(parameters)
            self._run = self.run_id
            run = self._client.get_run(self._run)
        self._experiment = str(run.info.experiment_id)
        self._model_name = re.sub(r"[/:]", "_", f"{self._config.experiment} {run.info.run_name}")
        self._inputs = {own.dataset.name for own in run.inputs.dataset_inputs} if run.inputs else set()

    def _find_or_create_run(self, parameters: Mapping[str, Any]) -> str:
        """Return a new run, or one of the directory that this run has made and no checkpoint names.

        Earlier runs of the directory that a kill left open are ended, those without a step deleted. No other
        run goes on in the directory: it is locked.
        """
        from mlflow.exceptions import MlflowException

        experiment, place = self._client.get_experiment_by_name(self._config.experiment), None
        if self.uri.startswith("sqlite:///"):
            # without a place, MLflow keeps the artifacts of a database in the working directory
            place = (Path(self.uri.removeprefix("sqlite:///")).resolve().parent / "mlartifacts").as_uri()
        if experiment is not None:
            number = str(experiment.experiment_id)
        else:
            kind = {"mlflow.experimentKind": "custom_model_development"}
            try:
                number = self._client.create_experiment(
                    self._config.experiment, artifact_location=place, tags=kind
                )
            except MlflowException:
                made_meanwhile = self._client.get_experiment_by_name(self._config.experiment)
                if made_meanwhile is None:  # by no other run
                    raise
                number = str(made_meanwhile.experiment_id)
        # machine and directory, as a filter can ask for them
        tag = f"{socket.gethostname()}:{self._directory}".replace("'", "_")[:_MAX_TAG]
        for run in self._client.search_runs([number], f"tags.`{_DIRECTORY_TAG}` = '{tag}'"):
            run_id = run.info.run_id
            histories = (self._client.get_metric_history(run_id, name) for name in run.data.metrics)
            if not any(point.step > 0 for history in histories for point in history):
                self._client.delete_run(run_id)
            elif self._is_resumed and self._began_as(run):
                self._client.update_run(run_id, status="RUNNING")
                return str(run_id)
            elif run.info.status == "RUNNING":
                self._client.set_terminated(run_id, "KILLED")
        made = f"{self._directory.name}-{datetime.now():%Y%m%d-%H%M%S}-seed{parameters.get('seed', 0)}"
        name = self._config.run_name or made
        tags = {_DIRECTORY_TAG: tag, **_describe(parameters, self._directory)}
        if self._sweep is not None:
            tag = f"{socket.gethostname()}:{self._sweep}".replace("'", "_")[:_MAX_TAG]
            with contextlib.ExitStack() as stack:
                # runs of a sweep may start together; where files cannot be locked, each may make a parent
                with contextlib.suppress(OSError, NotImplementedError):
                    stack.enter_context(FileLock(self._sweep / ".mlflow.lock", timeout=60))
                found = self._client.search_runs([number], f"tags.`{_SWEEP_TAG}` = '{tag}'", max_results=1)
                if not found:
                    parent = self._client.create_run(
                        number, run_name=self._sweep.name, tags={_SWEEP_TAG: tag}
                    )
                    self._client.set_terminated(parent.info.run_id)
                    found = [parent]
            tags["mlflow.parentRunId"] = found[0].info.run_id
        return str(self._client.create_run(number, run_name=name, tags=tags).info.run_id)

    def _began_as(self, run: Run) -> bool:
        """Whether ``run`` has logged the first line of ``metrics.jsonl``.

        The line holds measured seconds, so another run has other values.
        """
        if not self._num_bytes("metrics.jsonl"):
            return False
        with (self._directory / "metrics.jsonl").open("rb") as stream:
            row = next(whole_records([stream.readline()]), {"step": 0})
        step, names = row.pop("step"), {legal_name(name): value for name, value in row.items()}
        known = {n: value for n, value in names.items() if value is not None and n in run.data.metrics}
        histories = ((v, self._client.get_metric_history(run.info.run_id, n)) for n, v in known.items())
        return bool(known) and all(
            any((point.step, point.value) == (step, value) for point in history)
            for value, history in histories
        )

    def _num_bytes(self, name: str) -> int | None:
        file = self._directory / name
        return file.stat().st_size if file.exists() else None

    def _meet_record(self) -> None:
        """Send the points of ``metrics.jsonl`` that MLflow lacks; without it, it has all up to the resume."""
        if self._unmet is None:
            return
        resume_step, num_bytes = self._unmet
        stored: Counter[tuple[str, int]] = Counter()
        for name in self._client.get_run(self._run).data.metrics:
            steps = [point.step for point in self._client.get_metric_history(self._run, name)]
            stored.update((name, step) for step in steps if num_bytes is not None or step > resume_step)
        self._stored, self._unmet = stored, None
        if num_bytes is None:
            return
        points: list[_Point] = []
        with (self._directory / "metrics.jsonl").open("rb") as stream:
            for row in whole_records(stream.read(num_bytes).splitlines()):
                step = int(row.pop("step"))
                values = {name: math.nan if value is None else value for name, value in row.items()}
                points += self._points(values, step)
        self._send_metrics(points)

    def _catch_up(self, worker: BackgroundWriter) -> None:
        """If MLflow refused writes, send parameters, events and points again, if the run has records."""
        size = self._num_bytes("metrics.jsonl")
        if not worker.num_failed or size is None:
            return
        num_failed = worker.num_failed
        self._send_parameters(self._parameters)
        if "data sets" not in self._refused:
            self._send_inputs()
        if (num_bytes := self._num_bytes("events.jsonl")) is not None:
            self._load_events(0, num_bytes)
        self._last_kept.clear()
        self.num_dropped, self._unmet = 0, (0, size)
        self._meet_record()
        self._num_sent_again = num_failed

    def _load_events(self, resume_step: int, num_bytes: int | None) -> None:
        """Send the first ``num_bytes`` of ``events.jsonl`` anew; None: it is missing, MLflow has them."""
        path = self._directory / "events.jsonl"
        is_cut = num_bytes is not None  # to the checkpoint; events that a rollback undid have later steps
        with contextlib.ExitStack() as stack:
            if not is_cut:
                if not any(entry.path == path.name for entry in self._client.list_artifacts(self._run)):
                    return
                directory = stack.enter_context(tempfile.TemporaryDirectory())
                path = Path(self._client.download_artifacts(self._run, path.name, directory))
            events = list(whole_records(path.read_bytes()[:num_bytes].splitlines()))
        # of the steps that are made again, the run knows no event any more
        for tag in self._client.get_run(self._run).data.tags:
            if tag.startswith("event."):
                self._client.delete_tag(self._run, tag)
        self._events, self._event_counts = [], Counter()
        for event in events:
            if is_cut or event["step"] <= resume_step:
                self._send_event(event)

    def _send_parameters(self, parameters: Mapping[str, Any]) -> None:
        """Log parameters that the run lacks; changed values go to ``config.resumed.json`` and a tag."""
        from mlflow.entities import Param

        data = self._client.get_run(self._run).data
        wanted = dict(flatten_parameters(parameters))
        new = [Param(key, value) for key, value in wanted.items() if key not in data.params]
        if new:
            self._client.log_batch(self._run, params=new, synchronous=True)
        changed = {key: value for key, value in wanted.items() if data.params.get(key, value) != value}
        if changed or _RESUMED_TAG in data.tags:
            self._client.log_dict(self._run, changed, "config.resumed.json")  # MLflow changes no parameter
        if changed:
            told = ", ".join(f"{key}={value}" for key, value in changed.items())
            self._client.set_tag(self._run, _RESUMED_TAG, told[:_MAX_TAG])
        elif _RESUMED_TAG in data.tags:  # a later resume took the changes back
            self._client.delete_tag(self._run, _RESUMED_TAG)

    def _send_metrics(self, points: Sequence[_Point]) -> None:
        """Send the kept points that MLflow lacks, under legal names."""
        from mlflow.entities import Metric

        self._meet_record()
        first, new = list[Metric](), list[Metric]()  # MLflow lists a run's metrics as they came
        for own, value, time_ms, step in points:
            for name in map(legal_name, (own, *_headlines(own))):
                if self._keeps(name, step):
                    if self._stored[name, step] > 0:
                        self._stored[name, step] -= 1
                    else:
                        kind = first if name.startswith((_AT_A_GLANCE, _NEXT)) else new
                        kind.append(Metric(name, value, time_ms, step))
        if first or new:
            self._client.log_batch(self._run, metrics=first + new, synchronous=True)

    def _keeps(self, name: str, step: int) -> bool:
        """Whether to keep a point: the last kept point before it is far enough away."""
        last = self._last_kept.get(name, step)
        is_headline = name.startswith((_AT_A_GLANCE, _NEXT))
        if last < step < last + step // (_HEADLINE_RESOLUTION if is_headline else _RESOLUTION):
            return False
        self._last_kept[name] = step
        return True

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue the finite values."""
        if (points := self._points(metrics, step)) and self._worker is not None:
            self._worker.put(points)

    def _points(self, metrics: Mapping[str, float], step: int) -> list[_Point]:
        """Return the finite values; count the others."""
        now_ms = int(time.time() * 1000)
        finite = [(n, float(value), now_ms, step) for n, value in metrics.items() if math.isfinite(value)]
        self.num_dropped += len(metrics) - len(finite)
        return finite

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

    def _send_file(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def log_datasets(self, datasets: Sequence[DatasetRecord]) -> None:
        """Queue data sets that the run lacks as its inputs: source, number of rows, hash."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(
                    name=f"{data.task} ({'held out' if data.is_held_out else 'train'})",
                    digest=data.digest(),
                    source_type="multitask_rl",
                    source=json.dumps({"dataset": data.source}),
                    profile=json.dumps({"num_rows": data.num_rows}),
                ),
                [InputTag("mlflow.data.context", "evaluation" if data.is_held_out else "training")],
            )
            for data in datasets
        ]

        def send() -> None:
            if new := [own for own in inputs if own.dataset.name not in self._inputs]:
                self._client.log_inputs(self._run, datasets=new)
                self._inputs.update(own.dataset.name for own in new)

        self._send_inputs = send
        self._offer("data sets", send)

    def log_checkpoint(self, actor: Path, step: int, *, is_best: bool, judged_good: bool) -> None:
        """Queue a version of the run's registered model, if the weights are the best or judged good."""
        aliases = [a for a, holds in (("best", is_best), ("last_good", judged_good)) if holds]
        if aliases:
            self._offer("models", partial(self._send_model, actor.resolve(), step, aliases))

    def _send_model(self, actor: Path, step: int, aliases: Sequence[str]) -> None:
        """Make the version and move the aliases to it; versions without an alias are deleted."""
        from mlflow.exceptions import MlflowException

        about, own = f"weights of the run {self._run}", {_RUN_TAG: self._run}
        known: Mapping[str, Any] = {}
        for name in (self._model_name, f"{self._model_name} {self._run[:8]}"):
            try:
                model = self._client.get_registered_model(name)
            except MlflowException:
                model = self._client.create_registered_model(name, tags=own, description=about)
            known = model.aliases or {}
            if model.tags.get(_RUN_TAG, self._run if model.description == about else "") == self._run:
                break  # else it is of another run of this name
        tags = {"step": str(step)}
        made = self._client.create_model_version(name, actor.as_uri(), self._run, tags=tags)
        for alias in aliases:
            self._client.set_registered_model_alias(name, alias, made.version)
        kept = {number for alias, number in known.items() if alias not in aliases}
        for number in {*known.values()} - kept:
            self._client.delete_model_version(name, number)

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Queue the best and the worst rollout of two tasks as traces: once a minute, later more rarely.

        The tasks of the step take turns.
        """
        now = time.monotonic()
        apart = max(SAMPLES_EVERY_S, (now - self._started_s) / _TRACE_RESOLUTION)
        if self._worker is None or now - self._traced_s < apart:
            return
        self._traced_s = now
        there = dict.fromkeys(item.rollout.prompt.task for item in scored)
        chosen = sorted(there, key=lambda task: self._traced.get(task, -math.inf))[:_TRACED]
        self._traced |= dict.fromkeys(chosen, now)
        for item in best_and_worst([item for item in scored if item.rollout.prompt.task in chosen]):
            self._offer("traces", partial(self._send_trace, scored_to_dict(item, step)))

    def _send_trace(self, line: Mapping[str, Any]) -> None:
        """Write one rollout: its messages, a span per turn, rewards and verdicts as assessments."""
        from mlflow.entities import AssessmentSource, Feedback, Span, TraceInfo, TraceLocation, TraceState
        from mlflow.tracing.client import TracingClient

        # made of what it is: a resumed run does not write it twice
        key = f"{self._run} {line['task']} {line['draw']} {line['sample']} {line['attempt']} {line['step']}"
        number = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        trace, began = f"tr-{number}", time.time_ns()
        turns = line.get("turns") or [{"messages": [], "response": line["response"]}]
        spans: list[Span] = []

        def add(name: str, kind: str, inputs: object, outputs: object, parent: str | None) -> str:
            own = hashlib.blake2b(f"{key} {len(spans)}".encode(), digest_size=8).hexdigest()
            values = {
                "mlflow.traceRequestId": trace,
                "mlflow.spanInputs": inputs,
                "mlflow.spanOutputs": outputs,
                "mlflow.spanType": kind,
            }
            span: dict[str, Any] = {
                "context": {"trace_id": number, "span_id": own},
                "parent_id": parent,
                "name": name,
                "start_time": began + len(spans),
                "end_time": began + len(spans) + 1,
                "attributes": {k: json.dumps(v, default=str) for k, v in values.items()},
                "status_code": "ERROR" if line["failure"] else "OK",
                "status_message": str((line["failure"] or {}).get("message", "")),
                "events": [],
            }
            spans.append(Span.from_dict(span))
            return own

        messages: list[dict[str, str]] = [{"role": "user", "content": line["prompt"]}]
        for turn in turns:
            messages += [*turn["messages"], {"role": "assistant", "content": turn["response"]}]
        root = add(line["task"], "CHAIN", {"messages": messages[:-1]}, _answer(line["response"]), None)
        num_known = 1
        for index, turn in enumerate(turns, start=1):
            num_known += len(turn["messages"])
            add(
                f"turn {index}",
                "CHAT_MODEL",
                {"messages": messages[:num_known]},
                _answer(turn["response"]),
                root,
            )
            num_known += 1
        source = AssessmentSource(source_type="CODE", source_id="multitask-rl")
        values = {"reward": line["reward"]} | {
            name: result["value"] for name, result in line["breakdown"].items() if "value" in result
        }
        values |= {f"violates {name}": verdict["violated"] for name, verdict in line["verdicts"].items()}
        info = TraceInfo(
            trace_id=trace,
            trace_location=TraceLocation.from_experiment_id(self._experiment),
            request_time=began // 1_000_000,
            execution_duration=0,
            state=TraceState.ERROR if line["failure"] else TraceState.OK,
            request_preview=line["prompt"][:1000],
            response_preview=line["response"][:1000],
            trace_metadata={"mlflow.sourceRun": self._run},
            tags={"mlflow.traceName": line["task"], "task": line["task"], "step": str(line["step"])},
            assessments=[
                Feedback(name=legal_name(name), value=value, source=source, trace_id=trace)
                for name, value in values.items()
                if value is not None
            ],
        )
        client = TracingClient(self.uri)
        client.start_trace(info)
        client.log_spans(self._experiment, spans)

    def log_page(self, page: str) -> None:
        """Queue the page as the artifact ``report.html``, and a link to it in the run's note."""
        self._offer("page", partial(self._send_page, page))

    def _send_page(self, page: str) -> None:
        self._client.log_text(self._run, page, _PAGE)
        note = self._client.get_run(self._run).data.tags.get(_NOTE, "")
        if _PAGE_LINE not in note:  # which a user may have edited
            link = f"#/experiments/{self._experiment}/runs/{self._run}/artifacts/{_PAGE}"
            head, *below = note.split("\n", 1)  # MLflow shows the first lines
            self._client.set_tag(self._run, _NOTE, "\n".join([f"{head} {_PAGE_LINE}({link})", *below]))

    def _offer(self, kind: str, call: Callable[[], object]) -> None:
        """Queue a call that some stores refuse (old servers, files); after a failure, skip its kind."""

        def attempt() -> None:
            try:
                if kind not in self._refused:
                    call()
            except Exception as error:  # noqa: BLE001 - numbers are worth more
                self._client.get_run(self._run)  # if the store is away, this is one lost write
                self._refused.add(kind)
                _LOG.warning("MLflow at %s takes no %s: %r", redact_text(self.uri), kind, error)

        if self._worker is not None:
            self._worker.put(attempt)

    def finish(self, status: str) -> None:
        """Send what is queued (at most a minute) and close the run. A second call does nothing."""
        worker, self._worker = self._worker, None
        if worker is None:
            return

        def tag_dropped() -> None:
            # in the worker's turn: it counts the values of the record first
            if self.num_dropped:
                self._client.set_tag(self._run, "metrics_not_finite", str(self.num_dropped))

        worker.try_again()
        worker.put(partial(self._catch_up, worker))
        worker.put(self._send_events)
        for path in (self._directory / name for name in _KEPT_FILES):
            if path.is_file():
                worker.put(partial(self._send_file, path))
        worker.put(tag_dropped)
        worker.put(lambda: self._client.set_terminated(self._run, _STATUS.get(status, "FAILED")))
        worker.close(timeout_s=60.0)
        if num_lost := worker.num_failed - self._num_sent_again:
            text = (
                "%s did not take everything: %d writes lost; the same command, once it answers or with "
                "another tracking.uri, sends what the run's records hold"
            )
            _LOG.warning(text, worker.name, num_lost)
        elif self._num_sent_again:
            text = "%s was away for %d writes; what the run's records hold of them was sent again at the end"
            _LOG.warning(text, worker.name, self._num_sent_again)
