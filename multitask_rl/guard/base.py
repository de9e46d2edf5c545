"""What a guard is: it sees every step and every held-out evaluation, and says whether the run may go on.

The trainer carries out what a guard decides: it restores the checkpoint, multiplies learning rate and task
shares by the guard's factors, and ends the run on ``stop``. Subclass ``Guard``, override ``observe``, and
name the class in ``guard.plugin``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from multitask_rl.errors import ConfigError
from multitask_rl.guard.decision import CheckpointInfo, GuardDecision
from multitask_rl.guard.settings import GuardConfig
from multitask_rl.plugins import build_plugin
from multitask_rl.records import Event, TaskEvaluation, TaskStats

__all__ = ["Confirm", "Guard"]

Confirm = Callable[[str], tuple[TaskEvaluation, TaskEvaluation] | None]
"""``confirm(task)`` evaluates the current weights and those last judged good afresh, same prompts and seeds
for both and new ones at every call; returns ``(current, reference)``, None where no good weights are kept."""

_OF_SAFETY_GUARD = ("monitor_metrics", "threshold_delta", "absolute", "max_rollbacks")


class Guard:
    """Base of all guards: built as ``Cls(Cls.Config(**guard_config))``, or ``Cls()`` without a ``Config``.

    The trainer calls ``bind``, then ``record_step`` after every step, ``observe`` after every evaluation,
    then ``rollback_target`` and ``rolled_back`` where the decision was ``rollback``. A rollback does not
    restore the guard: what it has counted stays.
    """

    rollback_steps: int = 100
    """``guard.rollback_steps``: steps that a rollback may lose. While weights are judged good, the run saves
    them at least every half of it."""
    webhook: str = ""
    """``http(s)://`` address that every alert is posted to as JSON; empty = none."""

    @classmethod
    def build(cls, config: GuardConfig) -> Guard:
        """Return the guard that the run configuration describes.

        Raises:
            ConfigError: ``guard_config`` does not fit ``Config``, or a key of ``SafetyGuard`` alone is set.
            PluginError: it cannot be built.
        """
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
        """Learn which tasks are evaluated, and start afresh: when the guard is added, and again at the start.

        Args:
            tasks: their names.
            metrics: by task, the metrics that its evaluations can have and whether each has a direction.

        Raises:
            ConfigError: a setting names what is not there.
        """

    def record_step(self, step: int, stats: Mapping[str, TaskStats]) -> None:
        """Note the statistics of the step that was made from the weights of ``step``, by task."""

    def observe(
        self, step: int, evaluations: Mapping[str, TaskEvaluation], confirm: Confirm | None = None
    ) -> GuardDecision:
        """Judge the weights of ``step`` by their held-out evaluation.

        Args:
            step: step of the weights evaluated.
            evaluations: by task.
            confirm: fresh paired evaluation on demand (see ``Confirm``).
        """
        raise NotImplementedError

    def rollback_target(self, checkpoints: Sequence[CheckpointInfo]) -> CheckpointInfo | None:
        """Return the checkpoint to restore. Default: the newest that was judged good; None = there is none.

        Asked again without a checkpoint that turns out to be damaged. The answer None lets the run go on from
        the weights as they are.
        """
        good = [checkpoint for checkpoint in checkpoints if checkpoint.judged_good]
        return max(good, key=lambda checkpoint: checkpoint.step, default=None)

    def rolled_back(self, target: CheckpointInfo, *, step: int) -> list[Event]:
        """Take note that the run goes on from ``target``, its next step being numbered from ``step``.

        Returns:
            What to log of it.
        """
        reason = f"rolled back to the checkpoint of step {target.step}"
        return [Event(step=step, source="guard", kind="rolled_back", reason=reason, data={"to": target.step})]

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate that is in force at ``step``."""
        return 1.0

    def weight_factors(self) -> dict[str, float]:
        """Return the factors on the scheduler's shares in force; missing = 1, 0 = no prompts of the task."""
        return {}

    def metrics(self) -> dict[str, float]:
        """Return numbers to log after every evaluation, as ``guard/<name>``."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able; it is part of every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict`` after ``bind``, at a resume; tasks added since start fresh.

        Args:
            state: what ``state_dict`` returned.
            renamed: old name -> new name of tasks renamed since.
        """
