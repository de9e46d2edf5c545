"""Builds the parts of a run from its plan, each on its executor, and closes them."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from multitask_rl.config.devices import actor_devices
from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.pool import WorldPool
from multitask_rl.errors import ConfigError, MultitaskRLError, TrainingError
from multitask_rl.executor.engine import RayEngine
from multitask_rl.executor.group import hold_gpus
from multitask_rl.executor.scorer import RayScorer, RunScorer
from multitask_rl.guard.base import Guard
from multitask_rl.models.actor import Actor
from multitask_rl.plugins import GUARDS, load_plugin
from multitask_rl.report.page import attach_page
from multitask_rl.rollout.base import RolloutEngine, push_weights
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.run.estimate import disk_text, estimate_disk, free_bytes
from multitask_rl.run.plan import RunPlan, training_warnings
from multitask_rl.run.profiling import StepProfiler
from multitask_rl.run.state import RunProgress, RunState
from multitask_rl.run.store import RunStore
from multitask_rl.run.supervisor import Supervisor
from multitask_rl.run.teachers import load_teachers
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.scoring.results import place_of
from multitask_rl.seeding import derive_seed
from multitask_rl.statistics.definitions import metric_names
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.step.experience import ExperienceSource
from multitask_rl.step.flow import DataFlow, Stage
from multitask_rl.step.stages import AdvantageStage, UpdateStage, sampling_stages
from multitask_rl.step.task_state import TaskState, suppress_control_tokens
from multitask_rl.step.texts import TextMeter
from multitask_rl.step.tokens import TokenTexts
from multitask_rl.tracking.alerts import AlertTracker
from multitask_rl.tracking.base import Trackers
from multitask_rl.tracking.console import ProgressTracker
from multitask_rl.tracking.timeline import Timeline
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RunParts:
    """The parts of an open run."""

    store: RunStore
    state: RunState
    timeline: Timeline
    profiler: StepProfiler | None
    engine: RolloutEngine
    learner: Learner
    flow: DataFlow
    """All stages of a step, with those of the user."""
    learning: DataFlow
    """The stages from the advantages on."""
    advantages: AdvantageStage
    texts: TokenTexts
    update: UpdateStage
    evaluator: Evaluator
    experience: ExperienceSource
    trackers: Trackers
    supervisor: Supervisor
    closing: contextlib.ExitStack
    """Closes every part but the trackers, in reverse order."""

    def close(self, status: str) -> None:
        """End the trackers with ``status`` (``finished``, ``stopped``, ``failed``); close all. Idempotent."""
        with self.closing as last:
            last.callback(self.trackers.finish, status)
            last.callback(attach_page, self.trackers)


@contextlib.contextmanager
def refusing_exits() -> Iterator[None]:
    """Turn ``sys.exit`` of a plugin or a stage into an error: a run that is not finished must not end with 0.

    Raises:
        TrainingError: names the line.
    """
    try:
        yield
    except SystemExit as error:
        raise TrainingError(
            f"a plugin, or code of yours, called sys.exit({error.code!r}){place_of(error)} in the middle of "
            "a run; raise another exception there. A guard ends a run by GuardDecision(action=stop)"
        ) from error


def _tell_disk(plan: RunPlan, actor: Actor) -> None:
    """Log what the run will write; warn if the disk has no room for it."""
    parameters = sum(p.numel() for p in actor.model.parameters())
    trainable = sum(p.numel() for p in actor.trainable_parameters())
    disk = estimate_disk(plan, parameters, trainable, plan.config.rollout.max_new_tokens)
    has_room = disk["total"] <= free_bytes(plan.output_dir)
    logger.log(logging.INFO if has_room else logging.WARNING, "disk: %s", disk_text(plan.config, disk))


def build_parts(
    plan: RunPlan,
    *,
    actor: Actor,
    critic: Critic,
    tasks: Mapping[str, TaskState],
    scheduler: DynamicTaskWeightScheduler,
    guard: Guard | None,
    scorer: RunScorer,
    progress: RunProgress,
    inserted: Sequence[tuple[Stage, str]],
    track: bool,
) -> RunParts:
    """Build all parts and resume; ``critic``, ``scheduler``, ``guard`` and ``progress`` are filled here.

    Each stage of ``inserted`` stands with the name of the stage it follows. Without ``track`` the run is only
    read: nothing is trained or recorded.

    Raises:
        ConfigError, CheckpointError, EngineError, MissingExtraError, TrainingError: a part cannot be built;
            the other parts are closed.
    """
    config = plan.config
    torch.manual_seed(config.seed)
    random.seed(derive_seed(config.seed, "python"))
    np.random.seed(derive_seed(config.seed, "numpy") % 2**32)
    traits = scorer.reward_traits()
    for name, task in tasks.items():
        task.metrics.declare(traits.get(name, {}))
    bind_controllers(plan, scheduler, guard, tasks)
    if not track and not config.eval.num_prompts:
        raise ConfigError("eval.num_prompts: 0 held-out prompts leave nothing to evaluate; give 1 or more")
    for warning in training_warnings(plan, scheduler.active, guard) if track else ():
        logger.warning("%s", warning)
    with contextlib.ExitStack() as closing:
        store = RunStore(plan.output_dir, config.checkpoint, track=track)
        closing.callback(store.close)
        store.restore_control_tokens(actor)
        suppress_control_tokens(tasks, actor)
        critic.build(actor, [n for n in plan.trained if tasks[n].algorithm.needs_critic])
        timeline = Timeline(plan.output_dir / "timeline.jsonl" if track else None)
        actor.release_engine()
        if config.executor == "ray":
            closing.callback(hold_gpus([str(actor.device), *plan.devices.values()]))
        engine = plan.engine
        if engine is None:
            build: Callable[..., RolloutEngine] = partial(
                build_engine, plan.engine_class, copies=plan.samples_from_copy
            )
            if config.executor == "ray":
                build = partial(RayEngine, plan.engine_class, ray=config.ray)
            engine = build(actor, config.rollout, seed=config.seed, output_dir=plan.output_dir)
            closing.callback(engine.close)
        active = scheduler.active if plan.trained else ()
        follows = config.model.reference_decay < 1.0
        reference = store.reference(actor, follows=follows) if plan.needs_reference(active) else None
        # without training a teacher only measures the KL of a task without rewards
        taught = {n: spec for n, spec in plan.specs.items() if (track and n in active) or not spec.is_scored}
        former = store.recorded_tasks()
        teachers = load_teachers(taught, actor, config.model, config.seed, former)
        runner = ModelRunner(actor, critic, config, reference, teachers=teachers)
        learner_tasks = {n: tasks[n].learner for n in plan.trained}
        backend = plan.backend_class.build(runner, learner_tasks, config)
        closing.callback(backend.close)
        if config.executor == "local" and config.rollout_lag == 0:
            engine = backend.spread(engine)  # other learner ranks sample too
        learner = Learner(backend, learner_tasks, config)
        many_updates = config.batch.num_minibatches * config.batch.num_epochs > 1
        credit = CreditAssigner(backend, learner_tasks, many_updates=many_updates)
        worlds = build_worlds(plan)
        if worlds is not None:
            closing.callback(worlds.close)
        state = RunState(
            *(progress, actor, critic, learner, tasks, scheduler, scorer, guard), store.reference_dir
        )
        run_id = store.resume(state, config, plan.specs)
        if plan.trained and (guard is None or store.has_other_guard):
            scheduler.set_factors({})  # those of the checkpoint's guard
        push_weights(engine, actor)
        trackers = build_trackers(plan, guard, run_id, track=track)
        told, seed = trackers.log_progress, config.seed
        stages_of = partial(
            sampling_stages, actor, engine, scorer, tasks, seed=seed, worlds=worlds, on_progress=told
        )
        stages = stages_of(quorum=config.batch.quorum)
        advantages, update = AdvantageStage(credit, tasks), UpdateStage(learner)
        flow = DataFlow([*stages, advantages, update])
        for stage, after in inserted:
            flow.insert(stage, after=after)
        sampling, learning = flow.split(advantages)
        closing.callback(flow.close)
        closing.callback(timeline.close)
        profiler = None
        if track and config.profile == "torch":
            profiler = StepProfiler(plan.output_dir / "profile", actor.model.parameters(), learner)
            closing.callback(profiler.close)
        experience = ExperienceSource(
            config, sampling, stages, actor=actor, tasks=tasks, scheduler=scheduler, timeline=timeline
        )
        closing.callback(experience.close)
        closing.callback(scorer.close)  # closed before the source, which may wait for it
        meter = TextMeter(backend=backend, actor=actor, engine=engine, tasks=tasks, seed=seed)
        evaluator = Evaluator(actor, engine, scorer, tasks, config.eval.temperature, meter, stages_of)
        supervisor = Supervisor(
            config=config,
            progress=progress,
            state=state,
            store=store,
            trackers=trackers,
            engine=engine,
            tasks=tasks,
            scheduler=scheduler,
            evaluator=evaluator,
            experience=experience,
        )
        if track:
            settings = store.settings(config, plan.specs)
            try:
                trackers.start(settings, store.resumed_at)
                trackers.log_datasets(plan.dataset_records())
                supervisor.note(store.events)
                store.write_config(settings)
                logger.info("%s", plan.describe())
                _tell_disk(plan, actor)
            except BaseException as error:
                with contextlib.suppress(MultitaskRLError, OSError):
                    trackers.finish("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
                raise
        return RunParts(
            store=store,
            state=state,
            timeline=timeline,
            profiler=profiler,
            engine=engine,
            learner=learner,
            flow=flow,
            learning=learning,
            advantages=advantages,
            texts=TokenTexts(actor.tokenizer),
            update=update,
            evaluator=evaluator,
            experience=experience,
            trackers=trackers,
            supervisor=supervisor,
            closing=closing.pop_all(),
        )


@refusing_exits()
def bind_controllers(
    plan: RunPlan,
    scheduler: DynamicTaskWeightScheduler,
    guard: Guard | None,
    tasks: Mapping[str, TaskState],
) -> None:
    """Bind scheduler and guard to the tasks; ``tasks`` is empty before they are built.

    Raises:
        ConfigError: a setting of scheduler or guard does not fit the tasks.
    """
    specs = plan.specs
    if plan.trained:
        ranges = {n: own for n in plan.trained if n in tasks and (own := tasks[n].metrics.reward_range)}
        scheduler.bind(
            plan.trained,
            targets={n: specs[n].target for n in plan.trained},
            min_shares={n: specs[n].min_share for n in plan.trained},
            reward_ranges=ranges,
            seed=plan.config.seed,
        )
        cuts = plan.has_parts or plan.config.batch.context_ranks > 1
        if cuts and scheduler.policy_config.gradients_every:
            raise ConfigError(
                "scheduler.policy_config.gradients_every: with sharded models or batch.context_ranks > 1 a "
                "learner rank has a part of every gradient, and parts are not compared; set it to 0, or give "
                "every rank the whole model"
            )
    if guard is not None:
        names = [n for n in specs if n not in plan.reported]
        try:
            guard.bind(names, {n: metric_names(specs[n]) for n in names})
        except ConfigError as error:
            if not plan.reported:
                raise
            raise ConfigError(
                f"{error}. The guard does not watch {', '.join(sorted(plan.reported))}: their held-out rows "
                "are of the split test, which is only reported"
            ) from error


def build_worlds(plan: RunPlan) -> WorldPool | None:
    """Return the pool of the tasks' environments, each tried once; None if no task has one.

    Raises:
        ConfigError, PluginError, MissingExtraError: an environment cannot be built.
    """
    specs = {name: WorldSpec.of_task(spec) for name, spec in plan.specs.items() if spec.environment}
    if not specs:
        return None
    rollout = plan.config.rollout
    pool = WorldPool(specs, num_workers=rollout.environment_workers, in_lockstep=rollout.lockstep)
    try:
        for name in specs:
            pool.check(name)
    except BaseException:
        pool.close()
        raise
    return pool


def build_scorer(plan: RunPlan) -> RunScorer:
    """Return the reward pool, not started: in this process's workers, or in Ray actors."""
    specs, devices, scoring, seed = plan.specs, plan.devices, plan.config.scoring, plan.config.seed

    def make(_index: int = 0) -> RewardPool:
        return RewardPool(specs, scoring, seed=seed, devices=devices)

    return (
        RayScorer(make, num_pools=plan.config.ray.num_reward_pools)
        if plan.config.executor == "ray"
        else make()
    )


def describe_overlap(plan: RunPlan, actor: Actor) -> str:
    """Return as text what an overlapped run does at the same time, what it shares, and why."""
    config = plan.config
    name, bound = config.rollout.engine, config.rollout.max_staleness
    if config.executor == "ray":
        weights = "has its own weights in Ray actors and receives them after each update"
    elif plan.engine_class.shares_weights:
        size = sum(p.numel() * p.element_size() for p in actor.model.parameters()) / 2**20
        alternative = (
            "no learner rank has all of them; rollout.engine=vllm needs no whole copy of the actor here"
            if plan.has_parts
            else "they must not change under a rollout; with rollout.max_staleness=0 it samples from them in "
            "place"
        )
        weights = (
            f"samples from one snapshot of the training weights ({size:.1f} MiB more memory): {alternative}"
        )
    else:
        weights = "keeps its own copy of the weights and receives them in memory after each update"
    where = (
        "on a CPU sampling and update share the cores, so what is hidden is the time rewards wait"
        if actor.device.type == "cpu" and config.executor == "local"
        else "sampling and update run at the same time, and both hide the time rewards take"
    )
    return (
        f"hybrid engine: overlap on, rollout.max_staleness={bound}: the next rollout runs while rewards come "
        "in and the update is made, rewards begin when a sample ends, stale samples are weighted by "
        f"truncated importance sampling; rollout engine {name!r} {weights}; "
        f"actor on {actor.device}: {where}; training backend {config.training.backend!r}, "
        f"{len(actor_devices(config).names)} learner rank(s), the weights in {plan.num_parts} part(s), "
        f"sequences in {config.batch.context_ranks}; no pipeline parallelism"
    )


def build_scheduler(config: RunConfig, weights: Mapping[str, float] | None) -> DynamicTaskWeightScheduler:
    """Return the configured scheduler."""
    scheduler = config.scheduler
    return DynamicTaskWeightScheduler(
        initial_weights=weights,
        metric_key=scheduler.metric_key,
        min_weight=scheduler.min_weight,
        policy=scheduler.policy,
        **scheduler.policy_config,
    )


def build_guard(config: RunConfig) -> Guard | None:
    """Return the configured guard; None when it is off."""
    if not config.guard.enabled:
        return None
    guard_class: type[Guard] = load_plugin(GUARDS, config.guard.plugin, expects=Guard, where="guard.plugin")
    return guard_class.build(config.guard)


def build_trackers(plan: RunPlan, guard: Guard | None, run_id: str | None, *, track: bool = True) -> Trackers:
    """Return the configured trackers and, with a guard, its alerts; without ``track`` progress alone."""
    if not track:
        told = {} if plan.config.tracking.console == "quiet" else {"progress": ProgressTracker()}
        return Trackers(plan.output_dir, replace(plan.config.tracking, trackers=[]), run_id, told)
    webhook = guard.webhook if guard is not None else ""
    logs = "console" not in plan.config.tracking.trackers  # which shows every event
    alerts = AlertTracker(plan.output_dir, webhook, logs=logs)
    return Trackers(plan.output_dir, plan.config.tracking, run_id, {"alerts": alerts})
