"""A learner rank other than the trainer's: holds copies of the models and carries out rank 0's calls.

Its process ends when the connection to rank 0 does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import output_capturing

from multitask_rl.boundary.channel import Channel
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import MultitaskRLError
from multitask_rl.models.actor import compile_blocks
from multitask_rl.plugins import ROLLOUT_ENGINES, load_plugin
from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import GenerationRequest, RolloutEngine
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.training.backend import StepStartOutputs, UpdateResult, Weighted
from multitask_rl.training.backends.context import ContextPasses, check_model
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.ranks import Ranks, Traffic, join_store
from multitask_rl.training.backends.sharded import ShardedPasses, Shards, probe, shard_learner
from multitask_rl.training.backends.shared_state import SharedState
from multitask_rl.training.backends.skeleton import thaw
from multitask_rl.training.runner import ModelRunner


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The first message to a rank: its place among the ranks, its devices and the models to hold."""

    context: int
    tensor: int
    parts: int
    host: str
    port: int
    devices: Sequence[tuple[str, str]]
    """Of actor and critic, by rank."""
    num_threads: int
    frozen: bytes
    """Actor, critic, reference, tasks and configuration without their tensors (``skeleton.freeze``)."""


def main() -> None:
    """Serve rank 0; standard input holds one line of JSON, the arguments of ``serve``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the trainer handles them and hangs up
        signal.signal(number, signal.SIG_IGN)
    serve(**json.loads(sys.stdin.readline()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the process groups must not keep the process


def serve(*, host: str, port: int, token: str, rank: int) -> bool:
    """Connect to rank 0 and carry out its calls until it hangs up; return whether all of them succeeded.

    After a failure the process must end: other ranks may wait for it in collectives. ``token`` proves that
    rank 0 started this process.
    """
    sock = socket.create_connection((host, port))
    address = str(sock.getsockname()[0])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(f"{token} {rank:08d}".encode())
    channel = Channel(sock)
    replica: Replica | None = None
    with contextlib.suppress(EOFError, OSError):
        try:
            replica = Replica(rank, channel.receive(), channel, address)
            while True:
                method, arguments = channel.receive()
                result = method(replica, *arguments)
                traffic, replica.ranks.traffic = replica.ranks.traffic, Traffic()
                channel.send(("done", (result, traffic)))
        except (EOFError, ConnectionError):
            raise
        except MultitaskRLError as error:
            channel.send(("failed", (type(error), str(error))))
            return False
        except Exception:  # noqa: BLE001 - rank 0 raises it; its collectives end with this process
            channel.send(("failed", (None, traceback.format_exc())))
            return False
    if replica is not None:
        replica.ranks.close()
    channel.close()
    return True


def register_outputs(model: nn.Module) -> None:
    """Let unpickled models record hidden states; transformers registers them in their ``__init__`` only."""
    registry: dict[str, Any] = getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            registry.setdefault(str(type(module)), module._can_record_outputs)


class Replica:
    """The models of this rank and the methods that rank 0 calls."""

    def __init__(self, rank: int, setup: Setup, channel: Channel, address: str) -> None:
        torch.set_num_threads(setup.num_threads)
        self._channel = channel
        self._engine: RolloutEngine | None = None
        self._has_new_weights = False
        main, own = setup.devices[0], setup.devices[rank]
        places = {main[1]: own[1], main[0]: own[0]}
        thawed, self._tensors = thaw(setup.frozen, places)
        actor, critic, reference, average, teachers, tasks, config = thawed
        for model in (actor.model, reference, critic.trunk, *teachers.values()):
            if model is not None:
                register_outputs(model)
        self._config: RunConfig = config
        critic.device = torch.device(places[str(critic.device)])
        channel.send(("thawed", None))
        sizes = (len(setup.devices), setup.context, setup.tensor, setup.parts)
        store = join_store(setup.host, setup.port)
        self.ranks = Ranks(rank, *sizes, address=address, store=store, device=torch.device(own[0]))
        self.ranks.before_sum = lambda: channel.send(("arrived", time.monotonic()))
        if config.model.compile:
            compile_blocks(actor.model)
        passes = ContextPasses(self.ranks) if setup.context > 1 else None
        given = {"teachers": teachers, "passes": passes, "is_whole": False}
        runner = ModelRunner(actor, critic, config, reference, **given)
        runner.average = average
        self._own = InProcess(runner, tasks, config)
        self._state = SharedState(self.ranks, *self._own.optimizer.parameters)
        self._shards: Shards
        """Of sharded models only."""
        self._own.optimizer.share_out(self._state)

    def fill(self, numbers: Sequence[int]) -> None:
        """Receive the tensors ``numbers`` from rank 0."""
        self.ranks.broadcast([self._tensors[i] for i in numbers])
        self._has_new_weights = True

    def shard(self, places: Mapping[int, int], gone: Sequence[int], traits: tuple[bool, bool]) -> None:
        """Replace actor (tensors ``places``) and reference (tensors ``gone``) by this rank's parts."""
        for number in (*places, *gone):
            self._tensors[number] = torch.empty(0)
        whole = self._own.runner
        parts = (whole.actor, whole.critic, whole.reference, self._own.tasks, self._config, self.ranks)
        self._own, self._state = shard_learner(*parts, *traits)
        self._shards = self._state.shards

    def fill_parts(self, numbers: Sequence[int]) -> None:
        """Receive this rank's part of the parameters ``numbers``."""
        self._shards.fill(numbers)

    def gather(self, numbers: Sequence[int]) -> None:
        """Take part in gathering the whole parameters ``numbers`` for rank 0."""
        for number in numbers:
            self._shards.gather(number)

    def keep(self) -> None:
        """Note the present parts (``Shards.keep``)."""
        self._shards.keep()

    def restore(self) -> None:
        """Set the parts to those noted."""
        self._shards.restore()

    def score_texts(self, samples: Sequence[TrainSample], with_kl: bool, task: str) -> None:
        """Take part in the passes of ``ModelRunner.score_texts``."""
        self._own.runner.score_texts(samples, with_kl=with_kl, task=task)

    def probe(self) -> None:
        """Compute this rank's part of the trial pass that rank 0 makes (``sharded.probe``)."""
        probe(self._own.runner.actor.model, ShardedPasses(self.ranks))

    def load_optimizer(self, described: Mapping[str, torch.Tensor]) -> None:
        """Receive this rank's part of the optimizer's state, as ``described`` on torch's device ``meta``."""
        tensors = {name: self.ranks.receive(like, 0) for name, like in described.items()}
        self._own.optimizer.load_tensors(tensors, self._state.numbered)

    def describe_optimizer(self) -> dict[str, torch.Tensor]:
        """Return the tensors of ``send_optimizer`` on torch's device ``meta``: without contents."""
        return {name: t.to("meta") for name, t in self._optimizer_tensors().items()}

    def send_optimizer(self) -> None:
        """Send this rank's part of the optimizer's state to rank 0."""
        for tensor in self._optimizer_tensors().values():
            self.ranks.send(tensor, 0)

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        found = self._own.optimizer.tensors(self._state.names)
        return {name: tensor for name, tensor in found.items() if self._state.is_first(name)}

    def check(self) -> None:
        """Compute this rank's part of the trial of context parallelism (``context.check_model``)."""
        check_model(self.ranks, self._own.runner.actor.model)

    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], want_values: bool, want_ref: bool
    ) -> StepStartOutputs | None:
        """Return the outputs of this rank's samples; only the first of the peers returns them."""
        found = self._own.step_start_outputs(task, samples, want_values=want_values, want_ref=want_ref)
        return None if self.ranks.peer_index else found

    def sample(self, requests: Sequence[GenerationRequest]) -> None:
        """Sample ``requests``; send each sample when it ends."""
        if self._engine is None:
            name = self._config.rollout.engine
            kind = load_plugin(ROLLOUT_ENGINES, name, expects=RolloutEngine)
            directory = Path(self._config.output_dir) / f"rank{self.ranks.rank}"
            actor, seed = self._own.runner.actor, self._config.seed
            self._engine = build_engine(kind, actor, self._config.rollout, seed=seed, output_dir=directory)
            self._has_new_weights = False
        if self._has_new_weights:  # they are in the actor's tensors; the engine may hold a copy
            self._engine.update_weights({}, self._own.runner.actor.policy_version)
            self._has_new_weights = False
        for ended in self._engine.generate_stream(requests):
            self._channel.send(("ended", ended))

    def step(
        self,
        active: Sequence[Weighted],
        factor: float,
        compared: Sequence[str],
        coefficients: Mapping[str, float],
        seed: int,
    ) -> UpdateResult | None:
        """Make an optimizer step with the other ranks; only the first of the peers returns the result."""
        torch.manual_seed(seed)  # of the adapters' dropout: a resumed run repeats it
        for name, coefficient in coefficients.items():
            self._own.tasks[name].kl_coefficient = coefficient
        result = self._own.step(active, factor, compared)
        self._has_new_weights = True
        return None if self.ranks.peer_index else result

    def ema_update(self) -> None:
        """Move the reference towards the actor."""
        self._own.ema_update()
