"""Activations in host memory between the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ActivationOffload"]


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves of a forward under this context waits in host memory; weights stay where they are.

    ``torch.autograd.graph.save_on_cpu`` would send the weights to the host as well, once per layer and pass.

    Args:
        model: its weights are left alone.
    """

    def __init__(self, model: Any) -> None:
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            if tensor.untyped_storage().data_ptr() in weights:
                return tensor.device, tensor
            saved = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return tensor.device, saved.copy_(tensor)

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=True)

        super().__init__(pack, unpack)
