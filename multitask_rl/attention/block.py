"""Attention over many samples packed into one sequence, where responses may share the prefix of a prompt.

Only attention divides the sequence into blocks of rows of similar length. A response reads the keys and
values of its prompt from the same forward. The blocks travel with the attention mask.

Axes: ``M`` tokens of the sequence, padding counted; ``U`` prompts, ``P`` the longest prefix; ``R`` rows of a
block, ``T`` its width; ``H`` heads, ``K`` key-value heads, ``D`` head width.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from multitask_rl.attention.float32 import attend_float32, score_dtype
from multitask_rl.attention.interface import check_options

BLOCKS = "multitask_rl_blocks"

MASK_CELLS = 2**25
"""Queries times keys of all biases kept for the layers, and of any other bias: 128 MiB each."""


@dataclass(kw_only=True, slots=True)
class Block:
    """Rows of similar length, right-padded: ``R * T`` tokens of the sequence."""

    rows: int
    """R"""
    width: int
    """T"""
    prompt: Tensor | None = None
    """[R] index of the prefix that each row continues; None: the rows are whole samples."""


class Blocks:
    """All blocks of a sequence: the ``prefixes`` of prompts, then the ``responses`` and whole samples.

    Made for one forward; the layers share the biases. ``prefix_lengths`` [U] are those of all prefixes, in
    order.
    """

    def __init__(self, prefixes: list[Block], prefix_lengths: Tensor, responses: list[Block]) -> None:
        self.prefixes = prefixes
        self.responses = responses
        self.sizes = [b.rows * b.width for b in (*prefixes, *responses)]
        self._longest = max((b.width for b in prefixes), default=0)
        columns = torch.arange(self._longest, device=prefix_lengths.device)
        self._seen = columns < prefix_lengths.unsqueeze(-1)
        """[U, P] bool: a token of the prompt, not padding."""
        self.even = bool(self._seen.all())
        """All prompts are equally long: all rows share one bias."""
        self._biases: dict[tuple[int, torch.dtype], Tensor] = {}
        self.slice_sizes: list[int] = []
        """By response block: queries to compute at once; 0 = all, with a bias that is kept for all layers."""
        room = MASK_CELLS
        for block in responses:
            cells = (1 if self.even else block.rows) * (self._longest + block.width)
            is_kept = block.prompt is not None and cells * block.width <= room
            self.slice_sizes.append(0 if is_kept else max(1, MASK_CELLS // cells))
            room -= cells * block.width if is_kept else 0

    def join(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return [U, P, K, D] of the prefixes' ``parts`` [R * T, K, D]; None without prefixes."""
        if not self._longest:
            return None
        own = [
            pad(_rows(part, b), (0, 0, 0, 0, 0, self._longest - b.width))
            for part, b in zip(parts, self.prefixes, strict=False)
        ]
        return own[0] if len(own) == 1 else torch.cat(own)

    def bias(self, number: int, queries: range, dtype: torch.dtype) -> Tensor:
        """Return [R or 1, 1, queries, P + queries.stop], the bias of ``queries`` of a response block."""
        known = self._biases.get((number, dtype))
        if known is not None:
            return known
        block, device = self.responses[number], self._seen.device
        columns = torch.arange(queries.stop, device=device)
        own = (columns <= columns[queries.start :, None])[None, None]
        prompt = self._seen[:1] if self.even else self._seen[block.prompt]
        prompt = prompt[:, None, None].expand(-1, 1, len(queries), -1)
        visible = torch.cat([prompt, own.expand(len(prompt), -1, -1, -1)], dim=-1)
        # CUDA's kernel reads rows that begin at multiples of 8; other biases torch copies for every layer
        width = visible.shape[-1]
        rows = torch.zeros(*visible.shape[:-1], -(-width // 8) * 8, dtype=dtype, device=device)
        bias = rows[..., :width].masked_fill_(~visible, float("-inf"))
        if not self.slice_sizes[number]:
            self._biases[number, dtype] = bias
        return bias


_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, Blocks] = weakref.WeakValueDictionary()
"""Number in a mask -> its blocks."""


def mask_of(blocks: Blocks, model: Any) -> Tensor:
    """Return an empty attention mask by whose shape ``block_attention`` finds ``blocks``.

    Its third axis is the number of ``blocks`` in ``_living``. A shape survives the checkpointing and
    offloading of a layer, and is read without waiting for a device. ``model`` passes a mask of four axes on
    unchanged.
    """
    number = next(_numbers)
    _living[number] = blocks
    return torch.empty(1, 1, number, 0, device=next(model.parameters()).device)


def keep_until_backward(blocks: Blocks, outputs: Sequence[Tensor]) -> None:
    """Keep ``blocks`` as long as the graph of ``outputs``.

    With gradient checkpointing the backward pass computes layers again and looks ``blocks`` up.
    """
    for output in outputs:
        node: Any = output.grad_fn
        if node is not None:
            node.metadata[BLOCKS] = blocks


def block_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend within blocks and to prompts (``transformers``' attention interface).

    ``query`` is [1, H, M, D], ``key`` and ``value`` are [1, K, M, D]. With a mask that is not from
    ``mask_of`` this is ``attend_float32``.

    Raises:
        NotImplementedError: see ``check_options``.
    """
    if attention_mask is None or attention_mask.dim() != 4 or attention_mask.shape[3]:
        return attend_float32(module, query, key, value, attention_mask, **kwargs)
    blocks = _living.get(attention_mask.shape[2])
    if blocks is None or sum(blocks.sizes) != query.shape[2]:
        raise RuntimeError("attention in blocks: the mask names the blocks of another sequence")
    scaling: float | None = kwargs.pop("scaling", None)
    check_options(kwargs, "in blocks")
    queries, keys, values = (
        torch.split(states.squeeze(0).transpose(0, 1), blocks.sizes) for states in (query, key, value)
    )
    first = len(blocks.prefixes)
    prompt_keys, prompt_values = blocks.join(keys[:first]), blocks.join(values[:first])
    outputs = []
    for number, block in enumerate((*blocks.prefixes, *blocks.responses)):
        if not block.width:  # behind prompts of one token; transformers 5.23 fails without queries
            continue
        asked, seen, read = (
            _rows(states[number], block).transpose(1, 2) for states in (queries, keys, values)
        )
        if block.prompt is None or prompt_keys is None or prompt_values is None:
            outputs.append(attend_float32(module, asked, seen, read, None, scaling=scaling)[0])
            continue
        seen = torch.cat([prompt_keys[block.prompt].transpose(1, 2), seen], dim=2)
        read = torch.cat([prompt_values[block.prompt].transpose(1, 2), read], dim=2)
        outputs.append(_continue(module, asked, seen, read, blocks, number - first, scaling))
    return torch.cat([out.flatten(0, 1) for out in outputs]).unsqueeze(0), None


def _continue(
    module: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, number: int, scaling: float | None
) -> Tensor:
    """Return [R, T, H, D] of a block's rows; keys and values [R, K, P + T, D] begin with their prompts."""
    width, dtype = query.shape[2], score_dtype(query, key.shape[2])

    def attend(query: Tensor, start: int, stop: int) -> Tensor:
        end = key.shape[2] - width + stop
        bias = blocks.bias(number, range(start, stop), dtype)
        return attend_float32(module, query, key[:, :, :end], value[:, :, :end], bias, scaling=scaling)[0]

    size = blocks.slice_sizes[number]
    if not size:
        return attend(query, 0, width)
    # the backward pass makes the bias of each slice again: it is not kept
    slices = [
        checkpoint(
            attend,
            query[:, :, start : start + size],
            start,
            min(width, start + size),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, width, size)
    ]
    return torch.cat(slices, dim=1)


def _rows(states: Tensor, block: Block) -> Tensor:
    """Return [R, T, heads, D] of ``states`` [R * T, heads, D]."""
    return states.view(block.rows, block.width, *states.shape[1:])


AttentionInterface.register(BLOCKS, block_attention)
AttentionMaskInterface.register(BLOCKS, sdpa_mask)
