"""Pickles of objects without their tensors, for learner ranks.

The pickle holds a number for every tensor; the values follow over the ranks' own connection. Tensors that
share memory here (tied weights) share it there.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[Any, int] = {}

    def reducer_override(self, found: Any) -> Any:
        # pickle refuses closures; this hook of transformers (gradient checkpointing) is one, over nothing
        if getattr(found, "__qualname__", "").endswith("<locals>.make_inputs_require_grads"):
            return partial, (_require_gradient,)
        return NotImplemented

    def persistent_id(self, found: Any) -> Any:
        if not isinstance(found, Tensor):
            return None
        same = (found.data_ptr(), found.shape, found.stride(), found.dtype, found.device)
        key = same if found.numel() else id(found)
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(found)
        is_parameter = isinstance(found, nn.Parameter)
        place = (self._numbers[key], tuple(found.shape), found.dtype, str(found.device))
        return (*place, is_parameter, found.requires_grad and is_parameter)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, places: Mapping[str, str], absent: Collection[int]) -> None:
        super().__init__(file)
        self._places, self._absent = places, absent
        self.tensors: dict[int, Tensor] = {}
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, found: Any) -> Any:
        number, shape, dtype, device, is_parameter, wants_gradient = found
        if number not in self.tensors:
            place = "meta" if number in self._absent else self._places.get(device, device)
            self.tensors[number] = torch.zeros(shape, dtype=dtype, device=place)
        if not is_parameter:
            return self.tensors[number]
        if number not in self._parameters:
            self._parameters[number] = nn.Parameter(self.tensors[number], requires_grad=wants_gradient)
        return self._parameters[number]


def _require_gradient(module: nn.Module, given: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def freeze(thing: Any) -> tuple[bytes, list[Tensor]]:
    """Return ``thing`` pickled without its tensors, and the tensors, each memory once.

    Raises:
        TypeError, AttributeError, pickle.PicklingError: a part of it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(thing)
    return file.getvalue(), pickler.tensors


def thaw(frozen: bytes, places: Mapping[str, str], absent: Collection[int] = ()) -> tuple[Any, list[Tensor]]:
    """Return the argument of ``freeze`` with tensors of zeros, and these tensors in the order of ``freeze``.

    Args:
        frozen: from ``freeze``; unpickling can run code, so the sender must be trusted.
        places: device at the sender -> device here; other devices stay the same.
        absent: numbers of tensors that get no memory (torch's device ``meta``).
    """
    unpickler = _Unpickler(io.BytesIO(frozen), places, absent)
    thing = unpickler.load()
    return thing, [unpickler.tensors[number] for number in range(len(unpickler.tensors))]
