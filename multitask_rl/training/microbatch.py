"""Cutting samples into micro-batches of bounded size: sorted by length, or packed without padding.

Axes: ``B`` samples of the micro-batch, ``S`` its width (prompt + response), ``N`` its response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multitask_rl.errors import TrainingError

__all__ = ["MicroBatch", "build_microbatches", "make_microbatch", "padding_share"]


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Token tensors of some samples, ready for one forward."""

    indices: list[int]
    """[B] position of each sample in the list that was cut."""
    input_ids: Tensor
    """[B, S] right-padded, or [1, S] packed."""
    position_ids: Tensor
    """Same shape; packed samples start again at 0."""
    row: Tensor
    """[N] row of ``input_ids`` that predicts each response token."""
    column: Tensor
    """[N] column of ``input_ids`` that predicts it."""
    targets: Tensor
    """[N] the response tokens, samples in the order of ``indices``."""
    sequence: Tensor
    """[N] which sample each token belongs to: 0 .. B - 1."""
    num_tokens: int
    """Prompt and response tokens, padding left out."""

    def to(self, device: torch.device) -> MicroBatch:
        """Move the tensors."""
        return MicroBatch(
            indices=self.indices,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            row=self.row.to(device),
            column=self.column.to(device),
            targets=self.targets.to(device),
            sequence=self.sequence.to(device),
            num_tokens=self.num_tokens,
        )


def build_microbatches(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    layout: str,
    pad_token_id: int,
) -> list[MicroBatch]:
    """Cut samples into micro-batches of at most ``max_tokens`` tokens, padding counted.

    A single longer sample gets a micro-batch of its own. Samples without a response token are left out
    (there is nothing to learn from).

    Args:
        prompts: [B] lists of ids, each of at least one token.
        responses: [B] lists of ids.
        max_tokens: token budget of one micro-batch.
        layout: ``bucketed`` (sorted by length, right-padded: causal attention never sees padding on the
            right, so no mask is needed) or ``packed``.
        pad_token_id: any valid id.
    """
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    order = sorted((i for i in range(len(lengths)) if responses[i]), key=lambda i: (lengths[i], i))
    batches: list[list[int]] = []
    used = 0
    for i in order:
        # ascending order: in a padded batch every row becomes as wide as the newest
        need = lengths[i] * (len(batches[-1]) + 1) if batches and layout == "bucketed" else used + lengths[i]
        if not batches or need > max_tokens:
            batches.append([])
            need = lengths[i]
        batches[-1].append(i)
        used = need
    return [make_microbatch(i, prompts, responses, layout=layout, pad_token_id=pad_token_id) for i in batches]


def make_microbatch(
    indices: list[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    layout: str,
    pad_token_id: int,
) -> MicroBatch:
    """Return the micro-batch of exactly the samples ``indices``, in their order."""
    make = _padded if layout == "bucketed" else _packed
    return make(indices, prompts, responses, pad_token_id)


def padding_share(batches: Sequence[MicroBatch]) -> float:
    """Return the fraction of computed tokens that are padding."""
    cells = sum(b.input_ids.numel() for b in batches)
    return 1.0 - sum(b.num_tokens for b in batches) / cells if cells else 0.0


def _padded(
    indices: list[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int
) -> MicroBatch:
    width = max(len(prompts[i]) + len(responses[i]) for i in indices)
    ids = torch.full((len(indices), width), pad)
    rows, columns = [], []
    for row, i in enumerate(indices):
        prompt, response = prompts[i], responses[i]
        _check(prompt)
        ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
        rows.append(torch.full((len(response),), row))
        columns.append(torch.arange(len(prompt) - 1, len(prompt) - 1 + len(response)))
    row_index, column = torch.cat(rows), torch.cat(columns)
    return MicroBatch(
        indices=indices,
        input_ids=ids,
        position_ids=torch.arange(width).expand(len(indices), width),
        row=row_index,
        column=column,
        targets=ids[row_index, column + 1],
        sequence=row_index,
        num_tokens=sum(len(prompts[i]) + len(responses[i]) for i in indices),
    )


def _packed(
    indices: list[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int
) -> MicroBatch:
    ids: list[int] = []
    positions, columns, sequences = [], [], []
    for number, i in enumerate(indices):
        prompt, response = prompts[i], responses[i]
        _check(prompt)
        start = len(ids)
        ids.extend((*prompt, *response))
        positions.append(torch.arange(len(ids) - start))
        first = start + len(prompt) - 1
        columns.append(torch.arange(first, first + len(response)))
        sequences.append(torch.full((len(response),), number))
    input_ids, column = torch.tensor([ids]), torch.cat(columns)
    return MicroBatch(
        indices=indices,
        input_ids=input_ids,
        position_ids=torch.cat(positions).unsqueeze(0),
        row=torch.zeros_like(column),
        column=column,
        targets=input_ids[0, column + 1],
        sequence=torch.cat(sequences),
        num_tokens=len(ids),
    )


def _check(prompt: Sequence[int]) -> None:
    if not prompt:
        raise TrainingError("a training sample has an empty prompt; every response needs a token before it")
