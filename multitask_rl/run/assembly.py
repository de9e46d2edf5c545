"""From a plan to the parts of a run: scorer, engine, scheduler and guard, each on its executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.executor.engine import EngineFactory, RayEngineFactory
from multitask_rl.executor.scorer import RayScorer, RunScorer
from multitask_rl.guard.base import Guard
from multitask_rl.plugins import GUARDS, load_plugin
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.rollout.snapshot import SnapshotFactory
from multitask_rl.run.plan import RunPlan
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.tracking.alerts import AlertTracker
from multitask_rl.tracking.fanout import Trackers
from multitask_rl.training.backends.build import build_backend
from multitask_rl.training.credit import CreditAssigner, LearnerTask
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner

if TYPE_CHECKING:
    from multitask_rl.models.actor import Actor

__all__ = [
    "RunScorer",
    "build_guard",
    "build_learner",
    "build_scheduler",
    "build_scorer",
    "build_trackers",
    "describe_overlap",
    "engine_factory",
]


def build_scorer(plan: RunPlan) -> RunScorer:
    """Return the reward pool, not started: in this process's workers, or in Ray actors."""
    config = plan.config
    if config.executor == "ray":
        return RayScorer.build(
            plan.specs,
            config.scoring,
            seed=config.seed,
            devices=plan.devices,
            num_pools=config.ray.num_reward_pools,
        )
    return RewardPool(plan.specs, config.scoring, seed=config.seed, devices=plan.devices)


def engine_factory(plan: RunPlan) -> EngineFactory:
    """Return what builds the rollout engine: its class, one over a snapshot, or replicas in Ray actors."""
    engine: EngineFactory = plan.engine_class
    ray = plan.config.ray
    if plan.config.executor == "ray":
        return RayEngineFactory(
            engine=plan.engine_class, num_replicas=ray.num_engines, num_gpus=ray.gpus_per_engine
        )
    if plan.config.rollout_lag > 0 and plan.engine_class.shares_weights:
        return SnapshotFactory(plan.engine_class)
    return engine


def describe_overlap(plan: RunPlan, actor: Actor) -> str:
    """Return what runs at the same time, what is shared, and why, for a person."""
    config = plan.config
    name, bound = config.rollout.engine, config.rollout.max_staleness
    if config.executor == "ray":
        weights = "has its own weights in Ray actors and receives them after each update"
    elif plan.engine_class.shares_weights:
        size = sum(p.numel() * p.element_size() for p in actor.model.parameters()) / 2**20
        weights = (
            f"samples from one snapshot of the training weights ({size:.1f} MiB more memory): they must "
            "not change under a rollout; with rollout.max_staleness=0 it samples from them in place"
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
        f"actor on {actor.device}: {where}; {len(plan.rank_devices)} learner rank(s) with "
        f"{'parts' if plan.is_sharded else 'all'} of the weights, sequences in "
        f"{config.batch.context_ranks} part(s), layers in {plan.tensor_ranks}; no pipeline parallelism"
    )


def build_learner(
    plan: RunPlan, runner: ModelRunner, tasks: Mapping[str, LearnerTask], engine: RolloutEngine
) -> tuple[Learner, CreditAssigner, RolloutEngine]:
    """Return what makes the updates, what assigns credit and what samples, on one training backend.

    Where there are other learner ranks they take part in all three, except in sampling by an engine that the
    backend cannot spread, that runs in Ray actors, or that samples during the update.

    Raises:
        ConfigError, MissingExtraError, TrainingError: see ``build_backend``.
    """
    config = plan.config
    backend = build_backend(
        runner, tasks, config, plan.rank_devices, sharded=plan.is_sharded, tensor=plan.tensor_ranks
    )
    if config.executor == "local" and config.rollout_lag == 0:
        engine = backend.spread(engine)
    many_updates = config.batch.num_minibatches * config.batch.num_epochs > 1
    return Learner(backend, tasks, config), CreditAssigner(backend, tasks, many_updates=many_updates), engine


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
    guard_class: type[Guard] = load_plugin(GUARDS, config.guard.plugin, expects=Guard)
    return guard_class.build(config.guard)


def build_trackers(plan: RunPlan, guard: Guard | None, run_id: str | None, *, track: bool = True) -> Trackers:
    """Return the configured trackers and, with a guard, its alerts; without ``track`` nothing is recorded."""
    if not track:
        return Trackers(plan.output_dir, replace(plan.config.tracking, trackers=[]), run_id)
    webhook = guard.webhook if guard is not None else ""
    logs = "console" not in plan.config.tracking.trackers  # which shows every event
    alerts = AlertTracker(plan.output_dir, webhook, logs=logs)
    return Trackers(plan.output_dir, plan.config.tracking, run_id, {"alerts": alerts})
