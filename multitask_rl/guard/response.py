"""The guard's response to a confirmed fall: action, adjustments, their duration, count of rollbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from multitask_rl.guard.decision import GuardAction, RollbackAdjustments
from multitask_rl.guard.settings import SafetyGuardConfig

__all__ = ["Response"]


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
        self.began = 0
        """Step from which the adjustments count."""
        self.is_restored = False
        """The adjustments follow a completed rollback: the run goes on from good weights."""
        self.adjustments = RollbackAdjustments()
        """The current adjustments."""

    def choose(self, key: str, statistics: Mapping[str, float], step: int) -> GuardAction:
        """Return the action on a confirmed fall of the watched metric ``key``.

        Each call takes the next rung of the ladder until the task recovers. A fall of twice the threshold
        takes the last rung. A rollback beyond ``max_rollbacks`` completed rollbacks in the window becomes a
        stop.
        """
        ladder = self._config.ladder
        rung = self._rungs.get(key, 0)
        if statistics["drop"] >= 2.0 * statistics["relevant_drop"]:
            rung = len(ladder) - 1
        self._rungs[key] = rung + 1
        action = GuardAction(ladder[min(rung, len(ladder) - 1)])
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
        self.adjustments = RollbackAdjustments(
            skip_data=config.skip_data and is_rollback,
            lr_factor=config.lr_factor**times if is_rollback else 1.0,
            lr_hold_steps=config.lr_hold_steps if is_rollback else 0,
            lr_rewarm_steps=config.lr_rewarm_steps if is_rollback else 0,
            weight_factors=factors,
            victim=victim,
            culprit=culprit,
        )
        self.began = step
        self.is_restored = False
        if is_rollback:
            self.cooldown_until = step + config.cooldown_steps * 2 ** (times - 1)

    def resume_at(self, step: int) -> None:
        """Count the completed rollback; adjustments and cooldown now start at ``step``."""
        self.rollbacks.append(self.began)
        self.cooldown_until += step - self.began
        self.began = step
        self.is_restored = True

    def lift(self, step: int) -> str:
        """End the adjustments after the cooldown and return the recovered victim; empty = nothing to end.

        Call it when every watched metric is good.
        """
        victim = self.adjustments.victim
        if not victim or step <= self.began or step < self.cooldown_until:
            return ""
        self._rungs = {key: rung for key, rung in self._rungs.items() if key.partition("/")[0] != victim}
        self.adjustments = RollbackAdjustments()
        return victim

    def lr_factor(self, step: int) -> float:
        """Return the factor on the learning rate at ``step``."""
        return self.adjustments.lr_factor_after(step - self.began)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "rungs": dict(self._rungs),
            "adjustments": asdict(self.adjustments),
            "rollbacks": self.rollbacks,
            "cooldown_until": self.cooldown_until,
            "began": self.began,
            "is_restored": self.is_restored,
        }

    def load_state_dict(self, state: Mapping[str, Any], rename: Callable[[str], str]) -> None:
        """Restore ``state_dict``; ``rename`` maps old names and keys to new ones."""
        self._rungs = {rename(key): rung for key, rung in state["rungs"].items()}
        saved = dict(state["adjustments"])
        saved["weight_factors"] = {rename(task): f for task, f in saved["weight_factors"].items()}
        saved |= {role: rename(saved[role]) for role in ("victim", "culprit")}
        self.adjustments = RollbackAdjustments(**saved)
        self.rollbacks, self.cooldown_until = state["rollbacks"], state["cooldown_until"]
        self.began, self.is_restored = state["began"], state["is_restored"]
