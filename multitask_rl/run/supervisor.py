"""Between steps: evaluate, let the guard judge, carry out its decision, save."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multitask_rl.boundary.interrupts import finishing, interruptible
from multitask_rl.boundary.printable import counted, shown_path
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.ranges import unknown_name
from multitask_rl.constraints.satisfaction import PREFIX
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.errors import CheckpointError, GuardStop, MultitaskRLError
from multitask_rl.guard.base import Guard, checked_decision, checked_factors, checked_numbers
from multitask_rl.guard.decision import CheckpointInfo, GuardAction, GuardDecision, newest_good
from multitask_rl.records import Event, TaskEvaluation
from multitask_rl.report.summary import rows_at_end
from multitask_rl.rollout.base import RolloutEngine, push_weights
from multitask_rl.run.checkpoint import Checkpoint, CheckpointEntry
from multitask_rl.run.state import RunProgress, RunState
from multitask_rl.run.store import RunStore
from multitask_rl.statistics.definitions import REWARD, measured
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.step.experience import ExperienceSource
from multitask_rl.step.metrics import aggregate
from multitask_rl.step.task_state import TaskState
from multitask_rl.tracking.base import Trackers
from multitask_rl.tracking.jsonl import append_evaluations, repeat_evaluations
from multitask_rl.tracking.reading import former_names

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Supervisor:
    """Evaluates, saves and, if the guard decides so, rolls back a run.

    Weights are judged before they are saved, so every checkpoint has its verdict.
    """

    config: RunConfig
    progress: RunProgress
    state: RunState
    store: RunStore
    trackers: Trackers
    engine: RolloutEngine
    tasks: Mapping[str, TaskState]
    scheduler: DynamicTaskWeightScheduler
    evaluator: Evaluator
    experience: ExperienceSource
    _known: CheckpointEntry = field(init=False, default_factory=lambda: CheckpointEntry(step=-1))
    """Score and verdict of the last evaluated weights."""
    _has_other_weights: bool = field(init=False, default=False)
    """The actor holds a checkpoint's weights, during a confirmation."""
    _unknown: set[str] = field(init=False, default_factory=set)
    """Names in the guard's ``weight_factors`` that were told to be no tasks."""

    def note(self, events: Sequence[Event]) -> None:
        """Record events in ``progress.events`` and with every tracker."""
        for event in events:
            self.progress.events.append(event)
            self.trackers.log_event(event)

    def inspect(self, *, last: bool = False) -> bool:
        """Evaluate, judge and save what is due at this step; return False if the run was rolled back.

        With ``last``, and at the start of a run or fork, all of it is due. In ``Trainer.train`` a signal
        interrupts the evaluation, but waits for its records and the checkpoint.

        Raises:
            GuardStop: the guard ended the run.
        """
        step, config = self.progress.step, self.config
        forced = last or self.progress.evaluated_at < 0  # the end; the beginning of a run or fork
        if forced:  # steps made by hand before it may have begun a batch for the next one
            self.experience.rewind()
        evaluates = (forced or _is_due(step, config.eval.every)) and self.progress.evaluated_at != step
        judged = self._judge() if evaluates else None
        if (new := self.state.unmeasured) and not evaluates:
            # else a new task's first value would be of weights trained on it; no controller reads this one
            with self.saving_on_failure(), interruptible():
                evaluations = self.evaluator.evaluate(step, tasks=new)
            self._record(evaluations, {})
        self.state.unmeasured = []
        if evaluates or new:
            self.note(self.evaluator.scorer.health_events(step))
            self._tell_edited_plugins()
        if judged is not None and not self._conclude(*judged):
            return False
        due = forced or _is_due(step, config.checkpoint.every)
        if not due and evaluates and self.state.guard is not None and self._known.judged_good:
            # with evaluations and checkpoints on different steps, no checkpoint would be judged good
            newest = newest_good(self._checkpoints())
            reach = max(1, self.state.guard.rollback_steps // 2)
            age = math.inf if newest is None else step - newest.step
            due = age >= min(config.checkpoint.every or reach, reach)
        # a step saved by an interrupted evaluation is saved again, with the verdict
        if evaluates if self.progress.saved_at == step else due:
            self.save()
        return True

    def tell_worse(self) -> dict[str, dict[str, Any]]:
        """At the end of the run, warn of tasks that ``report`` calls worse; return its rows of all tasks."""
        step, checkpoints = self.progress.step, self.store.checkpoints
        best = checkpoints.best()
        path = None if best in (None, step) else checkpoints.path(best)
        rows = rows_at_end(Path(self.config.output_dir), step)
        self.note(_worse(rows, step, self.config, path))
        return rows

    def _tell_edited_plugins(self) -> None:
        if edited := self.store.code.edited():
            reason = (
                f"edited while the run goes on: {', '.join(edited)}. New episodes run the new file. A "
                "reward or constraint runs the old one until its worker is started again, any other plugin "
                "until the run is. Stop the run and resume it, so that all run the new file"
            )
            self.note([Event(step=self.progress.step, source="run", kind="changed", reason=reason)])

    def _record(self, evaluations: dict[str, TaskEvaluation], numbers: Mapping[str, float]) -> None:
        """Write ``evaluations``, their metrics and further ``numbers`` to records and trackers."""
        append_evaluations(Path(self.config.output_dir) / "evaluations.jsonl", evaluations)
        per_task = {name: {"eval": e.primary.mean} for name, e in evaluations.items()}
        limits: dict[str, float] = {}
        for name, evaluation in evaluations.items():
            for key, statistic in evaluation.metrics.items():
                if key.startswith(PREFIX):
                    limits[f"eval/{name}/{key.removeprefix(PREFIX)}"] = statistic.mean
                else:
                    per_task[name][f"eval_{key}"] = statistic.mean
        directions = {name: e.primary.direction for name, e in evaluations.items()}
        # a mean of rates and of the logits of a reward model would say nothing
        judged = self._counted(evaluations)
        among = [e.task for e in judged if math.isfinite(e.primary.high - e.primary.low)]
        among = among or [e.task for e in judged]
        flat = aggregate(per_task, "eval", directions, among)
        if len(evaluations) < len(self.tasks):  # a mean over some tasks is not one over all
            flat = {key: value for key, value in flat.items() if key.startswith("task/")}
        self.trackers.log_metrics({**flat, **limits, **numbers}, self.progress.step)
        self.trackers.log_evaluation(evaluations, self.progress.step)

    def save(self) -> None:
        """Write a checkpoint, with score and verdict if these weights were evaluated."""
        step = self.progress.step
        known = self._known if self._known.step == step else CheckpointEntry(step=step)
        self.progress.saved_at = step
        with self.experience.giving_back_late_groups():
            path = self.store.save(known, self.state, self.trackers.run_id)
        is_best = known.score is not None and self.store.checkpoints.best() == step
        good = known.judged_good is True
        self.trackers.log_checkpoint(path / "actor", step, is_best=is_best, judged_good=good)

    @contextlib.contextmanager
    def saving_on_failure(self) -> Iterator[None]:
        """If sampling or scoring fails or is interrupted, save the state as it was before the step.

        A fork that has made no step saves nothing: it begins from its parent again, whose verdict stands.
        """
        try:
            yield
        except BaseException:
            try:
                self.experience.rewind()
                begun_at = 0 if self.store.forked is None else self.store.forked.step
                if (
                    self.progress.step > begun_at
                    and self.progress.saved_at != self.progress.step
                    and not self._has_other_weights
                    and not self.store.is_taken
                ):
                    self.save()
            except Exception as error:
                told = "the run ends and its last checkpoint cannot be written: %s"
                logger.error(told, error, exc_info=not isinstance(error, MultitaskRLError))
            raise

    def _judge(self) -> tuple[dict[str, TaskEvaluation], float, GuardDecision | None]:
        """Evaluate these weights and let the guard decide; return evaluations, seconds and decision.

        An interruption restores the guard, so that a resumed run evaluates again.
        """
        guard = self.state.guard
        before = (guard.state_dict() if guard is not None else {}), self.progress.num_confirmations
        with self.saving_on_failure():
            try:
                with interruptible():
                    began = time.perf_counter()
                    evaluations = self.evaluator.evaluate(self.progress.step)
                    seconds = time.perf_counter() - began
                    decision = None
                    if guard is not None and self._former_verdict is None:
                        deciding = self._deciding(evaluations)
                        given = guard.observe(self.progress.step, deciding, self._confirm)
                        decision = checked_decision(guard, given)
                    self.store.check()
                    return evaluations, seconds, decision
            except BaseException:
                if guard is not None:
                    guard.load_state_dict(before[0])
                self.progress.num_confirmations = before[1]
                raise

    def _conclude(
        self, evaluations: dict[str, TaskEvaluation], seconds: float, decision: GuardDecision | None
    ) -> bool:
        """Record the evaluation and carry out the guard's decision; False if the run was rolled back."""
        step = self.progress.step
        self.progress.evaluated_at = step
        deciding = self._deciding(evaluations)
        best_of = self._counted(deciding)
        finite = [e.primary.score for e in best_of if math.isfinite(e.primary.score)]
        # weights are compared by the same tasks: not without one whose rewards failed this time
        score = math.fsum(finite) / len(finite) if finite and len(finite) == len(best_of) else None
        named = sorted(
            f"{e.task}: {e.metric} {e.primary.direction.value} {' '.join(measured(e))}" for e in best_of
        )
        self._known = CheckpointEntry(step=step, score=score, score_of=named)
        self.progress.history.append((step, evaluations))
        numbers = {"time/evaluation_s": seconds} | ({} if score is None else {"eval/score": score})
        self._record(evaluations, numbers)
        if _is_due(step, self.config.eval.every):
            rewards = {n: e.metrics[REWARD] for n, e in deciding.items() if REWARD in e.metrics}
            means = {n: reward.mean for n, reward in rewards.items()}
            errors = {n: reward.error for n, reward in rewards.items()}
            self.scheduler.calibrate(means, step, errors)
        guard = self.state.guard
        if decision is None or guard is None:
            self._known.judged_good = self._former_verdict
            return True
        self._known.judged_good = decision.judged_good
        self.note(_told(decision, step))
        self.trackers.log_metrics(checked_numbers(guard, "metrics", guard.metrics()), step)
        if decision.action is GuardAction.stop:
            # the weights that a rollback would restore, else the newest good ones
            found = self._read(guard.rollback_target) or self._read(newest_good)
            where = (
                "no checkpoint was judged good"
                if found is None
                else f"the last good weights are in {found[1].path}"
            )
            raise GuardStop(f"the guard stopped the run at step {step}: {decision.reason}; {where}")
        is_back = decision.action is GuardAction.rollback and self._roll_back(guard, decision)
        factors = checked_factors(guard)
        self._tell_unknown(guard, factors)
        trained = {name for name, task in self.tasks.items() if task.stream is not None}
        self.scheduler.set_factors({n: f for n, f in factors.items() if n in trained})
        if is_back:
            # the restored checkpoint does not record the rollback: a killed run would repeat it
            self.save()
            checkpoints = self.store.checkpoints
            if (best := checkpoints.best()) not in (None, self.progress.step):  # the former one may be undone
                actor = checkpoints.path(best) / "actor"
                self.trackers.log_checkpoint(actor, best, is_best=True, judged_good=False)
        return not is_back

    def _tell_unknown(self, guard: Guard, factors: Mapping[str, float]) -> None:
        for name in factors:
            if name not in self.tasks and name not in self._unknown:
                self._unknown.add(name)
                problem = unknown_name("task", name, self.tasks)
                reason = f"{type(guard).__name__}.weight_factors: {problem}; its factor has no effect"
                self.note([Event(step=self.progress.step, source="guard", kind="warn", reason=reason)])

    def _deciding(self, evaluations: Mapping[str, TaskEvaluation]) -> dict[str, TaskEvaluation]:
        """Return the evaluations that guard, scheduler and best checkpoint read: none of a split ``test``."""
        return {name: e for name, e in evaluations.items() if not self.tasks[name].only_reported}

    def _counted(self, evaluations: Mapping[str, TaskEvaluation]) -> list[TaskEvaluation]:
        """Return those that ``eval/score``, ``macro/eval`` and ``worst/eval`` count.

        No anchors count, and tasks without rewards only if no task has any.
        """
        own = [e for name, e in evaluations.items() if self.tasks[name].spec.kind != "anchor"]
        return [e for e in own if self.tasks[e.task].spec.is_scored] or own

    @property
    def _former_verdict(self) -> bool | None:
        """What the guard said of these weights in the run from which this one was forked; None = nothing."""
        forked = self.store.forked
        return forked.judged_good if forked is not None and forked.step == self.progress.step else None

    def _checkpoints(self) -> list[CheckpointInfo]:
        entries = self.store.checkpoints.entries
        return [CheckpointInfo(step=s, judged_good=entries[s].judged_good) for s in sorted(entries)]

    def _read(
        self, choose: Callable[[list[CheckpointInfo]], CheckpointInfo | None]
    ) -> tuple[CheckpointInfo, Checkpoint] | None:
        """Return the checkpoint that ``choose`` selects, without damaged ones."""
        checkpoints = self.store.checkpoints
        while (chosen := choose(self._checkpoints())) is not None:
            try:
                return chosen, checkpoints.load(checkpoints.path(chosen.step))
            except CheckpointError as error:
                del checkpoints.entries[chosen.step]
                reason = f"{error}: the guard does without this checkpoint"
                self.note([Event(step=self.progress.step, source="guard", kind="alarm", reason=reason)])
        return None

    def _confirm(self, task: str) -> tuple[TaskEvaluation, TaskEvaluation] | None:
        """Evaluate ``task`` with the present weights and with those last judged good.

        Both get the same prompts and the same new seeds, so the comparison is paired. None: no checkpoint is
        judged good.
        """
        found = self._read(newest_good)
        if found is None:
            return None
        good_step, actor_dir = found[0].step, found[1].actor_dir
        del found  # frees the optimizer's state for the time of both evaluations
        self.progress.num_confirmations += 1
        purpose = f"confirmation/{self.progress.step}/{self.progress.num_confirmations}"

        def evaluate(step: int) -> TaskEvaluation:
            return self.evaluator.evaluate(step, tasks=[task], purpose=purpose)[task]

        current = evaluate(self.progress.step)
        restore = self.state.actor.keep_weights()
        self._has_other_weights = True
        try:
            self.state.actor.load_weights(actor_dir)
            push_weights(self.engine, self.state.actor)
            reference = evaluate(good_step)
        finally:
            with finishing():
                restore()
                push_weights(self.engine, self.state.actor)
                self._has_other_weights = False
        return current, reference

    def _roll_back(self, guard: Guard, decision: GuardDecision) -> bool:
        """Restore the guard's target and apply the adjustments; False if there is no target."""
        found = self._read(guard.rollback_target)
        if found is None:
            reason = (
                f"no checkpoint judged good within {counted(guard.rollback_steps, 'step')} of "
                f"{self.progress.step} is better than these weights: the run goes on from them "
                "with the guard's adjustments alone"
            )
            self.note([Event(step=self.progress.step, source="guard", kind="warn", reason=reason)])
            return False
        target, checkpoint = found
        num_confirmations = self.progress.num_confirmations
        streams = [task.stream for task in self.tasks.values() if task.stream is not None]
        cursors = [stream.state_dict() for stream in streams]
        self.experience.clear()
        self.state.restore(checkpoint, without=["scorer", "guard"])
        if decision.adjustments.skip_data:
            for stream, cursor in zip(streams, cursors, strict=True):
                stream.skip_to(cursor)
        self.store.checkpoints.forget_after(target.step)
        former = former_names(self.store.read_config())
        repeat_evaluations(Path(self.config.output_dir) / "evaluations.jsonl", target.step, former)
        self.progress.evaluated_at = self.progress.saved_at = target.step
        self._known = self.store.checkpoints.entries[target.step]
        self.progress.num_confirmations = num_confirmations
        push_weights(self.engine, self.state.actor)
        self.note(guard.rolled_back(target, step=target.step))
        return True


def _told(decision: GuardDecision, step: int) -> list[Event]:
    """Return the decision's events; with one more of its action and reason if the guard gave none."""
    own = [e for e in decision.events if e.source == "guard"]
    kind = str(decision.action)
    is_told = any(e.kind == kind or e.reason == decision.reason for e in own)
    if decision.action is GuardAction.keep or is_told:
        return list(decision.events)
    statistics = dict(decision.statistics)
    event = Event(
        step=step, source="guard", kind=kind, reason=decision.reason, task=decision.task, data=statistics
    )
    return [*decision.events, event]


def _worse(
    rows: Mapping[str, Mapping[str, Any]], step: int, config: RunConfig, best: Path | None
) -> list[Event]:
    """Return a warning of the tasks that are worse at ``step``, the last one; none if no task is.

    ``best`` is the path of the best checkpoint; None if there is none, or it is the last one.
    """
    worse = {
        task: row for task, row in rows.items() if row["verdict"] == "worse" and row["steps"][-1] == step
    }
    if not worse:
        return []
    found = [
        f"{task} ({row['metric']} {row['before']:.4g} at step {row['steps'][0]}, now {row['after']:.4g})"
        for task, row in worse.items()
    ]
    back = "" if best is None else f"; checkpoint.resume={best} goes on from the best checkpoint"
    reason = (
        f"worse than at the first evaluation: {', '.join(found)}. Lower optimizer.learning_rate (it is "
        f"{config.optimizer.learning_rate:g}); "
        f"see `multitask-rl report {shown_path(config.output_dir)}`{back}"
    )
    data = {task: [row["before"], row["after"]] for task, row in worse.items()}
    return [Event(step=step, source="run", kind="alarm", reason=reason, data=data)]


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
