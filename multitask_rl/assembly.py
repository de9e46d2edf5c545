"""From a plan to the parts of a run: scorer, engine, scheduler and guard, each on its executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.executor.engine import EngineFactory, RayEngineFactory
from multitask_rl.executor.scorer import RayScorer, Scorer
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.plan import RunPlan
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.tracking.alerts import AlertTracker
from multitask_rl.tracking.fanout import Trackers

__all__ = [
    "Scorer",
    "build_guard",
    "build_scheduler",
    "build_scorer",
    "build_trackers",
    "describe_sharing",
    "engine_factory",
]


def build_scorer(plan: RunPlan) -> Scorer:
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
    """Return what builds the rollout engine: the engine's class, or replicas of it in Ray actors."""
    engine: EngineFactory = plan.engine_class
    ray = plan.config.ray
    if plan.config.executor == "ray":
        return RayEngineFactory(engine=engine, num_replicas=ray.num_engines, num_gpus=ray.gpus_per_engine)
    return engine


def build_scheduler(config: RunConfig, weights: Mapping[str, float] | None) -> DynamicTaskWeightScheduler:
    """Return the configured scheduler."""
    scheduler = config.scheduler
    return DynamicTaskWeightScheduler(
        initial_weights=weights,
        metric_key=scheduler.metric_key,
        patience=scheduler.patience,
        min_weight=scheduler.min_weight,
        policy=scheduler.policy,
        **scheduler.policy_config,
    )


def build_guard(config: RunConfig) -> SafetyGuard | None:
    """Return the configured guard; None when it is off."""
    guard = config.guard
    if not guard.enabled:
        return None
    return SafetyGuard(
        monitor_metrics=guard.monitor_metrics or None,
        threshold_delta=guard.threshold_delta,
        rollback_steps=guard.rollback_steps,
        absolute=guard.absolute,
        max_rollbacks=guard.max_rollbacks,
        **guard.guard_config,
    )


def build_trackers(
    plan: RunPlan, guard: SafetyGuard | None, run_id: str | None, *, track: bool = True
) -> Trackers:
    """Return the configured trackers and, with a guard, its alerts; without ``track`` nothing is recorded."""
    if not track:
        return Trackers(plan.output_dir, replace(plan.config.tracking, trackers=[]), run_id)
    alerts = AlertTracker(plan.output_dir, guard.config.webhook if guard is not None else "")
    return Trackers(plan.output_dir, plan.config.tracking, run_id, {"alerts": alerts})


def describe_sharing(plan: RunPlan, device: str) -> str:
    """Return how training and generation share the weights, in a sentence."""
    shares = bool(getattr(plan.engine_class, "shares_weights", False))
    how = (
        "samples from the training weights in place, no second copy"
        if shares
        else "keeps its own copy of the weights and receives them in memory after each update"
    )
    return (
        f"hybrid engine: rollout engine {plan.config.rollout.engine!r} {how}; actor on {device}, one "
        "data-parallel rank, no tensor or pipeline parallelism"
    )
