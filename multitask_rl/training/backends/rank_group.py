"""Rank 0's side of several learner ranks: start them, share work out, keep them the same, say who is late.

The trainer's process is rank 0 and holds all state; the other ranks hold copies. Whatever changes a weight
here outside of an update (a restored checkpoint, a rescaled head) is noticed by the tensor's version and sent
before the next call.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import Ended, GenerationRequest
from multitask_rl.seeding import derive_seed
from multitask_rl.training.backends.balance import deal
from multitask_rl.training.backends.calls import RankCalls, Span
from multitask_rl.training.backends.context import check_model
from multitask_rl.training.backends.rank_connections import Launch, RankLines
from multitask_rl.training.backends.ranks import Ranks, host_store
from multitask_rl.training.backends.replica import Setup, describe
from multitask_rl.training.backends.sharded import Shards
from multitask_rl.training.backends.sharded_learner import (
    check_probe,
    check_shardable,
    find_traits,
    probe,
    shard_learner,
)
from multitask_rl.training.backends.sharded_state import ShardedState
from multitask_rl.training.backends.shared_state import SharedState
from multitask_rl.training.backends.skeleton import freeze
from multitask_rl.training.backends.spreading import spread_samples
from multitask_rl.training.credit import Before, look_before, merge_before
from multitask_rl.training.learner import Learner, Learnt, Weighted
from multitask_rl.training.metrics import TokenMeans

__all__ = ["LearnerTeam"]


class LearnerTeam:
    """All learner ranks, seen from rank 0; a ``learner.Team``.

    Args:
        learner: of this process; becomes rank 0 of the team.
        config: the run.
        launch: how a rank is started.
        devices: of actor and critic in ranks 0, 1, ...
        context: ranks that share a sequence.
        sharded: every rank holds a part of the actor and its reference; this process the whole actor besides.
        tensor: ranks that compute every layer together; above 1 only with ``sharded``.
        host: where this process can be reached by the others.
        num_threads: of torch in each rank on a CPU; 0 = torch's choice.

    Raises:
        ConfigError: the models cannot be sent, or not be computed in parts of a sequence.
        TrainingError: a rank did not start.
    """

    def __init__(
        self,
        learner: Learner,
        config: RunConfig,
        launch: Launch,
        *,
        devices: Sequence[tuple[str, str]],
        context: int = 1,
        sharded: bool = False,
        tensor: int = 1,
        host: str = "127.0.0.1",
        num_threads: int = 0,
    ) -> None:
        self._learner = self._own = learner
        self._size, self._context, self._tensor = len(devices), context, tensor
        self._peers = context * tensor
        self._num_threads = num_threads
        runner = learner.runner
        if sharded:
            check_shardable(runner, tensor)
        models = (runner.actor, runner.critic, runner.reference, runner.average)
        parts = (*models, learner.tasks, config)
        try:
            frozen, self._tensors = freeze(parts)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"learner ranks: the models cannot be sent to other processes: {error}; "
                "name one device in device_map.actor"
            ) from error
        self._seed, self._version, self._number_in_step = config.seed, -1, 0
        self._known = [-1] * len(self._tensors)
        self._places: dict[int, int] = {}
        """Number of a tensor -> number of the parameter, of which every rank has a part."""
        self._config = config
        self._num_loads = 0
        self._undo = contextlib.ExitStack()
        self._lines = RankLines(launch, self._size, host)
        try:
            self._ranks = self._start(frozen, devices, host)
            self._undo.callback(self._ranks.close)
            self._lines.on_lost = self._ranks.abort
            self._calls = RankCalls(self._lines, self._ranks, num_threads)
            learner.team = self
            self._send_tensors()
            if sharded:
                self._shard()
            else:
                runner.ranks = self._ranks
                learner.optimizer.share_out(SharedState(self._ranks, *learner.optimizer.parameters))
                self._wholes = [p for group in learner.optimizer.parameters for p in group]
            if context > 1:
                model, pad = runner.actor.model, runner.actor.pad_token_id
                self._calls.call("check", {}, lambda: check_model(self._ranks, model, pad))
        except BaseException:
            self.close()
            raise

    def _start(self, frozen: bytes, devices: Sequence[tuple[str, str]], host: str) -> Ranks:
        """Tell every rank what it is and meet it in the process groups."""
        runner, (store, port) = self._learner.runner, host_store(host)
        for rank in range(1, self._size):
            setup = Setup(
                size=self._size,
                context=self._context,
                tensor=self._tensor,
                host=host,
                port=port,
                device=devices[rank][0],
                places={
                    str(runner.critic.device): devices[rank][1],
                    str(runner.actor.device): devices[rank][0],
                },
                num_threads=self._num_threads or torch.get_num_threads(),
                frozen=frozen,
            )
            self._lines.send(rank, setup)
        self._lines.collect("thawed", "start")
        device = runner.actor.device

        def join() -> Ranks:
            return Ranks(0, self._size, self._context, self._tensor, address=host, store=store, device=device)

        try:
            # on a GPU nothing waits yet, and the thread's current device is set
            return join() if device.type == "cuda" else self._lines.meet(join, "the start")
        except RuntimeError:
            self._lines.collect("done", "the start", until=time.monotonic() + 5.0)
            raise

    def _shard(self) -> None:
        """Cut the models; who reads whole weights goes on reading this process's actor."""
        runner, number = self._learner.runner, {}
        actor, reference = runner.actor, runner.reference
        for place, (_, parameter) in enumerate(actor.model.named_parameters()):
            number[parameter.data_ptr()] = place
        cut = {p.data_ptr() for p in (reference.parameters() if reference is not None else ())}
        self._places = {
            i: number[t.data_ptr()] for i, t in enumerate(self._tensors) if t.data_ptr() in number
        }
        gone = [i for i, t in enumerate(self._tensors) if t.data_ptr() in cut]
        for i in gone:
            self._tensors[i] = torch.empty(0)
        traits, expected = find_traits(actor.model), probe(actor.model)
        # its buffers are the actor's own: what changes them changes both
        same = {id(buffer): buffer for buffer in actor.model.buffers()}
        double = Actor(copy.deepcopy(actor.model, same), actor.tokenizer, actor.config)
        self._own, _ = self._calls.call(
            "shard",
            dict.fromkeys(range(1, self._size), (self._places, gone, traits)),
            lambda: shard_learner(
                double, runner.critic, reference, self._learner.tasks, self._config, self._ranks, traits
            ),
        )
        found, _ = self._calls.call("probe", {}, lambda: probe(self._own.runner.actor.model))
        check_probe(actor.model, found, expected)
        self._remember()
        self._wholes = [*actor.trainable_parameters(), *self._learner.optimizer.parameters[1]]
        self._learner.optimizer.share_out(self._shared)

    # -- the work -------------------------------------------------------------------------------------------

    def learn(self, active: Sequence[Weighted], factor: float) -> Learnt:
        """Make one optimizer step, everybody on a part of ``active``."""
        self._synchronise()
        shares = self._deal([c.sample for c, _ in active])
        parts = [[active[i] for i in share] for share in shares]
        coefficients = {name: task.kl_coefficient for name, task in self._learner.tasks.items()}
        version = self._learner.runner.actor.policy_version
        self._number_in_step = self._number_in_step + 1 if version == self._version else 0
        self._version = version
        work: dict[int, tuple[Any, ...]] = {}
        for rank in range(1, self._size):
            seed = self._seed_of(rank)
            sent = [(c.compact(), weight) for c, weight in parts[rank // self._peers]]
            work[rank] = (sent, factor, coefficients, seed)
        began = time.monotonic()
        own, others = self._calls.call("learn", work, lambda: self._learn(parts[0], factor))
        self._calls.note(began)
        means = TokenMeans()
        results = [own, *(result for result in others if result is not None)]
        for one in results:
            means.merge(one.means)
        self._remember()
        return Learnt(loss=sum(one.loss for one in results), norms=own.norms, means=means)

    def _learn(self, active: Sequence[Weighted], factor: float) -> Learnt:
        if self._own is self._learner:  # the trainer's learner has put its model into the mode of an update
            return self._own.learn(active, factor)
        with self._own.runner.actor.learning(), self._own_stream():
            return self._own.learn(active, factor)

    def _seed_of(self, rank: int) -> int:
        """Return the seed of the adapters' dropout in the next step: peers in layers drop the same."""
        return derive_seed(
            self._seed, "learner rank", rank // self._tensor, self._version, self._number_in_step
        )

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Let this rank drop what its peers drop; the trainer's own stream stays as it is."""
        if self._tensor == 1:
            yield
            return
        with torch.random.fork_rng(devices=None if self._ranks.device.type == "cuda" else []):
            torch.manual_seed(self._seed_of(0))
            yield

    def look(self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool) -> Before:
        """Return what ``credit.look_before`` returns, everybody for a part of ``samples``."""
        self._synchronise()
        shares = self._deal(samples)
        parts = [[samples[i] for i in share] for share in shares]
        work = {r: (task, parts[r // self._peers], want_values, want_ref) for r in range(1, self._size)}
        runner = self._own.runner
        own, others = self._calls.call(
            "look",
            work,
            lambda: look_before(runner, task, parts[0], want_values=want_values, want_ref=want_ref),
        )
        return merge_before(shares, [own, *(result for result in others if result is not None)])

    def sample(
        self,
        requests: Sequence[GenerationRequest],
        own: Callable[[Sequence[GenerationRequest]], Iterator[list[Ended]]],
    ) -> Iterator[list[Ended]]:
        """Yield the samples of ``requests`` as they end, each rank at some of them.

        Args:
            requests: those with a ``watch`` stay in this process.
            own: this process's engine.
        """
        self._synchronise()
        yield from spread_samples(self._calls, self._lines, self._size, requests, own)

    def follow(self) -> None:
        """Move everybody's reference towards the actor; rank 0's has moved. So do whole weights."""
        if self._own is not self._learner:
            self._calls.call("gather", {}, self._gather)
        elif self._learner.runner.average is not None:
            self._calls.call("follow", {}, lambda: None)
        self._remember()

    @torch.no_grad()
    def _gather(self) -> None:
        wholes = dict(self._learner.runner.actor.model.named_parameters())
        for name, found in self._shards.gather():
            if wholes[name].requires_grad:
                wholes[name].copy_(found)

    def report(self) -> tuple[dict[str, float], list[tuple[str, Span]]]:
        """Return metrics and spans since the last call."""
        return self._calls.report()

    def _deal(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return deal(
            [s.prompt_ids for s in samples],
            [s.response_ids for s in samples],
            self._size // self._peers,
            self._learner.runner.actor.hidden_size,
        )

    # -- the same everywhere --------------------------------------------------------------------------------

    def _synchronise(self) -> None:
        """Send what was changed here since the last call."""
        self._send_tensors()
        optimizer = self._learner.optimizer
        if optimizer.num_loads != self._num_loads:
            self._num_loads = optimizer.num_loads
            self._share_out_state()

    def _send_tensors(self) -> None:
        changed = [i for i, t in enumerate(self._tensors) if t._version != self._known[i]]
        whole = [i for i in changed if i not in self._places]
        cut = [i for i in changed if i in self._places]
        everybody = range(1, self._size)
        if whole:
            tensors = [self._tensors[i] for i in whole]
            self._calls.call(
                "fill", dict.fromkeys(everybody, (whole,)), lambda: self._ranks.broadcast(tensors)
            )
        if cut:
            numbers, wholes = [self._places[i] for i in cut], [self._tensors[i] for i in cut]
            self._calls.call(
                "fill_parts", dict.fromkeys(everybody, (numbers,)), lambda: self._shards.fill(numbers, wholes)
            )
        self._remember()

    @property
    def _shards(self) -> Shards:
        shards = self._own.runner.actor.shards
        if shards is None:
            raise AssertionError("the models are whole")
        return shards

    @property
    def _shared(self) -> SharedState | ShardedState:
        shared = self._own.optimizer.shared
        if shared is None:
            raise AssertionError("the state was not shared out")
        return shared

    def _share_out_state(self) -> None:
        """Give every rank its part of the optimizer's state, all of which is here."""
        optimizer = self._learner.optimizer
        numbers = {id(p): str(number) for number, p in enumerate(self._wholes)}
        parts: dict[int, dict[str, torch.Tensor]] = {rank: {} for rank in range(self._size)}
        for name, value in optimizer.tensors(numbers).items():
            for rank, part in self._shared.deal(name, value):
                parts[rank][name] = part
        own = parts.pop(0)

        def send() -> None:
            for rank, part in parts.items():
                for value in part.values():
                    self._ranks.send(value, rank)

        self._calls.call("load_optimizer", {rank: (describe(part),) for rank, part in parts.items()}, send)
        is_elsewhere = self._own is not self._learner
        optimizer.forget(p for p in self._wholes if is_elsewhere or not self._shared.is_own(p))
        if is_elsewhere:
            self._own.optimizer.load_tensors(
                own, {self._shared.names[id(p)]: p for p in self._shared.parameters}
            )

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """Return everybody's part of the optimizer's state (see ``ActorCriticOptimizer.tensors``)."""
        self._synchronise()
        own = self._own.optimizer.tensors(self._shared.names)
        parts = {name: [value.cpu()] for name, value in own.items()}
        _, described = self._calls.call("describe_optimizer", {}, lambda: None)

        def receive() -> None:
            for rank, part in enumerate(described, start=1):
                for name, shape, dtype in part:
                    parts.setdefault(name, []).append(self._ranks.receive(shape, dtype, rank))

        self._calls.call("send_optimizer", {}, receive)
        kept = {}
        for name, found in parts.items():
            number, _, key = name.partition("|")
            kept[f"{names[id(self._wholes[int(number)])]}|{key}"] = self._shared.join(name, found)
        return kept

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's moments in this process."""
        return self._own.optimizer.state_bytes

    def _remember(self) -> None:
        self._known = [t._version for t in self._tensors]

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._lines.close()
        self._learner.team = self._learner.runner.ranks = None
        if self._own.optimizer.shared is not None:
            self._own.optimizer.shared.close()
        self._undo.close()
