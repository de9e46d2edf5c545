"""Evaluate, judge, save: what happens between steps, and what the guard's word leads to."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from multitask_rl.config.run import RunConfig
from multitask_rl.constraints.satisfaction import PREFIX
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.errors import CheckpointError, GuardStop
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision
from multitask_rl.models.actor import Actor
from multitask_rl.records import Event, TaskEvaluation
from multitask_rl.rollout.base import RolloutEngine, push_weights
from multitask_rl.run.interrupts import check_interrupt, finishing
from multitask_rl.run.state import RunProgress, RunState
from multitask_rl.run.store import RunStore
from multitask_rl.statistics.definitions import REWARD
from multitask_rl.step.evaluation import Evaluator, append_evaluations
from multitask_rl.step.experience import ExperienceSource
from multitask_rl.step.metrics import aggregate
from multitask_rl.step.task_state import TaskState
from multitask_rl.tracking.fanout import Trackers
from multitask_rl.training.checkpoint import Checkpoint, CheckpointEntry

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)


class Supervisor:
    """Looks at a run between its steps and, on the guard's word, takes it back.

    Weights are judged before they are saved, so a checkpoint is never newer than its verdict.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        progress: RunProgress,
        state: RunState,
        store: RunStore,
        trackers: Trackers,
        actor: Actor,
        engine: RolloutEngine,
        tasks: Mapping[str, TaskState],
        scheduler: DynamicTaskWeightScheduler,
        guard: Guard | None,
        evaluator: Evaluator,
        experience: ExperienceSource,
    ) -> None:
        self._config = config
        self._progress = progress
        self._state = state
        self._store = store
        self._trackers = trackers
        self._actor = actor
        self._engine = engine
        self._tasks = tasks
        self._scheduler = scheduler
        self._guard = guard
        self._evaluator = evaluator
        self._experience = experience
        self._known = CheckpointEntry(step=-1)
        """What is known of the weights evaluated last."""
        self._has_other_weights = False
        """The actor has a checkpoint's weights for the time of a comparison."""

    def note(self, events: Sequence[Event]) -> None:
        """Record decisions: in ``progress.events`` and with every tracker."""
        for event in events:
            self._progress.events.append(event)
            self._trackers.log_event(event)

    def inspect(self, *, last: bool = False) -> bool:
        """Evaluate, judge and save what is due at this step; False if the run was taken back.

        Args:
            last: everything is due.

        Raises:
            GuardStop: the guard ended the run.
        """
        step, config = self._progress.step, self._config
        forced = last or step == 0
        evaluates = (forced or _is_due(step, config.eval.every)) and self._progress.evaluated_at != step
        judged = self._judge() if evaluates else None
        with finishing():  # recorded and saved with what came of it, or not at all
            if judged is not None and not self._conclude(*judged):
                return False
            # saved before its evaluation when that was interrupted: once more, with the verdict
            due = forced or _is_due(step, config.checkpoint.every) or (evaluates and self._lacks_target())
            if evaluates if self._progress.saved_at == step else due:
                self.save()
        return True

    def _lacks_target(self) -> bool:
        """Whether these weights are good, and the newest good ones on disk are old for a rollback.

        Where evaluations and checkpoints fall on different steps, none of the checkpoints would be judged.
        """
        step, every = self._progress.step, self._config.checkpoint.every
        if self._guard is None or self._known.step != step or not self._known.judged_good:
            return False
        newest = _newest_good(self._checkpoints())
        reach = max(1, self._guard.rollback_steps // 2)
        return newest is None or step - newest.step >= min(every or reach, reach)

    def _record(self, evaluations: dict[str, TaskEvaluation], seconds: float) -> None:
        """Record the evaluation of every task at this step."""
        self._progress.evaluated_at = self._progress.step
        self._known = CheckpointEntry(step=self._progress.step, score=_score(evaluations))
        self._progress.history.append((self._progress.step, evaluations))
        append_evaluations(Path(self._config.output_dir) / "evaluations.jsonl", evaluations)
        per_task = {name: {"eval": e.primary.mean} for name, e in evaluations.items()}
        limits: dict[str, float] = {}
        for name, evaluation in evaluations.items():
            for key, statistic in evaluation.metrics.items():
                if key.startswith(PREFIX):
                    limits[f"eval/{name}/{key.removeprefix(PREFIX)}"] = statistic.mean
                else:
                    per_task[name][f"eval_{key}"] = statistic.mean
        directions = {name: e.primary.direction for name, e in evaluations.items()}
        numbers = {**aggregate(per_task, "eval", directions), **limits}
        numbers["time/evaluation_s"] = seconds
        self._trackers.log_metrics(numbers, self._progress.step)

    def save(self) -> None:
        """Write a checkpoint with what is known of its weights."""
        known = (
            self._known
            if self._known.step == self._progress.step
            else CheckpointEntry(step=self._progress.step)
        )
        self._progress.saved_at = self._progress.step
        self._store.save(known, self._state, self._guard, self._trackers.run_id)

    @contextlib.contextmanager
    def saving_on_failure(self) -> Iterator[None]:
        """If sampling or scoring fails or is interrupted, save the state as it was before the step."""
        try:
            yield
        except BaseException:
            try:
                self._experience.rewind()
                if (
                    self._progress.step > 0
                    and self._progress.saved_at != self._progress.step
                    and not self._has_other_weights
                ):
                    self.save()
            except Exception:
                logger.exception("the run fails and its last checkpoint cannot be written")
            raise

    def _judge(self) -> tuple[dict[str, TaskEvaluation], float, GuardDecision | None]:
        """Evaluate these weights and let the guard decide; return the seconds the evaluation took as well.

        Interrupted, it leaves no trace: a resumed run does it anew.
        """
        guard = self._guard
        before = (guard.state_dict() if guard is not None else {}), self._progress.num_confirmations
        with self.saving_on_failure():
            try:
                check_interrupt()
                began = time.perf_counter()
                evaluations = self._evaluator.evaluate(self._progress.step)
                seconds = time.perf_counter() - began
                decision = None
                if guard is not None:
                    decision = guard.observe(self._progress.step, evaluations, self._confirm)
                self._store.check()
                return evaluations, seconds, decision
            except BaseException:
                if guard is not None:
                    guard.load_state_dict(before[0])
                self._progress.num_confirmations = before[1]
                raise

    def _conclude(
        self, evaluations: dict[str, TaskEvaluation], seconds: float, decision: GuardDecision | None
    ) -> bool:
        """Record the evaluation and do what the guard decided; False if the run was taken back."""
        step = self._progress.step
        self._record(evaluations, seconds)
        # the last step of a run that goes on later is not due
        if _is_due(step, self._config.eval.every):
            rewards = {n: e.metrics[REWARD] for n, e in evaluations.items() if REWARD in e.metrics}
            means = {n: reward.mean for n, reward in rewards.items()}
            errors = {n: reward.error for n, reward in rewards.items()}
            self._scheduler.calibrate(means, step, errors)
        if decision is None or self._guard is None:
            return True
        self._known.judged_good = decision.judged_good
        return self._carry_out(self._guard, decision)

    def _carry_out(self, guard: Guard, decision: GuardDecision) -> bool:
        """Do what the guard decided; False if the run was taken back."""
        self.note(decision.events)
        self._trackers.log_metrics(guard.metrics(), self._progress.step)
        if decision.action is GuardAction.stop:
            self._stop(guard, decision)
        is_back = decision.action is GuardAction.rollback and self._roll_back(guard, decision)
        factors = guard.weight_factors()
        trained = {name for name, task in self._tasks.items() if task.stream is not None}
        self._scheduler.set_factors({n: f for n, f in factors.items() if n in trained})
        if is_back:
            # the checkpoint restored knows nothing of the rollback: a killed run would repeat it for ever
            self.save()
        return not is_back

    def _checkpoints(self) -> list[CheckpointInfo]:
        entries = self._store.checkpoints.entries
        return [CheckpointInfo(step=s, judged_good=entries[s].judged_good) for s in sorted(entries)]

    def _read(
        self, choose: Callable[[list[CheckpointInfo]], CheckpointInfo | None]
    ) -> tuple[CheckpointInfo, Checkpoint] | None:
        """Return the checkpoint that ``choose`` takes of those there are; one that is damaged is left out."""
        checkpoints = self._store.checkpoints
        while (chosen := choose(self._checkpoints())) is not None:
            try:
                return chosen, checkpoints.load(checkpoints.path(chosen.step))
            except CheckpointError as error:
                del checkpoints.entries[chosen.step]
                reason = f"{error}: the guard does without this checkpoint"
                self.note([Event(step=self._progress.step, source="guard", kind="alarm", reason=reason)])
        return None

    def _confirm(self, task: str) -> tuple[TaskEvaluation, TaskEvaluation] | None:
        """Evaluate ``task`` afresh with the weights as they are and with those last judged good.

        Both get the same prompts and the same new sampling seeds, so the comparison is paired. None: no
        checkpoint is judged good.
        """
        found = self._read(_newest_good)
        if found is None:
            return None
        actor_dir = found[1].actor_dir
        del found  # the optimizer's state need not lie in memory while both are evaluated
        self._progress.num_confirmations += 1
        purpose = f"confirmation/{self._progress.step}/{self._progress.num_confirmations}"

        def evaluate() -> TaskEvaluation:
            return self._evaluator.evaluate(self._progress.step, tasks=[task], purpose=purpose)[task]

        current = evaluate()
        kept = {name: value.detach().clone() for name, value in self._actor.model.state_dict().items()}
        self._has_other_weights = True
        try:
            self._actor.load_weights(actor_dir)
            push_weights(self._engine, self._actor)
            reference = evaluate()
        finally:
            with finishing():
                self._actor.model.load_state_dict(kept)
                push_weights(self._engine, self._actor)
                self._has_other_weights = False
        return current, reference

    def _roll_back(self, guard: Guard, decision: GuardDecision) -> bool:
        """Restore the newest judged-good checkpoint, change what the guard says; False if there is none."""
        found = self._read(guard.rollback_target)
        if found is None:
            reason = (
                f"no checkpoint judged good within {guard.rollback_steps} steps of {self._progress.step} is "
                "better than these weights: the run goes on from them with the guard's adjustments alone"
            )
            self.note([Event(step=self._progress.step, source="guard", kind="warn", reason=reason)])
            return False
        target, checkpoint = found
        num_confirmations = self._progress.num_confirmations
        cursors = {n: t.stream.state_dict() for n, t in self._tasks.items() if t.stream is not None}
        self._experience.clear()
        self._state.restore(checkpoint, without=["scorer", "guard"])
        if decision.adjustments.skip_data:
            for name, cursor in cursors.items():
                stream = self._tasks[name].stream
                if stream is not None:
                    stream.skip_to(cursor)
        self._store.checkpoints.forget_after(target.step)
        self._progress.evaluated_at = self._progress.saved_at = target.step
        self._known = self._store.checkpoints.entries[target.step]
        self._progress.num_confirmations = num_confirmations
        push_weights(self._engine, self._actor)
        self.note(guard.rolled_back(target, step=target.step))
        return True

    def _stop(self, guard: Guard, decision: GuardDecision) -> None:
        # the weights to go on from: those a rollback would take, else the newest that were good
        found = self._read(guard.rollback_target) or self._read(_newest_good)
        where = (
            "no checkpoint was judged good"
            if found is None
            else f"the last good weights are in {found[1].path}"
        )
        raise GuardStop(
            f"the guard stopped the run at step {self._progress.step}: {decision.reason}; {where}"
        )


def _newest_good(checkpoints: list[CheckpointInfo]) -> CheckpointInfo | None:
    return max((c for c in checkpoints if c.judged_good), key=lambda c: c.step, default=None)


def _score(evaluations: Mapping[str, TaskEvaluation]) -> float | None:
    """Return the mean of the primary metrics, each such that higher is better."""
    finite = [score for e in evaluations.values() if math.isfinite(score := e.primary.score)]
    return math.fsum(finite) / len(finite) if finite else None


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
