"""Attention over rows that stand one after another in a single sequence, some continuing others' prompts.

Everything but attention looks at single tokens, so many samples go through the model as one sequence, and
only attention takes it apart into blocks of rows of similar length. The rows of a response read the keys and
values of their prompt where those were computed, in the same forward. It is plugged in through
``transformers``' own attention interface, so no model code is replaced: the blocks come along with the
attention mask.

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

from multitask_rl.attention.float32 import FLOAT32, attend_float32, is_float32
from multitask_rl.attention.interface import check_options

__all__ = ["BLOCKS", "Block", "Blocks", "can_attend_in_blocks", "keep_until_backward", "mask_of"]

BLOCKS = "multitask_rl_blocks"

MASK_CELLS = 2**25
"""Queries times keys: of biases that are kept for all layers, and of one made beside; 128 MiB each."""


@dataclass(kw_only=True, slots=True)
class Block:
    """Rows of similar length, right-padded: ``R * T`` tokens of the sequence."""

    rows: int
    """R"""
    width: int
    """T"""
    prompt: Tensor | None = None
    """[R] which prefix each row continues; None: they are whole."""


class Blocks:
    """All blocks of a sequence: the prefixes of prompts, then the responses and whole samples.

    Made for one forward; the layers share the biases.
    """

    def __init__(self, prefixes: list[Block], prefix_lengths: Tensor, responses: list[Block]) -> None:
        """``prefix_lengths`` [U] are those of all rows of ``prefixes``, in order."""
        self.prefixes = prefixes
        self.responses = responses
        self.sizes = [b.rows * b.width for b in (*prefixes, *responses)]
        self._longest = max((b.width for b in prefixes), default=0)
        columns = torch.arange(self._longest, device=prefix_lengths.device)
        self._seen = columns < prefix_lengths.unsqueeze(-1)
        """[U, P] bool: a token of the prompt, not padding."""
        self.even = bool(self._seen.all())
        """All prompts are equally long: one bias does for all rows."""
        self._biases: dict[tuple[int, torch.dtype], Tensor] = {}
        self._kept: list[bool] = []
        """Of each response block, whether its bias is kept for all layers."""
        room = MASK_CELLS
        for block in responses:
            cells = self._num_biases(block) * block.width * (self._longest + block.width)
            self._kept.append(block.prompt is not None and cells <= room)
            room -= cells if self._kept[-1] else 0

    def join(self, parts: Sequence[Tensor]) -> Tensor | None:
        """Return [U, P, K, D] of the prefixes' ``parts`` [R * T, K, D]; None where no row has a prefix."""
        if not self._longest:
            return None
        own = [
            pad(_rows(part, b), (0, 0, 0, 0, 0, self._longest - b.width))
            for part, b in zip(parts, self.prefixes, strict=False)
        ]
        return own[0] if len(own) == 1 else torch.cat(own)

    def _num_biases(self, block: Block) -> int:
        """Return how many rows have a bias of their own."""
        return 1 if self.even else block.rows

    def slice_size(self, number: int) -> int:
        """Return how many queries of response block ``number`` go together; 0: all, their bias is kept."""
        block = self.responses[number]
        if self._kept[number]:
            return 0
        return max(1, MASK_CELLS // (self._num_biases(block) * (self._longest + block.width)))

    def bias(self, number: int, queries: range, dtype: torch.dtype) -> Tensor:
        """Return what is added to the scores of ``queries`` of response block ``number``.

        [R or 1, 1, queries, P + the last of them].
        """
        known = self._biases.get((number, dtype))
        if known is not None:
            return known
        block, device = self.responses[number], self._seen.device
        columns = torch.arange(queries.stop, device=device)
        own = (columns <= columns[queries.start :, None])[None, None]
        prompt = self._seen[:1] if self.even else self._seen[block.prompt]
        prompt = prompt[:, None, None].expand(-1, 1, len(queries), -1)
        visible = torch.cat([prompt, own.expand(len(prompt), -1, -1, -1)], dim=-1)
        bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        if self._kept[number]:
            self._biases[number, dtype] = bias
        return bias


_numbers = itertools.count(1)
_living: weakref.WeakValueDictionary[int, Blocks] = weakref.WeakValueDictionary()
"""Number in a mask -> its blocks."""


def mask_of(blocks: Blocks, model: Any) -> Tensor:
    """Return the attention mask that stands for ``blocks``: four axes, so ``model`` leaves it alone.

    Its shape holds their number: that is still there when a layer saved it to be computed again and hooks
    stored it elsewhere, and no device has to be waited for to read it.
    """
    number = next(_numbers)
    _living[number] = blocks
    return torch.empty(1, 1, number, 0, device=next(model.parameters()).device)


def keep_until_backward(blocks: Blocks, outputs: Sequence[Tensor]) -> None:
    """Let ``blocks`` live as long as the graph behind ``outputs``, whose layers may be computed again."""
    for output in outputs:
        node: Any = output.grad_fn
        if node is not None:
            node.metadata[BLOCKS] = blocks


def _blocks_of(mask: Tensor | None, tokens: int) -> Blocks | None:
    """Return what ``mask`` stands for; None for an ordinary mask."""
    if mask is None or mask.dim() != 4 or mask.shape[3]:
        return None
    blocks = _living.get(mask.shape[2])
    if blocks is None or sum(blocks.sizes) != tokens:
        raise RuntimeError("attention in blocks, but the blocks are no more those of this sequence")
    return blocks


def block_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within blocks and to prompts; an implementation of ``transformers``' attention interface.

    Args:
        module: the attention layer.
        query: [1, H, M, D].
        key: [1, K, M, D].
        value: [1, K, M, D].
        attention_mask: of ``mask_of``; with any other the call goes to ``attend_float32``.
        scaling: factor of the scores; default D ** -0.5.
        kwargs: only what changes nothing, see ``check_options``.

    Raises:
        NotImplementedError: the layer wants something more, such as capped scores, sinks or dropout.
    """
    blocks = _blocks_of(attention_mask, query.shape[2])
    if blocks is None:
        return attend_float32(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    check_options(kwargs, "in blocks")
    queries, keys, values = (
        torch.split(states.squeeze(0).transpose(0, 1), blocks.sizes) for states in (query, key, value)
    )
    first = len(blocks.prefixes)
    outputs = []
    for number, block in enumerate(blocks.prefixes):
        asked, seen, read = (_heads(states[number], block) for states in (queries, keys, values))
        outputs.append(attend_float32(module, asked, seen, read, None, scaling=scaling)[0])
    prompt_keys, prompt_values = blocks.join(keys[:first]), blocks.join(values[:first])
    for number, block in enumerate(blocks.responses):
        asked, seen, read = (_heads(states[first + number], block) for states in (queries, keys, values))
        if block.prompt is None or prompt_keys is None or prompt_values is None:
            outputs.append(attend_float32(module, asked, seen, read, None, scaling=scaling)[0])
            continue
        seen = torch.cat([prompt_keys[block.prompt].transpose(1, 2), seen], dim=2)
        read = torch.cat([prompt_values[block.prompt].transpose(1, 2), read], dim=2)
        outputs.append(_continue(module, asked, seen, read, blocks, number, scaling))
    return torch.cat([out.flatten(0, 1) for out in outputs]).unsqueeze(0), None


def _continue(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Blocks,
    number: int,
    scaling: float | None,
) -> Tensor:
    """Return [R, T, H, D] of a block's rows, whose keys and values [R, K, P + T, D] begin with prompts."""
    width = query.shape[2]
    dtype = _bias_dtype(query, key.shape[2])

    def attend(query: Tensor, start: int, stop: int) -> Tensor:
        end = key.shape[2] - width + stop
        bias = blocks.bias(number, range(start, stop), dtype)
        return attend_float32(module, query, key[:, :, :end], value[:, :, :end], bias, scaling=scaling)[0]

    size = blocks.slice_size(number)
    if not size:
        return attend(query, 0, width)
    # each slice's bias is made again in the backward pass, not kept until then
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


def _heads(states: Tensor, block: Block) -> Tensor:
    """Return [R, heads, T, D] of ``states`` [R * T, heads, D]."""
    return _rows(states, block).transpose(1, 2)


def _bias_dtype(query: Tensor, keys: int) -> torch.dtype:
    """Return the type that scores over ``keys`` tokens are computed in."""
    kind = query.device.type
    if is_float32(query.device, keys):
        return torch.float32
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def can_attend_in_blocks(model: Any) -> bool:
    """Whether the attention of ``model`` goes through the interface in a way that this can stand in for."""
    return bool(model.config._attn_implementation in ("sdpa", "eager", FLOAT32, BLOCKS))


AttentionInterface.register(BLOCKS, block_attention)
AttentionMaskInterface.register(BLOCKS, sdpa_mask)
