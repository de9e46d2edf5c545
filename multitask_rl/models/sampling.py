"""The sampled distribution, in one place: engine and trainer must mean the same one.

Axes: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "TokenMask",
    "draw_uniforms",
    "keep_allowed",
    "keep_top",
    "nearest_possible",
    "sample_tokens",
    "suppress",
]


def draw_uniforms(seed: int, count: int) -> np.ndarray:
    """Return ``count`` uniforms in [0, 1) of the stream ``seed``: [count] float32.

    Each sample owns its stream, so its tokens do not depend on what else is in the batch.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count, dtype=np.float32)


@dataclass(kw_only=True, slots=True)
class TokenMask:
    """What a grammar allows at some of the tokens of a batch, one bit per token of the vocabulary."""

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
        return TokenMask(
            tokens=self.tokens.to(device),
            packed=self.packed.to(device),
            which=self.which.to(device),
            forced=self.forced.to(device),
        )

    def slice(self, start: int, stop: int) -> TokenMask | None:
        """Return the masks of the positions from ``start`` up to ``stop``, counted from there."""
        inside = (self.tokens >= start) & (self.tokens < stop)
        if not bool(inside.any()):
            return None
        return TokenMask(
            tokens=self.tokens[inside] - start,
            packed=self.packed,
            which=self.which[inside],
            forced=self.forced[inside],
        )

    def select(self, chosen: Tensor, number: int) -> TokenMask | None:
        """Return the masks of the positions ``chosen`` (ascending) of ``number``, counted among them."""
        place = torch.full((number,), -1, device=chosen.device)
        place[chosen] = torch.arange(len(chosen), device=chosen.device)
        inside = place[self.tokens] >= 0
        if not bool(inside.any()):
            return None
        return TokenMask(
            tokens=place[self.tokens[inside]],
            packed=self.packed,
            which=self.which[inside],
            forced=self.forced[inside],
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Return ``logits`` [N, V] with -inf for what is not allowed; the other positions are untouched."""
        kept = keep_allowed(logits[self.tokens], self.packed[self.which])
        return logits.index_copy(0, self.tokens, kept)


def keep_allowed(logits: Tensor, packed: Tensor) -> Tensor:
    """Set the logits of tokens that a grammar does not allow to -inf.

    Before temperature and filters: the nucleus is one of the allowed tokens.

    Args:
        logits: [B, V].
        packed: [B, >= V / 8] uint8, see ``TokenMask``.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    refused = ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[:, : logits.shape[-1]] == 0
    return logits.masked_fill(refused, float("-inf"))


def suppress(logits: Tensor, ids: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Return ``logits`` [B, V] with -inf for the tokens ``ids`` [S].

    Before temperature and filters: the nucleus is one of the other tokens.

    Args:
        logits: [B, V].
        ids: tokens that are never sampled.
        chosen: [B] bool, the rows this is true of; None = all.
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
        keep: [B] token ids that stay whatever the filter says. The trainer passes the sampled tokens: a
            rounding difference at the border must not give one of them probability zero.

    Returns:
        [B, V]; ``logits`` itself when nothing is filtered.
    """
    size = logits.shape[-1]
    if (top_k <= 0 or top_k >= size) and top_p >= 1.0:
        return logits
    with torch.no_grad():
        drop = torch.zeros_like(logits, dtype=torch.bool)
        if 0 < top_k < size:
            smallest = logits.topk(top_k, dim=-1).values[..., -1:]
            drop |= logits < smallest
        if top_p < 1.0:
            ordered, order = logits.masked_fill(drop, float("-inf")).sort(dim=-1, descending=True)
            mass = ordered.softmax(dim=-1).cumsum(dim=-1)
            # a token is dropped when the mass before it already reaches top_p; the first always stays
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
        temperature: > 0 samples; 0 takes the most likely token.
        top_k: see ``keep_top``.
        top_p: see ``keep_top``.

    Returns:
        ``(tokens [B] int64, logprobs [B] float32)``; log-probabilities are those of the sampled distribution,
        for temperature 0 those of temperature 1.
    """
    logits = logits.float()
    if temperature == 0:
        probabilities = logits.softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
        return tokens, probabilities.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).log()
    probabilities = keep_top(logits / temperature, top_k, top_p).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniforms.unsqueeze(-1) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True)
    # u * total can round up to the total itself: the last token with mass, not one past it
    tokens.clamp_(max=logits.shape[-1] - 1)
    chosen = probabilities.gather(-1, tokens)
    if bool((chosen == 0).any()):
        tokens = nearest_possible(tokens, probabilities)
        chosen = probabilities.gather(-1, tokens)
    return tokens.squeeze(-1), chosen.squeeze(-1).log()


def nearest_possible(tokens: Tensor, probabilities: Tensor) -> Tensor:
    """Return, of each row, the token nearest to ``tokens`` [B, 1] that has a probability [B, V]: [B, 1].

    Sums that a GPU makes in parallel may rise, by rounding, at a token without one.
    """
    places = torch.arange(probabilities.shape[-1], device=tokens.device)
    # of two as near the earlier, on every device
    distance = 2 * (places - tokens).abs() + (places > tokens)
    return distance.masked_fill(probabilities == 0, 2 * len(places) + 2).argmin(dim=-1, keepdim=True)
