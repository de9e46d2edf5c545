"""The training backend of several learner ranks, as rank 0 sees it.

Rank 0 is the trainer's process. All ranks hold copies of the models, or all hold parts. A whole weight that
changes here outside a step (restored checkpoint, rescaled head) has a new tensor version; the next call sends
it first.
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from multitask_rl.attention.interface import use_attention
from multitask_rl.boundary.interrupts import check_interrupt, finishing
from multitask_rl.config.devices import actor_devices
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError, MultitaskRLError, TrainingError
from multitask_rl.models.actor import Actor
from multitask_rl.models.weights import WeightStream
from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import Ended, GenerationRequest, RolloutEngine, WrappedEngine
from multitask_rl.seeding import derive_seed
from multitask_rl.tracking.timeline import Span
from multitask_rl.training.backend import (
    StepStartOutputs,
    TokenMeans,
    TrainingBackend,
    UpdateResult,
    Weighted,
)
from multitask_rl.training.backends.context import check_windows
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.rank_connections import Launch, RankConnections
from multitask_rl.training.backends.ranks import Ranks, Traffic, host_store
from multitask_rl.training.backends.replica import Rank, Setup
from multitask_rl.training.backends.sharded import Shards, check_shardable, probe
from multitask_rl.training.backends.skeleton import freeze
from multitask_rl.training.balance import Homes, deal
from multitask_rl.training.forward import split_head
from multitask_rl.training.optimizer import fitting_state
from multitask_rl.training.runner import Passes
from multitask_rl.training.shared_prompt import supports_shared_prompts

_OwnStream = Callable[[Sequence[GenerationRequest]], Iterator[list[Ended]]]


class RankGroup(TrainingBackend):
    """The backend of several learner ranks; each computes with an ``InProcess`` of its own.

    Args:
        main: backend of this process, with whole models; computes rank 0's part unless models are cut.
        config, launch: the run, and how a rank is started.
        devices: [ranks] (actor's device, critic's device).
        host: address by which the other ranks reach this process.
        num_threads: of torch in each rank on a CPU; 0 = torch's choice.
        shards: cuts actor and reference, of which every rank then holds a part; None = ranks hold copies.

    Raises:
        ConfigError: the models cannot be sent, or cannot be computed in parts.
        TrainingError: a rank did not start.
    """

    def __init__(
        self,
        main: InProcess,
        config: RunConfig,
        launch: Launch,
        *,
        devices: Sequence[tuple[str, str]],
        host: str = "127.0.0.1",
        num_threads: int = 0,
        shards: type[Shards] | None = None,
    ) -> None:
        self._main = main
        self._config = config
        self.optimizer = main.optimizer
        self.runner = runner = main.runner
        layout, context = actor_devices(config), config.batch.context_ranks
        self.num_ranks, self._tensor, self._peers = len(devices), layout.tensor, context * layout.tensor
        self._others = range(1, self.num_ranks)
        models_to_cut = [m for m in (runner.actor.model, runner.reference) if m is not None]
        if shards is not None:
            check_shardable(runner, layout.tensor, shards.settings)
            # ranks with parts of the models cannot try it
            runner.shares_prompts = supports_shared_prompts(runner.actor.model)
            for model in models_to_cut:
                split_head(model)
        if context > 1:
            check_windows(runner.actor.model)
        sizes = (self.num_ranks, context, layout.tensor, layout.parts if layout.is_sharded else 0)
        try:
            frozen, self._tensors = freeze((runner, main.tasks, config))
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"learner ranks: the models cannot be sent to other processes: {error}; "
                "name one device in device_map.actor"
            ) from error
        self._version, self._number_in_step = -1, 0
        self._known = [-1] * len(self._tensors)
        """Version of each tensor that the other ranks have."""
        at = {t.data_ptr(): number for number, t in enumerate(self._tensors)}
        absent = [at[p.data_ptr()] for model in models_to_cut for p in model.parameters()]
        absent = absent if shards is not None and shards.begins_empty else []
        for number in absent:
            self._known[number] = self._tensors[number]._version
        self._places: dict[int, int] = {}
        """Number of a tensor -> number of the sharded parameter that it is."""
        self._wholes = [parameter for group in self.optimizer.parameters for parameter in group]
        """Trained parameters; the ranks name one by its index."""
        self._is_busy = False
        self._homes = Homes()
        self._num_threads = num_threads
        self._metrics: dict[str, float] = defaultdict(float)
        self._spans: list[tuple[str, Span]] = []
        self._undo = contextlib.ExitStack()
        self._connections = connections = RankConnections(launch, self.num_ranks, host)

        def wait_for_all() -> None:
            connections.arrived[0] = time.monotonic()
            connections.collect("arrived", "step")

        def join() -> Ranks:
            return Ranks(0, *sizes, address=host, store=store, device=runner.actor.device)

        try:
            store, port = host_store(host)
            setup = Setup(
                sizes=sizes,
                host=host,
                port=port,
                devices=[(str(runner.actor.device), str(runner.critic.device)), *devices[1:]],
                num_threads=num_threads or torch.get_num_threads(),
                frozen=frozen,
                absent=frozenset(absent),
                shards=shards,
            )
            for rank in self._others:
                connections.send(rank, setup)
            connections.collect("thawed", "start")
            with self._naming_the_lost("the start"):
                # on a GPU nothing waits yet, and the thread's current device is set
                is_on_gpu = runner.actor.device.type == "cuda"
                ranks = join() if is_on_gpu else connections.meet(join, "the start")
            self._undo.callback(ranks.close)
            connections.on_lost = ranks.abort
            ranks.before_sum = wait_for_all
            self._rank = Rank(main, ranks, self._tensors, config, shards)
            self._synchronise()
            if shards is not None or context > 1:
                # the kernels of a GPU do not run on weights in host memory
                home = next(runner.actor.model.parameters()).device
                is_elsewhere = runner.actor.device != home
                attention = runner.actor.model.config._attn_implementation
                is_of_gpu = is_elsewhere and attention.startswith(("flash", "flex"))
                plain = use_attention([runner.actor.model], "sdpa")
                with plain if is_of_gpu else contextlib.nullcontext():
                    expected = probe(runner.actor.model, Passes(), home)
                if shards is not None:
                    self._shard(at)
                self._call("probe", each=[(expected,), *[()] * len(self._others)])
        except BaseException:
            self.close()
            raise

    def _shard(self, at: Mapping[int, int]) -> None:
        """Cut the models of all ranks. The actor keeps its adapters; its other weights are in the ranks.

        ``at`` maps the address of a tensor to its number.
        """
        runner = self.runner
        actor, reference = runner.actor, runner.reference
        is_adapted = actor.config.lora.rank > 0
        ranks, home = self._rank.ranks, next(actor.model.parameters()).device
        # the copy takes over the weights and shares the buffers: a change of one is seen in the other
        whole = {n: p for n, p in actor.model.named_parameters() if not (is_adapted and p.requires_grad)}
        same: dict[int, Any] = {id(buffer): buffer for buffer in actor.model.buffers()}
        same |= {id(p): torch.nn.Parameter(p.detach(), p.requires_grad) for p in whole.values()}
        double = Actor(copy.deepcopy(actor.model, same), actor.tokenizer, actor.config)
        del same
        self._places = {at[p.data_ptr()]: number for number, p in enumerate(actor.model.parameters())}
        for parameter in (*whole.values(), *(() if reference is None else reference.parameters())):
            number = at[parameter.data_ptr()]
            self._tensors[number] = torch.empty(0)  # so that its memory can be freed
            self._places.pop(number, None)
        for parameter in whole.values():
            nothing = torch.full((), math.nan, dtype=parameter.dtype, device=ranks.device)
            parameter.data = nothing.expand(parameter.shape)
        self._emptied, self._home = whole, home
        for parameter in actor.model.parameters():
            parameter.data = parameter.data.to(ranks.device)  # adapters
        self._call("shard", each=[(double,), *[()] * len(self._others)])
        self._remember()
        numbers = {id(p): number for number, p in enumerate(actor.model.parameters())}
        named = actor.model.named_parameters(remove_duplicate=False)
        self._numbers = {name: numbers[id(p)] for name, p in named}
        actor.parts = self

    def _call(self, name: str, *given: Any, each: Sequence[tuple[Any, ...]] = ()) -> list[Any]:
        """Run a method of all ranks at the same time; return their results that are not None, rank 0's first.

        ``name`` is a method of ``Rank`` or of one of its attributes (``shards.keep``). All ranks get the
        arguments ``given``, or rank ``i`` gets ``each[i]``. A signal waits for the end of the call: after
        half a call no rank can be called again, so the run could not be saved.
        """
        what, each = name.rpartition(".")[2], each or [given] * self.num_ranks
        self._connections.arrived = {}
        with finishing(), self._at_work():
            for rank in self._others:
                self._connections.send(rank, (name, each[rank]))
            with self._naming_the_lost(what):
                own = attrgetter(name)(self._rank)(*each[0])
            answers = self._connections.collect("done", what)
        check_interrupt()
        ranks = self._rank.ranks
        traffic, ranks.traffic = ranks.traffic, Traffic()
        self._metrics["ranks/communication_s"] += traffic.seconds
        for sent in [traffic, *(sent for _, sent in answers.values())]:
            self._metrics["ranks/sent_mb"] += sent.num_bytes / 2**20
        found = [own, *(result for _, (result, _) in sorted(answers.items()))]
        return [result for result in found if result is not None]

    @contextlib.contextmanager
    def _naming_the_lost(self, what: str) -> Iterator[None]:
        """If a collective breaks, raise the error of a rank that failed or died: it says why."""
        try:
            yield
        except MultitaskRLError:
            raise
        except RuntimeError:
            self._connections.collect("done", what, until=time.monotonic() + 5.0)
            raise

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Reserve the ranks for one call; an error inside makes every later call fail."""
        if self._is_busy:
            raise TrainingError("the engine's last call still has samples; fetch all of them first")
        self._is_busy = True
        threads = torch.get_num_threads()
        try:
            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            yield
        except BaseException as error:
            self._connections.give_up(repr(error))
            raise
        finally:
            self._is_busy = False
            torch.set_num_threads(threads)

    def step(self, active: Sequence[Weighted], factor: float, compared: Sequence[str] = ()) -> UpdateResult:
        """See ``TrainingBackend``."""
        self._synchronise()
        shares = self._deal([c.sample for c, _ in active])
        parts = [[active[i] for i in share] for share in shares]
        coefficients = {name: task.kl_coefficient for name, task in self._main.tasks.items()}
        version = self.runner.actor.policy_version
        self._number_in_step = self._number_in_step + 1 if version == self._version else 0
        self._version = version

        def seed(rank: int) -> int | None:
            """Return the seed of the adapters' dropout; ranks that share a layer have the same."""
            if not rank and self._tensor == 1:
                return None
            place = (rank // self._tensor, version, self._number_in_step)
            return derive_seed(self._config.seed, "learner rank", *place)

        began = time.monotonic()
        work = [
            (parts[r // self._peers], factor, compared, coefficients, seed(r)) for r in range(self.num_ranks)
        ]
        results: list[UpdateResult] = self._call("step", each=work)
        arrived = self._connections.arrived
        last = max(arrived, key=lambda rank: arrived[rank])
        for rank, at in sorted(arrived.items()):
            self._spans.append((f"rank{rank}", (began, at)))
            self._metrics[f"ranks/{rank}/busy_s"] += at - began
            self._metrics[f"ranks/{rank}/waits_s"] += arrived[last] - at
        self._spans.append((f"wait/rank{last}", (min(arrived.values()), arrived[last])))
        self._spans.append(("gradient_sum", (arrived[last], self._rank.ranks.summed_at)))
        merged = UpdateResult(loss=0.0, norms=results[0].norms, means=TokenMeans())
        for one in results:
            merged.loss += one.loss
            merged.means.merge(one.means)
            for name, sketch in one.sketches.items():
                merged.sketches[name] = merged.sketches.get(name, 0.0) + sketch
        self._remember()
        return merged

    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
    ) -> StepStartOutputs:
        """See ``TrainingBackend``."""
        self._synchronise()
        shares = self._deal(samples)
        parts = [[samples[i] for i in share] for share in shares]
        work = [(task, parts[r // self._peers], want_values, want_ref) for r in range(self.num_ranks)]
        return StepStartOutputs.merge(shares, self._call("step_start_outputs", each=work))

    def spread(self, engine: RolloutEngine) -> RolloutEngine:
        """Return an engine that samples on all ranks; ``engine`` if it has a copy, or ranks hold parts."""
        can_spread = engine.shares_weights and self._rank.own is self._main
        return SpreadEngine(engine, self) if can_spread else engine

    def sample(self, requests: Sequence[GenerationRequest], own: _OwnStream) -> Iterator[list[Ended]]:
        """Yield the samples of ``requests`` as they end. Every rank samples some.

        Requests with a ``watch`` stay in this process; ``own`` is its engine's ``generate_stream``.
        """
        self._synchronise()
        free = [i for i, request in enumerate(requests) if request.watch is None]
        shares = self._homes.deal([requests[i] for i in free], range(self.num_ranks))
        indices = [[free[position] for position in shares.get(rank, ())] for rank in range(self.num_ranks)]
        indices[0] = sorted({*range(len(requests))} - {i for share in indices[1:] for i in share})
        connections, owed = self._connections, Counter[int]()
        """``owed``: rank -> number of answers that it has still to send."""

        def received(until: float | None = None) -> Iterator[list[Ended]]:
            """Yield what the other ranks send until all are done, or until nothing has come at ``until``."""
            while late := [rank for rank, number in owed.items() if number]:
                message = connections.receive("sampling", late, until)
                if message is None:
                    break
                rank, kind, content = message
                if kind == "done":
                    owed[rank] -= 1
                else:
                    yield [(indices[rank][i], j, generation) for i, j, generation in content]

        ended_by: BaseException | None = None
        with self._at_work():
            try:
                for rank in self._others:
                    if indices[rank]:
                        connections.send(rank, ("sample", ([requests[i] for i in indices[rank]],)))
                        owed[rank] = 1
                for ended in own([requests[i] for i in indices[0]]):
                    yield [(indices[0][i], j, generation) for i, j, generation in ended]
                    yield from received(until=time.monotonic())
                yield from received()
            except BaseException as error:  # noqa: BLE001 - raised below, when all ranks can be called again
                ended_by = error
                for rank in [rank for rank, number in owed.items() if number]:
                    connections.send(rank, ("stop", ()))
                    owed[rank] += 1
                for _ in received():
                    pass
        if ended_by is not None:
            raise ended_by

    def retain(self, conversations: Collection[int]) -> None:
        """Let the other ranks drop the cache of all conversations except ``conversations``."""
        if self._homes and not self._connections.has_lost:
            self._homes.retain(conversations)
            self._call("retain", list(conversations))

    def ema_update(self) -> None:
        """See ``TrainingBackend``."""
        if self.runner.average is not None:
            self._call("own.ema_update")
            self._remember()

    @torch.no_grad()
    def gather_weights(self) -> None:
        """See ``TrainingBackend``."""
        if self._places:
            actor = self.runner.actor
            adapters = {n: p for n, p in actor.model.named_parameters() if n not in self._emptied}
            for name, found in self._gather(list(adapters)).items():
                adapters[name].copy_(found)
            self._remember()

    def _gather(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return whole weights of the actor; persistent buffers are in this process."""
        model = self.runner.actor.model
        found = {name: model.get_buffer(name) for name in names if name not in self._numbers}
        numbers = {name: self._numbers[name] for name in names if name in self._numbers}
        (wholes,) = self._call("gather", [*numbers.values()])
        return found | dict(zip(numbers, wholes, strict=True))

    def stream(self, without: Collection[str] = ()) -> WeightStream:
        """See ``WeightParts``."""
        state = self.runner.actor.model.state_dict()
        return WeightStream({n: t for n, t in state.items() if n not in without}, self._gather)

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See ``WeightParts``."""
        found = {self._numbers[name]: value for name, value in weights.items() if name in self._numbers}
        self._fill_parts(list(found), list(found.values()))
        for name, buffer in self.runner.actor.model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])

    def keep(self) -> Callable[[], Any]:
        """See ``WeightParts``."""
        self._call("shards.keep")
        return partial(self._call, "shards.restore")

    def _fill_parts(self, numbers: Sequence[int], wholes: Sequence[torch.Tensor]) -> None:
        self._call("shards.fill", each=[(numbers, wholes), *[(numbers,)] * len(self._others)])

    def score_texts(
        self, samples: Sequence[TrainSample], *, with_kl: bool, task: str = ""
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """See ``ModelRunner``; ranks with parts of the models compute all samples together, others idle."""
        if self._rank.own is self._main:
            alone = copy.copy(self.runner)
            alone.passes = Passes()
            return alone.score_texts(samples, with_kl=with_kl, task=task)
        self._synchronise()
        found: tuple[list[torch.Tensor], list[torch.Tensor] | None]
        (found,) = self._call("score_texts", samples, with_kl, task)
        return found

    def report(self) -> tuple[dict[str, float], list[tuple[str, Span]]]:
        """See ``TrainingBackend``."""
        metrics, self._metrics = dict(self._metrics), defaultdict(float)
        spans, self._spans = self._spans, []
        return metrics, spans

    def _deal(self, samples: Sequence[TrainSample]) -> list[list[int]]:
        prompts, responses = [s.prompt_ids for s in samples], [s.behind_prompt()[0] for s in samples]
        return deal(prompts, responses, self.num_ranks // self._peers, self.runner.actor.hidden_size)

    def load_optimizer(
        self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]
    ) -> None:
        """See ``TrainingBackend``."""
        self._synchronise()
        numbers = {id(p): number for number, p in enumerate(self._wholes)}
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(self.num_ranks)]
        for parameter, key, value in fitting_state(tensors, parameters):
            if (number := numbers.get(id(parameter))) is not None:
                for rank, part in self._rank.state.deal(number, value):
                    parts[rank][f"{number}|{key}"] = part
        described = [({name: value.to("meta") for name, value in part.items()},) for part in parts[1:]]
        self._call("load_optimizer", each=[(parts[0], parts[1:]), *described])

    def _synchronise(self) -> None:
        """Send the tensors that changed here since the last call."""
        changed = [i for i, t in enumerate(self._tensors) if t._version != self._known[i]]
        whole = [i for i in changed if i not in self._places]
        cut = [i for i in changed if i in self._places]
        if whole:
            self._call("fill", whole)
        if cut:
            self._fill_parts([self._places[i] for i in cut], [self._tensors[i] for i in cut])
        self._remember()

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
        """See ``TrainingBackend``."""
        self._synchronise()
        described = self._call("describe_optimizer")
        (found,) = self._call("gather_optimizer", each=[(described,), *[()] * len(self._others)])
        kept = {}
        for name, value in found.items():
            number, _, key = name.partition("|")
            kept[f"{names[id(self._wholes[int(number)])]}|{key}"] = value
        return kept

    @property
    def optimizer_bytes(self) -> int:
        """See ``TrainingBackend``."""
        return self._rank.own.optimizer.state_bytes

    def _remember(self) -> None:
        self._known = [t._version for t in self._tensors]

    def close(self) -> None:
        """End the other ranks; a sharded actor gets its weights back, if none has failed. Idempotent."""
        actor = self.runner.actor
        try:
            if actor.parts is self:
                with contextlib.suppress(MultitaskRLError, RuntimeError):
                    weights = self.stream()
                    for name, parameter in self._emptied.items():
                        parameter.data = weights[name].to(self._home)
                    actor.model.to(self._home)
                    actor.parts = None
        finally:  # Ctrl-C does not wait for the weights
            self._connections.close()
            self._undo.close()


class SpreadEngine(WrappedEngine):
    """``engine`` in rank 0 and one like it in every other rank of ``group``.

    Each sample has its own seed, so the rank that draws it affects only the last bits of log-probabilities.
    """

    def __init__(self, engine: RolloutEngine, group: RankGroup) -> None:
        super().__init__(engine)
        self._group = group
        self.can_admit = False  # requests are dealt to the ranks when a stream opens

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield samples as they end (see ``RolloutEngine``)."""
        return self._group.sample(requests, self._engine.generate_stream)

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        self._engine.retain(conversations)
        self._group.retain(conversations)
