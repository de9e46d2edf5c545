"""The trainer: one loop from task weights to a better actor.

quotas -> prompts -> rollout -> constraints -> rewards -> advantages -> update -> scheduler, guard
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.boundary.allowance import limit_threads
from multitask_rl.boundary.interrupts import (
    answer_with,
    between_stages,
    finishing,
    interruptible,
    stopping_on_signals,
)
from multitask_rl.boundary.printable import redact_text
from multitask_rl.config.devices import actor_devices, torchrun_size
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.data.loader import TaskDataLoader
from multitask_rl.errors import ConfigError, GuardStop, MultitaskRLError, TrainingError, with_notes
from multitask_rl.guard.base import Guard, checked_factor
from multitask_rl.lazy import lazy_names
from multitask_rl.models.actor import Actor, default_device, load_actor, make_actor
from multitask_rl.records import Event, TaskEvaluation
from multitask_rl.rollout.base import RolloutEngine, push_weights
from multitask_rl.run.assembly import (
    RunParts,
    bind_controllers,
    build_guard,
    build_parts,
    build_scheduler,
    build_scorer,
    describe_overlap,
    refusing_exits,
)
from multitask_rl.run.objects import name_objects
from multitask_rl.run.plan import check_output_dir, check_overlap, plan_run
from multitask_rl.run.profiling import MemoryWatch, SystemUse
from multitask_rl.run.state import RunProgress
from multitask_rl.statistics.evaluations import Evaluations
from multitask_rl.step.experience import Experience
from multitask_rl.step.flow import DataFlow, Stage
from multitask_rl.step.metrics import (
    StepReport,
    collect_stats,
    explained,
    logged,
    observe_groups,
    some_of_each,
    step_numbers,
)
from multitask_rl.step.task_state import build_task_states
from multitask_rl.step.tokens import with_tokens
from multitask_rl.training.backends.build import serve_torchrun_rank
from multitask_rl.training.critic import Critic
from multitask_rl.training.optimizer import schedule_factor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Trainer"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {"PPOTrainer": "multitask_rl.api.rl_trainer", "SafetyGuard": "multitask_rl.guard.safety_guard"},
)

logger = logging.getLogger(__name__)

MAX_STEPS_VARIABLE = "MULTITASK_RL_MAX_STEPS"
"""Environment variable: most steps of a run, to try a script out without changing it."""


class Trainer:
    """Trains one shared actor on the tasks of a tasks file.

    Args:
        actor: the shared actor (``get_actor_critic``), or a loaded model of ``transformers``; None loads
            ``config.model``, after the settings were checked.
        critic: its critic; None makes heads on the actor's trunk where a task needs them.
        dataloader: rows by task (``get_dataloader``), or what that takes; None reads the data sets that the
            tasks name.
        config_path: the tasks file, or the tasks as a mapping, in which rewards, constraints and data sets
            may be objects; None = ``config.tasks_file`` and ``config.tasks``.
        config: the run's configuration; None = ``RunConfig()``.
        tokenizer: for an ``actor`` that is a model of ``transformers``; None = the model's own.
        engine: a rollout engine that already runs, and stays open when the run ends; None = the one of
            ``config.rollout``.

    Raises:
        ConfigError, PluginError, DataError: a setting, plugin or data set cannot be used.
    """

    def __init__(
        self,
        actor: Actor | PreTrainedModel | None = None,
        critic: Critic | None = None,
        dataloader: TaskDataLoader | Any = None,
        config_path: str | Path | Mapping[str, Any] | Sequence[Any] | None = None,
        *,
        config: RunConfig | Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        engine: RolloutEngine | None = None,
    ) -> None:
        if isinstance(config, Mapping):
            config = build_dataclass(RunConfig, config, Where("config"))
        config = RunConfig() if config is None else config
        if not isinstance(config, RunConfig):
            raise ConfigError(f"config: expected a mapping or a RunConfig, got {config!r}")
        _check_torch()
        if actor is not None and not isinstance(actor, Actor):
            actor = make_actor(actor, tokenizer, config.model, config.seed)
        serve_torchrun_rank()
        config, dataloader = name_objects(config, config_path, dataloader)
        if most := os.environ.get(MAX_STEPS_VARIABLE):
            if not most.isdecimal() or int(most) < 1:
                raise ConfigError(
                    f"{MAX_STEPS_VARIABLE} must be a whole number >= 1, got {most!r}; or unset it"
                )
            if int(most) < config.max_steps:
                logger.warning("max_steps=%d is cut to %s=%s", config.max_steps, MAX_STEPS_VARIABLE, most)
                config = replace(config, max_steps=int(most))
        if actor is not None:
            config = actor.settle(config)
        if (size := torchrun_size()) and "actor" not in config.device_map:
            devices = f"{default_device()}:0-{size - 1}"
            config = replace(config, device_map={**config.device_map, "actor": devices})
        if dataloader is not None and dataloader.batch_size:
            config = replace(config, batch=replace(config.batch, prompts_per_step=dataloader.batch_size))
        limit_threads(config.num_threads)
        self.plan = plan = plan_run(config, dataloader, engine)
        given = dataloader.weights if dataloader is not None else {}
        if idle := [name for name in given if name in plan.specs and name not in plan.trained]:
            raise ConfigError(f"task_weights names {idle[0]!r}, which is only evaluated; leave it out")
        self.scheduler = build_scheduler(config, given or {n: plan.specs[n].weight for n in plan.trained})
        self.guard = build_guard(config)
        bind_controllers(plan, self.scheduler, self.guard, {})
        self.progress = RunProgress()
        self.scorer = build_scorer(plan)
        self._inserted: list[tuple[Stage, str]] = []
        self._parts: RunParts | None = None
        self._memory, self._system = MemoryWatch(), SystemUse()
        self._is_closed = False
        with self._closing_on_error():
            self.scorer.start()
            if actor is None:
                logger.info("loading the actor from %s", config.model.name_or_path)
            wanted = plan.devices.get("actor", "")
            on_host = actor_devices(config).begins_on_host and plan.num_parts > 1
            if actor is not None and wanted:
                actor.place(wanted, on_host=on_host)
            self.actor = actor or load_actor(config.model, wanted, config.seed, tokenizer, on_host=on_host)
            device = plan.devices.get("critic", str(self.actor.device))
            self.critic = critic or Critic(config.critic, device)
            self.tasks = build_task_states(plan.specs, plan.algorithms, plan.rows, config, self.actor)

    @classmethod
    def from_config(cls, config: RunConfig) -> Trainer:
        """Build a trainer from the configuration alone."""
        return cls(config=config)

    @property
    def config(self) -> RunConfig:
        """The run's configuration, resolved."""
        return self.plan.config

    @property
    def step(self) -> int:
        """Number of steps made so far."""
        return self.progress.step

    @property
    def history(self) -> list[tuple[int, dict[str, TaskEvaluation]]]:
        """Evaluations of this process in order, undone ones too: (step, evaluation by task)."""
        return self.progress.history

    @property
    def events(self) -> list[Event]:
        """Decisions of scheduler, guard and the other controllers since this process began, in order."""
        return self.progress.events

    @property
    def parts(self) -> RunParts:
        """The parts of the run, from its opening on.

        Raises:
            TrainingError: the run was never opened.
        """
        if self._parts is None:
            raise TrainingError("this trainer has not begun: call train, train_step or evaluate first")
        return self._parts

    @property
    def flow(self) -> DataFlow:
        """The stages of a step, once the run is open."""
        return self.parts.flow

    @property
    def run_id(self) -> str | None:
        """Identity of the run with its trackers."""
        return self.parts.trackers.run_id

    # -- settings of the Python front door: a ``TrainingError`` once the run is open ------------------------

    def _check_not_open(self, method: str) -> None:
        if self._parts is not None:
            raise TrainingError(
                f"{method} has no effect on a run that is open; call it before the run begins: before train, "
                "train_step and evaluate"
            )

    def set_task_scheduler(self, scheduler: DynamicTaskWeightScheduler) -> None:
        """Use ``scheduler`` instead of the configured one. Before the run is open."""
        self._check_not_open("set_task_scheduler")
        _expect(DynamicTaskWeightScheduler, scheduler, "set_task_scheduler")
        self.scheduler = scheduler

    def add_guard(self, guard: Guard) -> None:
        """Use ``guard`` instead of the configured one. Before the run is open.

        Raises:
            ConfigError: it watches a metric that no task has, or that has no direction.
        """
        self._check_not_open("add_guard")
        _expect(Guard, guard, "add_guard")
        self.guard = guard
        bind_controllers(self.plan, self.scheduler, guard, {})

    def insert_stage(self, stage: Stage, *, after: str) -> None:
        """Insert a stage into the flow of every step, after the stage ``after``. Before the run is open."""
        self._check_not_open("insert_stage")
        _expect(Stage, stage, "insert_stage")
        self._inserted.append((stage, after))

    def enable_3d_hybrid_engine(self) -> str:
        """Overlap sampling, scoring and learning, share weights where possible; print and return the choice.

        Sets ``rollout.max_staleness`` to 1 unless it is higher. Before the run is open.

        Raises:
            ConfigError: a task or the engine does not work with it; nothing is changed.
        """
        self._check_not_open("enable_3d_hybrid_engine")
        before, rollout = self.config, self.config.rollout
        staleness = max(1, rollout.max_staleness)
        self.plan.config = replace(before, rollout=replace(rollout, max_staleness=staleness))
        try:
            check_overlap(self.plan)
        except ConfigError:
            self.plan.config = before
            raise
        choice = describe_overlap(self.plan, self.actor)
        logger.info("%s", choice)
        sys.stdout.write(choice + "\n")
        return choice

    # -- the run --------------------------------------------------------------------------------------------

    @stopping_on_signals()
    @refusing_exits()
    def train(self) -> Evaluations:
        """Run to ``max_steps`` and return the last evaluation: a mapping that prints as a table.

        Its ``changes`` compare the last evaluation with the first; an event ``alarm`` names tasks that are
        worse. A finished run makes no more steps; its trackers are ended again, in case a kill prevented it.

        At Ctrl-C, SIGTERM, SIGUSR1 or a closed terminal the update is finished, a checkpoint is saved and a
        ``KeyboardInterrupt`` is raised. A second signal ends the process at once.

        Raises:
            GuardStop: the guard ended the run.
            TrainingError: the run is finished with other settings, or gradients stayed non-finite.
            RewardError: a task's rewards fail beyond its error budget, or no sample was scored.
            CheckpointError: checkpoints or records cannot be written.
        """
        parts = self._open()
        answer_with(parts.trackers.log_stopping)
        status = "failed"
        try:
            with between_stages(), refusing_exits():
                while not self._is_at_end or not parts.supervisor.inspect(last=True):
                    # the last step is judged too: a regression in it is rolled back
                    if not self._is_at_end and parts.supervisor.inspect():
                        self.train_step()
            parts.evaluator.tally.check()
            changes = parts.supervisor.tell_worse()
            status = "finished"
            last = self.history[-1][1] if self.history else parts.evaluator.evaluate(self.step)
            result = Evaluations(last)
            result.changes = changes
            return result
        except (GuardStop, KeyboardInterrupt):
            status = "stopped"
            raise
        except Exception as error:
            if not self._is_closed:  # else what failed is the end, which has closed the records
                told = error if isinstance(error, MultitaskRLError) else with_notes(error)
                failed = Event(step=self.step, source="run", kind="failed", reason=redact_text(str(told)))
                with contextlib.suppress(MultitaskRLError, OSError):
                    parts.supervisor.note([failed])
            raise
        finally:
            self._close(status)

    @refusing_exits()
    def evaluate(self) -> Evaluations:
        """Evaluate every task with the present weights, without training, and close the trainer.

        If no step was made and ``output_dir`` has checkpoints, the weights are those that a run would go on
        from. The evaluation is not recorded.

        Raises:
            TrainingError: the trainer is closed.
            RewardError: a task's rewards fail beyond its error budget, or give no result at all.
            ConfigError: ``eval.num_prompts`` is 0.
        """
        parts = self._open(track=False)
        try:
            found = Evaluations(parts.evaluator.evaluate(self.step, must_score=True))
            for task in self.tasks.values():
                for event in task.take_warnings(self.step):
                    logger.warning("task %s: %s", event.task, event.reason)
            return found
        finally:
            self._close("finished")

    @refusing_exits()
    def train_step(self) -> StepReport:
        """Make one step: sample, score, learn, update the scheduler. It evaluates nothing.

        A checkpoint is saved only if sampling or scoring fails. After an error in learning the batch of the
        step is lost, and some of its minibatches may have changed the weights: close the trainer and make a
        new one, which goes on from the last checkpoint.

        Raises:
            TrainingError: the trainer is closed, or gradients stayed non-finite.
            RewardError, CheckpointError: as ``train``.
        """
        parts = self._open()
        parts.timeline.begin_step()
        with parts.supervisor.saving_on_failure(), interruptible():
            parts.store.check()
            experience = parts.experience.next(self.step)
        with finishing():
            return self._finish_step(parts, experience)

    def _finish_step(self, parts: RunParts, experience: Experience) -> StepReport:
        """Learn from the experience; let the controllers decide."""
        parts.experience.take()
        step, timeline, supervisor = self.step, parts.timeline, parts.supervisor
        quotas, drawn = experience.quotas, experience.drawn
        parts.evaluator.tally.note(drawn)
        report = StepReport(step=step, quotas=quotas, drawn=drawn, kept=experience.kept)
        supervisor.note(observe_groups(report, self.tasks))
        factor = schedule_factor(self.config.optimizer, step, self.config.max_steps)
        if self.guard is not None:
            factor *= checked_factor(self.guard, self.guard.lr_factor(step))
        parts.update.prepare(step, report.shares, factor, compare=self.scheduler.compares_gradients(step))
        parts.learning(experience.kept, note=partial(timeline.add, step=step))
        update = parts.update.report
        for stage, span in update.spans:
            timeline.add(stage, span, step=step)
        self.actor.policy_version += 1
        report.train = {
            **update.metrics,
            "learning_rate": self.config.optimizer.learning_rate * factor,
            "policy_version": float(self.actor.policy_version),
        }
        parts.experience.wait_for_sampling()
        self.push_weights()
        sources = [update.task_metrics, parts.advantages.metrics, self.scorer.metrics(), experience.metrics]
        stats = collect_stats(report, self.tasks, experience.weights, sources)
        events = [*self.scheduler.update(stats, step)]
        if self.guard is not None:
            self.guard.record_step(step, stats)
        events += [*self.scorer.health_events(step), *parts.engine.health_events(step)]
        for name, task in self.tasks.items():
            events += task.take_warnings(step)
            if name in stats and stats[name].num_prompts:
                events += task.control(stats[name], step)
        supervisor.note(events)
        recorded = some_of_each(drawn, self.config.tracking.store_rollouts)
        if parts.trackers.record_rollouts:
            recorded = with_tokens(recorded, parts.texts, parts.advantages.of_tokens)
            if any(task.spec.judged for task in self.tasks.values()):
                began = time.monotonic()
                recorded = explained(recorded, self.scorer)
                timeline.add("constraints", (began, time.monotonic()), step=step)
        memory, full = self._memory.observe(step)
        supervisor.note(full)
        report.seconds, shares = timeline.end_step(step, parts.experience.running())
        shares |= {**memory, **self._system.numbers()}
        if parts.profiler is not None:
            parts.profiler.step()
        self.progress.step += 1
        stats = logged(stats)
        numbers = {**step_numbers(report, stats), **self.scheduler.metrics(stats), **shares}
        parts.trackers.log_metrics(numbers, self.step)
        parts.trackers.log_rollouts(recorded, self.step)
        return report

    def push_weights(self) -> None:
        """Give the engine the actor's present weights."""
        push_weights(self.parts.engine, self.actor)

    # -- opening and closing --------------------------------------------------------------------------------

    @property
    def _is_at_end(self) -> bool:
        return self.step >= self.config.max_steps

    def _open(self, *, track: bool = True) -> RunParts:
        """Build the parts and resume, once."""
        if self._is_closed:
            raise TrainingError(
                "this trainer's run has ended, or could not begin; make a new one as this one was made: with "
                "trainer.actor as the actor it goes on with its weights"
            )
        _check_torch()
        if self._parts is None:
            with self._closing_on_error():
                if track and not self.plan.trained:
                    raise ConfigError(
                        f"{self.config.tasks_file or 'tasks'}: every task is evaluation_only; nothing would "
                        "be trained. `multitask-rl eval MODEL tasks.yaml` evaluates them"
                    )
                if track and not self.actor.trainable_parameters():
                    raise ConfigError(
                        "no parameter of the actor is trainable (requires_grad is False): a run would learn "
                        "nothing; call model.requires_grad_(True), or leave it True for what is to be trained"
                    )
                if track:
                    check_output_dir(self.plan.output_dir)
                self._parts = build_parts(
                    self.plan,
                    actor=self.actor,
                    critic=self.critic,
                    tasks=self.tasks,
                    scheduler=self.scheduler,
                    guard=self.guard,
                    scorer=self.scorer,
                    progress=self.progress,
                    inserted=self._inserted,
                    track=track,
                )
        return self._parts

    def close(self) -> None:
        """End a run made of ``train_step``: trackers finish, workers and engine stop. Idempotent.

        ``train`` and ``evaluate`` do it themselves; ``with Trainer(...) as trainer:`` does it at the end.
        """
        self._close("finished")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_stopped = kind is not None and issubclass(kind, (GuardStop, KeyboardInterrupt))
        self._close("finished" if kind is None else "stopped" if is_stopped else "failed")

    def _close(self, status: str) -> None:
        was_closed, self._is_closed = self._is_closed, True
        if self._parts is None:
            self.scorer.close()
        elif not was_closed:
            self._parts.close(status)

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the scorer and its workers if opening fails."""
        try:
            yield
        except BaseException:
            self._is_closed = True
            self.scorer.close()
            raise


def _check_torch() -> None:
    """Raise a ``ConfigError`` if a setting of Python or torch prevents training or makes it fail."""
    import torch

    if sys.flags.optimize > 1:
        raise ConfigError(
            "python -OO (PYTHONOPTIMIZE=2) drops docstrings, without which transformers cannot import its "
            "models; use python or python -O"
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            "torch.inference_mode() is on, in which nothing is learnt; call the trainer outside of it"
        )
    if (dtype := torch.get_default_dtype()) != torch.float32:
        raise ConfigError(
            f"torch's default dtype is {dtype}; call torch.set_default_dtype(torch.float32). model.dtype is "
            "the type of the weights"
        )
    if (device := torch.get_default_device()).type != "cpu":
        raise ConfigError(
            f"torch's default device is {device}; call torch.set_default_device(None), or the trainer "
            "outside of `with torch.device(...)`. device_map.actor names the actor's device; without "
            "it a GPU is used where there is one"
        )
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        raise ConfigError(
            "torch.autocast is on; call the trainer outside of it. model.autocast=true computes in bfloat16"
        )


def _expect(kind: type, given: object, method: str) -> None:
    if not isinstance(given, kind):
        raise ConfigError(f"{method}: expected a {kind.__name__}, got {given!r}")
