"""What training shows: the history of steps, and signs that reward and ability diverge.

Signs are hacking (the training reward rises while the held-out metric falls), KL over budget, entropy
collapse, length drift and starvation. No sign is a proof: on hacking the guard lowers the task's share; the
other signs only warn.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.records import Event, TaskStats, rename_tasks

_WINDOW = 8
"""Number of evaluations in a trend."""
_MIN_KENDALL = 16
"""Least Mann-Kendall statistic of a trend (largest: 28); chance reaches it in 3 % of windows."""
_MIN_STEPS_FOR_TREND = 5
_CHANCE = 0.023
"""Probability by chance, below which a task's training reward counts as risen."""
_STEPS_BEFORE, _MIN_STEPS_OF_LEVEL = 8, 3
"""Steps before that its level is compared with, and the fewest on each side."""
_METRICS = ("length", "entropy", "kl")
"""Keys of ``TaskStats.metrics`` that are kept."""


class StepHistory:
    """The last ``max_steps`` steps of every task, each a dictionary of numbers; NaN = not known.

    ``updates`` counts learnable groups (``num_informative``), ``prompts`` groups with a response to train on
    (NaN: the task has no share, because the guard froze it or its weight is 0).
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps, self._steps = max_steps, dict[str, deque[dict[str, float]]]()

    def record(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Add the step that started from the weights of ``step``; forget tasks that are trained no more."""
        self._steps = {task: own for task, own in self._steps.items() if task in stats}
        for task, seen in stats.items():
            prompts = float(seen.num_prompts if seen.num_trainable is None else seen.num_trainable)
            entry = {
                "step": step,
                "updates": float(seen.num_informative),
                "prompts": prompts if seen.metrics.get("weight") != 0.0 else math.nan,
                # of uniformly drawn prompts: a curriculum that draws easier ones is no rise of the reward
                "reward": seen.reward_mean + seen.shift,
            }
            for name in _METRICS:
                entry[name] = seen.metrics.get(name, math.nan)
            self._steps.setdefault(task, deque(maxlen=self._max_steps)).append(entry)

    def find_culprit(self, victim: str, since: Sequence[int]) -> str:
        """Return the task that likely caused a fall of ``victim``; "" if no task had a gradient meanwhile.

        It is the victim itself if its training reward rose: the reward is then hacked, flipped or corrupt.
        Otherwise it is the other task with the most groups with a gradient, or the victim if no other task
        had any. ``since`` as in ``has_risen``.
        """
        if self.has_risen(victim, since):
            return victim
        updates = {
            task: math.fsum(entry["updates"] for entry in entries if entry["step"] >= min(since))
            for task, entries in self._steps.items()
        }
        trained = {task: number for task, number in updates.items() if number > 0.0}
        candidates = [task for task in trained if task != victim] or list(trained)
        return max(candidates, key=lambda task: (trained[task], task), default="")

    def has_risen(self, task: str, since: Sequence[int]) -> bool:
        """Whether the training reward of ``task`` rose.

        It did if it has a trend over at least five steps from one of ``since`` on (Mann-Kendall), or is
        higher from the latest of them on than in the eight steps before (Mann-Whitney): flipped rewards can
        be high already when the held-out metric begins to fall.

        Args:
            task: its name.
            since: the earliest and the latest step at which a fall may have begun. A flip first lowers the
                training reward: seen from far before it, the rise after it is no trend.
        """
        # rounded: a mean and its shift leave an error of rounding, which is no rise
        known = [
            (entry["step"], round(entry["reward"], 9))
            for entry in self._steps.get(task, ())
            if math.isfinite(entry["reward"])
        ]
        from scipy.stats import kendalltau, mannwhitneyu  # half a second, for an alarm only

        for start in since:
            rewards = [reward for step, reward in known if step > start]
            if len(rewards) >= _MIN_STEPS_FOR_TREND:
                trend = kendalltau(range(len(rewards)), rewards, alternative="greater")
                if trend.pvalue < _CHANCE:  # NaN if all are equal
                    return True
        after = [reward for step, reward in known if step >= max(since)]
        before = [reward for step, reward in known if step < max(since)][-_STEPS_BEFORE:]
        if min(len(after), len(before)) < _MIN_STEPS_OF_LEVEL:
            return False
        return bool(mannwhitneyu(after, before, alternative="greater").pvalue < _CHANCE)

    @property
    def trained(self) -> list[str]:
        """Tasks of which a step had prompts."""
        return [t for t, entries in self._steps.items() if any(entry["prompts"] > 0.0 for entry in entries)]

    def means_since(self, task: str, since: int) -> dict[str, float]:
        """Return the means of ``reward``, ``prompts`` and ``_METRICS`` since a step; NaN = unknown."""
        entries = [entry for entry in self._steps.get(task, ()) if entry["step"] >= since]
        means = {}
        for name in ("reward", "prompts", *_METRICS):
            known = [entry[name] for entry in entries if math.isfinite(entry[name])]
            means[name] = fmean(known) if known else math.nan
        return means

    def forget(self, tasks: Collection[str], *names: str) -> None:
        """Take the numbers ``names`` of ``tasks`` as not known: those to come are not comparable."""
        for entry in (entry for task in tasks for entry in self._steps.get(task, ())):
            entry |= dict.fromkeys(names, math.nan)

    def remove(self, tasks: Collection[str]) -> None:
        """Drop the steps of ``tasks``."""
        self._steps = {task: own for task, own in self._steps.items() if task not in tasks}

    def rewind(self, step: int) -> None:
        """Drop the steps after the weights of ``step``: a rollback has undone them."""
        for task, entries in self._steps.items():
            kept = (entry for entry in entries if entry["step"] < step)
            self._steps[task] = deque(kept, maxlen=self._max_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {task: list(entries) for task, entries in self._steps.items()}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None) -> None:
        """Restore ``state_dict``."""
        steps = rename_tasks(state, renamed)
        self._steps = {task: deque(entries, maxlen=self._max_steps) for task, entries in steps.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """One task at an evaluation: the held-out metric, and training means since the last; NaN = not known."""

    train_reward: float
    """Mean training reward since the last evaluation."""
    value: float
    """Held-out metric, higher is better; ``error`` is its standard error."""
    error: float
    length: float = math.nan
    """Tokens per response in training."""
    entropy: float = math.nan
    """Nats per token."""
    kl: float = math.nan
    """Nats per response, to the reference policy."""
    prompts: float = math.nan
    """Groups per step that have a response to train on."""


class HackingDetector:
    """Detects the signs that the module lists, per task.

    Hacking is a trend over the last ``_WINDOW`` evaluations. Entropy and length are compared with the task's
    first evaluation. Starvation is two evaluation intervals without a training sample.
    """

    def __init__(self, config: SafetyGuardConfig) -> None:
        self._config = config
        self._points: dict[str, deque[Observation]] = {}
        self._start: dict[str, Observation] = {}
        self._raised: dict[str, list[str]] = {}

    def observe(self, task: str, point: Observation, step: int) -> list[Event]:
        """Add an evaluation of ``task``; return each sign as an event, once, when it appears."""
        config = self._config
        points = self._points.setdefault(task, deque(maxlen=_WINDOW))
        points.append(point)
        known = {k: v for k, v in asdict(point).items() if math.isfinite(v)}
        before = asdict(self._start.get(task, point))
        start = Observation(**{k: v if math.isfinite(v) else known.get(k, v) for k, v in before.items()})
        self._start[task] = start
        signs: dict[str, str] = {}
        drop, error = fall_while_rising(points)
        if drop > config.hacking_z * error:
            signs["hacking"] = (
                f"training reward rose over the last {_WINDOW} evaluations ({points[0].train_reward:.3f} -> "
                f"{point.train_reward:.3f}) while the held-out metric fell by {drop:.3f} (standard error "
                f"{error:.3f}): the reward may be exploited"
            )
        if config.kl_budget and point.kl > config.kl_budget:
            signs["kl"] = (
                f"KL to the reference is {point.kl:.2f} nats per response, over its budget of "
                f"{config.kl_budget:g}"
            )
        if point.entropy < config.min_entropy_fraction * start.entropy:
            signs["entropy"] = f"entropy fell from {start.entropy:.3f} to {point.entropy:.3f} nats per token"
        ratio = point.length / start.length if start.length > 0.0 else math.nan
        if ratio > config.max_length_ratio or ratio < 1.0 / config.max_length_ratio:
            signs["length"] = f"responses went from {start.length:.1f} to {point.length:.1f} tokens"
        # needed as its own sign: the held-out metric falls late, or not at all, when training samples stop
        if start.prompts > 0.0 and [p.prompts for p in points][-2:] == [0.0, 0.0]:
            signs["starved"] = (
                "no training sample in the last two evaluation intervals, although the task was trained "
                "before: check its data, its share and its rewards"
            )
        raised, self._raised[task] = self._raised.get(task, []), list(signs)
        events = []
        for sign, text in signs.items():
            if sign not in raised:
                kind = sign if sign in ("hacking", "starved") else "warn"
                events.append(Event(step=step, source="guard", kind=kind, reason=text, task=task, data=known))
        return events

    def forget(self) -> None:
        """Forget the evaluations of every task, because a rollback has undone them."""
        self._points.clear()

    def begin_anew(self, task: str) -> None:
        """Compare entropy and length of ``task`` with its next evaluation, no longer with its first."""
        self._start.pop(task, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "points": {task: [asdict(point) for point in points] for task, points in self._points.items()},
            "start": {task: asdict(point) for task, point in self._start.items()},
            "raised": self._raised,
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None) -> None:
        """Restore ``state_dict``."""
        points, start = rename_tasks(state["points"], renamed), rename_tasks(state["start"], renamed)
        self._points = {
            t: deque((Observation(**p) for p in own), maxlen=_WINDOW) for t, own in points.items()
        }
        self._start = {task: Observation(**point) for task, point in start.items()}
        self._raised = rename_tasks(state["raised"], renamed)


def fall_while_rising(points: Sequence[Observation]) -> tuple[float, float]:
    """Return the fall of the held-out metric while the training reward rose, and its standard error.

    It compares the first and last two of ``_WINDOW`` evaluations; (0, 0) if there are fewer, or no trend.
    """
    rewards = [p.train_reward for p in points]
    is_known = len(points) >= _WINDOW and all(map(math.isfinite, rewards))
    if not is_known or kendall_score(rewards) < _MIN_KENDALL:
        return 0.0, 0.0
    a, b, *_, y, z = points
    return (a.value + b.value - y.value - z.value) / 2, math.hypot(a.error, b.error, y.error, z.error) / 2


def kendall_score(values: Sequence[float]) -> int:
    """Return the Mann-Kendall statistic: pairs that rise minus pairs that fall."""
    return sum((b > a) - (b < a) for a, b in itertools.combinations(values, 2))
