"""What the trainer does on the guard's word: confirm, restore, change something, or stop."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from multitask_rl.errors import GuardStop
from multitask_rl.evaluation import Evaluator
from multitask_rl.guard.decision import CheckpointInfo, GuardDecision
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Event, TaskEvaluation
from multitask_rl.run_state import restore

if TYPE_CHECKING:
    from multitask_rl.trainer import Trainer

__all__ = ["Recovery"]

logger = logging.getLogger(__name__)


class Recovery:
    """Carries out the guard's decisions on one run."""

    def __init__(self, trainer: Trainer, guard: SafetyGuard, evaluator: Evaluator) -> None:
        self._trainer = trainer
        self._guard = guard
        self._evaluator = evaluator
        self._num_confirmations = 0

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return what there is to go back to, oldest first."""
        entries = self._trainer.store.checkpoints.entries
        return [CheckpointInfo(step=s, judged_good=entries[s].judged_good) for s in sorted(entries)]

    def confirm(self, task: str) -> tuple[TaskEvaluation, TaskEvaluation]:
        """Evaluate ``task`` afresh with the weights as they are and with those last judged good.

        Both get the same prompts and the same new sampling seeds, so the comparison is paired. Without a
        judged-good checkpoint both are the weights as they are: nothing can be confirmed.
        """
        trainer = self._trainer
        self._num_confirmations += 1
        purpose = f"confirmation/{trainer.step}/{self._num_confirmations}"

        def evaluate() -> TaskEvaluation:
            return self._evaluator.evaluate(trainer.step, tasks=[task], purpose=purpose)[task]

        current = evaluate()
        good = [c.step for c in self.checkpoints() if c.judged_good]
        if not good:
            return current, current
        kept = {name: value.detach().clone() for name, value in trainer.actor.model.state_dict().items()}
        try:
            trainer.actor.load_weights(trainer.store.checkpoints.path(good[-1]) / "actor")
            trainer.push_weights()
            reference = evaluate()
        finally:
            trainer.actor.model.load_state_dict(kept)
            trainer.push_weights()
        return current, reference

    def roll_back(self, decision: GuardDecision) -> bool:
        """Restore the newest judged-good checkpoint and change what the guard says; False if there is none."""
        trainer, guard = self._trainer, self._guard
        target = guard.rollback_target(self.checkpoints())
        if target is None:
            reason = (
                f"no checkpoint judged good within {guard.rollback_steps} steps of {trainer.step}: the run "
                "goes on from these weights with the guard's adjustments alone"
            )
            trainer.note([Event(step=trainer.step, source="guard", kind="warn", reason=reason)])
            return False
        cursors = {n: run.stream.state_dict() for n, run in trainer.runs.items() if run.stream is not None}
        restore(trainer, trainer.store.checkpoints.load(trainer.store.checkpoints.path(target.step)))
        if decision.adjustments.skip_data:
            for name, cursor in cursors.items():
                stream = trainer.runs[name].stream
                if stream is not None:
                    stream.load_state_dict(cursor)
        trainer.store.checkpoints.forget_after(target.step)
        trainer.push_weights()
        trainer.note(guard.rolled_back(target, step=target.step))
        return True

    def stop(self, decision: GuardDecision) -> None:
        """End the run.

        Raises:
            GuardStop: always; the message says why and where the good weights are.
        """
        good = [c.step for c in self.checkpoints() if c.judged_good]
        where = (
            f"the last good weights are in {self._trainer.store.checkpoints.path(good[-1])}"
            if good
            else ("no checkpoint was judged good")
        )
        raise GuardStop(f"the guard stopped the run at step {self._trainer.step}: {decision.reason}; {where}")
