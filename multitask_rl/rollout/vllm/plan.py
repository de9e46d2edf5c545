"""A plan of copies that brings a checkpoint's tensors into vLLM's parameters.

``reload_weights`` builds every layer again and runs Python loaders over each tensor: tens of milliseconds of
the same work at every update. So one reload is recorded (``TorchDispatchMode``) as pairs of views, and an
update is one multi-tensor copy. Layers that the CPU build keeps in a packed form are packed again.

A reload that does more than copy (quantisation, repacked experts) gives no plan. Each tensor-parallel rank
has its own plan, with the views of its shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multitask_rl.models.weights import buckets_of

_aten = torch.ops.aten
_HARMLESS = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default, _aten.detach.default}


@dataclass(kw_only=True, slots=True)
class _Copy:
    """``target`` takes the view (``size``, ``stride``, ``offset``) of the weight ``name``."""

    target: Tensor
    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements, from the weight's first."""


@dataclass(kw_only=True, slots=True)
class WeightPlan:
    """The tensor copies that bring new weights into vLLM's parameters."""

    copies: list[_Copy]
    packed: list[tuple[Any, Tensor | None]]
    """Layers to pack again, with the plain weight to pack; None = the layer has kept it."""

    @torch.no_grad()
    def apply(self, weights: Mapping[str, Tensor]) -> None:
        """Copy ``weights``, which have the shapes of the recording, into the engine."""
        copies: dict[str, list[_Copy]] = {}
        for copy in self.copies:
            copies.setdefault(copy.name, []).append(copy)
        for names in buckets_of(weights):
            chosen = [copy for name in names for copy in copies.get(name, ())]
            whole = {name: weights[name].detach().contiguous() for name in {c.name for c in chosen}}
            sources = [
                whole[c.name].as_strided(c.size, c.stride, whole[c.name].storage_offset() + c.offset)
                for c in chosen
            ]
            if chosen:
                torch._foreach_copy_([c.target for c in chosen], sources)
            del whole, sources  # before the next bucket takes memory
        for layer, plain in self.packed:
            if plain is not None:
                layer.weight = plain
            layer.quant_method.process_weights_after_loading(layer)


def reload(worker: Any, weights: Mapping[str, Tensor]) -> None:
    """Load ``weights`` in ``worker`` as vLLM does; then pack output heads and, on a CPU, experts.

    A head tied to the embedding is not in the weights: vLLM's reload writes through the shared tensor, but
    not into the packed copy that the CPU build decodes with. vLLM packs experts at their first load only.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    worker.reload_weights(weights_iterator=((name, t.detach()) for name, t in weights.items()))
    for module in worker.model_runner.get_model().modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and current_platform.is_cpu():
            kernel.fused_experts.process_weights_after_loading(module)


def record_plan(worker: Any, weights: Mapping[str, Tensor]) -> WeightPlan | str:
    """Reload ``weights`` in ``worker``; return the plan that repeats it, or why there is none."""
    weights = dict(weights)  # a plan tells weights by where they are in memory
    with _Recorder(worker.model_runner.get_model(), weights) as recorder:
        reload(worker, weights)
    return recorder.plan()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the copies of a reload, and the first other operation on the weights."""

    def __init__(self, model: Any, weights: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._sources: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in weights.items():
            self._sources.setdefault(_storage(tensor), []).append((name, tensor))
        # parameters that hold their weights; packed parameters are empty
        self._live = {_storage(t) for t in (*model.parameters(), *model.buffers()) if t.numel()}
        self._pending: dict[int, list[_Copy]] = {}
        self._done: list[_Copy] = []
        self._packed: dict[int, tuple[Any, Tensor | None]] = {}
        self._is_packing = False
        self._obstacle = ""
        self._methods: dict[int, Any] = {}

    def __enter__(self) -> _Recorder:
        self._methods = {
            id(m.quant_method): m.quant_method for m in self._model.modules() if hasattr(m, "cpu_linear")
        }
        for method in self._methods.values():
            method.process_weights_after_loading = self._watch(method.process_weights_after_loading)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for method in self._methods.values():
            del method.process_weights_after_loading

    def _watch(self, process: Any) -> Any:
        def watched(layer: Any) -> None:
            plain = layer.weight
            self._is_packing = True
            try:
                process(layer)
            finally:
                self._is_packing = False
            # a layer that keeps its plain weight gets it by a recorded copy of the reload
            self._packed[id(layer)] = (layer, None if layer.weight is plain else plain)

        return watched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_packing or func.is_view or func in _HARMLESS:
            return result
        tensors = [a for a in args if isinstance(a, Tensor)]
        if any(t.device.type == "meta" for t in tensors):
            return result  # vLLM first runs the loaders on the meta device, to count
        if func is _aten.copy_.default:
            self._note(*tensors)
            return result
        for tensor in tensors:
            place = _storage(tensor)
            is_live = place in self._live and tensor.numel() > 1
            if is_live or place in self._sources or place in self._pending:
                self._obstacle = self._obstacle or f"{func} is applied to the weights"
        return result

    def _note(self, target: Tensor, source: Tensor) -> None:
        place = _storage(source)
        if place in self._sources:
            extent = 1 + sum((n - 1) * s for n, s in zip(source.size(), source.stride(), strict=True))
            found = [
                (name, int(offset))
                for name, tensor in self._sources[place]
                if (offset := source.storage_offset() - tensor.storage_offset()) >= 0
                and offset + extent <= tensor.numel()
                and tensor.is_contiguous()
            ]
            if not found:
                self._obstacle = self._obstacle or "a view reaches over several weights"
                return
            name, offset = found[0]
            size, stride = tuple(source.size()), tuple(source.stride())
            copy = _Copy(target=target, name=name, size=size, stride=stride, offset=offset)
            if _storage(target) in self._live:
                self._done.append(copy)
            else:
                self._pending.setdefault(_storage(target), []).append(copy)
        elif place in self._pending:
            # a finished layer is copied into the engine's parameter: redirect the copies it was made of
            same = target.shape == source.shape and target.stride() == source.stride()
            if not same or _storage(target) not in self._live:
                self._obstacle = self._obstacle or "a layer changes its layout"
                return
            for copy in self._pending.pop(place):
                begin = copy.target.storage_offset() - source.storage_offset() + target.storage_offset()
                copy.target = target.as_strided(copy.target.size(), copy.target.stride(), begin)
                self._done.append(copy)

    def plan(self) -> WeightPlan | str:
        """Return the plan, or why copies cannot repeat the reload."""
        packed = list(self._packed.values())
        for _, plain in packed:
            if plain is not None:
                self._done.extend(self._pending.pop(_storage(plain), []))
        if self._pending:
            self._obstacle = self._obstacle or f"{len(self._pending)} layers are made of copies and more"
        return self._obstacle or WeightPlan(copies=self._done, packed=packed)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
