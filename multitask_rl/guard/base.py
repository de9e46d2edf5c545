"""Base of guards: a guard reads every step and every held-out evaluation and decides whether the run goes on.

The trainer carries out the decision. To write a guard, subclass ``Guard``, override ``observe``, and name the
class in ``guard.plugin``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from numbers import Real
from typing import Any

from multitask_rl.config.run import GuardConfig
from multitask_rl.errors import ConfigError, PluginError
from multitask_rl.guard.decision import CheckpointInfo, GuardDecision, newest_good
from multitask_rl.plugins import build_plugin
from multitask_rl.records import Event, TaskEvaluation, TaskStats

Confirm = Callable[[str], tuple[TaskEvaluation, TaskEvaluation] | None]
"""``confirm(task)`` evaluates the current weights and the weights last judged good. Both get the task's
held-out prompts and the same seeds; every call uses new seeds. It returns ``(current, good)``, each with the
step of its weights, or None if no checkpoint is judged good."""

_OF_SAFETY_GUARD = ("monitor_metrics", "threshold_delta", "absolute", "max_rollbacks")


class Guard:
    """Base of all guards: built as ``Cls(Cls.Config(**guard_config))``, or ``Cls()`` without a ``Config``.

    The trainer calls ``bind``, then ``record_step`` after every step and ``observe`` after every evaluation.
    A rollback calls ``rollback_target`` and ``rolled_back``; it does not restore the guard's state.
    """

    rollback_steps: int = 100
    """``guard.rollback_steps``: most steps that a rollback may lose. The run saves weights that are judged
    good at least every ``rollback_steps / 2`` steps."""
    webhook: str = ""
    """``http(s)://`` address for alerts, posted as JSON; empty = none."""

    @classmethod
    def build(cls, config: GuardConfig) -> Guard:
        """Return the guard that the run configuration describes; ConfigError or PluginError if it cannot."""
        given, default = asdict(config), asdict(GuardConfig())
        for key in _OF_SAFETY_GUARD:
            if given[key] != default[key]:
                raise ConfigError(
                    f"guard.{key} is a setting of safety_guard, and guard.plugin={config.plugin!r} does not "
                    f"read it; leave guard.{key} out, or give the guard its own key in guard.guard_config"
                )
        guard: Guard = build_plugin(cls, config.guard_config, where="guard.guard_config")
        guard.rollback_steps = config.rollback_steps
        return guard

    def bind(self, tasks: Collection[str], metrics: Mapping[str, Mapping[str, bool]] | None = None) -> None:
        """Set the evaluated tasks and reset the state; called when the guard is added and at the run's start.

        ``metrics`` holds by task the possible metrics of its evaluations and whether each has a direction.
        ConfigError if a setting names an unknown task or metric.
        """

    def record_step(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Record the statistics, by task, of the step that started from the weights of ``step``."""

    def forget_rewards(self, tasks: Collection[str]) -> None:
        """Drop the training rewards of ``tasks`` so far: a resume has changed them. Default: nothing."""

    def forget_tasks(self, tasks: Collection[str]) -> None:
        """Drop the steps of ``tasks``: a resume no longer trains or has them. Default: nothing."""

    def observe(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None = None
    ) -> GuardDecision:
        """Judge the weights of ``step`` by their held-out evaluations, by task."""
        raise NotImplementedError

    def rollback_target(self, checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
        """Return the checkpoint to restore; None = keep these weights.

        Default: the newest judged good, also if it is more than ``rollback_steps`` old. If the checkpoint is
        damaged, the trainer calls this again without it.
        """
        return newest_good(checkpoints)

    def rolled_back(self, target: CheckpointInfo, *, step: int) -> list[Event]:
        """Record that the run goes on from ``target`` and counts on from ``step``; return events to log."""
        reason = f"rolled back to the checkpoint of step {target.step}"
        return [Event(step=step, source="guard", kind="rolled_back", reason=reason, data={"to": target.step})]

    def lr_factor(self, step: int) -> float:
        """Return the factor in (0, 1] on the learning rate that is in force at ``step``."""
        return 1.0

    def weight_factors(self) -> dict[str, float]:
        """Return the current factors on the scheduler's shares; missing = 1, 0 = no prompts of the task.

        A name that is no task is told by an event, once.
        """
        return {}

    def metrics(self) -> dict[str, float]:
        """Return numbers to log after every evaluation, by their whole names: ``guard/<name>``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able; it is part of every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict`` after ``bind``, at a resume; ``renamed`` maps old task names to new ones."""


def checked_decision(guard: Guard, decision: object) -> GuardDecision:
    """Return what ``observe`` of ``guard`` returned; ``PluginError`` if it is no decision."""
    if not isinstance(decision, GuardDecision):
        raise _wrong(guard, "observe", decision, "a GuardDecision")
    return decision


def checked_numbers(guard: Guard, method: str, given: object) -> dict[str, float]:
    """Return what ``method`` of ``guard`` returned; ``PluginError`` if it holds anything but numbers."""
    if not isinstance(given, Mapping) or not all(isinstance(value, Real) for value in given.values()):
        raise _wrong(guard, method, given, "a mapping of names to numbers")
    return {name: float(value) for name, value in given.items()}


def checked_factors(guard: Guard) -> dict[str, float]:
    """Return ``weight_factors`` of ``guard``; ``PluginError`` if one is below 0 or not finite."""
    factors = checked_numbers(guard, "weight_factors", given := guard.weight_factors())
    if not all(0.0 <= factor < math.inf for factor in factors.values()):
        raise _wrong(guard, "weight_factors", given, "finite numbers >= 0")
    return factors


def checked_factor(guard: Guard, factor: object) -> float:
    """Return what ``lr_factor`` of ``guard`` returned; ``PluginError`` if it is outside of (0, 1]."""
    if not isinstance(factor, Real) or not 0.0 < float(factor) <= 1.0:
        raise _wrong(guard, "lr_factor", factor, "a number in (0, 1]")
    return float(factor)


def _wrong(guard: Guard, method: str, given: object, expected: str) -> PluginError:
    return PluginError(
        f"guard.plugin: {type(guard).__name__}.{method} returned {given!r:.200}, expected {expected}"
    )
