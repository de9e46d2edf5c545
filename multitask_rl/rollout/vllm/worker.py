"""What vLLM's workers get of ours: they take the trainer's weights, wherever they run.

A worker in the trainer's process reads the trainer's tensors. Workers in processes of their own (tensor
parallel) map memory instead: one anonymous block that the trainer fills once per update and every rank
cuts its shards from; on CUDA the tensors themselves, by their interprocess handles, where those can be
opened. No file, and nothing but names and places goes through vLLM's queue.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from multitask_rl.rollout.vllm.plan import WeightPlan, record_plan, reload

__all__ = ["SharedWeights", "WeightReceiver"]

_ALIGNMENT = 64
"""Bytes; any element size divides it."""

Parcel = list[Any]
"""Weights on their way, in plain values: ``["memory", path, bytes, entries]`` or ``["cuda", pickles]``."""


class WeightReceiver:
    """Mixed into vLLM's worker class (``worker_extension_cls``), which has everything that is not here."""

    _taken_plan: WeightPlan | None = None
    _taken_memory: tuple[str, Tensor] | None = None

    def stay_eager(self) -> None:
        """Keep ``torch.compile`` out of this process: one kernel would cost up to 14 s."""
        torch.compiler.set_stance("force_eager")

    def take_weights(self, how: str, weights: Mapping[str, Tensor] | Parcel) -> str:
        """Load ``weights``.

        Args:
            how: ``reload`` (vLLM's own way), ``record`` (the same, keeping a plan), ``copy`` (by the plan).
            weights: tensors, or a parcel of ``SharedWeights``.

        Returns:
            Why ``record`` made no plan; else nothing.
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
        """Return why the parcel cannot be opened here, or nothing."""
        try:
            self._open_parcel(parcel)
        except Exception as error:  # noqa: BLE001 - whatever it is, the trainer has another way
            return f"{type(error).__name__}: {error}"
        return ""

    def _open_parcel(self, parcel: Parcel) -> Mapping[str, Tensor]:
        if parcel[0] == "cuda":
            tensors: Mapping[str, Tensor] = pickle.loads(parcel[1][getattr(self, "rank", 0)])
            return tensors
        _, path, size, entries = parcel
        # what grew is new memory, though its path may be the old one's
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
        """Weights on CUDA are lent, not copied to host memory first."""
        self._descriptor = -1
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def parcel(self, weights: Mapping[str, Tensor]) -> Parcel:
        """Return what ``WeightReceiver.take_weights`` opens; it holds until the next call."""
        if self.by_handles and all(tensor.is_cuda for tensor in weights.values()):
            tensors = {name: tensor.detach() for name, tensor in weights.items()}
            # torch registers CUDA handles with this pickler; a handle counts its readers: one copy per reader
            return ["cuda", [bytes(ForkingPickler.dumps(tensors)) for _ in range(self._num_workers)]]
        entries, size = _places(weights)
        if size > len(self._memory):
            self.close()
            # memory without a name: not bounded as /dev/shm is, and gone with the processes that map it
            self._descriptor = os.memfd_create("weights")
            os.ftruncate(self._descriptor, size)
            self._memory = _map(self._descriptor, size)
        views = _views(self._memory, entries)
        torch._foreach_copy_([views[name] for name in weights], [t.detach() for t in weights.values()])
        return ["memory", f"/proc/{os.getpid()}/fd/{self._descriptor}", len(self._memory), entries]

    def close(self) -> None:
        """Give the memory up. Idempotent."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _map(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _places(weights: Mapping[str, Tensor]) -> tuple[list[list[Any]], int]:
    """Return per weight its name, type, shape and first byte, and the bytes of all."""
    entries, end = [], 0
    for name, tensor in weights.items():
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return entries, end


def _views(memory: Tensor, entries: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
    found = {}
    for name, type_name, shape, begin in entries:
        dtype: torch.dtype = getattr(torch, type_name)
        found[name] = memory[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return found
