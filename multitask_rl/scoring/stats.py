"""What the pool counts per task: failures by kind, seconds, cache hits, and the error budget."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from multitask_rl.errors import RewardError
from multitask_rl.records import Event, Failure, FailureKind
from multitask_rl.scoring.grader import Result

__all__ = ["ErrorBudget", "TaskCounts"]

WINDOW = 200
MIN_SAMPLES = 20
"""Fewer say nothing: the first failing sample of a run is not a rate of 100 %."""


@dataclass(slots=True)
class TaskCounts:
    """Numbers of one task since the last report."""

    samples: int = 0
    results: int = 0
    hits: int = 0
    overruns: int = 0
    """Results of responses that passed a limit of time or memory."""
    failures: Counter[FailureKind] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By name of reward or constraint."""

    def add(self, results: Iterable[Result]) -> None:
        """Count one sample with its results."""
        self.samples += 1
        for result in results:
            self.results += 1
            if isinstance(result, Failure):
                self.failures[result.kind] += 1

    def metrics(self) -> dict[str, float]:
        """Return the numbers by metric name; rates are per sample, hits per result, seconds are sums."""
        samples, results = max(1, self.samples), max(1, self.results)
        numbers = {f"reward_failures/{kind.value}": self.failures[kind] / samples for kind in FailureKind}
        numbers["reward_failure_rate"] = sum(self.failures.values()) / samples
        numbers["reward_overrun_rate"] = self.overruns / samples
        numbers["reward_cache_hits"] = self.hits / results
        numbers.update({f"reward_s/{name}": seconds for name, seconds in self.seconds.items()})
        return numbers


class ErrorBudget:
    """The last ``WINDOW`` samples of a task: warns at half of the allowed failure rate, stops above it.

    Args:
        task: its name.
        limit: allowed failure rate.
    """

    def __init__(self, task: str, limit: float) -> None:
        self._task, self._limit = task, limit
        self._recent: deque[Failure | None] = deque(maxlen=WINDOW)
        self._warned = False
        self._pending: list[str] = []

    @property
    def rate(self) -> float:
        """Failure rate of the window."""
        return sum(f is not None for f in self._recent) / max(1, len(self._recent))

    def add(self, failure: Failure | None) -> None:
        """Take note of one sample."""
        self._recent.append(failure)

    def check(self) -> None:
        """Compare the rate with the budget.

        Raises:
            RewardError: it is above; the message is the report.
        """
        if len(self._recent) < MIN_SAMPLES:
            return
        rate = self.rate
        if rate > self._limit:
            raise RewardError(
                f"task {self._task!r}: {rate:.0%} of its last {len(self._recent)} samples could not be "
                f"scored, allowed are {self._limit:.0%} (scoring.max_failure_rate). {self._report()} "
                "Failed samples are never counted as 0; mend the plugin or the data (multitask-rl plugins "
                "check NAME)."
            )
        if rate > self._limit / 2 and not self._warned:
            self._warned = True
            self._pending.append(
                f"{rate:.0%} of the last {len(self._recent)} samples could not be scored; the run stops "
                f"above {self._limit:.0%}. {self._report()}"
            )
        elif rate <= self._limit / 4:
            self._warned = False

    def state_dict(self) -> dict[str, Any]:
        """Return the window, JSON-able; of a spent budget nothing: who resumes has mended what failed."""
        recent = [] if self.rate > self._limit else list(self._recent)
        return {"recent": [asdict(f) if f else None for f in recent], "warned": self._warned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._recent.clear()
        self._recent.extend(
            None if f is None else Failure(**{**f, "kind": FailureKind(f["kind"])}) for f in state["recent"]
        )
        self._warned = bool(state["warned"])

    def events(self, step: int) -> list[Event]:
        """Return the warnings since the last call."""
        pending, self._pending = self._pending, []
        return [
            Event(
                step=step,
                source="rewards",
                kind="warn",
                reason=reason,
                task=self._task,
                data={"failure_rate": self.rate, "max_failure_rate": self._limit},
            )
            for reason in pending
        ]

    def _report(self) -> str:
        by_kind = Counter((f.source, f.kind.value) for f in self._recent if f is not None)
        example = {(f.source, f.kind.value): f.message for f in self._recent if f is not None}
        parts = [f"{n} x {s} {k} (last: {example[s, k]})" for (s, k), n in by_kind.most_common(5)]
        return "Failures: " + "; ".join(parts) + "."
