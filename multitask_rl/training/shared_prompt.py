"""A group's prompt computed once: the samples of a micro-batch continue from shared prompt states.

The prompt without its last token (the *prefix*) goes through the model once per distinct prompt; its keys and
values, with their gradient, are shared out to the group's rows, which hold the last prompt token and the
response. Every token sees exactly what it would see in a row of its own, so values and gradients are the
same. (The idea is Prefix Grouper's, arXiv:2506.05433; here through the model's own cache, so that no
attention code has to be replaced.)

Axes: ``U`` distinct prompts, ``P`` longest prefix, ``B`` rows of a chunk, ``T`` its longest response.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "SharedChunk",
    "SharedPart",
    "cut_by_length",
    "cut_prompts",
    "make_part",
    "shared_logits",
    "supports_shared_prompts",
]

logger = logging.getLogger(__name__)

MAX_PADDING = 0.04
"""Share of a chunk that may be padding once the chunk is large enough to pay for its own forward."""
MIN_CELLS = 384
"""Tokens from which a chunk pays for its own forward."""


@dataclass(kw_only=True, slots=True)
class SharedChunk:
    """Rows of one forward."""

    prompt: Tensor
    """[B] row of the part's ``prefix_ids`` that each row continues."""
    input_ids: Tensor
    """[B, T]: last prompt token, then the response without its last token, right-padded."""
    valid: Tensor
    """[B, T] bool: the position predicts a response token."""


@dataclass(kw_only=True, slots=True)
class SharedPart:
    """Prompts of similar length and the chunks that continue them."""

    prefix_ids: Tensor
    """[U, P] left-padded; P = 0 when every prompt is a single token."""
    prefix_lengths: Tensor
    """[U]"""
    chunks: list[SharedChunk]

    def to(self, device: torch.device) -> SharedPart:
        """Move the tensors."""
        return SharedPart(
            prefix_ids=self.prefix_ids.to(device),
            prefix_lengths=self.prefix_lengths.to(device),
            chunks=[
                SharedChunk(
                    prompt=c.prompt.to(device), input_ids=c.input_ids.to(device), valid=c.valid.to(device)
                )
                for c in self.chunks
            ],
        )

    @property
    def num_cells(self) -> int:
        """Tokens computed, padding counted."""
        return self.prefix_ids.numel() + sum(c.input_ids.numel() for c in self.chunks)


def cut_by_length(lengths: Sequence[int], *, max_padding: float, min_cells: int) -> list[int]:
    """Return the sizes of the chunks into which ascending ``lengths`` are cut.

    A chunk ends where the next row would push its padding above ``max_padding``, but not before it holds
    ``min_cells`` cells.
    """
    sizes: list[int] = []
    rows = tokens = 0
    for i in range(len(lengths) - 1, -1, -1):
        if rows:
            width = lengths[i + rows]
            cells = width * (rows + 1)
            if width * rows >= min_cells and cells - tokens - lengths[i] > max_padding * cells:
                sizes.append(rows)
                rows = tokens = 0
        rows += 1
        tokens += lengths[i]
    return [*([rows] if rows else []), *reversed(sizes)]


def cut_prompts(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_tokens: int,
) -> list[list[int]]:
    """Group samples of the same and of similarly long prompts, at most ``max_tokens`` cells a part.

    Returns:
        Samples of each part, ordered by prompt length; a single longer sample is a part of its own.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in indices:
        groups.setdefault(tuple(prompts[i]), []).append(i)
    ordered = sorted(groups.items(), key=lambda item: (len(item[0]), item[1][0]))
    parts: list[list[list[int]]] = []
    shortest = 0
    for prompt, own in ordered:
        if not parts or len(prompt) > 2 * shortest + 32:
            parts.append([])
            shortest = len(prompt)
        parts[-1].append(own)
    return [piece for part in parts for piece in _within(part, prompts, responses, max_tokens)]


def _within(
    part: list[list[int]], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], limit: int
) -> list[list[int]]:
    """Halve ``part`` (prompts first, then the rows of one prompt) until each piece has ``limit`` cells."""
    flat = [i for own in part for i in own]
    if len(flat) == 1 or _count_cells(flat, prompts, responses) <= limit:
        return [flat]
    if len(part) == 1:
        half = len(flat) // 2
        halves = [[flat[:half]], [flat[half:]]]
    else:
        half = len(part) // 2
        halves = [part[:half], part[half:]]
    return [piece for h in halves for piece in _within(h, prompts, responses, limit)]


def _chunks(indices: Sequence[int], responses: Sequence[Sequence[int]]) -> list[list[int]]:
    order = sorted(indices, key=lambda i: (len(responses[i]), i))
    sizes = cut_by_length([len(responses[i]) for i in order], max_padding=MAX_PADDING, min_cells=MIN_CELLS)
    rows = iter(order)
    return [[next(rows) for _ in range(size)] for size in sizes]


def _count_cells(
    indices: Sequence[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> int:
    unique = {tuple(prompts[i]) for i in indices}
    cells = sum(len(c) * len(responses[c[-1]]) for c in _chunks(indices, responses))
    return cells + len(unique) * (max(map(len, unique)) - 1)


def make_part(
    indices: Sequence[int], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad: int
) -> tuple[SharedPart, list[int]]:
    """Return the part of the samples ``indices`` and the order in which their tokens come out of it."""
    numbers: dict[tuple[int, ...], int] = {}
    for i in indices:
        numbers.setdefault(tuple(prompts[i]), len(numbers))
    width = max(map(len, numbers)) - 1
    prefix = torch.full((len(numbers), width), pad)
    for prompt, row in numbers.items():
        prefix[row, width - len(prompt) + 1 :] = torch.tensor(prompt[:-1], dtype=torch.long)
    chunks, order = [], []
    for own in _chunks(indices, responses):
        longest = len(responses[own[-1]])
        ids = torch.full((len(own), longest), pad)
        for row, i in enumerate(own):
            ids[row, : len(responses[i])] = torch.tensor([prompts[i][-1], *responses[i][:-1]])
        lengths = torch.tensor([len(responses[i]) for i in own])
        chunks.append(
            SharedChunk(
                prompt=torch.tensor([numbers[tuple(prompts[i])] for i in own]),
                input_ids=ids,
                valid=torch.arange(longest) < lengths.unsqueeze(-1),
            )
        )
        order.extend(own)
    lengths = torch.tensor([len(p) - 1 for p in numbers])
    return SharedPart(prefix_ids=prefix, prefix_lengths=lengths, chunks=chunks), order


def shared_logits(
    model: Any, parts: Sequence[SharedPart], *, want_hidden: bool
) -> tuple[Tensor, Tensor | None]:
    """Return logits [N, V] of all response tokens, chunk by chunk, and the hidden states [N, H] if wanted."""
    logits, hidden = [], []
    for part in parts:
        states = _prefix_states(model, part)
        for chunk in part.chunks:
            out = _continue(model, part, chunk, states, want_hidden)
            logits.append(out.logits[chunk.valid])
            if want_hidden:
                hidden.append(out.hidden_states[-1][chunk.valid])
    return torch.cat(logits), torch.cat(hidden) if want_hidden else None


def _prefix_mask(part: SharedPart) -> Tensor | None:
    """Return [U, P] with 0 on padding; None without padding."""
    width = part.prefix_ids.shape[1]
    if not width or bool((part.prefix_lengths == width).all()):
        return None
    columns = torch.arange(width, device=part.prefix_ids.device)
    return (columns >= width - part.prefix_lengths.unsqueeze(-1)).long()


def _prefix_states(model: Any, part: SharedPart) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values [U, heads, P, head width] of every layer, with gradient."""
    if not part.prefix_ids.shape[1]:
        return []
    from transformers import DynamicCache

    mask = _prefix_mask(part)
    width = part.prefix_ids.shape[1]
    columns = torch.arange(width, device=part.prefix_ids.device)
    positions = columns - (width - part.prefix_lengths.unsqueeze(-1))
    cache = DynamicCache()
    model(
        input_ids=part.prefix_ids,
        attention_mask=mask,
        position_ids=positions.clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return [(layer.keys, layer.values) for layer in cache.layers]


def _continue(
    model: Any,
    part: SharedPart,
    chunk: SharedChunk,
    states: Sequence[tuple[Tensor, Tensor]],
    want_hidden: bool,
) -> Any:
    """Run the rows of ``chunk`` after their prompts."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, (keys, values) in enumerate(states):
        cache.update(keys[chunk.prompt], values[chunk.prompt], number)
    rows, width = chunk.input_ids.shape
    prefix = _prefix_mask(part)
    mask = None
    if prefix is not None:
        # padding on the right is never seen by what comes before it
        mask = torch.cat([prefix[chunk.prompt], prefix.new_ones(rows, width)], dim=-1)
    columns = torch.arange(width, device=chunk.input_ids.device)
    return model(
        input_ids=chunk.input_ids,
        attention_mask=mask,
        position_ids=part.prefix_lengths[chunk.prompt].unsqueeze(-1) + columns,
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=want_hidden,
    )


@torch.no_grad()
def supports_shared_prompts(model: Any) -> bool:
    """Whether ``model`` says the same with a shared prompt as without; tried on a few tokens.

    Models with another state than keys and values (Mamba), with attention windows, or whose cache is switched
    off by gradient checkpointing do not.
    """
    config = model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or getattr(model, "is_gradient_checkpointing", False):
        return False
    # a window is wider than the probe's few tokens, so it has to be asked for
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if windowed or kinds != {"full_attention"}:
        return False
    was_training = model.training
    model.eval()
    try:
        device = next(model.parameters()).device
        ids = (torch.arange(12, device=device) % int(config.vocab_size)).view(2, 6).flip(0)
        part = SharedPart(
            prefix_ids=torch.stack([ids[0, :2], ids[1, :2].roll(1)]),
            prefix_lengths=torch.tensor([2, 1], device=device),
            chunks=[
                SharedChunk(
                    prompt=torch.tensor([1, 0], device=device),
                    input_ids=ids[:, 2:],
                    valid=torch.ones(2, 4, dtype=torch.bool, device=device),
                )
            ],
        )
        shared = shared_logits(model, [part], want_hidden=False)[0].view(2, 4, -1).float()
        first = torch.cat([part.prefix_ids[1, 1:], ids[0, 2:]]).unsqueeze(0)
        second = torch.cat([part.prefix_ids[0], ids[1, 2:]]).unsqueeze(0)
        plain = [model(input_ids=x, use_cache=False).logits[0, -4:].float() for x in (first, second)]
    except (TypeError, ValueError, AttributeError, NotImplementedError, RuntimeError, IndexError) as error:
        logger.info("prompts of a group are computed per sample: %s", error)
        return False
    finally:
        model.train(was_training)
    whole = torch.stack(plain)
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
    gap = float((shared - whole).abs().max() / whole.abs().max().clamp(min=1.0))
    if gap > tolerance:
        logger.info("prompts of a group are computed per sample: a shared prompt moves logits by %.2g", gap)
        return False
    return True
