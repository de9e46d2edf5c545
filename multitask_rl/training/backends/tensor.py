"""Tensor parallelism: ranks that compute every layer together, each with some of its heads and columns.

Which layers are cut, and how, is what ``transformers`` says of the architecture (``_tp_plan``). Embeddings,
norms and the output head are whole on every peer. Parts are plain parameters, for FSDP to cut further over
the ranks with other samples.

Between the cuts every peer has all hidden states and goes on to the same loss.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from multitask_rl.errors import ConfigError
from multitask_rl.training.backends.ranks import Ranks

__all__ = ["ShardSpec", "check_layers", "cut_layers", "plan_layers"]

_OUT = ("colwise", "colwise_gather_output")
"""Cut by outputs: dimension 0 of the weight."""
_IN = ("rowwise", "rowwise_split_input")
"""Cut by inputs: dimension 1; the sum over the peers is the output."""
_PARTIAL = "replicated_with_grad_allreduce"
"""Whole, and applied to some of the heads: its gradient is a sum over the peers."""


@dataclass(kw_only=True, slots=True)
class ShardSpec:
    """What this rank has of the parameters, by name."""

    dims: dict[str, int] = field(default_factory=dict)
    """Dimension of those that are cut."""
    partial: set[str] = field(default_factory=set)
    """Whole ones whose gradients are to be summed over the peers."""


def plan_layers(model: Any) -> dict[str, str]:
    """Return how layers of ``model`` are cut: names of modules -> style.

    Raises:
        ConfigError: transformers has no plan, or layers are of a kind that is not cut here.
    """
    base = _base(model)
    plan: Mapping[str, str] = getattr(base, "_tp_plan", None) or {}
    patterns = [
        (re.compile(re.escape(key).replace(r"\*", r"\d+")), style)
        for key, style in plan.items()
        if ".layers." in f".{key}"
    ]
    styles = {
        name: style
        for name, _ in base.named_modules()
        for pattern, style in patterns
        if pattern.fullmatch(name)
    }
    problem = "" if styles else "transformers has no plan for cutting its layers"
    for name, style in styles.items():
        module = base.get_submodule(name)
        if style not in (*_OUT, *_IN, _PARTIAL):
            problem = problem or f"{name} is cut as {style!r}"
        elif style != _PARTIAL and type(getattr(module, "base_layer", module)) is not nn.Linear:
            problem = problem or f"{name} is a {type(module).__name__}"
    if problem:
        raise ConfigError(f"device_map.actor=... tensor: {type(base).__name__}: {problem}; leave tensor out")
    return styles


def check_layers(model: Any, number: int) -> None:
    """Refuse a model whose layers cannot be cut into ``number`` equal parts.

    Raises:
        ConfigError: see ``plan_layers``; heads or columns do not divide.
    """
    base, styles = _base(model), plan_layers(model)
    config = base.config.get_text_config()
    sizes = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    for name, style in styles.items():
        if style != _PARTIAL:
            module = base.get_submodule(name)
            weight = getattr(module, "base_layer", module).weight
            sizes[name] = int(weight.shape[0 if style in _OUT else 1])
    for name, size in sizes.items():
        if size is not None and size % number:
            raise ConfigError(
                f"device_map.actor=... tensor={number}: {name} of {type(base).__name__} is {size}, which "
                f"{number} does not divide"
            )


def cut_layers(model: Any, ranks: Ranks) -> ShardSpec:
    """Leave this rank its part of the layers of ``model``, in place.

    Args:
        model: passed ``check_layers``; adapted or not.
        ranks: all of them; the peers share the layers.
    """
    base, styles = _base(model), plan_layers(model)
    kept: dict[int, int] = {}
    partial: set[int] = set()
    entrances: dict[str, _Entrance] = {}
    for name, style in styles.items():
        module = base.get_submodule(name)
        if style == _PARTIAL:
            partial.update(id(p) for p in module.parameters())
            continue
        dim = 0 if style in _OUT else 1
        for part in _cut_module(module, dim, ranks):
            if part.dim is None:
                partial.add(id(part.parameter))
            else:
                kept[id(part.parameter)] = part.dim
        if dim == 0:
            entrance = entrances.setdefault(name.rpartition(".")[0], _Entrance(ranks))
            entrance.num_layers += 1
            module.register_forward_pre_hook(entrance)
            if style == "colwise_gather_output":
                module.register_forward_hook(_on_output(_Gather, ranks))
        else:
            if style == "rowwise_split_input":
                module.register_forward_pre_hook(_on_input(_Slice, ranks))
            module.register_forward_hook(_sum_output(getattr(module, "base_layer", module), ranks))
    named = {name: id(p) for name, p in model.named_parameters()}
    return ShardSpec(
        dims={name: kept[place] for name, place in named.items() if place in kept},
        partial={name for name, place in named.items() if place in partial},
    )


def _base(model: Any) -> Any:
    """Return the model that an adapted one adapts."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(kw_only=True, slots=True)
class _Part:
    parameter: nn.Parameter
    dim: int | None
    """None: whole, with a partial gradient."""


def _cut_module(module: Any, dim: int, ranks: Ranks) -> Iterator[_Part]:
    """Cut a linear layer, with adapters or without, and yield what its parameters now are."""
    layer = getattr(module, "base_layer", module)
    yield _cut(layer, "weight", dim, ranks)
    if dim == 0 and layer.bias is not None:
        yield _cut(layer, "bias", 0, ranks)
    if dim == 0:
        layer.out_features //= ranks.tensor
    else:
        layer.in_features //= ranks.tensor
        layer.forward = _without_bias(layer)  # added once, to the sum
    if layer is module:
        return
    # of the two factors of an adapter one is cut; the whole one meets what only this rank has
    for cut, whole in zip(*_factors(module, dim), strict=True):
        yield _cut(cut, "weight", dim, ranks)
        yield _Part(parameter=whole.weight, dim=None)


def _factors(module: Any, dim: int) -> tuple[list[Any], list[Any]]:
    down, up = list(module.lora_A.values()), list(module.lora_B.values())
    return (up, down) if dim == 0 else (down, up)


def _cut(module: Any, name: str, dim: int, ranks: Ranks) -> _Part:
    whole = getattr(module, name)
    own = whole.detach().chunk(ranks.tensor, dim)[ranks.peer_index].contiguous().clone()
    parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
    setattr(module, name, parameter)
    return _Part(parameter=parameter, dim=dim)


def _without_bias(layer: Any) -> Callable[[Tensor], Tensor]:
    own = weakref.ref(layer)  # a model that holds itself is freed late

    def forward(given: Tensor) -> Tensor:
        module: Any = own()
        return linear(given, module.weight)

    return forward


def _on_input(function: Any, ranks: Ranks) -> Callable[..., tuple[Tensor]]:
    return lambda _module, given: (function.apply(given[0], ranks),)


def _on_output(function: Any, ranks: Ranks) -> Callable[..., Tensor]:
    return lambda _module, _given, out: function.apply(out, ranks)


def _sum_output(layer: Any, ranks: Ranks) -> Callable[..., Tensor]:
    own = weakref.ref(layer)

    def hook(_module: Any, _given: Any, out: Tensor) -> Tensor:
        module: Any = own()
        total: Tensor = _Sum.apply(out, ranks)  # type: ignore[no-untyped-call]
        return total if module.bias is None else total + module.bias.to(total.dtype)

    return hook


class _Entrance:
    """Where hidden states enter layers that are cut by outputs: their gradients are summed, once for all.

    A pre-hook of each of the layers that read the same (query, key and value; gate and up).
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.num_layers = 0
        self._num_left = 0
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def __call__(self, _module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if given[0] is not self._given or self._entered is None:
            self._entered = _Enter.apply(given[0], self._ranks)  # type: ignore[no-untyped-call]
            self._given, self._num_left = given[0], self.num_layers
        entered: Tensor = self._entered
        self._num_left -= 1
        if not self._num_left:
            self._given = self._entered = None  # it would hold the graph
        return (entered, *given[1:])


class _Enter(torch.autograd.Function):
    """All of it, to all peers; they do different things with it, so the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.ranks.sum_peers(total)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum over the peers, which all compute the same loss from it."""

    @staticmethod
    def forward(_ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        total = part.detach().clone(memory_format=torch.contiguous_format)
        ranks.sum_peers(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    """[..., n] -> [..., peers * n], from which all peers compute the same loss."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _gather_last(own, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _own_of_last(gradients[0], ctx.ranks), None


class _Slice(torch.autograd.Function):
    """[..., peers * n] -> [..., n]; each peer goes on with another slice."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _own_of_last(whole, ranks).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather_last(gradients[0], ctx.ranks), None


def _gather_last(own: Tensor, ranks: Ranks) -> Tensor:
    return torch.cat(list(ranks.gather_peers(own)), dim=-1)


def _own_of_last(whole: Tensor, ranks: Ranks) -> Tensor:
    return whole.chunk(ranks.peers, dim=-1)[ranks.peer_index]
