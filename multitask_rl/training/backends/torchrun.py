"""Learner ranks that ``torchrun`` started: rank 0 is the trainer, the others serve it."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from datetime import timedelta
from functools import cache
from typing import Any

from multitask_rl.config.devices import torchrun_size
from multitask_rl.errors import ConfigError
from multitask_rl.training.backends.replica import serve


def serve_torchrun_rank() -> None:
    """In rank 0, and without ``torchrun``, return at once; in another rank serve the trainer, then exit.

    Raises:
        ConfigError: the processes are on several machines.
        SystemExit: rank 0 has ended, or this rank failed.
    """
    size = torchrun_size()
    if size < 2:
        return
    if os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "torchrun over several machines is not supported; start one process with executor=ray, which "
            "places learner ranks on the machines of a Ray cluster"
        )
    rank = int(os.environ["RANK"])
    if rank == 0:
        _invitations()
        return
    number = 0
    while (where := json.loads(_store().get(f"multitask_rl/{rank}/{number}"))) is not None:
        if not serve(**where):
            raise SystemExit(1)
        number += 1
    raise SystemExit(0)


class TorchrunRank:
    """A rank that waits in ``serve_torchrun_rank`` and gets ``where``, the arguments of ``replica.serve``."""

    def __init__(self, where: dict[str, Any]) -> None:
        _invite(where["rank"], where)

    def ended(self) -> str:
        """Return an empty text: ``torchrun`` would have ended this process with it."""
        return ""

    def kill(self) -> None:
        """Do nothing: the rank waits for the next run."""


def _invite(rank: int, where: dict[str, Any] | None) -> None:
    """Tell a rank to serve a run; None = there will be none."""
    number = _invitations()[rank]
    _invitations()[rank] += 1
    _store().set(f"multitask_rl/{rank}/{number}", json.dumps(where))


@cache
def _invitations() -> Counter[int]:
    """Return how many runs each rank was told to serve; at exit all ranks are told that no other follows."""
    for rank in range(1, torchrun_size()):
        atexit.register(_invite, rank, None)
    return Counter()


@cache
def _store() -> Any:
    """Return the key-value store that the processes of ``torchrun`` share."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    store.set_timeout(timedelta(days=365))  # a rank waits for as long as rank 0 loads and trains
    return store
