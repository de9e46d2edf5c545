"""From the devices of a run to its backend: this process, more of this machine, of torchrun or of Ray."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar

from multitask_rl.boundary.allowance import usable_cores
from multitask_rl.boundary.interrupts import noting_signals
from multitask_rl.config.devices import actor_devices, plan_ranks, ranks_per_machine, torchrun_size
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError, TrainingError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.training.backend import LearnerTask, TrainingBackend
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.rank_connections import Launch
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.replica import serve
from multitask_rl.training.backends.sharded import Shards
from multitask_rl.training.runner import ModelRunner

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from multitask_rl import lazy\n"
    "with lazy.without_collector(): from multitask_rl.training.backends import replica\n"
    "replica.main()"
)
_END_WITHIN_S = 5.0


class LocalRank:
    """A learner rank in a new interpreter on this machine, which calls ``replica.serve(**where)``."""

    def __init__(self, where: dict[str, Any]) -> None:
        # -P: a file of the working directory named like a standard module must not be imported in its place
        command = [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=2, text=True, start_new_session=True
        )
        assert self._process.stdin is not None
        # not on the command line, where every user of the machine could read the token
        with self._process.stdin as line:
            line.write(json.dumps(where) + "\n")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ended(self) -> str:
        """Return how it ended; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        self._process.kill()
        self._process.wait()


class TorchBackend(TrainingBackend):
    """Learns in this process or, if ``device_map.actor`` names several devices, in a rank on each of them.

    ``executor`` says where ranks start: on this machine, or with ``ray`` on those of the cluster.
    """

    group: ClassVar[Callable[..., RankGroup]] = RankGroup
    launch: ClassVar[Launch] = LocalRank
    """Starts a rank on this machine."""

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """See ``TrainingBackend``."""
        cls.settings(config)
        plan_ranks(config)
        for key in refused_in_parts(config) if cls.num_parts(config) > 1 else ():
            raise ConfigError(
                f"device_map.actor={config.device_map['actor']!r} gives each rank a part of the weights, "
                f"with which {key} does not work; leave that at its default, or sharded out"
            )
        if actor_devices(config).is_offloaded and config.optimizer.moments == "host":
            raise ConfigError(
                f"optimizer.moments=host: device_map.actor={config.device_map['actor']!r} keeps the weights "
                "and the optimizer's state in host memory already; leave optimizer.moments out"
            )

    @classmethod
    def num_parts(cls, config: RunConfig) -> int:
        """See ``TrainingBackend``."""
        actor = actor_devices(config)
        return actor.parts * actor.tensor

    @classmethod
    def build(
        cls, runner: ModelRunner, tasks: Mapping[str, LearnerTask], config: RunConfig
    ) -> TrainingBackend:
        """See ``TrainingBackend``; errors as of ``RankGroup`` and ``RayRanks``."""
        main, devices = InProcess(runner, tasks, config), plan_ranks(config)
        if len(devices) == 1:
            return main
        on_gpu = devices[0][0].startswith("cuda")
        local = ranks_per_machine() or len(devices)
        uses_cpu = not on_gpu or config.optimizer.moments == "host" or actor_devices(config).is_offloaded
        # the ranks of a machine compute on its cores at the same time
        threads = (config.num_threads or max(1, usable_cores() // local)) if uses_cpu else 0
        launch: Launch = cls.launch
        if started := torchrun_size():
            if started != len(devices) or config.executor != "local":
                raise ConfigError(
                    f"torchrun's number of processes is {started}, and device_map.actor names {len(devices)} "
                    f"devices with executor={config.executor}; make the two numbers equal (executor=local), "
                    "or start without torchrun"
                )
            launch = TorchrunRank
        host = rank_0_address() if ranks_per_machine() else "127.0.0.1"
        with contextlib.ExitStack() as undo:
            if config.executor == "ray":
                cpus = 1 if on_gpu else threads
                ray_ranks = RayRanks(len(devices) - 1, num_cpus=cpus, num_gpus=float(on_gpu))
                undo.callback(ray_ranks.close)
                launch, host = ray_ranks, ray_ranks.host
                own = "cuda:0" if on_gpu else "cpu"  # Ray shows an actor its own device alone
                devices = [devices[0], *[(own, own)] * (len(devices) - 1)]
            group = cls.group(
                main,
                config,
                launch,
                devices=devices,
                host=host,
                num_threads=threads,
                shards=Shards if actor_devices(config).is_sharded else None,
            )
            undo.pop_all()
        return group


def refused_in_parts(config: RunConfig) -> list[str]:
    """Return the keys of ``config`` that ask for what ranks with parts of the weights cannot do."""
    wants = {
        "model.compile": config.model.compile,
        "model.activation_offload": config.model.activation_offload,
        "model.reference_decay": config.model.reference_decay < 1.0,
        "critic.trunk": config.critic.trunk != "actor",
        "batch.context_ranks": config.batch.context_ranks > 1,
        "device_map.critic": "critic" in config.device_map,
        "device_map.reference": "reference" in config.device_map,
    }
    return [key for key, is_wanted in wants.items() if is_wanted]


def serve_torchrun_rank() -> None:
    """In rank 0, and without ``torchrun``, return at once; in another rank serve the trainer, then exit.

    Raises:
        SystemExit: rank 0 has ended, this rank failed, or a signal came while it served a run.
    """
    if torchrun_size() < 2:
        return
    rank = int(os.environ["RANK"])
    if rank == 0:
        _invitations()
        return
    number = 0
    while (where := json.loads(_store().get(f"multitask_rl/{rank}/{number}"))) is not None:
        # the process serves the next run too, and torchrun ends it if the trainer is killed
        # torchrun sends a signal to all ranks; this one goes on, since the trainer needs it to save
        with noting_signals() as came:
            has_succeeded = serve(**where, outlives=True)
        if came or not has_succeeded:
            raise SystemExit(0 if has_succeeded else 1)
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


def rank_0_address() -> str:
    """Return the address at which other machines of ``torchrun`` reach this machine, which runs rank 0.

    Raises:
        ConfigError: ``MASTER_ADDR`` has no IPv4 address.
    """
    name = os.environ["MASTER_ADDR"]
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={name!r}: the ranks need an IPv4 address of this machine or a name that has one "
            f"({error.strerror}); give torchrun --master-addr, or --local-addr beside --rdzv-backend"
        ) from error
    if address.startswith("127.") and name not in ("localhost", address):
        # Debian gives the machine's own name such an address; a UDP socket knows the other and sends nothing
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            address = str(probe.getsockname()[0])
    return address


class RayRanks:
    """Starts ``num_helpers`` learner ranks as Ray actors (extra ``ray``), with so many CPUs and GPUs each.

    Raises:
        MissingExtraError, ConfigError: see ``ActorGroup``.
    """

    def __init__(self, num_helpers: int, *, num_cpus: float = 1.0, num_gpus: float = 0.0) -> None:
        self._group: ActorGroup | None = ActorGroup(
            "learner rank", lambda _index: _Rank(), num_helpers, num_cpus=num_cpus, num_gpus=num_gpus
        )
        self._calls: list[Any] = []

    @property
    def host(self) -> str:
        """The address by which the cluster's machines reach this process."""
        import ray

        return str(ray.util.get_node_ip_address())

    def __call__(self, where: dict[str, Any]) -> _RayRank:
        """Start the rank ``where["rank"]``."""
        if self._group is None:
            raise TrainingError("the learner ranks are closed")
        self._calls.append(self._group.submit(where["rank"] - 1, "serve", where))
        return _RayRank(self, self._calls[-1])

    def close(self) -> None:
        """Give the actors a few seconds to end by themselves, then stop them. Idempotent.

        An actor ends by itself when its connection is closed.
        """
        import ray

        group, self._group = self._group, None
        if group is not None:
            try:
                if self._calls:
                    ray.wait(self._calls, num_returns=len(self._calls), timeout=_END_WITHIN_S)
            finally:  # also after Ctrl-C
                group.close()


class _RayRank:
    """A started rank."""

    def __init__(self, ranks: RayRanks, call: Any) -> None:
        self._call = call
        self.kill = ranks.close

    def ended(self) -> str:
        import ray

        if not ray.wait([self._call], timeout=0)[0]:
            return ""
        try:
            ray.get(self._call)
        except ray.exceptions.RayError as error:
            return f"died: {error}"
        return "ended"


class _Rank:
    """The learner rank inside a Ray actor."""

    def serve(self, where: dict[str, Any]) -> None:
        if not serve(**where):
            os._exit(1)  # this closes its connections, so that no other rank waits for it
