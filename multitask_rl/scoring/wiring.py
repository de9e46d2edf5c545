"""From task specs to lanes: the plugins of a run, the device of each, and the tasks that share one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import ConfigError, PluginError
from multitask_rl.plugins import absolute_reference
from multitask_rl.scoring.adapt import PluginSource, find_plugin
from multitask_rl.scoring.grader import Grader
from multitask_rl.scoring.items import Limiter
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.output import PluginOutput
from multitask_rl.scoring.worker.main import WorkerTask
from multitask_rl.scoring.worker.runners import LocalRunner, ProcessRunner
from multitask_rl.seeding import derive_seed

__all__ = ["LanePlan", "plan_lane", "start_lane"]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """One plugin with one configuration on one device."""

    source: PluginSource
    task: WorkerTask
    key: bytes
    """Digest of plugin, version and configuration: equal plans share a lane, and cached results."""

    @property
    def isolate(self) -> bool:
        """It runs in worker processes."""
        return self.source.isolates(self.task.config)


def plan_lane(
    task: TaskSpec, spec: RewardSpec | ConstraintSpec, index: int, *, seed: int, devices: Mapping[str, str]
) -> LanePlan:
    """Find the plugin of ``spec`` and check its shape and configuration; nothing is built.

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
    worker_task = WorkerTask(
        kind=kind, reference=reference, config=config, source=spec.name or spec.plugin, where=where
    )
    return LanePlan(source, worker_task, hashlib.blake2b(identity.encode(), digest_size=16).digest())


def start_lane(plan: LanePlan, *, config: ScoringConfig, limiter: Limiter) -> Lane:
    """Return the lane of ``plan`` with its first runner started; a worker process may not be up yet.

    Raises:
        MultitaskRLError: a plugin of the trainer's process cannot be built or warmed up.
    """
    task = replace(plan.task, memory_mb=config.worker_memory_mb)
    lane = Lane(task.source, num_workers=config.num_workers, retries=config.retries, limiter=limiter)
    if plan.isolate:
        output = PluginOutput(task.source)
        lane.make_runner = lambda: ProcessRunner(lane, task, output)
        runner: ProcessRunner | LocalRunner = ProcessRunner(lane, task, output)
    else:
        runner = LocalRunner(lane, _build(plan.source, task))
    lane.start(runner)
    return lane


def _build(source: PluginSource, task: WorkerTask) -> Grader:
    grader = Grader(task.kind, source.build(task.config), task.source)
    try:
        grader.warm_up()
    except Exception as error:
        raise PluginError(
            f"{task.where}: {task.kind} {task.reference!r} failed its warm-up: "
            f"{type(error).__name__}: {error}"
        ) from error
    return grader
