"""A group's prompt computed once: the samples of a micro-batch continue from shared prompt states.

The prompt without its last token (the *prefix*) goes through the model once per distinct prompt; its keys and
values, with their gradient, are shared out to the group's rows, which hold the last prompt token and the
response. Every token sees exactly what it would see in a row of its own, so values and gradients are the
same. (The idea is Prefix Grouper's, arXiv:2506.05433; here through the model's own cache, so that no
attention code has to be replaced.)

Axes: ``U`` distinct prompts, ``P`` longest prefix, ``B`` rows of a chunk, ``T`` its longest response.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = [
    "COMPILED_FORWARD_CELLS",
    "SharedChunk",
    "SharedPart",
    "cut_by_length",
    "cut_prompts",
    "make_part",
    "read_shared",
    "supports_shared_prompts",
]

logger = logging.getLogger(__name__)

FORWARD_CELLS = 24
"""What a forward of its own costs, in tokens of padding: more chunks, less padding."""
COMPILED_FORWARD_CELLS = 40
"""The same where the products of a new shape are compiled first (bfloat16 on a CPU)."""


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
    """[U], ascending."""
    prefix_sizes: list[int]
    """How many prefixes at a time run together."""
    chunks: list[SharedChunk]

    def to(self, device: torch.device) -> SharedPart:
        """Move the tensors."""
        return SharedPart(
            prefix_ids=self.prefix_ids.to(device),
            prefix_lengths=self.prefix_lengths.to(device),
            prefix_sizes=self.prefix_sizes,
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
        prefixes = _padded_cells(self.prefix_lengths.tolist(), self.prefix_sizes)
        return prefixes + sum(c.input_ids.numel() for c in self.chunks)


def cut_by_length(lengths: Sequence[int], *, forward_cells: int) -> list[int]:
    """Return the sizes of the chunks into which ascending ``lengths`` are cut at the least total cost.

    A chunk costs its cells (rows times longest row) and ``forward_cells`` for being a forward of its own.
    """
    counts = Counter(lengths)
    runs = sorted(counts.items())
    ends = list(itertools.accumulate((count for _, count in runs), initial=0))
    best, start = [0], [0]
    for j in range(1, len(runs) + 1):
        width = runs[j - 1][0]
        cost, cut = best[j - 1] + width * (ends[j] - ends[j - 1]) + forward_cells, j - 1
        for i in range(j - 2, -1, -1):
            middle = (i + j) // 2
            # another cut there would pay, and all the more for every chunk that starts earlier
            if (width - runs[middle - 1][0]) * (ends[middle] - ends[i]) > forward_cells and middle > i:
                break
            candidate = best[i] + width * (ends[j] - ends[i]) + forward_cells
            if candidate < cost:
                cost, cut = candidate, i
        best.append(cost)
        start.append(cut)
    sizes: list[int] = []
    j = len(runs)
    while j:
        sizes.append(ends[j] - ends[start[j]])
        j = start[j]
    return sizes[::-1]


def cut_prompts(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_tokens: int,
    forward_cells: int = FORWARD_CELLS,
) -> list[list[int]]:
    """Group samples of the same and of similarly long prompts, at most ``max_tokens`` cells a part.

    A forward of its own costs ``forward_cells`` tokens of padding.

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

    def count(chosen: Sequence[int]) -> int:
        return _count_cells(chosen, prompts, responses, forward_cells)

    return [piece for part in parts for piece in _within(part, count, max_tokens)]


def _within(part: list[list[int]], count: Callable[[Sequence[int]], int], limit: int) -> list[list[int]]:
    """Halve ``part`` (prompts first, then the rows of one prompt) until each piece counts ``limit`` cells."""
    flat = [i for own in part for i in own]
    if len(flat) == 1 or count(flat) <= limit:
        return [flat]
    if len(part) == 1:
        half = len(flat) // 2
        halves = [[flat[:half]], [flat[half:]]]
    else:
        half = len(part) // 2
        halves = [part[:half], part[half:]]
    return [piece for h in halves for piece in _within(h, count, limit)]


def _chunks(
    indices: Sequence[int], responses: Sequence[Sequence[int]], forward_cells: int
) -> list[list[int]]:
    order = sorted(indices, key=lambda i: (len(responses[i]), i))
    sizes = cut_by_length([len(responses[i]) for i in order], forward_cells=forward_cells)
    rows = iter(order)
    return [[next(rows) for _ in range(size)] for size in sizes]


def _count_cells(
    indices: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    forward_cells: int,
) -> int:
    prefixes = sorted(len(p) - 1 for p in {tuple(prompts[i]) for i in indices})
    cells = sum(len(c) * len(responses[c[-1]]) for c in _chunks(indices, responses, forward_cells))
    return cells + _padded_cells(prefixes, cut_by_length(prefixes, forward_cells=forward_cells))


def _padded_cells(lengths: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the cells of ascending ``lengths`` cut into chunks of ``sizes`` rows."""
    return sum(size * lengths[end - 1] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True))


def make_part(
    indices: Sequence[int],
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    filler: int,
    forward_cells: int = FORWARD_CELLS,
) -> tuple[SharedPart, list[int]]:
    """Return the part of the samples ``indices`` and the order in which their tokens come out of it."""
    unique = sorted(dict.fromkeys(tuple(prompts[i]) for i in indices), key=len)
    numbers = {prompt: row for row, prompt in enumerate(unique)}
    width = len(unique[-1]) - 1
    prefix = torch.full((len(numbers), width), filler)
    for prompt, row in numbers.items():
        prefix[row, width - len(prompt) + 1 :] = torch.tensor(prompt[:-1], dtype=torch.long)
    chunks, order = [], []
    for own in _chunks(indices, responses, forward_cells):
        longest = len(responses[own[-1]])
        ids = torch.full((len(own), longest), filler)
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
    prefixes = [len(prompt) - 1 for prompt in unique]
    part = SharedPart(
        prefix_ids=prefix,
        prefix_lengths=torch.tensor(prefixes),
        prefix_sizes=cut_by_length(prefixes, forward_cells=forward_cells),
        chunks=chunks,
    )
    return part, order


def read_shared(
    model: Any, parts: Sequence[SharedPart], read: Callable[[Any], tuple[Tensor, ...]], **kwargs: Any
) -> tuple[Tensor, ...]:
    """Run ``parts`` and return what ``read`` finds in the outputs, for all response tokens: [N, ...] each.

    Args:
        model: causal language model or its decoder.
        parts: what to compute.
        read: takes one output of ``model`` to tensors [B, T, ...].
        kwargs: passed to ``model`` with every chunk.
    """
    found: list[tuple[Tensor, ...]] = []
    for part in parts:
        states = _prefix_states(model, part)
        for chunk in part.chunks:
            out = read(_continue(model, part, chunk, states, **kwargs))
            found.append(tuple(one[chunk.valid] for one in out))
    return tuple(torch.cat(pieces) for pieces in zip(*found, strict=True))


def _left_mask(lengths: Tensor, width: int) -> Tensor | None:
    """Return [U, width] with 0 on the padding left of ``lengths``; None without padding."""
    if not width or bool((lengths == width).all()):
        return None
    return (torch.arange(width, device=lengths.device) >= width - lengths.unsqueeze(-1)).long()


def _prefix_states(model: Any, part: SharedPart) -> list[tuple[Tensor, Tensor]]:
    """Return keys and values [U, heads, P, head width] of every layer, with gradient.

    Prefixes of different length run apart where that is cheaper than padding; their states are padded.
    """
    width = part.prefix_ids.shape[1]
    if not width:
        return []
    pieces: list[list[tuple[Tensor, Tensor]]] = []
    for ids, lengths in zip(
        torch.split(part.prefix_ids, part.prefix_sizes),
        torch.split(part.prefix_lengths, part.prefix_sizes),
        strict=True,
    ):
        own = int(lengths.max())
        states = _prefill(model, ids[:, width - max(own, 1) :], lengths)
        missing = (0, 0, width - max(own, 1), 0)
        pieces.append([(pad(keys, missing), pad(values, missing)) for keys, values in states])
    return [
        (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
        for layer in zip(*pieces, strict=True)
    ]


def _prefill(model: Any, ids: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Run the left-padded prefixes ``ids`` [U, P] and return every layer's keys and values."""
    from transformers import DynamicCache

    cache = DynamicCache()
    positions = torch.arange(ids.shape[1], device=ids.device) - (ids.shape[1] - lengths.unsqueeze(-1))
    model(
        input_ids=ids,
        attention_mask=_left_mask(lengths, ids.shape[1]),
        position_ids=positions.clamp(min=0),
        past_key_values=cache,
        use_cache=True,
        **({"logits_to_keep": 1} if model.get_output_embeddings() is not None else {}),
    )
    return [(layer.keys, layer.values) for layer in cache.layers]


def _continue(
    model: Any,
    part: SharedPart,
    chunk: SharedChunk,
    states: Sequence[tuple[Tensor, Tensor]],
    **kwargs: Any,
) -> Any:
    """Run the rows of ``chunk`` after their prompts."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, (keys, values) in enumerate(states):
        cache.update(keys[chunk.prompt], values[chunk.prompt], number)
    rows, width = chunk.input_ids.shape
    prefix = _left_mask(part.prefix_lengths, part.prefix_ids.shape[1])
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
        **kwargs,
    )


@torch.no_grad()
def supports_shared_prompts(model: Any) -> bool:
    """Whether ``model`` says the same with a shared prompt as without; tried on a few tokens.

    Models with another state than keys and values (Mamba), with attention windows, or whose cache is switched
    off by gradient checkpointing do not.
    """
    config = model.config.get_text_config()
    # not the model's own property: its name changes with the versions of transformers
    is_checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if getattr(model, "_is_stateful", False) or is_checkpointing:
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
            prefix_ids=torch.stack([ids[1, :2].roll(1), ids[0, :2]]),
            prefix_lengths=torch.tensor([1, 2], device=device),
            prefix_sizes=[2],
            chunks=[
                SharedChunk(
                    prompt=torch.tensor([0, 1], device=device),
                    input_ids=ids[:, 2:],
                    valid=torch.ones(2, 4, dtype=torch.bool, device=device),
                )
            ],
        )
        shared = read_shared(model, [part], lambda out: (out.logits,))[0].view(2, 4, -1).float()
        first = torch.cat([part.prefix_ids[0, 1:], ids[0, 2:]]).unsqueeze(0)
        second = torch.cat([part.prefix_ids[1], ids[1, 2:]]).unsqueeze(0)
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
