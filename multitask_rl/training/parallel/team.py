"""Rank 0's side of several learner ranks: start them, share work out, keep them the same, say who is late.

The trainer's process is rank 0 and holds all state; the other ranks hold copies. Whatever changes a weight
here outside of an update (a restored checkpoint, a rescaled head) is noticed by the tensor's version and sent
before the next call.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError, MultitaskRLError, TrainingError
from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import Ended, GenerationRequest, most_tokens
from multitask_rl.seeding import derive_seed
from multitask_rl.training.credit import Before, look_before
from multitask_rl.training.learner import Learner, Learnt, Weighted
from multitask_rl.training.metrics import TokenMeans
from multitask_rl.training.parallel.balance import deal, share_out
from multitask_rl.training.parallel.context import check_model
from multitask_rl.training.parallel.lines import Launch, RankLines
from multitask_rl.training.parallel.ranks import Ranks, Traffic, host_store
from multitask_rl.training.parallel.replica import Done, Setup
from multitask_rl.training.parallel.skeleton import freeze

__all__ = ["LearnerTeam"]

Span = tuple[float, float]


class LearnerTeam:
    """All learner ranks, seen from rank 0; a ``learner.Team``.

    Args:
        learner: of this process; becomes rank 0 of the team.
        config: the run.
        launch: how a rank is started.
        devices: of actor and critic in ranks 0, 1, ...
        context: ranks that share a sequence.
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
        host: str = "127.0.0.1",
        num_threads: int = 0,
    ) -> None:
        self._learner = learner
        self._size, self._context = len(devices), context
        self._num_threads = num_threads
        self._numbers: dict[str, float] = {}
        self._spans: list[tuple[str, Span]] = []
        runner = learner.runner
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
        self._is_busy = False
        self._known = [-1] * len(self._tensors)
        self._num_loads = 0
        self._lines = RankLines(launch, self._size, host)
        try:
            self._ranks = self._start(frozen, devices, host)
            learner.ranks = runner.ranks = self._ranks
            learner.team = self
            self._synchronise()
            if context > 1:
                model, pad = runner.actor.model, runner.actor.pad_token_id
                self._call("check", {}, lambda: check_model(self._ranks, model, pad))
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
        try:
            ranks = Ranks(0, self._size, self._context, address=host, store=store, device=device)
        except RuntimeError:
            self._lines.collect("done", "the start", until=time.monotonic() + 5.0)
            raise
        ranks.before_sum = self._wait_for_all
        return ranks

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
            seed = derive_seed(self._seed, "learner rank", rank, version, self._number_in_step)
            sent = [(c.compact(), weight) for c, weight in parts[rank // self._context]]
            work[rank] = (sent, factor, coefficients, seed)
        began = time.monotonic()
        own, others = self._call("learn", work, lambda: self._learner.learn(parts[0], factor))
        self._note(began)
        means = TokenMeans()
        results = [own, *(result for result in others if result is not None)]
        for one in results:
            means.merge(one.means)
        self._remember()
        return Learnt(loss=sum(one.loss for one in results), norms=own.norms, means=means)

    def look(self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool) -> Before:
        """Return what ``credit.look_before`` returns, everybody for a part of ``samples``."""
        self._synchronise()
        shares = self._deal(samples)
        parts = [[samples[i] for i in share] for share in shares]
        work = {r: (task, parts[r // self._context], want_values, want_ref) for r in range(1, self._size)}
        runner = self._learner.runner
        own, others = self._call(
            "look",
            work,
            lambda: look_before(runner, task, parts[0], want_values=want_values, want_ref=want_ref),
        )
        return _merge(shares, [own, *(result for result in others if result is not None)])

    def sample(
        self,
        requests: Sequence[GenerationRequest],
        own: Callable[[Sequence[GenerationRequest]], Iterator[list[Ended]]],
    ) -> Iterator[list[Ended]]:
        """Yield the samples of ``requests`` as they end, everybody at some of them (``rollout.base.stream``).

        Args:
            requests: those with a ``watch`` stay in this process.
            own: this process's engine.
        """
        self._synchronise()
        free = [i for i, request in enumerate(requests) if request.watch is None]
        shares = share_out([most_tokens(requests[i]) for i in free], self._size)
        indices = [[free[position] for position in share] for share in shares]
        indices[0] = sorted({*range(len(requests))} - {i for share in indices[1:] for i in share})
        busy: set[int] = set()
        threads = torch.get_num_threads()
        self._begin()
        try:
            for rank in range(1, self._size):
                if indices[rank]:
                    self._lines.send(rank, ("sample", ([requests[i] for i in indices[rank]],)))
                    busy.add(rank)
            if self._num_threads and busy:
                torch.set_num_threads(self._num_threads)
            for ended in own([requests[i] for i in indices[0]]):
                yield [(indices[0][i], j, generation) for i, j, generation in ended]
                while busy and (message := self._lines.receive("sampling", sorted(busy), time.monotonic())):
                    yield _ended(message, indices, busy)
            torch.set_num_threads(threads)
            while busy and (message := self._lines.receive("sampling", sorted(busy))):
                yield _ended(message, indices, busy)
        except GeneratorExit:
            while busy and (message := self._lines.receive("sampling", sorted(busy))):
                _ended(message, indices, busy)  # nobody wants the rest, but the next call wants a quiet line
            raise
        except BaseException as error:
            self._lines.give_up(repr(error))
            raise
        finally:
            self._is_busy = False
            torch.set_num_threads(threads)

    def follow(self) -> None:
        """Move everybody's reference towards the actor; rank 0's has moved."""
        if self._learner.runner.average is None:
            return
        self._call("follow", {}, lambda: None)
        self._remember()

    def report(self) -> tuple[dict[str, float], list[tuple[str, Span]]]:
        """Return metrics and spans since the last call."""
        numbers, self._numbers = self._numbers, {}
        spans, self._spans = self._spans, []
        return numbers, spans

    def _deal(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        return deal(
            [s.prompt_ids for s in samples],
            [s.response_ids for s in samples],
            self._size // self._context,
            self._learner.runner.actor.hidden_size,
        )

    # -- the same everywhere --------------------------------------------------------------------------------

    def _synchronise(self) -> None:
        """Send what was changed here since the last call."""
        changed = [i for i, t in enumerate(self._tensors) if t._version != self._known[i]]
        if changed:
            tensors = [self._tensors[i] for i in changed]
            work = dict.fromkeys(range(1, self._size), (changed,))
            self._call("fill", work, lambda: self._ranks.broadcast(tensors))
            self._remember()
        optimizer = self._learner.optimizer
        if optimizer.num_loads != self._num_loads:
            self._num_loads = optimizer.num_loads
            actor, critic = optimizer.parameters
            state = optimizer.tensors({id(p): str(i) for i, p in enumerate([*actor, *critic])})
            found = [(name, value.shape, value.dtype) for name, value in state.items()]
            self._call(
                "load_optimizer",
                dict.fromkeys(range(1, self._size), (found,)),
                lambda: self._ranks.broadcast(list(state.values())),
            )

    def _remember(self) -> None:
        self._known = [t._version for t in self._tensors]

    # -- the connection -------------------------------------------------------------------------------------

    def _call(
        self, method: str, work: Mapping[int, tuple[Any, ...]], own: Callable[[], Any]
    ) -> tuple[Any, list[Any]]:
        """Let every rank do its part at the same time; return this rank's result and those of the others."""
        threads = torch.get_num_threads()
        self._lines.arrived = {}
        self._begin()
        try:
            for rank in range(1, self._size):
                self._lines.send(rank, (method, work.get(rank, ())))
            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            result = own()
            answers: dict[int, Done] = self._lines.collect("done", method)
        except MultitaskRLError as error:
            self._lines.give_up(repr(error))
            raise
        except RuntimeError as error:
            # a collective that broke: a rank that failed or died says more about it
            self._lines.collect("done", method, until=time.monotonic() + 5.0)
            self._lines.give_up(repr(error))
            raise
        except BaseException as error:
            self._lines.give_up(repr(error))
            raise
        finally:
            self._is_busy = False
            torch.set_num_threads(threads)
        self._count(answers)
        return result, [answers[rank].result for rank in sorted(answers)]

    def _begin(self) -> None:
        if self._is_busy:
            raise TrainingError(
                "the samples of the last call of the engine have to be fetched to the end first"
            )
        self._is_busy = True

    def _wait_for_all(self) -> None:
        """Wait until every rank is ready for the sum of gradients."""
        self._lines.arrived[0] = time.monotonic()
        self._lines.collect("arrived", "learn")

    # -- who waits for whom ---------------------------------------------------------------------------------

    def _count(self, answers: Mapping[int, Done]) -> None:
        own, self._ranks.traffic = self._ranks.traffic, Traffic()
        for traffic in [own, *(answer.traffic for answer in answers.values())]:
            self._add("sent_mb", traffic.num_bytes / 2**20)
        self._add("communication_s", own.seconds)

    def _add(self, name: str, value: float) -> None:
        self._numbers[f"ranks/{name}"] = self._numbers.get(f"ranks/{name}", 0.0) + value

    def _note(self, began: float) -> None:
        """Note who computed how long, and that the others waited for the last."""
        arrived = self._lines.arrived
        last = max(arrived, key=lambda rank: arrived[rank])
        for rank, at in sorted(arrived.items()):
            self._spans.append((f"rank{rank}", (began, at)))
            self._add(f"{rank}/busy_s", at - began)
            self._add(f"{rank}/waits_s", arrived[last] - at)
        self._spans.append((f"wait/rank{last}", (min(arrived.values()), arrived[last])))
        self._spans.append(("gradient_sum", (arrived[last], self._ranks.summed_at)))

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._lines.close()
        self._learner.team = None
        self._learner.ranks = self._learner.runner.ranks = None


def _ended(message: tuple[int, str, Any], indices: Sequence[Sequence[int]], busy: set[int]) -> list[Ended]:
    """Return what a rank's message tells of samples; a rank that is done is busy no more."""
    rank, kind, content = message
    if kind == "done":
        busy.discard(rank)
        return []
    return [(indices[rank][i], j, generation) for i, j, generation in content]


def _merge(shares: Sequence[Sequence[int]], parts: Sequence[Before]) -> Before:
    """Return the parts' tensors in the order of all samples."""
    number = sum(map(len, shares))

    def whole(lists: Sequence[list[torch.Tensor] | None]) -> list[torch.Tensor] | None:
        result = [torch.empty(0)] * number
        for share, own in zip(shares, lists, strict=True):
            if own is None:
                return None
            for index, tensor in zip(share, own, strict=True):
                result[index] = tensor
        return result

    old = whole([part.old_logprobs for part in parts])
    if old is None:
        raise AssertionError("log-probabilities are always computed")
    return Before(old, whole([part.ref_logprobs for part in parts]), whole([part.values for part in parts]))
