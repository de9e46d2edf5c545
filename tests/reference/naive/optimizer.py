"""AdamW with gradients scaled down to a norm, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .settings import Settings


def schedule(settings: Settings, step: int) -> float:
    """Factor of the learning rate at ``step``: linear warm-up, then constant or down to 0."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.max_steps - settings.warmup_steps))
    return {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[settings.schedule]


@dataclass
class AdamW:
    """Decoupled weight decay; a parameter without a gradient is left as it is."""

    settings: Settings
    moments: dict[str, tuple[int, Tensor, Tensor]] = field(default_factory=dict)

    def fit(self, weights: Mapping[str, Tensor]) -> None:
        """Forget parameters that are gone; those of new rows of a parameter begin at 0."""
        for name in list(self.moments):
            count, *moments = self.moments.pop(name)
            if name in weights:
                number = len(weights[name])
                first, second = (_with_rows(moment, number) for moment in moments)
                self.moments[name] = count, first, second

    def step(
        self, weights: dict[str, Tensor], gradients: dict[str, Tensor], rate: float
    ) -> dict[str, Tensor]:
        """Return the new weights; ``gradients`` as clipped."""
        first_decay, second_decay = self.settings.betas
        result = dict(weights)
        for name, gradient in gradients.items():
            zero = torch.zeros_like(gradient)
            count, first, second = self.moments.get(name, (0, zero, zero))
            count += 1
            first = first_decay * first + (1.0 - first_decay) * gradient
            second = second_decay * second + (1.0 - second_decay) * gradient**2
            self.moments[name] = count, first, second
            mean = first / (1.0 - first_decay**count)
            root = (second / (1.0 - second_decay**count)).sqrt()
            decayed = weights[name] * (1.0 - rate * self.settings.weight_decay)
            result[name] = decayed - rate * mean / (root + self.settings.adam_eps)
        return result


def clipped(settings: Settings, gradients: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Return the gradients scaled down to ``max_grad_norm`` all together, and their norm before."""
    norm = math.sqrt(math.fsum(float(g.square().sum()) for g in gradients.values()))
    limit = settings.max_grad_norm
    factor = min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
    return {name: factor * g for name, g in gradients.items()}, norm


def _with_rows(value: Tensor, number: int) -> Tensor:
    return torch.cat([value[:number], value.new_zeros((max(0, number - len(value)), *value.shape[1:]))])
