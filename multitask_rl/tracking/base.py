"""Base of trackers, and all trackers of a run.

Names of metrics: ``task/<name>/<metric>`` (one task), ``macro/<metric>`` (mean over tasks),
``worst/<metric>`` (the worst task), ``eval/<task>/<constraint>/<metric>`` (a held-out limit),
``time/<name>_s`` and ``time/<things>_per_s``, else ``<area>/<metric>``.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from multitask_rl.config.run import TrackingConfig
from multitask_rl.errors import CheckpointError, MultitaskRLError, PluginError, described, require_extra
from multitask_rl.plugins import TRACKERS, load_plugin
from multitask_rl.records import DatasetRecord, Event, Scored, TaskEvaluation

SAMPLES_EVERY_S = 60.0
"""Seconds between the samples that a tracker with a dashboard gets."""
TO_ACT_ON = ("alarm", "failed", "hacking", "rollback", "starved", "stop")
"""Kinds of events that a person should act on."""
ALARM_KINDS = ("warn", *TO_ACT_ON)
"""Kinds of events that are shown as alarms."""

_LOG = logging.getLogger(__name__)


def best_and_worst(scored: Sequence[Scored]) -> list[Scored]:
    """Return the best and the worst rollout of each task by reward; those without a reward are the worst."""
    tasks: dict[str, list[Scored]] = {}
    for item in scored:
        tasks.setdefault(item.rollout.prompt.task, []).append(item)
    found = []
    for items in tasks.values():
        items.sort(key=lambda item: -math.inf if item.reward is None else item.reward)
        found += items[:: max(1, len(items) - 1)][:2]
    return found


class Tracker:
    """Receives metrics, events and rollouts of a run; each method does nothing until it is overridden.

    Built as ``Cls(output_dir=Path, config=TrackingConfig, run_id=str | None)``.
    """

    run_id: str | None = None
    """Identity that a resumed run continues (kept in the checkpoint); None = has none."""

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Open the run; ``parameters`` are the resolved configuration, nested.

        ``resume_step`` is the last step that the checkpoint holds (0: the run was killed before its first);
        the tracker drops later records of the killed run if its medium allows it. None = a new run.
        """

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the numbers of one step, or of an evaluation after it."""

    def log_evaluation(self, evaluations: Mapping[str, TaskEvaluation], step: int) -> None:
        """Record a held-out evaluation after the step; ``log_metrics`` gets its means alone."""

    def log_progress(self, what: str, done: int, total: int) -> None:
        """Show how many responses have ended; ``what``: ``sampling``, ``evaluating`` or ``confirming``.

        An overlapped run calls it from another thread.
        """

    def log_stopping(self, text: str) -> bool:
        """Show that a signal stops the run, and return whether it is seen; called in a signal handler."""
        return False

    def log_event(self, event: Event) -> None:
        """Record one decision of a controller."""

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Record scored rollouts of the step: ``tracking.store_rollouts`` of each task."""

    def log_datasets(self, datasets: Sequence[DatasetRecord]) -> None:
        """Record what each task trains on and is evaluated on; called once, after ``start``."""

    def log_checkpoint(self, actor: Path, step: int, *, is_best: bool, judged_good: bool) -> None:
        """Record that weights were saved in the directory ``actor``: loadable by transformers."""

    def log_page(self, page: str) -> None:
        """Keep the page of the run, one HTML file, if the run has one; called once, before ``finish``."""

    def finish(self, status: str) -> None:
        """End the run with ``status``: ``finished``, ``failed`` or ``stopped``."""


class DashboardTracker(Tracker):
    """Base of trackers whose client has a dashboard. Samples become a table, alarms and stops alerts.

    ``_run`` is the client's run, ``_table`` makes its tables; ``start`` sets both.

    Raises:
        MissingExtraError: the client is not installed.
    """

    client: ClassVar[str]
    """Name of the client's package, and of its extra."""

    def __init__(self, output_dir: Path, config: TrackingConfig, run_id: str | None) -> None:
        require_extra(self.client, self.client, f"tracking.trackers names {self.client}")
        self.run_id = run_id
        self._directory, self._config = Path(output_dir), config
        self._run: Any = None
        self._table: Any = None
        self._sampled_s = -math.inf
        self._is_there = -1
        """Newest step of the run in the tracker's store; nothing is sent of it and of earlier steps."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the finite numbers of a step that the store lacks; one step may come in several calls."""
        if self._run is not None and step > self._is_there:
            self._log({k: v for k, v in metrics.items() if math.isfinite(v)}, step)

    def log_event(self, event: Event) -> None:
        """Send what a person should act on as an alert."""
        if self._run is not None and event.kind in TO_ACT_ON:
            self._run.alert(title=f"{event.source} {event.kind} {event.task}".strip(), text=event.reason)

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Send the best and the worst response of each task as a table, once a minute."""
        is_early = time.monotonic() - self._sampled_s < SAMPLES_EVERY_S
        if self._run is not None and step > self._is_there and not is_early:
            self._sampled_s = time.monotonic()
            columns = ["step", "task", "prompt", "response", "reward"]
            some = [(item.rollout, item.reward) for item in best_and_worst(scored)]
            rows = [[step, r.task, r.prompt.text, r.response, reward] for r, reward in some]
            self._log({"samples": self._table(columns=columns, data=rows)}, step)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        raise NotImplementedError


class Trackers:
    """Passes each call of a ``Tracker`` on to every tracker of the run, configured or ``further``, by name.

    A tracker that fails is reported once and left out. The run ends if its own records cannot be written.

    Raises:
        PluginError: a tracker is unknown, or cannot be imported or built.
        MissingExtraError: a tracker's library is not installed.
    """

    def __init__(
        self,
        output_dir: Path,
        config: TrackingConfig,
        run_id: str | None,
        further: Mapping[str, Tracker] | None = None,
    ) -> None:
        self.directory = Path(output_dir)
        """The run's output directory."""
        self._identities: dict[str, str] = json.loads(run_id) if run_id else {}
        self.failures: dict[str, str] = {}
        """Trackers left out: name -> what went wrong."""
        self._trackers: dict[str, Tracker] = {
            name: self._build(name, config) for name in dict.fromkeys(config.trackers)
        } | dict(further or {})

    def _build(self, name: str, config: TrackingConfig) -> Tracker:
        tracker_class = load_plugin(TRACKERS, name, expects="log_metrics", where="tracking.trackers")
        try:
            built: Tracker = tracker_class(
                output_dir=self.directory, config=config, run_id=self._identities.get(name)
            )
        except MultitaskRLError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"tracking.trackers: {name!r} cannot be built: {described(error)}; it is called "
                "as CLASS(output_dir=PATH, config=TrackingConfig, run_id=TEXT or None)"
            ) from error
        return built

    @property
    def run_id(self) -> str | None:
        """Identities of the trackers, with those left out since, as JSON: name -> id."""
        found = self._each(lambda tracker: json.loads(json.dumps(tracker.run_id)))
        self._identities |= {name: identity for name, identity in found.items() if identity}
        return json.dumps(self._identities, sort_keys=True) if self._identities else None

    def _each(self, call: Callable[[Tracker], Any]) -> dict[str, Any]:
        """Return what ``call`` returned of each tracker, by name, without those that failed."""
        found = {}
        for name, tracker in list(self._trackers.items()):
            try:
                found[name] = call(tracker)
            except CheckpointError:
                raise  # the run's own records
            except (Exception, SystemExit) as error:  # noqa: BLE001 - numbers are worth less than the run
                self.failures[name] = described(error)
                self._trackers.pop(name, None)  # a signal may have come in between
                _LOG.warning("tracker %r failed and is left out from here on: %s", name, self.failures[name])
        return found

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.start(parameters, resume_step))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_metrics(dict(metrics), step))  # one may change its own

    def log_evaluation(self, evaluations: Mapping[str, TaskEvaluation], step: int) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_evaluation(dict(evaluations), step))

    def log_progress(self, what: str, done: int, total: int) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_progress(what, done, total))

    def log_stopping(self, text: str) -> bool:
        """See ``Tracker``."""
        return any(self._each(lambda tracker: tracker.log_stopping(text)).values())

    def log_event(self, event: Event) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_event(event))

    @property
    def record_rollouts(self) -> bool:
        """Whether a tracker does something with rollouts."""
        return any(self._each(lambda t: type(t).log_rollouts is not Tracker.log_rollouts).values())

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_rollouts(list(scored), step))

    def log_datasets(self, datasets: Sequence[DatasetRecord]) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_datasets(datasets))

    def log_checkpoint(self, actor: Path, step: int, *, is_best: bool, judged_good: bool) -> None:
        """See ``Tracker``."""
        self._each(
            lambda tracker: tracker.log_checkpoint(actor, step, is_best=is_best, judged_good=judged_good)
        )

    @property
    def take_pages(self) -> bool:
        """Whether a tracker does something with the page of the run."""
        return any(self._each(lambda t: type(t).log_page is not Tracker.log_page).values())

    def log_page(self, page: str) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.log_page(page))

    def finish(self, status: str) -> None:
        """See ``Tracker``."""
        self._each(lambda tracker: tracker.finish(status))
