"""What each learner rank does, and the process of a rank other than the trainer's.

That process carries out rank 0's calls and ends when the connection to rank 0 does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import output_capturing

from multitask_rl.attention.products import multiply_with_onednn
from multitask_rl.boundary.channel import Channel
from multitask_rl.boundary.interrupts import ENDING
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import MultitaskRLError
from multitask_rl.models.actor import Actor, compile_blocks
from multitask_rl.plugins import ROLLOUT_ENGINES, load_plugin
from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import GenerationRequest, RolloutEngine
from multitask_rl.rollout.snapshot import build_engine
from multitask_rl.training.backend import StepStartOutputs, UpdateResult, Weighted
from multitask_rl.training.backends.context import ContextPasses
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.ranks import Ranks, Traffic, join_store
from multitask_rl.training.backends.sharded import Shards, probe
from multitask_rl.training.backends.shared_state import SharedState
from multitask_rl.training.backends.skeleton import thaw

_END_WITHIN_S = 2.0
"""A rank ends within this many seconds after rank 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The first message to a rank: its place among the ranks, its devices and the models to hold."""

    sizes: tuple[int, int, int, int]
    """``size``, ``context``, ``tensor`` and ``parts`` of ``Ranks``."""
    host: str
    port: int
    devices: Sequence[tuple[str, str]]
    """[ranks] (actor's device, critic's device)."""
    num_threads: int
    frozen: bytes
    """The ``ModelRunner``, tasks and configuration without their tensors (``skeleton.freeze``)."""
    shards: type[Shards] | None
    absent: frozenset[int] = frozenset()
    """Numbers of the tensors of which the rank gets parts later; until then they have no memory."""


def main() -> None:
    """Serve rank 0; standard input holds one line of JSON, the arguments of ``serve``."""
    for number in ENDING:  # the trainer handles them and hangs up
        signal.signal(number, signal.SIG_IGN)
    serve(**json.loads(sys.stdin.readline()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of the process groups must not keep the process


def serve(*, host: str, port: int, token: str, rank: int, outlives: bool = False) -> bool:
    """Connect to rank 0 and carry out its calls until it hangs up; return whether all of them succeeded.

    After a failure the process must end: other ranks may wait for it in collectives. ``token`` proves that
    rank 0 started this process, which ends soon after rank 0 hung up unless it ``outlives`` the run.
    """
    sock = socket.create_connection((host, port))
    address = str(sock.getsockname()[0])
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(f"{token} {rank:08d}".encode())
    channel = Channel(sock)
    has_ended = threading.Event()
    if not outlives:
        threading.Thread(target=_end_with, args=(sock, has_ended), name="trainer-watch", daemon=True).start()
    replica: Replica | None = None
    with contextlib.suppress(EOFError, OSError):
        try:
            replica = Replica(rank, channel.receive(), channel, address)
            while True:
                name, arguments = channel.receive()
                result = attrgetter(name)(replica)(*arguments)
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
        finally:
            has_ended.set()
    if replica is not None:
        replica.ranks.close()
    channel.close()
    return True


def _end_with(sock: socket.socket, has_ended: threading.Event) -> None:
    """End this process soon after rank 0 hung up, unless ``serve`` has returned: it may wait for hours.

    The store and gloo look minutes for a trainer that was killed, and NCCL's collectives do not notice.
    """
    watch = select.poll()
    watch.register(sock, getattr(select, "POLLRDHUP", select.POLLHUP))
    watch.poll()
    if not has_ended.wait(_END_WITHIN_S):
        os._exit(1)


def register_outputs(model: nn.Module) -> None:
    """Let unpickled models record hidden states; transformers registers them in their ``__init__`` only."""
    registry: dict[str, Any] = getattr(output_capturing, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            registry.setdefault(str(type(module)), module._can_record_outputs)


class Rank:
    """A learner rank. Rank 0 calls a method of all ranks, its own included, at the same time.

    Args:
        own: computes this rank's part.
        ranks: the collectives of this rank.
        tensors: those of the models, in the same order in every rank.
        config: the run.
        shards: cuts the models (``shard``); None = every rank holds copies.
    """

    shards: Shards
    """Set only if the models are sharded."""

    def __init__(
        self,
        own: InProcess,
        ranks: Ranks,
        tensors: list[torch.Tensor],
        config: RunConfig,
        shards: type[Shards] | None,
    ) -> None:
        self.own, self.ranks, self._tensors, self._config = own, ranks, tensors, config
        self._shards = shards
        self.state = SharedState(ranks, *own.optimizer.parameters)
        own.optimizer.sharing = self.state
        if ranks.context > 1:
            own.runner.passes = ContextPasses(ranks)
        self._has_new_weights = False
        """The weights changed since the engine last read them."""

    def fill(self, numbers: Sequence[int]) -> None:
        """Receive the tensors ``numbers`` from rank 0."""
        self.ranks.broadcast([self._tensors[i] for i in numbers])
        self._has_new_weights = True

    def shard(self, actor: Actor | None = None) -> None:
        """Cut the actor and the reference in place to this rank's parts.

        ``actor``: rank 0 cuts this one instead of its own, which has the same weights.
        """
        actor = actor or self.own.runner.actor
        assert self._shards is not None, "these ranks hold copies"
        cut = self._shards.cut_models(actor, self.own, self._config, self.ranks)
        self.shards, self.own, self.state = cut
        self.own.optimizer.sharing = self.state

    def gather(self, numbers: Sequence[int]) -> list[torch.Tensor] | None:
        """Return the whole sharded parameters ``numbers`` at rank 0, None elsewhere."""
        found = [self.shards.gather(number) for number in numbers]
        return None if self.ranks.rank else found

    def probe(self, expected: torch.Tensor | None = None) -> None:
        """Try a pass through the sharded actor; rank 0 compares it with ``expected``, the whole actor's."""
        runner = self.own.runner
        probe(runner.actor.model, runner.passes, self.ranks.device, expected)

    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], want_values: bool, want_ref: bool
    ) -> StepStartOutputs | None:
        """Return the outputs of this rank's samples; only the first of the peers returns them."""
        found = self.own.step_start_outputs(task, samples, want_values=want_values, want_ref=want_ref)
        return None if self.ranks.peer_index else found

    def step(
        self,
        active: Sequence[Weighted],
        factor: float,
        compared: Sequence[str],
        coefficients: Mapping[str, float],
        seed: int | None,
    ) -> UpdateResult | None:
        """Make an optimizer step with the other ranks; only the first of the peers returns the result.

        ``seed``: of the adapters' dropout, which a resumed run repeats; None = the present random state.
        """
        for name, coefficient in coefficients.items():
            self.own.tasks[name].kl_coefficient = coefficient
        is_trainer = not self.ranks.rank and seed is not None  # its own random state stays as it is
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=is_trainer):
            if seed is not None:
                torch.manual_seed(seed)
            result = self.own.step(active, factor, compared)
        self._has_new_weights = True
        return None if self.ranks.peer_index else result

    def retain(self, conversations: Sequence[int]) -> None:
        """Do nothing: rank 0's engine is not part of its ``Rank``; see ``Replica``."""

    def score_texts(self, samples: Sequence[TrainSample], with_kl: bool, task: str) -> Any:
        """Return ``ModelRunner.score_texts`` at rank 0, None elsewhere; all ranks compute all samples."""
        found = self.own.runner.score_texts(samples, with_kl=with_kl, task=task)
        return None if self.ranks.rank else found

    def load_optimizer(
        self, part: Mapping[str, torch.Tensor], others: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> None:
        """Keep this rank's ``part`` of the optimizer's state, ``<number>|<key>`` -> tensor.

        Rank 0 sends ``others``, the parts of ranks 1, 2, ..., to these ranks. On them ``part`` tells only
        names and shapes (torch's device ``meta``).
        """
        for rank, own in enumerate(others, start=1):
            for value in own.values():
                self.ranks.send(value, rank)
        if self.ranks.rank:
            part = {name: self.ranks.receive(like, 0) for name, like in part.items()}
        self.own.optimizer.load_tensors(part, self.state.numbered)

    def describe_optimizer(self) -> dict[str, torch.Tensor]:
        """Return what this rank gives to ``gather_optimizer``, on torch's device ``meta``."""
        return {name: t.to("meta") for name, t in self._optimizer_tensors().items()}

    def gather_optimizer(
        self, described: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> dict[str, torch.Tensor] | None:
        """Return the whole state at rank 0, which gives ``described`` of all ranks; None elsewhere."""
        own = self._optimizer_tensors()
        if self.ranks.rank:
            for tensor in own.values():
                self.ranks.send(tensor, 0)
            return None
        parts = {name: [value.cpu()] for name, value in own.items()}
        for rank, part in enumerate(described[1:], start=1):
            for name, like in part.items():
                parts.setdefault(name, []).append(self.ranks.receive(like, rank))
        return {name: self.state.join(_number(name), found) for name, found in parts.items()}

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        found = self.own.optimizer.tensors(self.state.names)
        return {name: tensor for name, tensor in found.items() if self.state.is_first(_number(name))}


def _number(name: str) -> int:
    """Return the number of the parameter whose state is named ``<number>|<key>``."""
    return int(name.partition("|")[0])


class _Stopped(Exception):
    """Rank 0 has called while this rank samples: it wants no more samples, or is gone."""


class Replica(Rank):
    """A rank other than the trainer's."""

    def __init__(self, rank: int, setup: Setup, channel: Channel, address: str) -> None:
        torch.set_num_threads(setup.num_threads)
        self._channel = channel
        self._engine: RolloutEngine | None = None
        main, own = setup.devices[0], setup.devices[rank]
        places = {main[1]: own[1], main[0]: own[0]}
        (runner, tasks, config), tensors = thaw(setup.frozen, places, setup.absent)
        actor, critic = runner.actor, runner.critic
        multiply_with_onednn(actor.hidden_size)
        for model in (actor.model, runner.reference, critic.trunk, *runner.teachers.values()):
            if model is not None:
                register_outputs(model)
        critic.device = torch.device(places[str(critic.device)])
        channel.send(("thawed", None))
        store = join_store(setup.host, setup.port)
        ranks = Ranks(rank, *setup.sizes, address=address, store=store, device=torch.device(own[0]))
        ranks.before_sum = lambda: channel.send(("arrived", time.monotonic()))
        if config.model.compile:
            compile_blocks(actor.model)
        super().__init__(InProcess(runner, tasks, config), ranks, tensors, config, setup.shards)

    def sample(self, requests: Sequence[GenerationRequest]) -> None:
        """Sample ``requests``; send each sample when it ends."""
        actor, config = self.own.runner.actor, self._config
        if self._engine is None:
            kind = load_plugin(ROLLOUT_ENGINES, config.rollout.engine, expects=RolloutEngine)
            directory = Path(config.output_dir) / f"rank{self.ranks.rank}"
            self._engine = build_engine(kind, actor, config.rollout, seed=config.seed, output_dir=directory)
            self._engine.call_between_steps(self._look_for_calls)
        elif self._has_new_weights:  # they are in the actor's tensors; the engine may hold a copy
            self._engine.update_weights({}, actor.policy_version)
        self._has_new_weights = False
        with contextlib.suppress(_Stopped):
            for ended in self._engine.generate_stream(requests):
                self._channel.send(("ended", ended))

    def stop(self) -> None:
        """Do nothing: the message itself ends ``sample``, whose hook sees that one came."""

    def retain(self, conversations: Sequence[int]) -> None:
        """Drop cached keys and values of all conversations except ``conversations``."""
        if self._engine is not None:
            self._engine.retain(conversations)

    def _look_for_calls(self) -> None:
        if self._channel.has_news():
            raise _Stopped
