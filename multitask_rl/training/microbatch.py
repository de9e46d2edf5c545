"""Cutting samples into micro-batches of bounded size: with shared prompts, sorted by length, or packed.

Axes: ``B`` samples of the micro-batch, ``S`` its width (prompt + response), ``N`` its response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multitask_rl.errors import TrainingError
from multitask_rl.training.shared_prompt import BLOCK_CELLS, SharedPart, cut_by_length, cut_prompts, make_part

__all__ = ["MicroBatch", "build_microbatches", "make_microbatch", "padding_share"]


FORWARD_CELLS = 256
"""What a micro-batch of its own costs, in tokens of padding."""


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Token tensors of some samples, ready for one forward."""

    indices: list[int]
    """[B] position of each sample in the list that was cut; none: the pass is made for other ranks alone."""
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
    """Tokens computed, padding left out."""
    shared: list[SharedPart] = field(default_factory=list)
    """Layout ``shared``: what to compute instead of ``input_ids``, which is then empty (as are
    ``position_ids``, ``row`` and ``column``)."""

    @property
    def num_cells(self) -> int:
        """Tokens computed, padding counted."""
        return self.input_ids.numel() + sum(part.num_cells for part in self.shared)

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
            shared=[part.to(device) for part in self.shared],
        )


def build_microbatches(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    layout: str,
    pad_token_id: int,
    device_type: str = "cpu",
    one_pass: bool = False,
) -> list[MicroBatch]:
    """Cut samples into micro-batches of at most ``max_tokens`` tokens, padding counted.

    A single longer sample gets a micro-batch of its own. Samples without a response token are left out
    (there is nothing to learn from).

    Args:
        prompts: [B] lists of ids, each of at least one token.
        responses: [B] lists of ids.
        max_tokens: token budget of one micro-batch.
        layout: ``shared`` (samples of similar prompts are one sequence in which a group's prompt stands once,
            see ``shared_prompt.py``),
            ``bucketed`` (sorted by length, right-padded: causal attention never sees padding on the right, so
            no mask is needed) or ``packed``.
        pad_token_id: any valid id.
        device_type: where they will be computed; another kind than a CPU gets fewer, larger blocks.
        one_pass: no micro-batch may take more than one pass through the model.
    """
    if layout == "shared":
        block_cells = BLOCK_CELLS.get(device_type, BLOCK_CELLS["cuda"])
        return _shared_microbatches(prompts, responses, max_tokens, pad_token_id, block_cells, one_pass)
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    order = sorted((i for i in range(len(lengths)) if responses[i]), key=lambda i: (lengths[i], i))
    batches: list[list[int]] = []
    for similar in _similar(order, lengths) if layout == "bucketed" else [order]:
        used = 0
        for number, i in enumerate(similar):
            # ascending order: in a padded batch every row becomes as wide as the newest
            need = (
                lengths[i] * (len(batches[-1]) + 1) if number and layout == "bucketed" else used + lengths[i]
            )
            if not number or need > max_tokens:
                batches.append([])
                need = lengths[i]
            batches[-1].append(i)
            used = need
    return [make_microbatch(i, prompts, responses, layout=layout, pad_token_id=pad_token_id) for i in batches]


def _similar(order: list[int], lengths: list[int]) -> list[list[int]]:
    """Cut samples in ascending order of length where padding would cost more than another forward."""
    sizes = cut_by_length([lengths[i] for i in order], own_cells=FORWARD_CELLS)
    samples = iter(order)
    return [[next(samples) for _ in range(size)] for size in sizes]


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
    cells = sum(b.num_cells for b in batches)
    return 1.0 - sum(b.num_tokens for b in batches) / cells if cells else 0.0


def _shared_microbatches(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    max_tokens: int,
    pad: int,
    block_cells: int,
    one_pass: bool,
) -> list[MicroBatch]:
    for prompt in prompts:
        _check(prompt)
    indices = [i for i in range(len(prompts)) if responses[i]]
    batches: list[list[tuple[SharedPart, list[int]]]] = []
    used = 0
    for piece in cut_prompts(prompts, responses, indices, max_tokens, block_cells):
        made = make_part(piece, prompts, responses, pad, block_cells)
        if not batches or one_pass or used + made[0].budget > max_tokens:
            batches.append([])
            used = 0
        batches[-1].append(made)
        used += made[0].budget
    return [_shared(parts, responses) for parts in batches]


def _shared(parts: list[tuple[SharedPart, list[int]]], responses: Sequence[Sequence[int]]) -> MicroBatch:
    order = [i for _, own in parts for i in own]
    sizes = torch.tensor([len(responses[i]) for i in order])
    empty = torch.empty(0, dtype=torch.long)
    return MicroBatch(
        indices=order,
        input_ids=empty,
        position_ids=empty,
        row=empty,
        column=empty,
        targets=torch.tensor([token for i in order for token in responses[i]]),
        sequence=torch.arange(len(order)).repeat_interleave(sizes),
        num_tokens=sum(part.num_tokens for part, _ in parts),
        shared=[part for part, _ in parts],
    )


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
