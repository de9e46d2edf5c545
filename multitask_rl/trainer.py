"""The trainer: one loop from task weights to a better actor.

    quotas -> prompts -> rollout -> constraints -> rewards -> advantages -> update -> scheduler, guard

Everything the loop decides comes from objects whose state is data, so a checkpoint holds all of it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.errors import GuardStop, TrainingError
from multitask_rl.guard.base import Guard
from multitask_rl.models.actor import Actor, load_actor
from multitask_rl.records import Event, TaskEvaluation, TaskStats
from multitask_rl.run.assembly import (
    build_guard,
    build_learner,
    build_scheduler,
    build_scorer,
    build_trackers,
    describe_overlap,
    engine_factory,
)
from multitask_rl.run.interrupts import check_interrupt, finishing
from multitask_rl.run.plan import RunPlan, check_overlap, initial_weights, plan_run, reach_warning
from multitask_rl.run.profiling import StepProfiler, memory_numbers, memory_report
from multitask_rl.run.store import RunStore
from multitask_rl.run.supervisor import Supervisor
from multitask_rl.statistics.definitions import metric_names
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.step.experience import Experience, Pipeline, build_stages
from multitask_rl.step.flow import DataFlow, Stage
from multitask_rl.step.report import StepReport, collect_stats, observe_groups, some_of_each, step_numbers
from multitask_rl.step.stages import AdvantageStage
from multitask_rl.step.task_state import TaskState, build_task_states, suppress_control_tokens
from multitask_rl.tracking.timeline import Timeline
from multitask_rl.training.backend import CreditedSample
from multitask_rl.training.critic import Critic
from multitask_rl.training.optimizer import schedule_factor
from multitask_rl.training.runner import ModelRunner

if TYPE_CHECKING:
    from multitask_rl.data import TaskDataLoader

__all__ = ["Trainer"]

logger = logging.getLogger(__name__)


class Trainer:
    """Trains one shared actor on the tasks of a tasks file.

    Args:
        actor: the shared actor (``get_actor_critic``).
        critic: its critic; None makes heads on the actor's trunk where a task needs them.
        dataloader: rows by task (``get_dataloader``); None reads the data sets named in the tasks file.
        config_path: the tasks file.
        config: the run's configuration; default: ``RunConfig()``.

    Raises:
        ConfigError, PluginError, DataError: whatever can be refused before training starts is refused here.
    """

    def __init__(
        self,
        actor: Actor,
        critic: Critic | None = None,
        dataloader: TaskDataLoader | None = None,
        config_path: str | Path | None = None,
        *,
        config: RunConfig | None = None,
    ) -> None:
        config = config or RunConfig()
        if config_path is not None:
            config = replace(config, tasks_file=str(config_path))
        if dataloader is not None:
            config = replace(config, batch=replace(config.batch, prompts_per_step=dataloader.batch_size))
        self._prepare(plan_run(actor.settle(config), dataloader))
        if dataloader is not None and dataloader.given_weights:
            self.scheduler = build_scheduler(config, dataloader.weights)
        with self._closing_on_error():
            self._take(actor, critic)

    @classmethod
    def from_config(cls, config: RunConfig) -> Trainer:
        """Build everything from the configuration; checks first, reward models next, the actor last."""
        trainer = cls.__new__(cls)
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        trainer._prepare(plan_run(config))
        with trainer._closing_on_error():
            device = trainer.plan.devices.get("actor", "")
            trainer._take(load_actor(config.model, device, config.seed), None)
        return trainer

    def _prepare(self, plan: RunPlan) -> None:
        """Build and check everything but the actor."""
        self.plan, self.config = plan, plan.config
        self.scheduler = build_scheduler(plan.config, initial_weights(plan.specs, plan.trained))
        self.guard = build_guard(plan.config)
        self.runs: dict[str, TaskState] = {}
        self._bind_controllers()
        self.scorer = build_scorer(plan)
        self._built: list[Any] = []
        with self._closing_on_error():
            self.scorer.start()
        self.step = 0
        self.history: list[tuple[int, dict[str, TaskEvaluation]]] = []
        self.events: list[Event] = []
        self._inserted: list[tuple[Stage, str]] = []
        self._is_open = self._is_closed = False

    def _take(self, actor: Actor, critic: Critic | None) -> None:
        """Take the actor in: its vocabulary and context decide on control tokens and prompt lengths."""
        plan, config = self.plan, self.config
        default_device = plan.devices.get("critic", str(actor.device))
        self.actor, self.critic = actor, critic or Critic(trunk=config.critic.trunk, device=default_device)
        self.runs = build_task_states(plan.specs, plan.algorithms, plan.rows, config, actor)

    def _bind_controllers(self) -> None:
        specs = self.plan.specs
        trained = self.plan.trained
        self.scheduler.bind(
            trained,
            targets={n: specs[n].target for n in trained},
            min_shares={n: specs[n].min_share for n in trained},
            reward_ranges={
                n: own for n in trained if n in self.runs and (own := self.runs[n].metrics.reward_range)
            },
            seed=self.config.seed,
        )
        self._bind_guard()

    def _bind_guard(self) -> None:
        if self.guard is not None:
            self.guard.bind(list(self.plan.specs), {n: metric_names(s) for n, s in self.plan.specs.items()})

    # -- settings of the Python front door ------------------------------------------------------------------

    def set_task_scheduler(self, scheduler: DynamicTaskWeightScheduler) -> None:
        """Use ``scheduler`` instead of the configured one. Before ``train``."""
        self.scheduler = scheduler

    def add_guard(self, guard: Guard) -> None:
        """Use ``guard`` instead of the configured one. Before ``train``.

        Raises:
            ConfigError: it is to watch what no task has, or a metric without a direction.
        """
        self.guard = guard
        self._bind_guard()

    def insert_stage(self, stage: Stage, *, after: str) -> None:
        """Put a node of your own into the flow of every step, after the stage ``after``. Before ``train``."""
        self._inserted.append((stage, after))

    def enable_3d_hybrid_engine(self) -> str:
        """Overlap sampling, scoring and learning, share weights where possible; print and return the choice.

        Sets ``rollout.max_staleness`` to 1 unless it is higher. Before ``train``.
        """
        staleness = max(1, self.config.rollout.max_staleness)
        self.config = replace(self.config, rollout=replace(self.config.rollout, max_staleness=staleness))
        self.plan.config = self.config
        check_overlap(self.plan)
        choice = describe_overlap(self.plan, self.actor)
        logger.info("%s", choice)
        sys.stdout.write(choice + "\n")
        return choice

    # -- the run --------------------------------------------------------------------------------------------

    def train(self) -> dict[str, TaskEvaluation]:
        """Run to ``max_steps`` and return the last evaluation.

        A run that already made its steps makes no more; its trackers are told that it has ended, which a kill
        may have kept from them.

        Raises:
            GuardStop: the guard ended the run.
            TrainingError: it made them with other settings, or gradients stayed non-finite.
            RewardError: a task's rewards fail beyond its error budget, or not one sample was scored.
            CheckpointError: checkpoints or records cannot be written.
        """
        self._open()
        status = "failed"
        try:
            while not self._is_at_end or not self.supervisor.inspect(last=True):
                # the last step is judged like any other: a regression in it is taken back too
                if not self._is_at_end and self.supervisor.inspect():
                    self.train_step()
            self._evaluator.tally.check()
            status = "finished"
            return self.history[-1][1] if self.history else self._evaluator.evaluate(self.step)
        except (GuardStop, KeyboardInterrupt):
            status = "stopped"
            raise
        finally:
            self._close(status)

    def evaluate(self) -> dict[str, TaskEvaluation]:
        """Evaluate every task with the weights as they are, without training."""
        self._open(track=False)
        try:
            return self._evaluator.evaluate(self.step, must_score=True)
        finally:
            self._close("finished")

    def train_step(self) -> StepReport:
        """Make one step: sample, score, learn, decide."""
        self._open()
        self.timeline.begin_step()
        with self.supervisor.keeping_what_was_learnt():
            check_interrupt()
            self.store.check()
            experience = self.pipeline.next(self.step)
        with finishing():
            return self._finish_step(experience)

    def _finish_step(self, experience: Experience) -> StepReport:
        """Learn from what was sampled, and decide."""
        quotas, drawn = experience.quotas, experience.drawn
        self._evaluator.tally.note(drawn)
        report = StepReport(step=self.step, quotas=quotas, drawn=drawn, kept=experience.kept)
        self.note(observe_groups(report, self.runs))
        note = partial(self.timeline.add, step=self.step)
        credited = self.flow(experience.kept, start="advantages", note=note)
        with self.timeline.busy("update", step=self.step):
            per_task = self._learn(credited, report)
        self.pipeline.settle()
        self.push_weights()
        sources = [per_task, self._advantages.metrics, self.scorer.metrics(), experience.metrics]
        stats = collect_stats(report, self.runs, experience.weights, sources)
        self._control(stats)
        report.seconds = self.timeline.seconds(self.step)
        shares = {**self.timeline.end_step(self.step, self.pipeline.running()), **memory_numbers()}
        if self._profiler is not None:
            self._profiler.step()
        self.step += 1
        numbers = {**step_numbers(report, stats, self.runs), **self.scheduler.metrics(), **shares}
        self.trackers.log_metrics(numbers, self.step)
        self.trackers.log_rollouts(some_of_each(drawn, self.config.tracking.store_rollouts), self.step)
        return report

    def _learn(self, credited: list[CreditedSample], report: StepReport) -> dict[str, dict[str, float]]:
        """Update the actor, fill in ``report``; return numbers per task."""
        factor = schedule_factor(self.config.optimizer, self.step, self.config.max_steps)
        if self.guard is not None:
            factor *= self.guard.lr_factor(self.step)
        update = self.learner.update(
            credited,
            shares=report.shares({c.sample.task for c in credited}),
            step=self.step,
            learning_rate_factor=factor,
        )
        for stage, span in update.spans:
            self.timeline.add(stage, span, step=self.step)
        self.actor.policy_version += 1
        report.train = {
            **update.metrics,
            "learning_rate": self.config.optimizer.learning_rate * factor,
            "policy_version": float(self.actor.policy_version),
        }
        return update.task_metrics

    def push_weights(self) -> None:
        """Let the engine sample from the actor's weights as they are."""
        weights = {} if self._engine.shares_weights else self.actor.state_dict()
        self._engine.update_weights(weights, self.actor.policy_version)

    def _control(self, stats: Mapping[str, TaskStats]) -> None:
        """Let every controller see the step; note what it decided."""
        self.note(self.scheduler.update(stats, self.step))
        if self.guard is not None:
            self.guard.record_step(self.step, stats)
        self.note(self.scorer.health_events(self.step))
        for name, own in stats.items():
            self.note(self.runs[name].control(own, self.step))

    def note(self, events: Sequence[Event]) -> None:
        """Record decisions: in ``events`` and with every tracker."""
        for event in events:
            self.events.append(event)
            self.trackers.log_event(event)

    @property
    def run_id(self) -> str | None:
        """Identity of the run with its trackers."""
        return self.trackers.run_id

    # -- opening and closing --------------------------------------------------------------------------------

    @property
    def _is_at_end(self) -> bool:
        return self.step >= self.config.max_steps

    def _open(self, *, track: bool = True) -> None:
        """Build what depends on the scheduler and guard in use, and resume. Once."""
        if not self._is_open:
            if self._is_closed:
                raise TrainingError("this trainer could not begin, or is closed; make a new one")
            with self._closing_on_error():
                self._build(track=track)
            self._is_open = True

    def _build(self, *, track: bool) -> None:
        config, plan = self.config, self.plan
        torch.manual_seed(config.seed)
        traits = self.scorer.reward_traits()
        for name, run in self.runs.items():
            run.metrics.declare(traits.get(name, {}))
        self._bind_controllers()
        if self.guard is not None and (
            warning := reach_warning(config.eval.every, self.guard.rollback_steps)
        ):
            logger.warning("%s", warning)
        self.store = RunStore(plan.output_dir, config.checkpoint, track=track)
        self._built.append(self.store)
        self.store.settle_vocabulary(self.actor)
        suppress_control_tokens(self.runs, self.actor)
        self.critic.build(self.actor, [n for n in plan.trained if self.runs[n].algorithm.needs_critic])
        self.timeline = Timeline(self.store.timeline if track else None)
        tracing = track and config.profile == "torch"
        self._profiler = StepProfiler(plan.output_dir / "profile") if tracing else None
        engine = engine_factory(plan).build(
            self.actor, config.rollout, seed=config.seed, output_dir=plan.output_dir
        )
        self._built.append(engine)
        runner = ModelRunner(self.actor, self.critic, config, self.store.reference(self.actor, self.runs))
        tasks = {n: self.runs[n].learner for n in plan.trained}
        self.learner, credit, self._engine = build_learner(plan, runner, tasks, engine)
        self._built.append(self.learner.backend)
        self._advantages = AdvantageStage(credit, self.runs)
        self._build_flow()
        parts = (self.actor, self._engine, self.scorer, self.runs)
        self._evaluator = Evaluator(*parts, seed=config.seed, temperature=config.eval.temperature)
        self.supervisor = Supervisor(self, self.guard, self._evaluator)
        run_id = self.store.resume(self)
        self.push_weights()
        self._open_trackers(run_id, track=track)

    def _build_flow(self) -> None:
        stages = build_stages(self, self._engine)
        self.flow = DataFlow([*stages, self._advantages])
        for stage, after in self._inserted:
            self.flow.insert(stage, after=after)
        self.pipeline = Pipeline(self, stages, self.timeline)

    def _open_trackers(self, run_id: str | None, *, track: bool) -> None:
        self.trackers = build_trackers(self.plan, self.guard, run_id, track=track)
        if track:
            parameters = self.store.settle_config(self)
            self.trackers.start(parameters, self.store.resumed_at)
            self.note(self.store.events)
            logger.info("%s", self.plan.describe())

    def close(self) -> None:
        """End a run made of ``train_step``: trackers finish, workers and engine stop. Idempotent.

        ``train`` and ``evaluate`` do it themselves; ``with Trainer(...) as trainer:`` does it at the end.
        """
        if self._is_open:
            self._close("finished")
        else:
            self.scorer.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._is_open:
            self._close("failed")
        self.close()

    def _close(self, status: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as last_first:
            for part in self._built:
                last_first.callback(part.close)
            last_first.callback(self.flow.close)
            last_first.callback(self.timeline.close)
            if self._profiler is not None:
                report = memory_report(self.actor.model.parameters(), self.learner.backend.optimizer_bytes)
                last_first.callback(self._profiler.close, report)
            last_first.callback(self.pipeline.close)
            last_first.callback(self.scorer.close)  # what the pipeline may wait for ends
            last_first.callback(self.trackers.finish, status)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """End the reward workers and the engine, if any, when opening fails: nobody else would."""
        try:
            yield
        except BaseException:
            self._is_closed = True
            self.scorer.close()
            for part in reversed(self._built):
                part.close()
            raise
