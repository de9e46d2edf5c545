"""From task specs to lanes: the plugins of a run, the device of each, and the tasks that share one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.plugins import absolute_reference
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.grader import PluginPlan
from multitask_rl.scoring.items import Limiter
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.process import PluginOutput
from multitask_rl.scoring.runners import LocalRunner, ProcessRunner
from multitask_rl.seeding import derive_seed


def plan_plugin(
    task: TaskSpec, spec: RewardSpec | ConstraintSpec, index: int, *, seed: int, devices: Mapping[str, str]
) -> PluginPlan:
    """Find the plugin of ``spec``, number ``index`` of its kind; check its shape and configuration.

    A ``Config`` with a field ``device`` or ``seed`` gets the run's, unless the tasks file gives it.

    Raises:
        PluginError, ConfigError, MissingExtraError: the plugin or its configuration cannot be used.
    """
    kind = "reward" if isinstance(spec, RewardSpec) else "constraint"
    where = f"{task.source + ': ' if task.source else ''}tasks.{task.name}.{kind}s[{index}]"
    reference = absolute_reference(spec.plugin)
    source = find_plugin(kind, reference, where)
    config = dict(spec.config)
    if source.takes("device"):
        device = spec.device or devices.get(f"{kind}.{task.name}") or devices.get(f"reward.{task.name}", "")
        if device:
            config.setdefault("device", device)
    elif spec.device:
        raise ConfigError(
            f"{where}.device: {spec.plugin!r} runs on the CPU; its Config has no field 'device'"
        )
    if source.takes("seed"):
        config.setdefault("seed", derive_seed(seed, "reward", spec.plugin))
    source.check(config)
    identity = json.dumps([kind, reference, source.located.version, config], sort_keys=True, default=repr)
    return PluginPlan(
        kind=kind,
        reference=reference,
        config=config,
        source=spec.name or spec.plugin,
        where=where,
        key=hashlib.blake2b(identity.encode(), digest_size=16).digest(),
        isolate=source.isolates(config),
    )


def start_lane(plan: PluginPlan, *, config: ScoringConfig, limiter: Limiter) -> Lane:
    """Return the lane of ``plan`` with its first runner started; a worker process may not be up yet.

    Raises:
        MultitaskRLError: a plugin of the trainer's process cannot be built or warmed up.
    """
    lane = Lane(plan.source, num_workers=config.num_workers, retries=config.retries, limiter=limiter)
    if plan.isolate:
        limited, output = replace(plan, memory_mb=config.worker_memory_mb), PluginOutput(plan.source)
        lane.make_runner = lambda: ProcessRunner(lane, limited, output)
        lane.start(lane.make_runner())
    else:
        lane.start(LocalRunner(lane, plan))
    return lane
