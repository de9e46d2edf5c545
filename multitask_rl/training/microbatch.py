"""Cuts samples into micro-batches of bounded size: with shared prompts, sorted by length, or packed.

Axes: ``B`` samples of the micro-batch, ``S`` its width (prompt + response), ``N`` its response tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from multitask_rl.errors import TrainingError
from multitask_rl.models.trial import TRIAL_ERRORS, evaluating, trial_ids, trial_tolerance
from multitask_rl.training.shared_prompt import BLOCK_CELLS, SharedPart, cut_by_length, cut_prompts, make_part

logger = logging.getLogger(__name__)

FORWARD_CELLS = 256
"""Cost of one more micro-batch, in tokens of padding."""


@dataclass(kw_only=True)
class MicroBatch:
    """Token tensors of some samples, ready for one forward."""

    indices: list[int]
    """[B] position of each sample in the list that was cut; empty: an idle pass beside other ranks."""
    input_ids: Tensor
    """[B, S] right-padded, or [1, S] packed."""
    position_ids: Tensor
    """Same shape; each packed sample starts at 0."""
    row: Tensor
    """[N] row of ``input_ids`` that predicts each response token."""
    column: Tensor
    """[N] column of ``input_ids`` that predicts it."""
    targets: Tensor
    """[N] the response tokens, samples in the order of ``indices``."""
    sequence: Tensor
    """[N] sample of each token: 0 .. B - 1."""
    num_tokens: int
    """Computed tokens without padding."""
    shared: list[SharedPart] = field(default_factory=list)
    """Layout ``shared``: computed instead of ``input_ids``; ``input_ids``, ``position_ids``, ``row`` and
    ``column`` are then empty."""

    @property
    def num_cells(self) -> int:
        """Computed tokens with padding."""
        return self.input_ids.numel() + sum(part.input_ids.numel() for part in self.shared)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy with its tensors on ``device``."""
        moved: Any = {name: own.to(device) for name, own in vars(self).items() if isinstance(own, Tensor)}
        return replace(self, **moved, shared=[part.to(device) for part in self.shared])


def build_microbatches(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int] | None] | None = None,
    *,
    max_tokens: int,
    layout: str,
    pad_token_id: int,
    device_type: str = "cpu",
    one_pass: bool = False,
) -> list[MicroBatch]:
    """Cut samples into micro-batches of at most ``max_tokens`` tokens, padding counted.

    A single longer sample gets a micro-batch of its own. Samples without a response token are left out.

    Args:
        prompts: [B] lists of ids, each of at least one token.
        responses: [B] lists of ids; the last of each is sampled.
        sampled: [B] positions of the sampled tokens in each response, ascending; None = all. The others are
            context: they are computed and have no outputs.
        max_tokens: token budget of one micro-batch.
        layout: ``shared`` (samples of similar prompts are one sequence that holds a group's prompt once, see
            ``shared_prompt.py``), ``bucketed`` (sorted by length and right-padded: causal attention needs no
            mask for padding on the right) or ``packed``.
        pad_token_id: any valid id.
        device_type: where they will be computed; devices other than CPUs get fewer, larger blocks.
        one_pass: layout ``shared``: each part (``cut_prompts``) is a micro-batch, which takes one pass.
    """
    if layout == "shared":
        _check(prompts)
        block_cells = BLOCK_CELLS.get(device_type, BLOCK_CELLS["cuda"])
        indices = [i for i in range(len(prompts)) if responses[i]]
        members: list[list[tuple[SharedPart, list[int]]]] = []
        used = 0
        for piece, cells in cut_prompts(prompts, responses, indices, max_tokens, block_cells):
            if not members or one_pass or used + cells > max_tokens:
                members.append([])
                used = 0
            members[-1].append(make_part(piece, prompts, responses, pad_token_id, block_cells, sampled))
            used += cells
        empty = torch.empty(0, dtype=torch.long)
        result = []
        for parts in members:
            order = [i for _, own in parts for i in own]
            targets = [torch.tensor(responses[i])[_positions(i, len(responses[i]), sampled)] for i in order]
            counts = torch.tensor([len(own) for own in targets])
            batch = MicroBatch(
                indices=order,
                input_ids=empty,
                position_ids=empty,
                row=empty,
                column=empty,
                targets=torch.cat(targets),
                sequence=torch.arange(len(order)).repeat_interleave(counts),
                num_tokens=sum(part.num_tokens for part, _ in parts),
                shared=[part for part, _ in parts],
            )
            result.append(batch)
        return result
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    order = sorted((i for i in range(len(lengths)) if responses[i]), key=lambda i: (lengths[i], i))
    chunks = [order]
    if layout == "bucketed":
        # cut where padding would cost more than another forward
        cuts = cut_by_length([lengths[i] for i in order], own_cells=FORWARD_CELLS)
        chunks = [order[cut] for cut in cuts]
    batches: list[list[int]] = []
    for similar in chunks:
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
    return [
        make_microbatch(i, prompts, responses, sampled, layout=layout, pad_token_id=pad_token_id)
        for i in batches
    ]


def make_microbatch(
    indices: list[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    sampled: Sequence[Sequence[int] | None] | None = None,
    *,
    layout: str,
    pad_token_id: int,
) -> MicroBatch:
    """Return the micro-batch of exactly the samples ``indices``, in their order."""
    _check(prompts[i] for i in indices)
    lengths = [len(prompts[i]) + len(responses[i]) for i in indices]
    is_packed = layout == "packed"
    width = sum(lengths) if is_packed else max(lengths)
    ids = torch.full((1 if is_packed else len(indices), width), pad_token_id)
    positions = torch.arange(width).repeat(len(ids), 1)
    rows, columns, begin = [], [], 0
    for number, (i, length) in enumerate(zip(indices, lengths, strict=True)):
        row, end = 0 if is_packed else number, begin + length
        ids[row, begin:end] = torch.tensor([*prompts[i], *responses[i]])
        positions[row, begin:end] = torch.arange(length)
        columns.append(end - len(responses[i]) + _positions(i, len(responses[i]), sampled) - 1)
        rows.append(torch.full_like(columns[-1], row))
        begin = end if is_packed else 0
    row_index, column = torch.cat(rows), torch.cat(columns)
    sizes = torch.tensor([len(own) for own in columns])
    return MicroBatch(
        indices=indices,
        input_ids=ids,
        position_ids=positions,
        row=row_index,
        column=column,
        targets=ids[row_index, column + 1],
        sequence=torch.arange(len(indices)).repeat_interleave(sizes),
        num_tokens=sum(lengths),
    )


def _positions(i: int, length: int, sampled: Sequence[Sequence[int] | None] | None) -> Tensor:
    """Return the positions of the sampled tokens of response ``i``: [N] int64."""
    own = None if sampled is None else sampled[i]
    return torch.arange(length) if own is None else torch.tensor(own)


def _check(prompts: Iterable[Sequence[int]]) -> None:
    if not all(prompts):
        raise TrainingError("a training sample has an empty prompt; every response needs a token before it")


@torch.no_grad()
def supports_packing(model: Any) -> bool:
    """Whether ``model`` gives packed samples the same logits as separate ones, tried on a few tokens.

    Models fail that have another state than keys and values (Mamba) or positions of their own (OPT, Bloom),
    or that do not derive their mask from restarted positions.
    """
    config = model.config.get_text_config()
    # chunks count from the start of the row; the trial's few tokens would not show it
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return False
    device = next(model.parameters()).device
    sample = trial_ids(model, range(3, 73, 7))
    befores = [trial_ids(model, row) for row in ([5, 3, 9, 4, 2, 8], [1, 6, 4, 7, 9, 3])]

    def score(*samples: list[int]) -> Tensor:
        """Return the logits at the last sample's tokens, where samples before it would leak."""
        prompts, responses = [s[:1] for s in samples], [s[1:] for s in samples]
        indices = list(range(len(samples)))
        batch = make_microbatch(indices, prompts, responses, layout="packed", pad_token_id=0).to(device)
        given = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        column = batch.column[batch.sequence == len(samples) - 1]
        logits: Tensor = model(**given).logits[0, column].float()
        return logits

    try:
        with evaluating(model):
            alone = score(sample)
            first, second = (score(before, sample) for before in befores)
    except TRIAL_ERRORS as error:
        logger.info("samples cannot be packed: %s", error)
        return False
    exact = next(model.parameters()).dtype == torch.float32
    scale = alone.abs().max().clamp(min=1e-6)
    gap, leak = float((first - alone).abs().max() / scale), float((first - second).abs().max() / scale)
    # first and second have the same shape, so that their rounding hardly differs
    if not (gap <= trial_tolerance(model) and leak <= (1e-5 if exact else 5e-3)):
        logger.info("samples cannot be packed: logits move by %.2g, by the samples before %.2g", gap, leak)
        return False
    return True
