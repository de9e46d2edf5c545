"""The sampled distribution, which engine and trainer share. Axes: ``B`` rows, ``V`` vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Tokens of the vocabulary that ``invert`` sums first."""
CELLS = 2**20
"""Rows times vocabulary that ``sample_tokens`` computes at once on a CPU: 4 MiB, which its cache holds.

Larger tensors are new memory at every token, which takes longer than the operations.
"""


def draw_uniforms(seed: int, count: int) -> np.ndarray:
    """Return [count] float32 in [0, 1) of the stream ``seed``; each sample has a stream of its own."""
    return np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32)


@dataclass(slots=True)
class TokenMask:
    """The tokens that grammars allow at some positions of a batch, one bit per token of the vocabulary."""

    tokens: Tensor
    """[M] positions in the batch that have a mask."""
    packed: Tensor
    """[U, >= V / 8] uint8, the distinct masks; token v is bit v % 8 of byte v // 8."""
    which: Tensor
    """[M] row of ``packed`` of each position."""
    forced: Tensor
    """[M] bool: a single token was allowed."""

    def to(self, device: torch.device) -> TokenMask:
        """Move the tensors."""
        return TokenMask(*(t.to(device) for t in (self.tokens, self.packed, self.which, self.forced)))

    def slice(self, start: int, stop: int) -> TokenMask | None:
        """Return the masks of the positions from ``start`` up to ``stop``, numbered from there."""
        return self._renumbered(self.tokens - start, (self.tokens >= start) & (self.tokens < stop))

    def select(self, chosen: Tensor, number: int) -> TokenMask | None:
        """Return the masks of the positions ``chosen`` (ascending) of ``number``, numbered among them."""
        place = torch.full((number,), -1, device=chosen.device)
        place[chosen] = torch.arange(len(chosen), device=chosen.device)
        return self._renumbered(place[self.tokens], place[self.tokens] >= 0)

    def _renumbered(self, tokens: Tensor, kept: Tensor) -> TokenMask | None:
        if not bool(kept.any()):
            return None
        return TokenMask(tokens[kept], self.packed, self.which[kept], self.forced[kept])

    def apply(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [N, V] with -inf for tokens that are not allowed."""
        kept = keep_allowed(logits[self.tokens], self.packed[self.which])
        return logits.index_copy(0, self.tokens, kept)


def keep_allowed(logits: Tensor, packed: Tensor) -> Tensor:
    """Return ``logits`` [B, V] with -inf where ``packed`` [B, >= V / 8] (see ``TokenMask``) has no bit.

    Call it before temperature and filters: the nucleus is one of the allowed tokens.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    refused = ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[:, : logits.shape[-1]] == 0
    return logits.masked_fill(refused, float("-inf"))


def suppress(logits: Tensor, ids: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Return ``logits`` [B, V] with -inf for the tokens ``ids`` [S], in the rows ``chosen`` [B] bool or all.

    Call it before temperature and filters: the nucleus is one of the other tokens.
    """
    columns = logits[:, ids]
    rows = columns.new_ones(len(columns), dtype=torch.bool) if chosen is None else chosen
    return logits.index_copy(1, ids, columns.masked_fill(rows.unsqueeze(-1), float("-inf")))


def keep_top(logits: Tensor, top_k: int, top_p: float, keep: Tensor | None = None) -> Tensor:
    """Set the logits outside top-k and the nucleus top-p to -inf (Holtzman et al., arXiv:1904.09751).

    Args:
        logits: [B, V], already divided by the temperature.
        top_k: number of tokens kept; 0 = all.
        top_p: mass kept, in (0, 1]; 1 = all.
        keep: [B] token ids that are never filtered. The trainer passes the sampled tokens: a rounding
            difference at the border must not give one of them probability zero.

    Returns:
        [B, V]; ``logits`` itself when nothing is filtered.
    """
    size = logits.shape[-1]
    if (top_k <= 0 or top_k >= size) and top_p >= 1.0:
        return logits
    with torch.no_grad():
        drop = torch.zeros_like(logits, dtype=torch.bool)
        if 0 < top_k < size:
            drop |= logits < logits.topk(top_k, dim=-1).values[..., -1:]
        if top_p < 1.0:
            ordered, order = logits.masked_fill(drop, float("-inf")).sort(dim=-1, descending=True)
            mass = ordered.softmax(dim=-1).cumsum(dim=-1)
            # a token is dropped when the mass before it reaches top_p; the first always stays
            outside = (mass - ordered.softmax(dim=-1)) >= top_p
            outside[..., 0] = False
            drop |= torch.zeros_like(drop).scatter(-1, order, outside)
        if keep is not None:
            drop.scatter_(-1, keep.unsqueeze(-1), False)
    return logits.masked_fill(drop, float("-inf"))


def sample_tokens(
    logits: Tensor, uniforms: Tensor, *, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution at ``uniforms``.

    Args:
        logits: [B, V].
        uniforms: [B] in [0, 1).
        temperature: 0 takes the most likely token.
        top_k: see ``keep_top``.
        top_p: see ``keep_top``.

    Returns:
        Tokens [B] int64 and their log-probabilities [B] float32 under the sampled distribution; for
        temperature 0 under that of temperature 1.
    """
    rows = max(1, CELLS // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    if len(logits) > rows:
        parts = [
            sample_tokens(few, own, temperature=temperature, top_k=top_k, top_p=top_p)
            for few, own in zip(torch.split(logits, rows), torch.split(uniforms, rows), strict=True)
        ]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])
    given, logits = logits, logits.float()
    if temperature == 0:
        probabilities = logits.softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
        return tokens, probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
    if temperature != 1:
        logits = logits / temperature if logits is given else logits.div_(temperature)
    probabilities = keep_top(logits, top_k, top_p).softmax(dim=-1)
    tokens = invert(probabilities, uniforms)
    chosen = probabilities.gather(-1, tokens)
    if bool((chosen == 0).any()):
        tokens = nearest_possible(tokens, probabilities)
        chosen = probabilities.gather(-1, tokens)
    return tokens.squeeze(-1), chosen.squeeze(-1).log()


def invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return per row the token in whose part of the cumulative distribution ``uniforms`` [B] lies: [B, 1].

    First the block of tokens is found, then the token in it: a CPU sums [B, V] by blocks sooner than it
    computes all cumulative sums. By rounding, a token may be returned that has no probability.

    Args:
        probabilities: [B, V].
        uniforms: in [0, 1).
    """
    size = probabilities.shape[-1]
    width = min(size, BLOCK)
    # ``pad`` copies, also by 0 places
    whole = pad(probabilities, (0, -size % width)) if size % width else probabilities
    blocks = whole.reshape(len(probabilities), -1, width)
    masses = blocks.sum(dim=-1).cumsum(dim=-1)
    threshold = uniforms.unsqueeze(-1) * masses[:, -1:]
    # u * total can round up to the total itself: the last block with mass, not one past it
    block = torch.searchsorted(masses, threshold, right=True).clamp_(max=blocks.shape[1] - 1)
    before = pad(masses, (1, 0)).gather(-1, block)
    within = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, width)).squeeze(1).cumsum(dim=-1)
    token = torch.searchsorted(within, threshold - before, right=True).clamp_(max=width - 1)
    return (block * width + token).clamp_(max=size - 1)


def nearest_possible(tokens: Tensor, probabilities: Tensor) -> Tensor:
    """Return per row the token nearest to ``tokens`` [B, 1] with a probability [B, V] above 0: [B, 1].

    Needed on a GPU: by rounding, its parallel sums may rise at a token with probability 0.
    """
    places = torch.arange(probabilities.shape[-1], device=tokens.device)
    # of two equally near tokens the earlier, on every device
    distance = 2 * (places - tokens).abs() + (places > tokens)
    return distance.masked_fill(probabilities == 0, 2 * len(places) + 2).argmin(dim=-1, keepdim=True)
