"""The guard's answers: decision, adjustments, and the checkpoint to restore."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from multitask_rl.config.schema.ranges import unknown_name
from multitask_rl.errors import PluginError
from multitask_rl.records import Event


class GuardAction(StrEnum):
    """Action for the trainer, from mildest to hardest."""

    keep = "keep"
    """No sign of a regression: go on."""
    warn = "warn"
    """A possible regression: log it and go on."""
    reweight = "reweight"
    """Go on from these weights with the guard's ``weight_factors``."""
    freeze = "freeze"
    """``reweight`` with factor 0 for the task that is the likely cause."""
    rollback = "rollback"
    """Restore ``Guard.rollback_target`` and go on with the adjustments."""
    stop = "stop"
    """End the run with ``GuardStop`` (exit code 3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A checkpoint on disk: its step, and whether its weights were judged good."""

    step: int
    """Training steps made at the time of writing."""
    judged_good: bool | None = None
    """``GuardDecision.judged_good`` of the evaluation of exactly these weights; None = not evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RollbackAdjustments:
    """Changes to training after a regression, so that it does not repeat; the defaults change nothing.

    ``reweight`` and ``freeze`` set the shares; a rollback sets the learning rate and the data, too. PaLM
    skipped 200 to 500 batches after a restart (arXiv:2204.02311, section 5.1).
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
    """The task that the action is about: it regressed, or may have. Empty with the action ``keep``."""
    metric: str = ""
    """The task's metric that fell; empty = its primary metric."""
    reason: str = ""
    """One sentence for a person."""
    statistics: Mapping[str, float] = field(default_factory=dict)
    """Numbers behind the decision, JSON-able: ``value``, ``demonstrated``, ``drop``, ``cusum``, ``z``..."""
    adjustments: RollbackAdjustments = field(default_factory=RollbackAdjustments)
    """Changes from now on; the guard's ``lr_factor`` and ``weight_factors`` apply them."""
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read an action that is given by its name; ``PluginError`` if there is none of that name."""
        object.__setattr__(self, "judged_good", bool(self.judged_good))  # numpy has truth values of its own
        try:
            object.__setattr__(self, "action", GuardAction(self.action))
        except ValueError as error:
            problem = unknown_name("action", str(self.action), GuardAction)
            raise PluginError(f"GuardDecision: {problem}") from error


def newest_good(checkpoints: Iterable[CheckpointInfo]) -> CheckpointInfo | None:
    """Return the newest checkpoint judged good; None = none."""
    return max((c for c in checkpoints if c.judged_good), key=lambda c: c.step, default=None)


def choose_step(
    steps: Sequence[int], seen: Sequence[tuple[int, float, float]], *, fell_after: int
) -> int | None:
    """Return the newest of ``steps`` at which the fallen metric was still near its best; None = none.

    An evaluation during the fall may still be judged good. The value at a step is therefore the mean of its
    evaluation and the evaluations before and after it. It must be within one standard error of the best
    step's, and more than one standard error above the current value.

    Args:
        steps: candidates, of the last ``rollback_steps``.
        seen: (step, value, standard error) of the metric at every evaluation, oriented, the current one last.
        fell_after: step after which the fall seems to have begun; candidates up to it are preferred.
    """
    means = {}
    for i, (step, _, _) in enumerate(seen):
        near = [value for _, value, _ in seen[max(0, i - 1) : i + 2]]
        means[step] = math.fsum(near) / len(near)
    if any(step in means for step in steps):
        _, value, error = seen[-1]
        steps = [step for step in steps if means.get(step, -math.inf) > value + error]
    candidates = [step for step in steps if step <= fell_after] or list(steps)
    known = [step for step in candidates if step in means]
    if known:
        lowest = max(means[step] for step in known) - seen[-1][2]
        candidates = [step for step in known if means[step] >= lowest]
    return max(candidates, default=None)
