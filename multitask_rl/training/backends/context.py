"""Context parallelism: the ranks of a context group hold each sequence in parts.

A sequence of ``S`` tokens is cut into ``2 C`` pieces for ``C`` ranks; rank ``r`` computes pieces ``r`` and
``2 C - 1 - r``, so that causal attention costs all the same. Everything but attention looks at single
positions; attention gathers the keys and values of all parts, and its backward pass sums their gradients
back to where they belong (as in the training of Llama 3, arXiv:2407.21783, section 3.3.2). It is plugged in
through ``transformers``' own attention interface, so no model code is replaced.

Each rank scores its own response tokens; the scores are then gathered, so every rank of the group computes
the same loss, and takes from it the gradient of its own tokens.

Axes: ``B`` samples, ``L`` tokens of a piece, ``N`` response tokens, ``H`` heads, ``D`` head width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from multitask_rl.attention.options import check_options
from multitask_rl.errors import ConfigError
from multitask_rl.models.sampling import TokenMask
from multitask_rl.records import SamplingParams
from multitask_rl.training.backends.ranks import Ranks
from multitask_rl.training.forward import TokenOutputs, forward_tokens, split_head
from multitask_rl.training.microbatch import MicroBatch, make_microbatch

__all__ = ["attention_over_parts", "check_model", "cut_sequences", "forward_in_parts"]

NAME = "multitask_rl_context_parallel"
MASK_CELLS = 2**25
"""Queries times keys whose mask exists at once: 32 MiB of booleans, 128 MiB as float32."""

_together: list[Ranks] = []
"""Innermost last. No context variable: layers are computed again in threads of the backward pass."""


@dataclass(kw_only=True, slots=True)
class Part:
    """What one rank computes of a micro-batch."""

    batch: MicroBatch
    """Its own positions and response tokens."""
    tokens: Tensor
    """[own N] which of the micro-batch's response tokens they are."""
    most: int
    """The most response tokens that a rank has."""
    place: Tensor
    """[N] where each token is among the gathered [C * most]."""


def cut_sequences(batch: MicroBatch, index: int, number: int, pad_token_id: int) -> Part:
    """Return part ``index`` of ``number`` of a ``bucketed`` micro-batch."""
    rows, width = batch.input_ids.shape
    piece = -(-width // (2 * number))
    whole = pad(batch.input_ids, (0, 2 * number * piece - width), value=pad_token_id)
    device = whole.device
    pieces = torch.arange(2 * number, device=device)
    owner_of_piece = torch.minimum(pieces, 2 * number - 1 - pieces)
    owner = owner_of_piece[batch.column // piece]
    counts = torch.bincount(owner, minlength=number)
    order = owner.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=device) - (counts.cumsum(0) - counts)[owner[order]]
    tokens = (owner == index).nonzero().squeeze(-1)
    columns = torch.cat([torch.arange(piece, device=device) + p * piece for p in _pieces(index, number)])
    local = torch.full((2 * number * piece,), -1, device=device)
    local[columns] = torch.arange(len(columns), device=device)
    part = replace(
        batch,
        input_ids=whole[:, columns],
        # padding stays within the positions that a model may have learnt
        position_ids=columns.clamp(max=width - 1).expand(rows, -1),
        row=batch.row[tokens],
        column=local[batch.column[tokens]],
        targets=batch.targets[tokens],
        sequence=batch.sequence[tokens],
    )
    most = int(counts.max())
    return Part(batch=part, tokens=tokens, most=most, place=owner * most + place)


def _pieces(index: int, number: int) -> tuple[int, int]:
    return index, 2 * number - 1 - index


def forward_in_parts(
    ranks: Ranks,
    model: Any,
    batch: MicroBatch,
    sampling: list[SamplingParams],
    *,
    mask: TokenMask | None,
    pad_token_id: int,
    **wants: bool,
) -> TokenOutputs:
    """Return what ``forward_tokens`` returns, computed by all ranks of the context group together.

    Call it, and the backward pass, under ``attention_over_parts``.

    Args:
        ranks: every rank of the group calls this with the same arguments.
        model: causal language model (see ``check_model``).
        batch: ``bucketed`` micro-batch.
        sampling: [B].
        mask: what grammars allowed.
        pad_token_id: any valid id.
        wants: see ``forward_tokens``.
    """
    part = cut_sequences(batch, ranks.peer_index, ranks.context, pad_token_id)
    own_mask = None if mask is None else mask.select(part.tokens, len(batch.targets))
    out = forward_tokens(model, part.batch, sampling, mask=own_mask, **wants)

    def whole(own: Tensor | None) -> Tensor | None:
        if own is None:
            return None
        missing = part.most - len(own)
        even = torch.cat([own, own.new_zeros(missing, *own.shape[1:])]) if missing else own
        gathered: Tensor = _Gather.apply(even, ranks)  # type: ignore[no-untyped-call]
        return gathered.flatten(0, 1)[part.place]

    logprobs, entropy = whole(out.logprobs), whole(out.entropy)
    if logprobs is None or entropy is None:
        raise AssertionError("log-probabilities are always computed")
    return TokenOutputs(
        logprobs=logprobs, entropy=entropy, logits=whole(out.logits), hidden=whole(out.hidden)
    )


class _Gather(torch.autograd.Function):
    """[N, ...] -> [C, N, ...]. All ranks go on to the same loss: each takes the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.index = ranks.peer_index
        return ranks.gather_peers(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.index], None


class _GatherAndSum(torch.autograd.Function):
    """[B, ...] -> [C, B, ...]. Every rank uses all parts for something else: the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.gather_peers(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ranks: Ranks = ctx.ranks
        return ranks.sum_rows(gradients[0]), None


def context_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's positions over everybody's (``transformers``' attention interface).

    Args:
        module: the attention layer.
        query: [B, H, 2 L, D].
        key: [B, K, 2 L, D].
        value: [B, K, 2 L, D].
        attention_mask: none.
        scaling: factor of the scores; default D ** -0.5.
        kwargs: only what changes nothing, see ``check_options``.

    Raises:
        NotImplementedError: the layer wants something more, such as a window, capped scores or sinks.
    """
    if attention_mask is not None:
        raise NotImplementedError("attention with a mask in parts")
    check_options(kwargs, "in parts")
    ranks = _together[-1]
    number, width = ranks.context, key.shape[-1]
    own = torch.cat([key, value], dim=-1)
    parts: Tensor = _GatherAndSum.apply(own, ranks)  # type: ignore[no-untyped-call]
    length = key.shape[2] // 2
    halves = [(p, 0) if p < number else (2 * number - 1 - p, 1) for p in range(2 * number)]
    everything = torch.cat(
        [parts[owner, :, :, half * length : (half + 1) * length] for owner, half in halves], dim=2
    )
    keys, values = everything[..., :width], everything[..., width:]
    outputs = []
    for half, number_of_piece in enumerate(_pieces(ranks.peer_index, number)):
        start, stop = half * length, (half + 1) * length
        while start < stop:
            before = number_of_piece * length + start - half * length
            end = stop if not before else min(stop, start + max(1, MASK_CELLS // (before + length)))
            seen = before + end - start
            outputs.append(
                checkpoint(
                    _attend,
                    query[:, :, start:end],
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    scaling,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
            start = end
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend causally, the last query at the last key; computed again in the backward pass with its mask."""
    asked, seen = query.shape[2], key.shape[2]
    mask = None
    if asked < seen:
        mask = torch.ones(asked, seen, dtype=torch.bool, device=query.device).tril(seen - asked)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _no_mask(*_: Any, **__: Any) -> None:
    """Causality is in the attention itself."""
    return


AttentionInterface.register(NAME, context_attention)
AttentionMaskInterface.register(NAME, _no_mask)


@contextlib.contextmanager
def attention_over_parts(ranks: Ranks, models: Sequence[Any]) -> Iterator[None]:
    """Let ``models`` attend over the parts of all ranks; what they used before is put back.

    It has to last until the backward pass is done, for checkpointed layers are computed again there.
    """
    for model in models:
        split_head(model)  # tried once, by forwards in which the other ranks take no part
    before = [model.config._attn_implementation for model in models]
    _together.append(ranks)
    try:
        for model in models:
            model.set_attn_implementation(NAME)
        yield
    finally:
        _together.pop()
        for model, own in zip(models, before, strict=True):
            model.set_attn_implementation(own)


@torch.no_grad()
def check_model(ranks: Ranks, model: Any, pad_token_id: int) -> None:
    """Compare ``model`` in parts with ``model`` whole on a few tokens; every rank of the group calls this.

    Raises:
        ConfigError: they differ: a window, another state than keys and values (Mamba), capped scores, or
            attention that does not go through ``transformers``' interface.
    """
    config = model.config.get_text_config()
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    problem = "it attends through windows" if windowed or kinds != {"full_attention"} else ""
    size = int(config.vocab_size)
    prompts = [[(7 * i + 3 * row) % size for i in range(11 - row)] for row in range(2)]
    responses = [[(5 * i + row) % size for i in range(6 + row)] for row in range(2)]
    sampling = [SamplingParams()] * 2
    # two ragged samples; one with a single token, so that some rank has none
    for numbers, answers in (([0, 1], responses), ([0], [responses[0][:1]])):
        if problem:
            break
        batch = make_microbatch(numbers, prompts, answers, layout="bucketed", pad_token_id=pad_token_id)
        batch = batch.to(next(model.parameters()).device)
        own = sampling[: len(numbers)]
        try:
            with attention_over_parts(ranks, [model]):
                found = forward_in_parts(ranks, model, batch, own, mask=None, pad_token_id=pad_token_id)
            whole = forward_tokens(model, batch, own)
        except (TypeError, ValueError, AttributeError, NotImplementedError, IndexError) as error:
            problem = str(error)
        else:
            gap = float((found.logprobs - whole.logprobs).abs().max())
            limit = 1e-3 if next(model.parameters()).dtype == torch.float32 else 0.1
            problem = "" if gap <= limit else f"log-probabilities move by {gap:.2g}"
    if problem:
        raise ConfigError(
            f"batch.context_ranks={ranks.context}: {type(model).__name__} cannot be computed in parts of a "
            f"sequence: {problem}; set batch.context_ranks=1"
        )
