"""Models of which every learner rank holds a part: torch's FSDP2 over the ranks' own process group.

A block of the model is gathered when its forward or backward pass needs it and given up after; its gradient
arrives summed, cut like the weights. All ranks pass through a model together, so each must make as many
passes as the others (``ModelRunner.cut`` adds idle ones).

Ranks may compute every layer together besides (``tensor.py``); each then cuts its part of a layer further.

Source: torch.distributed.fsdp.fully_shard; Zhao et al., "PyTorch FSDP" (arXiv:2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.backends.shared_state import SharedState
from multitask_rl.training.backends.tensor import ShardSpec, cut_layers
from multitask_rl.training.forward import TokenOutputs
from multitask_rl.training.runner import Passes

__all__ = ["ShardedPasses", "ShardedState", "Shards", "blocks", "forward_pass", "shard_model"]


def blocks(model: Any) -> list[nn.Module]:
    """Return what is gathered as one, inner before outer: the layers that transformers would not part."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in reversed(list(model.modules())) if type(module).__name__ in kinds]


def shard_model(model: Any, ranks: Ranks) -> ShardSpec:
    """Leave this rank a part of each parameter of ``model``, in place; return what the peers have cut.

    Args:
        model: a model of ``transformers``, adapted or not, the same on every rank.
        ranks: all of them.
    """
    spec = cut_layers(model, ranks) if ranks.tensor > 1 else ShardSpec()
    mesh = ranks.mesh()
    # bfloat16 gradients are summed in float32, as those of whole models are
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum: the loss has counted all ranks' samples
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # an expert that no token of this rank met
    model.set_reduce_scatter_unused_params(True)
    # the head is read outside of the model's own forward: any function may be the pass
    model.one_pass = MethodType(_one_pass, model)
    register_fsdp_forward_method(model, "one_pass")
    return spec


def _one_pass(_model: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    # a hook on a view would be lost where the view is changed in place
    return {
        name: value.clone() if isinstance(value, Tensor) and value._is_view() else value
        for name, value in act().items()
    }


def forward_pass(model: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``act`` returns, which makes one forward pass of the sharded ``model``.

    Args:
        model: what ``act`` calls.
        act: returns tensors that the backward pass begins at, by name.
    """
    found: dict[str, Any] = model.one_pass(act)
    if not any(p.requires_grad for p in model.parameters()):
        model.reset_iter_state()  # what torch notes in a pass it else forgets after the backward pass
    elif not torch.is_grad_enabled():
        model.reshard()  # torch keeps the outermost weights gathered for a backward pass
    return found


class ShardedPasses(Passes):
    """Passes through models of which every rank holds a part.

    Args:
        ranks: all of them.
    """

    in_step = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def most(self, number: int) -> int:
        """Return the largest ``number`` of any rank."""
        return self._ranks.most(number)

    def forward(self, model: Any, *args: Any, **wants: Any) -> TokenOutputs:
        """Return what ``forward_tokens`` returns."""

        def act() -> dict[str, Any]:
            out = super(ShardedPasses, self).forward(model, *args, **wants)
            return {
                "logprobs": out.logprobs,
                "entropy": out.entropy,
                "logits": out.logits,
                "hidden": out.hidden,
            }

        return TokenOutputs(**forward_pass(model, act))


def _note(names: set[str], name: str, _parameter: Tensor) -> None:
    names.add(name)


@torch.no_grad()
def _collect(local: nn.Parameter, sharded: Any) -> None:
    """Add the gradient of a backward pass to that of ``local``: in float32 where the weights are in less."""
    arrived = sharded.grad.to_local().to(local.grad_dtype)
    sharded.grad = None  # torch would add up in the type of the weights
    local.grad = arrived if local.grad is None else local.grad.add_(arrived)


class Shards:
    """This rank's part of a sharded model's parameters, and how wholes are cut and put together.

    Args:
        model: after ``shard_model``.
        ranks: all of them.
        spec: what ``shard_model`` returned.
    """

    def __init__(self, model: Any, ranks: Ranks, spec: ShardSpec | None = None) -> None:
        self._model, self._ranks, self._spec = model, ranks, spec or ShardSpec()
        named = dict(model.named_parameters())
        self.names = list(named)
        """Of the parameters, tied ones once."""
        self._sharded: list[Any] = list(named.values())
        # what the optimizer moves shares its memory with torch's own parameter
        self.local = [
            nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad) for p in self._sharded
        ]
        """[names] this rank's parts; one may be empty."""
        self._met: set[str] = set()
        """Parameters that a backward pass here gave a gradient."""
        for name, gathered in self._unsharded():  # torch gathers into the same parameters every time
            if gathered.requires_grad:
                # the set alone: a hook that held this object would keep it and the model for ever
                cast(Any, gathered).register_post_accumulate_grad_hook(partial(_note, self._met, name))
        for local, sharded in zip(self.local, self._sharded, strict=True):
            if sharded.requires_grad:
                sharded.register_post_accumulate_grad_hook(partial(_collect, local))

    def is_cut(self, number: int) -> bool:
        """The peers have different parts of the parameter."""
        return self.names[number] in self._spec.dims

    def cut(self, number: int, whole: Tensor) -> list[Tensor]:
        """Return the ranks' parts of ``whole``, of the parameter's shape; the last ones may be empty."""
        ranks = self._ranks
        columns = [whole] * ranks.tensor
        if self.is_cut(number):
            columns = list(whole.chunk(ranks.tensor, self._spec.dims[self.names[number]]))
        num_rows = ranks.size // ranks.tensor
        parts = [list(column.chunk(num_rows)) for column in columns]
        return [part[row] if row < len(part) else part[0][:0] for row in range(num_rows) for part in parts]

    def join(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole of the parts that are not empty, in the order of the ranks."""
        peers = self._ranks.tensor
        if not self.is_cut(number):
            return torch.cat(list(parts[::peers]))
        columns = [torch.cat(list(parts[index::peers])) for index in range(peers)]
        return torch.cat(columns, self._spec.dims[self.names[number]])

    def holders(self, number: int) -> list[int]:
        """Return the ranks whose part of the parameter is not empty."""
        peers = self._ranks.tensor
        parts = torch.empty(self._sharded[number].shape[0]).chunk(self._ranks.size // peers)
        return list(range(len(parts) * peers))

    @torch.no_grad()
    def fill(self, numbers: Sequence[int], wholes: Sequence[Tensor] | None = None) -> None:
        """Take this rank's part of the parameters ``numbers``, which rank 0 has in ``wholes``."""
        for place, number in enumerate(numbers):
            sharded = self._sharded[number]
            shape = list(sharded.shape)
            if self.is_cut(number):
                shape[self._spec.dims[self.names[number]]] *= self._ranks.tensor
            whole = torch.empty(shape, dtype=sharded.dtype, device=self._ranks.device)
            if wholes is not None:
                whole.copy_(wholes[place])
            self._ranks.broadcast([whole])
            self.local[number].copy_(self.cut(number, whole)[self._ranks.rank])

    def take_gradients(self) -> None:
        """Complete the gradients that the backward passes added to the local parts.

        torch has zeros for parameters that no rank met. They get none: the optimizer leaves them alone.
        """
        met = torch.tensor([float(name in self._met) for name in self.names], device=self._ranks.device)
        self._ranks.sum(met)
        self._met.clear()
        for local, number in zip(self.local, met.tolist(), strict=True):
            if not number:
                local.grad = None
        if self._ranks.tensor > 1:
            self._agree()

    def _agree(self) -> None:
        """Give the peers the same gradient of what all of them have.

        Each has a part of some; of the others, which should be the same already, they take the mean: sums in
        another order (scattered adds on a GPU) would let the copies drift apart.
        """
        chosen = [
            (local.grad, 1.0 if name in self._spec.partial else 1.0 / self._ranks.tensor)
            for name, local in zip(self.names, self.local, strict=True)
            if local.grad is not None and name not in self._spec.dims
        ]
        if not chosen:
            return
        flat = torch.cat([(grad.float() * share).reshape(-1) for grad, share in chosen])
        self._ranks.sum_peers(flat)
        for (grad, _), part in zip(chosen, torch.split(flat, [g.numel() for g, _ in chosen]), strict=True):
            grad.copy_(part.view(grad.shape))

    @torch.no_grad()
    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole weights, each there until the next is asked for.

        Every rank has to go through to the end.
        """
        for name, found in self._unsharded():
            dim = self._spec.dims.get(name)
            yield name, found if dim is None else torch.cat(list(self._ranks.gather_peers(found)), dim)

    def _unsharded(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and what the peers of this rank have of the weights."""
        known = set(self.names)
        for module in [m for m in self._model.modules() if isinstance(m, FSDPModule)]:
            sharded = {id(p) for p in self._sharded}
            module.unshard()
            for name, found in self._model.named_parameters():
                if id(found) not in sharded and name in known:
                    yield name, found
            module.reshard()


class ShardedState:
    """``SharedState`` of a model in parts: each rank has the optimizer's state of its own part.

    Value heads are whole on every rank and have an owner.

    Args:
        ranks: all of them.
        shards: of the actor.
        critic: value heads.
    """

    def __init__(self, ranks: Ranks, shards: Shards, critic: Sequence[nn.Parameter]) -> None:
        self._ranks, self.shards = ranks, shards
        self._heads = SharedState(ranks, [], critic)
        self._trained = [number for number, p in enumerate(shards.local) if p.requires_grad]
        self._num_sharded = len(self._trained)
        self.parameters = [*(shards.local[number] for number in self._trained), *critic]
        self.names = {id(p): str(number) for number, p in enumerate(self.parameters)}
        """``id(parameter)`` -> its number, by which ranks speak of it."""

    def is_own(self, parameter: nn.Parameter) -> bool:
        """Its state is in this process."""
        number = self.names.get(id(parameter))
        return number is not None and (int(number) < self._num_sharded or self._heads.is_own(parameter))

    def sum_gradients(self) -> None:
        """Take the parts of the gradient, which have arrived summed; sum those of the value heads.

        Raises:
            TrainingError: the other ranks have ended.
        """
        self.shards.take_gradients()
        self._heads.sum_gradients()

    def norms(self) -> list[float | None]:
        """Return the norm of the whole gradient of actor and critic; None where no rank had any."""
        total = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        # what no peer has cut every peer has
        for is_cut, share in ((True, 1.0), (False, 1.0 / self._ranks.tensor)):
            found = [
                grad
                for number in self._trained
                if (grad := self.shards.local[number].grad) is not None
                and self.shards.is_cut(number) == is_cut
            ]
            if found:
                total[0] += share * nn.utils.get_total_norm(found, foreach=True).double() ** 2
                total[1] = 1.0
        self._ranks.sum(total)
        norm, number = float(total[0].sqrt()), float(total[1])
        return [norm if number else None, self._heads.norms()[1]]

    def send_weights(self) -> None:
        """Give every rank the value heads; parts of the model stay where they are."""
        self._heads.send_weights()

    def deal(self, name: str, value: Tensor) -> list[tuple[int, Tensor]]:
        """Return which ranks are to have (what of) the whole state ``value`` of ``<number>|<key>``."""
        number = int(name.partition("|")[0])
        if number >= self._num_sharded:
            return self._heads.deal(f"{number - self._num_sharded}|", value)
        if value.dim():
            parts = self.shards.cut(self._trained[number], value)
            return [(rank, part) for rank, part in enumerate(parts) if part.numel()]
        return [(rank, value) for rank in self.shards.holders(self._trained[number])]

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole of what the ranks, in their order, have of ``<number>|<key>``."""
        number = int(name.partition("|")[0])
        if number >= self._num_sharded or not parts[0].dim():
            return parts[0]
        return self.shards.join(self._trained[number], parts)
