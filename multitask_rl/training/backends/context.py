"""Context parallelism: each rank of a context group holds a part of every sequence.

Attention combines the parts (``attention/context.py``); other layers work on single positions. Each rank
scores its own response tokens. The scores are gathered: every rank of the group computes the same loss.

Axes: ``B`` samples, ``N`` response tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from multitask_rl.attention.context import CONTEXT, pieces_of
from multitask_rl.attention.interface import exchange, has_windows, use_attention
from multitask_rl.errors import ConfigError
from multitask_rl.models.sampling import TokenMask
from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.forward import TokenOutputs, forward_tokens, split_head
from multitask_rl.training.microbatch import MicroBatch
from multitask_rl.training.runner import Passes


@dataclass(kw_only=True, slots=True)
class Part:
    """The part of a micro-batch's sequences that one rank of a context group computes."""

    batch: MicroBatch
    """The positions and response tokens of this rank."""
    tokens: Tensor
    """[own N] indices of these tokens among the micro-batch's response tokens."""
    most: int
    """The largest number of response tokens of a rank."""
    place: Tensor
    """[N] index of each token among the gathered [C * most]."""


def cut_sequences(batch: MicroBatch, index: int, number: int) -> Part:
    """Return part ``index`` of ``number`` of a ``bucketed`` micro-batch."""
    rows, width = batch.input_ids.shape
    piece = -(-width // (2 * number))
    whole = pad(batch.input_ids, (0, 2 * number * piece - width))
    device = whole.device
    pieces = torch.arange(2 * number, device=device)
    owner_of_piece = torch.minimum(pieces, 2 * number - 1 - pieces)
    owner = owner_of_piece[batch.column // piece]
    counts = torch.bincount(owner, minlength=number)
    order = owner.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device) - (counts.cumsum(0) - counts)[owner[order]]
    tokens = (owner == index).nonzero().squeeze(-1)
    columns = torch.cat([torch.arange(piece, device=device) + p * piece for p in pieces_of(index, number)])
    local = torch.full((2 * number * piece,), -1, device=device)
    local[columns] = torch.arange(len(columns), device=device)
    part = replace(
        batch,
        input_ids=whole[:, columns],
        # a model may have learnt no positions beyond ``width``
        position_ids=columns.clamp(max=width - 1).expand(rows, -1),
        row=batch.row[tokens],
        column=local[batch.column[tokens]],
        targets=batch.targets[tokens],
        sequence=batch.sequence[tokens],
    )
    most = int(counts.max())
    return Part(batch=part, tokens=tokens, most=most, place=owner * most + place)


class ContextPasses(Passes):
    """Passes over parts of sequences; every rank of a context group makes the same calls."""

    settings = "batch.context_ranks"
    layout = "bucketed"

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def attention(self, models: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Return the context in which ``models`` attend over the parts of all ranks of the group."""
        for model in models:
            split_head(model)  # the trial makes forwards without the other ranks
        return use_attention(models, CONTEXT, peers=self._ranks)

    def forward(
        self, model: Any, batch: MicroBatch, *args: Any, mask: TokenMask | None = None, **wants: Any
    ) -> TokenOutputs:
        """Return ``forward_tokens`` of the whole micro-batch; needs the context ``attention``."""
        ranks = self._ranks
        part = cut_sequences(batch, ranks.peer_index, ranks.context)
        own_mask = None if mask is None else mask.select(part.tokens, len(batch.targets))
        out = forward_tokens(model, part.batch, *args, mask=own_mask, **wants)

        def whole(own: Tensor) -> Tensor:
            missing = part.most - len(own)
            even = torch.cat([own, own.new_zeros(missing, *own.shape[1:])]) if missing else own
            # all ranks compute the same loss; each takes the gradient of its own part
            gathered: Tensor = exchange(even, ranks.gather_peers, lambda of_all: of_all[ranks.peer_index])
            return gathered.flatten(0, 1)[part.place]

        parts: Any = {name: None if own is None else whole(own) for name, own in vars(out).items()}
        return TokenOutputs(**parts)


def check_windows(model: Any) -> None:
    """Raise a ConfigError if ``model`` has sliding-window layers: no rank has a whole sequence."""
    if has_windows(model):
        raise ConfigError(
            f"{ContextPasses.settings}: {type(model).__name__} cannot be computed in parts: it attends "
            "through windows; set batch.context_ranks=1"
        )
