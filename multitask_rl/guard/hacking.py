"""Signs that reward and ability diverge: hacking, KL over budget, entropy collapse, length drift, starvation.

Reward hacking shows as a rising training reward with a falling held-out metric. Early signs are a large KL to
the reference, a loss of entropy, or a change of response length. None of them is a proof: on hacking the
guard lowers the task's share; the other signs only warn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.records import Event

__all__ = ["HackingMonitor", "Observation", "fall_while_rising", "kendall_score"]

_WINDOW = 8
"""Number of evaluations in a trend."""
_MIN_KENDALL = 16
"""Least Mann-Kendall statistic of a trend (largest: 28); chance reaches it in 3 % of windows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One task between two evaluations; NaN = not known."""

    train_reward: float
    """Mean training reward since the last evaluation."""
    value: float
    """Held-out metric, higher is better."""
    error: float
    """Its standard error."""
    length: float = math.nan
    """Tokens per response in training."""
    entropy: float = math.nan
    """Nats per token."""
    kl: float = math.nan
    """Nats per response, to the reference policy."""
    prompts: float = math.nan
    """Groups scored per step."""


class HackingMonitor:
    """Looks for the signs above in the last ``_WINDOW`` evaluations of every task."""

    def __init__(self, config: SafetyGuardConfig) -> None:
        self._config = config
        self._points: dict[str, deque[Observation]] = {}
        self._start: dict[str, Observation] = {}
        self._raised: set[str] = set()

    def observe(self, task: str, point: Observation, step: int) -> list[Event]:
        """Add an evaluation of ``task``; return each sign as an event once, when it appears.

        Kinds: ``hacking``; ``starved`` (a task that was trained before had no training sample for two
        evaluations); ``warn`` for the other signs.
        """
        points = self._points.setdefault(task, deque(maxlen=_WINDOW))
        points.append(point)
        start = self._start[task] = _first_known(self._start.get(task, point), point)
        signs = {
            "hacking": self._hacking(points),
            "kl": self._kl(point),
            "entropy": self._entropy(start, point),
            "length": self._length(start, point),
            "starved": self._starved(start, points),
        }
        events = []
        for sign, reason in signs.items():
            name = f"{task}#{sign}"
            if not reason:
                self._raised.discard(name)
            elif name not in self._raised:
                self._raised.add(name)
                kind = sign if sign in ("hacking", "starved") else "warn"
                data = {k: v for k, v in asdict(point).items() if math.isfinite(v)}
                text = f"{task}: {reason}"
                events.append(Event(step=step, source="guard", kind=kind, reason=text, task=task, data=data))
        return events

    def _hacking(self, points: Sequence[Observation]) -> str:
        drop, error = fall_while_rising(points)
        if drop <= self._config.hacking_z * error:
            return ""
        return (
            f"training reward rose over the last {_WINDOW} evaluations ({points[0].train_reward:.3f} -> "
            f"{points[-1].train_reward:.3f}) while the held-out metric fell by {drop:.3f} (standard error "
            f"{error:.3f}): the reward may be exploited"
        )

    def _kl(self, point: Observation) -> str:
        budget = self._config.kl_budget
        if not budget or not point.kl > budget:
            return ""
        return f"KL to the reference is {point.kl:.2f} nats per response, over its budget of {budget:g}"

    def _entropy(self, start: Observation, point: Observation) -> str:
        if not point.entropy < self._config.min_entropy_fraction * start.entropy:
            return ""
        return f"entropy fell from {start.entropy:.3f} to {point.entropy:.3f} nats per token"

    def _length(self, start: Observation, point: Observation) -> str:
        ratio = point.length / start.length if start.length > 0.0 else math.nan
        limit = self._config.max_length_ratio
        if not (ratio > limit or ratio < 1.0 / limit):
            return ""
        return f"responses went from {start.length:.1f} to {point.length:.1f} tokens"

    def _starved(self, start: Observation, points: Sequence[Observation]) -> str:
        # needed as its own sign: the held-out level falls late, or not at all, when training samples stop
        last = [p.prompts for p in points][-2:]
        if not (start.prompts > 0.0 and len(last) == 2 and last == [0.0, 0.0]):
            return ""
        return (
            "no training sample in the last two evaluation intervals, although the task was trained before: "
            "check its data, its share and its rewards"
        )

    def forget(self) -> None:
        """Restart trends, after a rollback."""
        self._points.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able (NaN is None)."""
        return {
            "points": {task: [_plain(p) for p in points] for task, points in self._points.items()},
            "start": {task: _plain(point) for task, point in self._start.items()},
            "raised": sorted(self._raised),
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restore ``state_dict``."""
        self._points = {
            renamed.get(task, task): deque(map(_observation, points), maxlen=_WINDOW)
            for task, points in state["points"].items()
        }
        self._start = {renamed.get(t, t): _observation(point) for t, point in state["start"].items()}
        raised = (name.rpartition("#") for name in state["raised"])
        self._raised = {f"{renamed.get(task, task)}#{sign}" for task, _, sign in raised}


def fall_while_rising(points: Sequence[Observation]) -> tuple[float, float]:
    """Return the fall of the held-out metric while the training reward rose, and its standard error.

    It compares the means of the first two and the last two of ``_WINDOW`` evaluations. It is (0, 0) with
    fewer evaluations or without an upward trend of the reward.
    """
    rewards = [p.train_reward for p in points]
    if len(points) < _WINDOW or not all(map(math.isfinite, rewards)):
        return 0.0, 0.0
    if kendall_score(rewards) < _MIN_KENDALL:
        return 0.0, 0.0
    first, last = list(points)[:2], list(points)[-2:]
    drop = math.fsum(p.value for p in first) / 2 - math.fsum(p.value for p in last) / 2
    return drop, math.sqrt(math.fsum(p.error**2 for p in (*first, *last))) / 2


def kendall_score(values: Sequence[float]) -> int:
    """Return the Mann-Kendall statistic: pairs that rise minus pairs that fall.

    >>> kendall_score([1, 2, 3]), kendall_score([1, 3, 2])
    (3, 1)
    """
    pairs = ((a, b) for i, a in enumerate(values) for b in values[i + 1 :])
    return sum((b > a) - (b < a) for a, b in pairs)


def _first_known(start: Observation, point: Observation) -> Observation:
    """Return ``start`` with its unknown values taken from ``point``."""
    now = asdict(point)
    return Observation(**{k: v if math.isfinite(v) else now[k] for k, v in asdict(start).items()})


def _plain(point: Observation) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in asdict(point).items()}


def _observation(saved: Mapping[str, float | None]) -> Observation:
    return Observation(**{key: math.nan if value is None else value for key, value in saved.items()})
