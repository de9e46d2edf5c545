"""Trials: what a model can compute is tried on a few tokens where none of its attributes tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

TRIAL_ERRORS = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
"""What a model raises that cannot compute what is tried."""


def trial_tolerance(model: Any) -> float:
    """Return the largest difference of logits or log-probabilities that counts as rounding."""
    return 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode, then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
