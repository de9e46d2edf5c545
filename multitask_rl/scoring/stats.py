"""Counts per task: failures by kind, seconds, cache hits, and the error budget."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from multitask_rl.boundary.printable import one_line
from multitask_rl.errors import RewardError
from multitask_rl.records import Event, Failure, FailureKind, Rollout, Scored

WINDOW = 200
MIN_SAMPLES = 20
"""Fewest samples for a rate: one failing first sample is not a failure rate of 100 %."""


@dataclass(slots=True)
class TaskCounts:
    """Numbers of one task since the last report."""

    responses: set[tuple[str, int, int, int]] = field(default_factory=set)
    """Prompt, draw, sample and attempt of the responses that were judged or scored.

    A draw alone may be one of training and one of an evaluation.
    """
    results: int = 0
    hits: int = 0
    overruns: int = 0
    """Results of responses that exceeded a limit of time or memory."""
    failures: Counter[FailureKind] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Reward or constraint -> seconds of its calls."""

    def include(self, other: TaskCounts) -> None:
        """Add the counts of another pool."""
        self.responses |= other.responses
        self.results += other.results
        self.hits += other.hits
        self.overruns += other.overruns
        self.failures.update(other.failures)
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds

    def metrics(self) -> dict[str, float]:
        """Return the numbers by metric name; rates are per response, hits per result, seconds are sums."""
        responses, results = max(1, len(self.responses)), max(1, self.results)
        numbers = {f"reward_failures/{kind.value}": self.failures[kind] / responses for kind in FailureKind}
        numbers["reward_failure_rate"] = sum(self.failures.values()) / responses
        numbers["reward_overrun_rate"] = self.overruns / responses
        numbers["reward_cache_hits"] = self.hits / results
        numbers.update({f"reward_s/{name}": seconds for name, seconds in self.seconds.items()})
        return numbers


class ErrorBudget:
    """Stops the run if the failure rate over the last ``WINDOW`` samples of a task exceeds ``limit``.

    Warns of the first failures, and when the rate exceeds half of ``limit``. ``what``, for messages:
    ``scored`` (by rewards) or ``judged`` (by constraints).
    """

    def __init__(self, task: str, limit: float, what: str = "scored") -> None:
        self._task, self._limit, self._what = task, limit, what
        self._recent: deque[Failure | None] = deque(maxlen=WINDOW)
        self._last_failed: Rollout | None = None
        self._told = False
        """A warning has told of failures."""
        self._warned = False
        """The warning at half of the limit was given, and the rate has not fallen far since."""
        self._pending: list[tuple[float, str]] = []

    @property
    def rate(self) -> float:
        """Failure rate of the window."""
        return sum(f is not None for f in self._recent) / max(1, len(self._recent))

    @property
    def is_spent(self) -> bool:
        """The rate is above the limit, over enough samples."""
        return len(self._recent) >= MIN_SAMPLES and self.rate > self._limit

    def add(self, rollout: Rollout, failure: Failure | None) -> None:
        """Add one sample with its failure (None = there was none)."""
        self._recent.append(failure)
        if failure is not None:
            self._last_failed = rollout

    def check(self) -> None:
        """Compare the rate with the budget; ``RewardError`` with a report if it is above."""
        if len(self._recent) < MIN_SAMPLES:
            return
        rate, failures = self.rate, filter(None, self._recent)
        if self.is_spent:
            raise RewardError(
                f"task {self._task!r}: {rate:.0%} of its last {len(self._recent)} samples could not be "
                f"{self._what}, allowed are {self._limit:.0%} (scoring.max_failure_rate). "
                f"{_report(failures)}{_sample(self._last_failed)} Failed samples are "
                "never counted as 0; mend the plugin or the data (multitask-rl plugins check NAME)."
            )
        is_half_spent = rate > self._limit / 2
        if (rate > 0 and not self._told) or (is_half_spent and not self._warned):
            self._told, self._warned = True, self._warned or is_half_spent
            reason = (
                f"{rate:.0%} of the last {len(self._recent)} samples could not be {self._what}; the run "
                f"stops above {self._limit:.0%}. {_report(failures)}{_sample(self._last_failed)}"
            )
            self._pending.append((rate, reason))
        elif rate <= self._limit / 4:
            self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """Return the window, JSON-able; empty if the budget is spent: a resume follows a repair."""
        recent = [] if self.is_spent else [asdict(f) if f else None for f in self._recent]
        return {"recent": recent, "told": self._told and not self.is_spent, "warned": self._warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        recent = state["recent"]
        failures = (f and Failure(**{**f, "kind": FailureKind(f["kind"])}) for f in recent)
        self._recent = deque(failures, maxlen=WINDOW)
        self._told, self._warned = bool(state.get("told")), bool(state["warned"])

    def events(self, step: int) -> list[Event]:
        """Return the warnings since the last call."""
        pending, self._pending = self._pending, []
        events = []
        for rate, reason in pending:
            data = {"failure_rate": rate, "max_failure_rate": self._limit}
            event = Event(step=step, source="rewards", kind="warn", reason=reason, task=self._task, data=data)
            events.append(event)
        return events


def of_plugins(record: Scored) -> bool:
    """Whether plugins or an environment decided the record: False where the engine gave no rollout."""
    failure = record.rollout.failure
    return failure is None or failure.source == "environment"


class ScoreTally:
    """Notes which tasks had a sample scored; ``check`` raises if every sample of a task failed."""

    def __init__(self) -> None:
        self._scored: set[str] = set()
        self._failed: defaultdict[str, list[tuple[Rollout, Failure]]] = defaultdict(list)

    def note(self, records: Iterable[Scored]) -> None:
        """Count records, except samples that the engine could not produce."""
        for record in records:
            task = record.rollout.task
            if record.failure is None:
                self._scored.add(task)
                self._failed.pop(task, None)
            elif of_plugins(record) and task not in self._scored:
                self._failed[task].append((record.rollout, record.failure))

    def check(self) -> None:
        """Raise ``RewardError``, with the reasons, if every sample of a task failed."""
        for task, failed in self._failed.items():
            raise RewardError(
                f"task {task!r}: not one of its {len(failed)} samples could be scored. "
                f"{_report(failure for _, failure in failed)}{_sample(failed[-1][0])} "
                "Mend the plugin or the data (multitask-rl plugins check NAME)."
            )


def _report(failures: Iterable[Failure]) -> str:
    last: dict[tuple[str, str], str] = {}
    by_kind: Counter[tuple[str, str]] = Counter()
    for failure in failures:
        key = (failure.source, failure.kind.value)
        by_kind[key] += 1
        last[key] = failure.message
    parts = [f"{n} x {s} {k} (last: {last[s, k]})" for (s, k), n in by_kind.most_common(5)]
    return "Failures: " + "; ".join(parts) + "."


def _sample(rollout: Rollout | None) -> str:
    """Return which prompt failed last and the response to it; a stopped run stores no rollout of its step."""
    if rollout is None:  # the failures are of a run before a resume
        return ""
    return (
        f" The last: prompt {rollout.prompt.prompt_id!r}, response {one_line(repr(rollout.response), 200)}."
    )
