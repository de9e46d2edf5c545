"""Gradients as short vectors: scalar products of the tasks' gradients without a copy of each gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

SIZE = 65_521
"""Cells of a sketch. A prime: no stride of a weight matrix puts its elements into few cells."""
_ROWS = 32
"""Rows of ``SIZE`` numbers that one row of random int32 gives their signs."""


@torch.no_grad()
def sketch_gradient(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a linear projection of the gradient of ``parameters``: [SIZE], float64, on the CPU.

    All elements are numbered in order. Element ``i`` is added to cell ``i mod SIZE`` with a random sign that
    depends on its place alone. Up to ``SIZE`` elements the projection keeps scalar products exactly. Of more
    it keeps them on average; the standard error of a cosine is at most ``sqrt(2 / SIZE)`` = 0.006.

    Source: Charikar, Chen and Farach-Colton, "Finding frequent items in data streams" (count sketch), 2002.
    """
    device = parameters[0].device
    generator, total = torch.Generator(device), torch.zeros(SIZE, dtype=torch.float64, device=device)
    bits = torch.arange(_ROWS, dtype=torch.int32, device=device).unsqueeze(-1)
    start = 0
    for number, parameter in enumerate(parameters):
        first, start = start, (start + parameter.numel()) % SIZE
        if parameter.grad is None:
            continue
        generator.manual_seed(number)
        flat = parameter.grad.to(device=device, dtype=torch.float32).reshape(-1)
        flat = nn.functional.pad(flat, (first, -(first + len(flat)) % SIZE))
        for rows in torch.split(flat.view(-1, SIZE), _ROWS):
            drawn = torch.empty(SIZE, dtype=torch.int32, device=device)
            drawn.random_(-(2**31), 2**31 - 1, generator=generator)
            signs = (drawn << bits[: len(rows)]) & -(2**31)
            total += (rows.view(torch.int32) ^ signs).view(torch.float32).sum(0)
    return total.cpu()


def compare_gradients(sketches: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return ``grad_norm`` and ``cosine/<other>`` of each task from the sketch of its gradient.

    A task whose gradient is 0 has no cosine.
    """
    norms = {name: float(own.norm()) for name, own in sketches.items()}
    found = {name: {"grad_norm": norm} for name, norm in norms.items()}
    moved = [name for name, norm in norms.items() if norm > 0.0]
    for name in moved:
        for other in moved:
            if other != name:
                dot = float(sketches[name] @ sketches[other])
                found[name][f"cosine/{other}"] = dot / (norms[name] * norms[other])
    return found
