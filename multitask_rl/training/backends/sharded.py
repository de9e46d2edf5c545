"""Models of which every learner rank holds a part: torch's FSDP2 over the ranks' own process group.

A pass gathers one block at a time and frees it; the block's gradient arrives summed and cut like the weights.
All ranks make every pass together (``ModelRunner.cut`` adds idle passes). With ``offload`` a rank's parts,
their gradients and the optimizer's state lie in its host memory. A block goes to the device for its pass, and
AdamW runs on the host.

Sources: torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP" (arXiv:2304.11277); for ``offload``
Ren et al., "ZeRO-Offload" (arXiv:2101.06840).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from multitask_rl.config.devices import actor_devices
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.models.trial import evaluating, trial_ids, trial_tolerance
from multitask_rl.records import SamplingParams
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.backends.shared_state import SharedState
from multitask_rl.training.backends.tensor import ShardSpec, check_layers, cut_layers
from multitask_rl.training.forward import TokenOutputs
from multitask_rl.training.microbatch import MicroBatch, make_microbatch
from multitask_rl.training.runner import ModelRunner, Passes


def blocks(model: Any) -> list[nn.Module]:
    """Return the modules that are gathered as one (``_no_split_modules`` of transformers), inner first."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in kinds]


def shard_model(model: Any, ranks: Ranks, *, offload: bool = False) -> Shards:
    """Give each rank its part of the weights that ``model`` has in rank 0; return the parts.

    With ``offload`` they lie in page-locked host memory, else on the rank's device. They replace the weights
    in place. Rank 0 sends one weight at a time and frees it, so that no other rank and no device of a rank
    needs room for more than its parts and a block.
    """
    wholes = {name: p.detach() for name, p in model.named_parameters()}
    _empty(model, list(model.parameters()), torch.device("meta"))
    spec = cut_layers(model, ranks) if ranks.tensor > 1 else ShardSpec()
    mesh = ranks.mesh()
    # bfloat16 gradients are summed in float32, as those of whole models are
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    place = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in [*blocks(model), model]:
        _empty(model, [p for p in block.parameters() if p.is_meta], ranks.device)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=place)
        for name, own in model.named_parameters():
            if name in wholes and not own.is_meta:
                whole = wholes.pop(name)
                Shards({name: own}, ranks, spec).fill([0], None if ranks.rank else [whole])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum: the loss has counted all ranks' samples
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # an expert may get no token of this rank
    model.set_reduce_scatter_unused_params(True)

    def one_pass(_model: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        # a change in place of a view would lose FSDP's hook on it
        return {
            name: value.clone() if isinstance(value, Tensor) and value._is_view() else value
            for name, value in act().items()
        }

    # the head is read outside the model's own forward: any function may be the pass
    model.one_pass = MethodType(one_pass, model)
    register_fsdp_forward_method(model, "one_pass")
    shards = Shards(dict(model.named_parameters()), ranks, spec)
    if any(p.requires_grad for p in shards.local):  # else a reference
        shards.catch_gradients(model)
    return shards


def _empty(model: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Replace ``parameters``, wherever ``model`` holds them, by some on ``device`` without values."""
    new = {
        p: nn.Parameter(torch.empty_like(p, device=device), requires_grad=p.requires_grad) for p in parameters
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in new:
                module._parameters[name] = new[parameter]


def forward_pass(model: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``act``, which makes one forward pass through the sharded ``model``.

    The result is a mapping of names to the tensors from which the backward pass begins.
    """
    found: dict[str, Any] = model.one_pass(act)
    if not any(p.requires_grad for p in model.parameters()):
        model.reset_iter_state()  # torch resets it in a backward pass, and there is none
    elif not torch.is_grad_enabled():
        model.reshard()  # torch keeps the outermost weights gathered for a backward pass
    return found


class ShardedPasses(Passes):
    """Passes through models of which every rank holds a part."""

    settings = "device_map.actor=... sharded"
    in_step = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def most(self, number: int) -> int:
        """See ``Passes``."""
        return self._ranks.most(number)

    def forward(self, model: Any, batch: MicroBatch, *args: Any, **options: Any) -> TokenOutputs:
        """See ``Passes``."""
        whole = super().forward
        return TokenOutputs(**forward_pass(model, lambda: vars(whole(model, batch, *args, **options))))


class Shards:
    """This rank's parts of the parameters ``named``; ``spec`` says how ``tensor=2`` cut the layers.

    A parameter is named by its number, its index in ``names``.
    """

    settings = ShardedPasses.settings
    """The setting that asks for these parts, for errors."""
    begins_empty: ClassVar[bool] = True
    """``cut_models`` needs whole weights in rank 0 only."""

    @classmethod
    def cut_models(
        cls, actor: Actor, whole: InProcess, config: RunConfig, ranks: Ranks
    ) -> tuple[Shards, InProcess, SharedState]:
        """Cut ``actor`` and the reference of ``whole`` in place to this rank's parts.

        Returns:
            The parts of ``actor``, the backend that computes with them, and how its optimizer is shared.
        """
        runner, offload = copy.copy(whole.runner), actor_devices(config).is_offloaded
        shards = shard_model(actor.model, ranks, offload=offload)
        if runner.reference is not None:
            shard_model(runner.reference, ranks, offload=offload)
        actor.compute_on(ranks.device)
        runner.actor, runner.passes = actor, ShardedPasses(ranks)
        trained = [p for p in shards.local if p.requires_grad and p.numel()]
        own = InProcess(runner, whole.tasks, config, trained)
        return shards, own, ShardedState(ranks, shards, list(runner.critic.parameters()))

    def __init__(self, named: Mapping[str, Any], ranks: Ranks, spec: ShardSpec) -> None:
        self._ranks, self._spec = ranks, spec
        self.names = list(named)
        """Names of the parameters; tied ones are there once."""
        self._dims = [spec.dims.get(name) for name in named]
        """[names] the dimension that tensor parallelism cuts, if any."""
        self.parameters: list[Any] = list(named.values())
        """[names] torch's own, or DeepSpeed's."""
        # the optimizer's parameters share their memory with torch's own
        self.local = [
            nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad) for p in self.parameters
        ]
        """[names] this rank's parts; one may be empty."""
        self._kept: list[Tensor] = []
        self._met: set[str] = set()
        """Parameters that a backward pass in this process gave a gradient."""

    def catch_gradients(self, model: nn.Module) -> None:
        """From now on put the gradients of ``model`` into ``local``, added up in float32."""

        @torch.no_grad()
        def collect(local: nn.Parameter, sharded: Any) -> None:
            # torch would add up in the type of the weights
            arrived = sharded.grad.to_local().to(local.grad_dtype)
            sharded.grad = None
            local.grad = arrived if local.grad is None else local.grad.add_(arrived)

        sharded_ids, names = {id(p) for p in self.parameters}, set(self.names)
        for module in [m for m in model.modules() if isinstance(m, FSDPModule)]:
            module.unshard()  # torch gathers into the same parameters every time
            found = model.named_parameters()
            self._note_gradients({n: p for n, p in found if id(p) not in sharded_ids and n in names})
            module.reshard()
        for local, sharded in zip(self.local, self.parameters, strict=True):
            if sharded.requires_grad:
                sharded.register_post_accumulate_grad_hook(partial(collect, local))

    def _note_gradients(self, parameters: Mapping[str, Any]) -> None:
        """From now on note by name which of ``parameters`` get a gradient, for ``_count_met``."""

        # no hook may hold this object: it would keep the model for ever
        def note(met: set[str], name: str, _parameter: Tensor) -> None:
            met.add(name)

        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(note, self._met, name))

    def _count_met(self) -> list[float]:
        """Return per parameter the number of ranks in which it got a gradient since the last call."""
        met = torch.tensor([float(name in self._met) for name in self.names], device=self._ranks.device)
        self._ranks.sum(met)
        self._met.clear()
        counts: list[float] = met.tolist()
        return counts

    def is_cut(self, number: int) -> bool:
        """Whether tensor parallelism cuts the parameter, so that the peers have different parts of it."""
        return self._dims[number] is not None

    def cut(self, number: int, whole: Tensor) -> list[Tensor]:
        """Return the parts of ``whole`` (of the parameter's shape) by rank; the last ones may be empty."""
        ranks = self._ranks
        dim = self._dims[number]
        columns = [whole] * ranks.tensor if dim is None else whole.chunk(ranks.tensor, dim)
        num_rows = ranks.copy_size // ranks.tensor
        parts = [list(column.chunk(num_rows)) for column in columns]
        copy = [part[row] if row < len(part) else part[0][:0] for row in range(num_rows) for part in parts]
        return copy * (ranks.size // ranks.copy_size)

    def join(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole parameter ``number`` from its non-empty ``parts``, in the order of the ranks."""
        peers, dim = self._ranks.tensor, self._dims[number]
        columns = [torch.cat(list(parts[index::peers])) for index in range(1 if dim is None else peers)]
        return columns[0] if dim is None else torch.cat(columns, dim)

    def shape(self, number: int) -> list[int]:
        """Return the shape of the whole parameter."""
        shape, dim = list(self.parameters[number].shape), self._dims[number]
        if dim is not None:
            shape[dim] *= self._ranks.tensor
        return shape

    @torch.no_grad()
    def fill(self, numbers: Sequence[int], wholes: Sequence[Tensor] | None = None) -> None:
        """Set this rank's parts of the parameters ``numbers``; rank 0 gives ``wholes``, and all call this."""
        for place, number in enumerate(numbers):
            dtype, device = self.parameters[number].dtype, self._ranks.device
            if wholes is None:
                whole = torch.empty(self.shape(number), dtype=dtype, device=device)
            else:
                whole = wholes[place].to(device, dtype)  # no copy if it is there
            self._ranks.broadcast([whole])
            self._set(number, whole)

    def _set(self, number: int, whole: Tensor) -> None:
        """Set this rank's part of the parameter ``number``; all ranks call this with the same ``whole``."""
        self.local[number].copy_(self.cut(number, whole)[self._ranks.rank])

    def take_gradients(self) -> None:
        """Drop gradients of parameters that no rank used; sum those that tensor-parallel peers share."""
        # torch has zeros where no rank had a gradient; the optimizer must leave these parameters alone
        for local, number in zip(self.local, self._count_met(), strict=True):
            if not number:
                local.grad = None
        if self._ranks.tensor == 1:
            return
        # Peers get the same gradient of what all of them hold: the sum of partial gradients, the mean of
        # the others. Those are equal up to the order of sums on a GPU, which would let the copies drift.
        chosen = [
            (local.grad, 1.0 if name in self._spec.partial else 1.0 / self._ranks.tensor)
            for name, local in zip(self.names, self.local, strict=True)
            if local.grad is not None and name not in self._spec.dims
        ]
        if not chosen:
            return
        parts = [(grad.float() * share).reshape(-1) for grad, share in chosen]
        flat = torch.cat(parts).to(self._ranks.device)
        self._ranks.sum_peers(flat)
        for (grad, _), part in zip(chosen, torch.split(flat, [g.numel() for g, _ in chosen]), strict=True):
            grad.copy_(part.view(grad.shape))

    @torch.no_grad()
    def gather(self, number: int) -> Tensor:
        """Return the whole parameter ``number`` at rank 0, nothing elsewhere; every rank must call this."""
        ranks, dim, own = self._ranks, self._dims[number], self.local[number]
        shape = self.parameters[number].shape
        # the parts of all ranks are of one length but for the last ones
        longest = -(-shape[0] * ranks.tensor // ranks.copy_size)
        even = own.new_zeros(longest, *shape[1:], device=ranks.device)
        even[: len(own)] = own
        columns = [column.flatten(0, 1)[: shape[0]] for column in ranks.gather(even)]
        return torch.cat(columns, dim) if len(columns) > 1 and dim is not None else columns[0]

    def _held(self) -> Sequence[Tensor]:
        """Return the tensors that hold this rank's parts."""
        return self.local

    @torch.no_grad()
    def keep(self) -> None:
        """Note the present values of this rank's parts, for ``restore``."""
        self._kept = [part.clone() for part in self._held()]

    @torch.no_grad()
    def restore(self) -> None:
        """Set this rank's parts to the values at ``keep``."""
        for part, kept in zip(self._held(), self._kept, strict=True):
            part.copy_(kept)
        self._kept = []


class ShardedState(SharedState):
    """``SharedState`` of a sharded model: each rank has the optimizer state of its own part.

    Value heads (``critic``) are whole on every rank and have an owner.
    """

    def __init__(self, ranks: Ranks, shards: Shards, critic: Sequence[nn.Parameter]) -> None:
        super().__init__(ranks, (), critic)
        self.shards = shards
        self._trained = [number for number, p in enumerate(shards.local) if p.requires_grad]
        self._number([*(shards.local[number] for number in self._trained), *critic])

    def sum_gradients(self) -> None:
        """See ``StateSharing``."""
        self.shards.take_gradients()
        super().sum_gradients()

    def norms(self) -> list[float | None]:
        """See ``StateSharing``."""
        total = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        grads = {n: grad for n in self._trained if (grad := self.shards.local[n].grad) is not None}
        if grads:
            copies, peers = self._ranks.size // self._ranks.copy_size, self._ranks.tensor
            # every peer holds the gradients that tensor parallelism does not cut
            holders = [copies * (1 if self.shards.is_cut(number) else peers) for number in grads]
            squares = torch.stack(torch._foreach_norm([*grads.values()])).double() ** 2
            total[0] = (squares / torch.tensor(holders, device=squares.device)).sum()
            total[1] = 1.0
        self._ranks.sum(total)
        norm, number = float(total[0].sqrt()), float(total[1])
        return [norm if number else None, super().norms()[1]]

    def deal(self, number: int, value: Tensor) -> list[tuple[int, Tensor]]:
        """See ``SharedState``."""
        if number >= len(self._trained):
            return super().deal(number, value)
        shard = self._trained[number]
        parts = self.shards.cut(shard, value.expand(self.shards.shape(shard)))
        # a scalar goes whole to every rank with a part of the parameter
        return [(rank, part if value.dim() else value) for rank, part in enumerate(parts) if part.numel()]

    def is_first(self, number: int) -> bool:
        """See ``SharedState``."""
        return number >= len(self._trained) or self._ranks.rank < self._ranks.copy_size

    def join(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """See ``SharedState``."""
        if number >= len(self._trained) or not parts[0].dim():
            return parts[0]
        return self.shards.join(self._trained[number], parts)


def check_shardable(runner: ModelRunner, tensor: int, where: str) -> None:
    """Raise a ConfigError if the models cannot be sharded, or their layers not cut into ``tensor`` parts.

    ``where``: what asks for it.
    """
    model = runner.actor.model
    if Version(torch.__version__) < Version("2.13"):
        raise ConfigError(f"{where} needs torch 2.13 or newer, this is {torch.__version__}")
    if runner.critic.trunk is not None or runner.average is not None or runner.actor.config.compile:
        raise ConfigError(
            f"{where}: a critic with a trunk of its own, a reference that moves or compiled blocks cannot be "
            "cut; take critic_trunk='actor', model.reference_decay=1 and model.compile=false"
        )
    odd = [name for name, p in model.named_parameters() if not p.dim() or not p.numel()]
    if odd:
        raise ConfigError(f"{where}: {odd[0]!r} of {type(model).__name__} is a single number or empty")
    if tensor > 1:
        check_layers(model, tensor)
    for block in [*blocks(model), model]:
        dtypes = {p.dtype for p in block.parameters() if p.requires_grad}
        if len(dtypes) > 1:
            raise ConfigError(
                f"{where}: {type(block).__name__} trains weights of {len(dtypes)} types ("
                f"{', '.join(sorted(map(str, dtypes)))}); set model.dtype=float32"
            )


@torch.no_grad()
def probe(model: Any, passes: Passes, device: torch.device, expected: Tensor | None = None) -> Tensor:
    """Return log-probabilities of fixed tokens [14], computed on ``device``.

    Every rank calls this for a model in parts.

    Raises:
        ConfigError: the model cannot be run in parts, or differs from the whole one's ``expected``.
    """
    what = f"{passes.settings}: {type(model).__name__}"
    prompts = [trial_ids(model, [7 * i + 3 * row for i in range(11 - row)]) for row in range(2)]
    responses = [trial_ids(model, [5 * i + row for i in range(6 + row)]) for row in range(2)]
    outputs = []
    try:
        with evaluating(model), passes.attention([model]) or contextlib.nullcontext():
            # two ragged samples; one with a single token, so that some rank may have none
            for numbers, answers in (([0, 1], responses), ([0], [responses[0][:1]])):
                batch = make_microbatch(numbers, prompts, answers, layout="bucketed", pad_token_id=0)
                out = passes.forward(model, batch.to(device), [SamplingParams()] * len(numbers))
                outputs.append(out.logprobs.clone())
    except (TypeError, ValueError, AttributeError, NotImplementedError, IndexError) as error:
        raise ConfigError(f"{what} cannot be computed in parts: {error}; leave this setting out") from error
    found = torch.cat(outputs).cpu()
    gap = 0.0 if expected is None else float((found - expected).abs().max())
    if not gap <= trial_tolerance(model):
        raise ConfigError(
            f"{what} computes something else in parts than whole: log-probabilities move by {gap:.2g}; leave "
            "this setting out"
        )
    return found
