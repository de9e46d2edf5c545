"""Rows of the vocabulary; at its end the control tokens that the tasks of a run have needed so far."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["control_ids", "control_names", "fill_rows", "fit_rows", "fit_weights", "vocabulary_rows"]

_CONTROL = re.compile(r"<\|reward_\d+\|>")


def control_names(number: int) -> list[str]:
    """Return the first ``number`` control tokens."""
    return [f"<|reward_{i}|>" for i in range(number)]


def control_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return name -> id of the control tokens that ``tokenizer`` has."""
    return {name: int(i) for name, i in tokenizer.get_vocab().items() if _CONTROL.fullmatch(name)}


def vocabulary_rows(model: PreTrainedModel) -> dict[str, int]:
    """Return name -> number of rows of the weights with one row per token."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    own = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.shape[0] for name, p in named if id(p) in own}


def fit_rows(saved: Tensor, number: int, *, blank: bool = False) -> Tensor:
    """Return ``saved`` [V, ...] with ``number`` rows; new rows are the mean of the old, or 0 if ``blank``."""
    missing = number - saved.shape[0]
    if missing <= 0:
        return saved[:number]
    row = torch.zeros_like(saved[0]) if blank else saved.mean(dim=0)
    return torch.cat([saved, row.expand(missing, *saved.shape[1:])])


def fit_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], *, at_least: int | None = None
) -> dict[str, Tensor]:
    """Return ``weights`` with the model's number of rows per token.

    Args:
        model: has its final vocabulary.
        weights: by name.
        at_least: a weight with fewer rows, or more than the model, belongs to another vocabulary and is
            unchanged; None: every number of rows fits.
    """
    fitted = dict(weights)
    for name, number in vocabulary_rows(model).items():
        if name in weights and (at_least is None or at_least <= weights[name].shape[0] <= number):
            fitted[name] = fit_rows(weights[name], number)
    return fitted


@torch.no_grad()
def fill_rows(model: PreTrainedModel, rows: list[int], num_known: int) -> None:
    """Make ``rows`` of both embeddings the mean of the first ``num_known``."""
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if layer is not None:
            layer.weight[rows] = layer.weight[:num_known].mean(dim=0)
