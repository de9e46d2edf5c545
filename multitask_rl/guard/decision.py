"""The guard's answers: decision, adjustments, and the response to a confirmed fall."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.records import Event, rename_task, rename_tasks


class GuardAction(StrEnum):
    """Action for the trainer, from mildest to hardest."""

    keep = "keep"
    """No sign of a regression: go on."""
    warn = "warn"
    """A possible regression: log it and go on."""
    reweight = "reweight"
    """Go on from these weights with the guard's ``weight_factors``."""
    freeze = "freeze"
    """As ``reweight``, with factor 0 for the task that is the likely cause."""
    rollback = "rollback"
    """Restore ``Guard.rollback_target`` and go on with the adjustments."""
    stop = "stop"
    """End the run with ``GuardStop`` (exit code 3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """One checkpoint on disk."""

    step: int
    """Optimizer steps of the run at the time of writing."""
    judged_good: bool | None = None
    """``GuardDecision.judged_good`` of the evaluation of exactly these weights; None = not evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackAdjustments:
    """Changes after a rollback, so that the same failure does not repeat; the defaults change nothing.

    PaLM skipped 200 to 500 batches after a restart (arXiv:2204.02311, section 5.1).
    """

    skip_data: bool = False
    """Do not restore the data cursors: the run does not see the data since the checkpoint again."""
    lr_factor: float = 1.0
    """Factor on the learning rate, in (0, 1]."""
    lr_hold_steps: int = 0
    """Steps at ``lr_factor``."""
    lr_rewarm_steps: int = 0
    """Steps over which the factor then rises linearly to 1."""
    weight_factors: Mapping[str, float] = field(default_factory=dict)
    """Factor on the scheduler's share per task, until the victim has recovered; missing = 1."""
    victim: str = ""
    """The task that regressed; ``culprit`` is the likely cause, empty = unknown."""
    culprit: str = ""

    def lr_factor_after(self, steps: int) -> float:
        """Return the factor on the learning rate ``steps`` steps after the rollback.

        >>> a = RollbackAdjustments(lr_factor=0.5, lr_hold_steps=50, lr_rewarm_steps=50)
        >>> a.lr_factor_after(0), a.lr_factor_after(75), a.lr_factor_after(100)
        (0.5, 0.75, 1.0)
        """
        if steps < self.lr_hold_steps:
            return self.lr_factor
        if steps >= self.lr_hold_steps + self.lr_rewarm_steps:
            return 1.0
        return self.lr_factor + (1.0 - self.lr_factor) * (steps - self.lr_hold_steps) / self.lr_rewarm_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardDecision:
    """The guard's answer to one evaluation."""

    action: GuardAction = GuardAction.keep
    judged_good: bool = False
    """The evaluated weights have not regressed in any watched metric: a rollback may return to them."""
    task: str = ""
    """The task that regressed, for every action but ``keep``, and its ``metric``."""
    metric: str = ""
    reason: str = ""
    """One sentence for a person."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """``value``, ``reference``, ``drop``, ``cusum``, ``cusum_limit``, ``z``..., JSON-able."""
    adjustments: RollbackAdjustments = field(default_factory=RollbackAdjustments)
    """Changes from now on; the guard's ``lr_factor`` and ``weight_factors`` apply them."""
    events: list[Event] = field(default_factory=list)


class Response:
    """The ladder, the count of rollbacks and the adjustments in force."""

    def __init__(self, config: SafetyGuardConfig, max_rollbacks: int) -> None:
        self._config = config
        self._max_rollbacks = max_rollbacks
        self._rungs: dict[str, int] = {}
        self.rollbacks: list[int] = []
        """Steps of the rollbacks within the window."""
        self.cooldown_until = -1
        """First step at which evidence accumulates again."""
        self.adjustments = RollbackAdjustments()
        self.began = 0
        """Step from which the adjustments count."""
        self.is_restored = False
        """They follow a completed rollback: the run goes on from good weights."""

    def choose(self, key: str, statistics: Mapping[str, float], step: int) -> GuardAction:
        """Return the action on a confirmed fall of the watched metric ``key``: the next rung of the ladder.

        A fall of twice the threshold takes the last one. One rollback too many in the window becomes a stop.
        """
        last = len(self._config.ladder) - 1
        is_large = statistics["drop"] >= 2.0 * statistics["relevant_drop"]
        rung = last if is_large else self._rungs.get(key, 0)
        self._rungs[key] = rung + 1
        action = GuardAction(self._config.ladder[min(rung, last)])
        if action is GuardAction.rollback:
            self.rollbacks = [at for at in self.rollbacks if step - at < self._config.rollback_window]
            if len(self.rollbacks) >= self._max_rollbacks:
                return GuardAction.stop
        return action

    def adjust(self, action: GuardAction, *, victim: str, culprit: str, step: int) -> None:
        """Set the adjustments from ``step`` on; a rollback also starts the cooldown."""
        config = self._config
        is_rollback = action is GuardAction.rollback
        times = len(self.rollbacks) + 1 if is_rollback else 1
        factors = {victim: config.victim_factor}
        if culprit:
            # a task that causes its own fall would fall again, more slowly, with half of its share
            is_frozen = action is GuardAction.freeze or (is_rollback and culprit == victim)
            factors[culprit] = 0.0 if is_frozen else config.culprit_factor**times
        self.adjustments = RollbackAdjustments(weight_factors=factors, victim=victim, culprit=culprit)
        self.began, self.is_restored = step, False
        if is_rollback:
            self.adjustments = replace(
                self.adjustments,
                skip_data=config.skip_data,
                lr_factor=config.lr_factor**times,
                lr_hold_steps=config.lr_hold_steps,
                lr_rewarm_steps=config.lr_rewarm_steps,
            )
            self.cooldown_until = step + config.cooldown_steps * 2 ** (times - 1)

    def resume_at(self, step: int) -> None:
        """Count the completed rollback; adjustments and cooldown now start at ``step``."""
        self.rollbacks.append(self.began)
        self.cooldown_until += step - self.began
        self.began = step
        self.is_restored = True

    def lift(self, step: int) -> str:
        """When all metrics are good: end the adjustments after the cooldown; return the recovered victim."""
        victim = self.adjustments.victim
        if not victim or step <= self.began or step < self.cooldown_until:
            return ""
        self._rungs = {key: rung for key, rung in self._rungs.items() if key.partition("/")[0] != victim}
        self.adjustments = RollbackAdjustments()
        return victim

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "rungs": self._rungs,
            "adjustments": asdict(self.adjustments),
            "rollbacks": self.rollbacks,
            "cooldown_until": self.cooldown_until,
            "began": self.began,
            "is_restored": self.is_restored,
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None) -> None:
        """Restore ``state_dict``."""
        self._rungs = rename_tasks(state["rungs"], renamed)
        saved = dict(state["adjustments"])
        saved["weight_factors"] = rename_tasks(saved["weight_factors"], renamed)
        saved |= {role: rename_task(saved[role], renamed) for role in ("victim", "culprit")}
        self.adjustments = RollbackAdjustments(**saved)
        self.rollbacks, self.cooldown_until = state["rollbacks"], state["cooldown_until"]
        self.began, self.is_restored = state["began"], state["is_restored"]


def choose_target(
    good: Sequence[CheckpointInfo], seen: Sequence[tuple[int, float, float]], *, fell_after: int
) -> CheckpointInfo | None:
    """Return the newest candidate at which the fallen metric was still near its best; None = none.

    An evaluation during the fall may still be judged good. The value at a checkpoint is therefore the mean of
    its evaluation and the evaluations before and after it. It must be within one standard error of the best
    candidate's, and more than one standard error above the current value.

    Args:
        good: candidates: judged good and at most ``rollback_steps`` back.
        seen: (step, value, standard error) of the metric at every evaluation, oriented, the current one last.
        fell_after: step after which the fall seems to have begun; candidates up to it are preferred.

    >>> infos = [CheckpointInfo(step=step, judged_good=True) for step in (10, 20, 30)]
    >>> seen = [(10, 0.6, 0.03), (20, 0.6, 0.03), (30, 0.56, 0.03), (40, 0.3, 0.03)]
    >>> choose_target(infos, seen, fell_after=30).step
    20
    """
    means = {}
    for i, (step, _, _) in enumerate(seen):
        near = [value for _, value, _ in seen[max(0, i - 1) : i + 2]]
        means[step] = math.fsum(near) / len(near)
    if any(c.step in means for c in good):
        _, value, error = seen[-1]
        good = [c for c in good if means.get(c.step, -math.inf) > value + error]
    candidates = [c for c in good if c.step <= fell_after] or list(good)
    known = [c for c in candidates if c.step in means]
    if known:
        lowest = max(means[c.step] for c in known) - seen[-1][2]
        candidates = [c for c in known if means[c.step] >= lowest]
    return max(candidates, key=lambda c: c.step, default=None)
