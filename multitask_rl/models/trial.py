"""Trials: what a model can compute is tried on a few tokens where none of its attributes tells."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

TRIAL_ERRORS = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
"""Errors of a model that cannot compute what is tried."""


def trial_tolerance(model: Any) -> float:
    """Return the largest difference of logits or log-probabilities that counts as rounding."""
    return 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1


def trial_ids(model: Any, numbers: Sequence[int]) -> list[int]:
    """Return ids of tokens from the middle of the vocabulary.

    The first ids are often special tokens that no text contains: a chat model may amplify rounding there by a
    factor of a hundred (SmolLM2), so that a trial fails with some weights and not with others.
    """
    size = int(model.config.get_text_config().vocab_size)
    return [(size // 2 + number) % size for number in numbers]


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
