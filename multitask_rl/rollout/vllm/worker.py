"""How vLLM's workers get the trainer's weights.

A worker in the trainer's process reads the trainer's tensors. Workers in other processes (tensor parallel)
map one anonymous block of memory that the trainer fills at every update; on CUDA they open the tensors by
their interprocess handles, where that works. No file is written; vLLM's queue carries only names and places.
"""

from __future__ import annotations

import inspect
import math
import mmap
import os
import pickle
import signal
from collections.abc import Mapping, Sequence
from math import prod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multitask_rl.models.weights import buckets_of, like_of
from multitask_rl.rollout.vllm.plan import WeightPlan, record_plan, reload

_CHANGED = ("__init__", "__call__", "save_aot_compiled_function", "_ignore_compile_vllm")
"""What ``support_torch_compile`` of vLLM sets in a class; it also adds a base."""
_ALIGNMENT = 64
"""Bytes; any element size divides it."""

Parcel = list[Any]
"""Weights as plain values: ``["memory", path, bytes, entries]`` or ``["cuda", pickles]``."""


class WeightReceiver:
    """Mixed into vLLM's worker class (``worker_extension_cls``), which has the model."""

    _taken_plan: WeightPlan | None = None
    _taken_memory: tuple[str, Tensor] | None = None

    def stay_eager(self) -> None:
        """Disable ``torch.compile`` in this process: one kernel would take up to 14 s."""
        torch.compiler.set_stance("force_eager")

    def ignore_terminal(self) -> None:
        """Ignore Ctrl-C, the end of a terminal and SIGUSR1 in this process: the trainer saves on them."""
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    def unlink_memory(self) -> None:
        """Remove the names of the memory that vLLM's CPU ranks share: a killed rank would leave it."""
        for path in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*-cpushm_*"):
            path.unlink(missing_ok=True)  # all ranks have mapped it

    def separate_classes(self) -> None:
        """Move what vLLM changed in a class of ``transformers`` into a subclass that vLLM alone uses.

        vLLM computes a model that it has no code for (GPT-NeoX, OLMo 2) with that of ``transformers``. It
        changes the class for ``torch.compile``: the trainer could not build or compute a model of this class.
        """
        from transformers import PreTrainedModel

        for module in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            shared = type(module)
            if not isinstance(module, PreTrainedModel) or "_ignore_compile_vllm" not in vars(shared):
                continue
            changed = {name: vars(shared)[name] for name in _CHANGED if name in vars(shared)}
            *before, added = shared.__bases__
            for name in changed:
                delattr(shared, name)
            shared.__init__ = inspect.getclosurevars(changed["__init__"]).nonlocals["old_init"]
            shared.__bases__ = tuple(before)
            changed["__module__"] = shared.__module__
            module.__class__ = type(shared.__name__, (shared, added), changed)

    @torch.no_grad()
    def forget_weights(self) -> None:
        """Set floating-point parameters to NaN: log-probabilities tell if an update does not bring one.

        Parameters of one byte, buffers and what the CPU build has packed stay.
        """
        for parameter in self.model_runner.get_model().parameters():  # type: ignore[attr-defined]
            if parameter.is_floating_point() and parameter.element_size() > 1:
                parameter.fill_(math.nan)

    def take_weights(self, how: str, weights: Mapping[str, Tensor] | Parcel) -> str:
        """Load ``weights``.

        Args:
            how: ``reload`` (vLLM's own way), ``record`` (the same, recorded as a plan), ``copy`` (the plan).
            weights: tensors, or a parcel of ``SharedWeights``.

        Returns:
            Why ``record`` made no plan; otherwise ''.
        """
        tensors = weights if isinstance(weights, Mapping) else self._open_parcel(weights)
        if how == "copy":
            assert self._taken_plan is not None, "the plan is recorded first"
            self._taken_plan.apply(tensors)
        elif how == "record":
            found = record_plan(self, tensors)
            if isinstance(found, str):
                return found
            self._taken_plan = found
        else:
            reload(self, tensors)
        return ""

    def try_parcel(self, parcel: Parcel) -> str:
        """Return why this process cannot open the parcel, or ''."""
        try:
            self._open_parcel(parcel)
        except Exception as error:  # noqa: BLE001 - the trainer has another way for every error
            return f"{type(error).__name__}: {error}"
        return ""

    def _open_parcel(self, parcel: Parcel) -> Mapping[str, Tensor]:
        if parcel[0] == "cuda":
            tensors: Mapping[str, Tensor] = pickle.loads(parcel[1][getattr(self, "rank", 0)])
            return tensors
        _, path, size, entries = parcel
        # memory that grew is new memory, possibly under the same path
        if self._taken_memory is None or (self._taken_memory[0], len(self._taken_memory[1])) != (path, size):
            descriptor = os.open(path, os.O_RDWR)
            try:
                self._taken_memory = path, _map(descriptor, size)
            finally:
                os.close(descriptor)
        return _views(self._taken_memory[1], entries)


class SharedWeights:
    """Makes the trainer's weights readable for ``num_workers`` workers in other processes of this machine."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self.by_handles = torch.cuda.is_available()
        """Weights on CUDA go by handles, not through host memory."""
        self._descriptor = -1
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def parcel(self, weights: Mapping[str, Tensor]) -> Parcel:
        """Return a parcel for ``WeightReceiver.take_weights``; it is valid until the next call."""
        like = like_of(weights)
        if self.by_handles and like is weights and all(tensor.is_cuda for tensor in weights.values()):
            tensors = {name: tensor.detach() for name, tensor in weights.items()}
            # torch registers CUDA handles with this pickler; a handle counts its readers: one copy per reader
            return ["cuda", [bytes(ForkingPickler.dumps(tensors)) for _ in range(self._num_workers)]]
        entries: list[list[Any]] = []  # name, type, shape, first byte
        size = 0
        for name, tensor in like.items():
            entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size])
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._memory):
            self.close()
            # memory without a name: no limit as on /dev/shm, and freed with the processes that map it
            self._descriptor = os.memfd_create("weights")
            os.ftruncate(self._descriptor, size)
            self._memory = _map(self._descriptor, size)
        views = _views(self._memory, entries)
        for names in buckets_of(weights):
            torch._foreach_copy_([views[name] for name in names], [weights[name].detach() for name in names])
        return ["memory", f"/proc/{os.getpid()}/fd/{self._descriptor}", len(self._memory), entries]

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _views(memory: Tensor, entries: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    found = {}
    for name, type_name, shape, begin in entries:
        dtype: torch.dtype = getattr(torch, type_name)
        found[name] = memory[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return found
