"""Tensor parallelism: ranks compute every layer together, each with some of its heads and columns.

``transformers`` says how layers are cut (``_tp_plan``). Embeddings, norms and the output head are whole on
every peer. Between the cuts every peer has all hidden states, and all compute the same loss.

Source: Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

from multitask_rl.attention.interface import exchange
from multitask_rl.errors import ConfigError
from multitask_rl.training.backends.ranks import Ranks

_OUT = ("colwise", "colwise_gather_output")
"""Cut by outputs: dimension 0 of the weight."""
_IN = ("rowwise", "rowwise_split_input")
"""Cut by inputs: dimension 1; the sum over the peers is the output."""
_PARTIAL = "replicated_with_grad_allreduce"
"""Whole, but applied to this peer's heads only: the gradient is the sum over the peers."""


@dataclass(kw_only=True, slots=True)
class ShardSpec:
    """Cuts of tensor parallelism, by name of the parameter."""

    dims: dict[str, int] = field(default_factory=dict)
    """Cut parameter -> dimension of the cut."""
    partial: set[str] = field(default_factory=set)
    """Whole parameters whose gradient is the sum over the peers."""


def plan_layers(model: Any) -> dict[str, str]:
    """Return how layers of ``model`` are cut: name of the module -> style.

    Raises:
        ConfigError: transformers has no plan, or the kind of a layer cannot be cut here.
    """
    base = _base(model)
    plan: Mapping[str, str] = getattr(base, "_tp_plan", None) or {}
    names = ((name, replace_layer_number_by_wildcard(name)) for name, _ in base.named_modules())
    styles = {name: plan[key] for name, key in names if key in plan and ".layers." in f".{key}"}
    problem = "" if styles else "transformers has no plan for cutting its layers"
    for name, style in styles.items():
        module = base.get_submodule(name)
        if style not in (*_OUT, *_IN, _PARTIAL):
            problem = problem or f"{name} is cut as {style!r}"
        elif style != _PARTIAL and type(_layer(module)) is not nn.Linear:
            problem = problem or f"{name} is a {type(module).__name__}"
    if problem:
        raise ConfigError(f"device_map.actor=... tensor: {type(base).__name__}: {problem}; leave tensor out")
    return styles


def check_layers(model: Any, number: int) -> None:
    """Refuse a model whose layers cannot be cut into ``number`` equal parts.

    Raises:
        ConfigError: see ``plan_layers``; or ``number`` does not divide its heads or columns.
    """
    base, styles = _base(model), plan_layers(model)
    config = base.config.get_text_config()
    sizes = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    for name, style in styles.items():
        if style != _PARTIAL:
            module = base.get_submodule(name)
            weight = _layer(module).weight
            sizes[name] = int(weight.shape[0 if style in _OUT else 1])
    for name, size in sizes.items():
        if size is not None and size % number:
            raise ConfigError(
                f"device_map.actor=... tensor={number}: {name} of {type(base).__name__} is {size}, which "
                f"{number} does not divide; take a tensor=N that divides it"
            )


def cut_layers(model: Any, ranks: Ranks) -> ShardSpec:
    """Cut the layers of ``model`` to this rank's part, in place.

    Args:
        model: passed ``check_layers``; adapted or not.
        ranks: all ranks; the peers share the layers.
    """
    base, styles = _base(model), plan_layers(model)
    dims: dict[int, int] = {}
    summed: set[int] = set()
    entrances: dict[str, _Entrance] = {}

    def same(whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    def add_up(part: Tensor) -> Tensor:
        total = part.clone(memory_format=torch.contiguous_format)
        ranks.sum_peers(total)
        return total

    def gather(own: Tensor) -> Tensor:
        return torch.cat(list(ranks.gather_peers(own)), dim=-1)

    def take_own(whole: Tensor) -> Tensor:
        return whole.chunk(ranks.peers, dim=-1)[ranks.peer_index].clone()

    # All peers compute the same loss, so the adjoint of a sum over the peers is the identity.
    def enter(given: Tensor) -> Tensor:
        entered: Tensor = exchange(given, same, add_up)
        return entered

    def sum_outputs(module: Any, layer: Callable[[], Any]) -> None:
        def with_bias(_module: Any, _given: Any, out: Tensor) -> Tensor:
            total: Tensor = exchange(out, add_up, same)
            bias = layer().bias
            return total if bias is None else total + bias.to(total.dtype)

        layer().forward = lambda given: linear(given, layer().weight)
        module.register_forward_hook(with_bias)

    def cut(module: Any, name: str, dim: int) -> None:
        whole = getattr(module, name)
        own = whole.detach().chunk(ranks.tensor, dim)[ranks.peer_index].contiguous().clone()
        parameter = nn.Parameter(own, requires_grad=whole.requires_grad)
        setattr(module, name, parameter)
        dims[id(parameter)] = dim

    for name, style in styles.items():
        module = base.get_submodule(name)
        if style == _PARTIAL:
            summed.update(id(p) for p in module.parameters())
            continue
        layer = _layer(module)
        dim = 0 if style in _OUT else 1
        cut(layer, "weight", dim)
        if layer is not module:
            # one factor of an adapter is cut; the whole one meets values that only this rank has
            down, up = module.lora_A.values(), module.lora_B.values()
            for cut_factor, whole_factor in zip(*((up, down) if dim == 0 else (down, up)), strict=True):
                cut(cut_factor, "weight", dim)
                summed.add(id(whole_factor.weight))
        if dim == 0:
            if layer.bias is not None:
                cut(layer, "bias", 0)
            layer.out_features //= ranks.tensor
            entrance = entrances.setdefault(name.rpartition(".")[0], _Entrance(enter))
            entrance.num_layers += 1
            module.register_forward_pre_hook(entrance)
            if style == "colwise_gather_output":
                module.register_forward_hook(lambda _module, _given, out: exchange(out, gather, take_own))
            continue
        layer.in_features //= ranks.tensor
        if style == "rowwise_split_input":
            module.register_forward_pre_hook(lambda _module, given: (exchange(given[0], take_own, gather),))
        sum_outputs(module, weakref.ref(layer))  # a model that holds itself is freed late
    named = {name: id(p) for name, p in model.named_parameters()}
    return ShardSpec(
        dims={name: dims[place] for name, place in named.items() if place in dims},
        partial={name for name, place in named.items() if place in summed},
    )


def _base(model: Any) -> Any:
    """Return the model that an adapted one adapts."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _layer(module: Any) -> Any:
    """Return the linear layer that an adapted one adapts."""
    return getattr(module, "base_layer", module)


class _Entrance:
    """Pre-hook of layers that are cut by outputs and read the same hidden states (query, key and value).

    ``enter``, which sums their gradients over the peers, is called once for all of the layers.
    """

    def __init__(self, enter: Callable[[Tensor], Tensor]) -> None:
        self._enter = enter
        self.num_layers = 0
        self._num_left = 0
        self._given: Tensor | None = None
        self._entered: Tensor | None = None

    def __call__(self, _module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if given[0] is not self._given or self._entered is None:
            self._entered = self._enter(given[0])
            self._given, self._num_left = given[0], self.num_layers
        entered: Tensor = self._entered
        self._num_left -= 1
        if not self._num_left:
            self._given = self._entered = None  # they would hold the graph
        return (entered, *given[1:])
