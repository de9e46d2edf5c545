"""From the devices of a run to its training backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence

from multitask_rl.config.run import RunConfig
from multitask_rl.training.backend import TrainingBackend
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.rank_connections import Launch
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.rank_starts import LocalRank, RayRanks
from multitask_rl.training.credit import LearnerTask
from multitask_rl.training.runner import ModelRunner

__all__ = ["build_backend"]


def build_backend(
    runner: ModelRunner,
    tasks: Mapping[str, LearnerTask],
    config: RunConfig,
    devices: Sequence[tuple[str, str]],
    *,
    sharded: bool = False,
    tensor: int = 1,
) -> TrainingBackend:
    """Return the backend of one process, or of as many learner ranks as there are devices.

    Args:
        runner: the models.
        tasks: by name.
        config: the run; ``executor`` says where ranks are started.
        devices: of actor and critic, by rank.
        sharded: every rank holds a part of the actor.
        tensor: ranks that compute every layer together.

    Raises:
        ConfigError, MissingExtraError, TrainingError: see ``RankGroup`` and ``RayRanks``.
    """
    main = InProcess(runner, tasks, config)
    if len(devices) == 1:
        return main
    on_gpu = devices[0][0].startswith("cuda")
    threads = 0 if on_gpu else config.num_threads or max(1, (os.cpu_count() or 1) // len(devices))
    launch: Launch = LocalRank
    host = "127.0.0.1"
    with contextlib.ExitStack() as undo:
        if config.executor == "ray":
            ray_ranks = RayRanks(len(devices) - 1, num_cpus=threads or 1, num_gpus=float(on_gpu))
            undo.callback(ray_ranks.close)
            launch, host = ray_ranks, ray_ranks.host
            own = "cuda:0" if on_gpu else "cpu"  # Ray shows an actor its own device alone
            devices = [devices[0], *[(own, own)] * (len(devices) - 1)]
        group = RankGroup(
            main,
            config,
            launch,
            devices=devices,
            context=config.batch.context_ranks,
            sharded=sharded,
            tensor=tensor,
            host=host,
            num_threads=threads,
        )
        undo.pop_all()
    return group
