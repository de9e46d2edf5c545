"""One forward over a micro-batch: log-probabilities, entropy and hidden states of response tokens.

The language-model head computes slices of the response tokens; on a CPU the operations after it go through
blocks of a slice. Of the first slices the probabilities are kept for the backward pass, which computes the
others again: no tensor of all tokens times the vocabulary exists.

Axes: ``B`` samples, ``N`` response tokens, ``V`` vocabulary, ``H`` hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from multitask_rl.models.sampling import TokenMask, keep_top, suppress
from multitask_rl.models.trial import TRIAL_ERRORS, evaluating
from multitask_rl.records import SamplingParams
from multitask_rl.training.microbatch import MicroBatch
from multitask_rl.training.shared_prompt import read_shared

SLICE_CELLS = 2**24
"""Logits (tokens times vocabulary) that exist at once: 64 MiB in float32."""
BLOCK_CELLS = 2**22
"""Logits that an operation after the head reads at once on a CPU: 16 MiB in float32. glibc uses freed memory
of that size again; from 32 MiB on, the system makes new pages, filled with zeros, in every operation."""
KEPT_BYTES = 2**27
"""Of the probabilities that are kept for the backward pass of a micro-batch, at most."""
LOWEST = -1e9
"""Takes the place of a log-probability of -inf: 0 * -inf is NaN, in the gradient too."""


class _Picked(torch.autograd.Function):
    """Log-probabilities of ``targets`` [N], and the entropy [N] without gradient, of ``filtered`` [N, V].

    ``filtered`` are the ``logits`` with -inf where a filter drops a token, never a target. The gradient is of
    ``logits`` and 0 there, as the probability is.

    The backward pass makes this gradient in one tensor. Those of ``gather`` and ``log_softmax`` make three:
    memory traffic is most of what a head costs besides matrix products. The probabilities wait for it in the
    type that ``_kept_type`` says for ``given``, the type of the head's output.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, filtered: Tensor, targets: Tensor, given: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the targets, and the entropy."""
        logprobs = filtered.log_softmax(dim=-1)
        picked = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        probabilities = logprobs.exp()
        entropy = -logprobs.clamp_(min=LOWEST).mul_(probabilities).sum(dim=-1)
        ctx.save_for_backward(probabilities.to(_kept_type(given)), picked, targets)
        ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits: ``gradient * (onehot(target) - p)``."""
        probabilities, picked, targets = ctx.saved_tensors
        found = probabilities * -gradient.unsqueeze(-1)
        # of the target from float32: in bfloat16 a probability of 0.999 is 1
        own = -gradient * picked.expm1()
        return found.scatter_(-1, targets.unsqueeze(-1), own.unsqueeze(-1)), None, None, None


def _kept_type(given: torch.dtype) -> torch.dtype:
    """Return in which type the probabilities of logits of the type ``given`` wait for the backward pass.

    In bfloat16 the gradient of such logits is rounded to bfloat16 anyway. float16 has no numbers below 6e-8,
    and the scale of the loss makes larger gradients of them.
    """
    return given if given == torch.bfloat16 else torch.float32


@dataclass(kw_only=True)
class TokenOutputs:
    """Outputs of the model at the response tokens of a micro-batch."""

    logprobs: Tensor
    """[N] nats, under the sampled distribution (grammar, temperature, top-k, top-p), float32."""
    entropy: Tensor
    """[N] nats of that distribution; with gradient only on request."""
    logits: Tensor | None = None
    """[N, V] float32, after grammar, suppressed ids and temperature, before top-k and top-p; only on request.

    Two models cut the vocabulary at different tokens: their KL after the cut is infinite."""
    hidden: Tensor | None = None
    """[N, H] last hidden state at the position before each token; only on request."""


def forward_tokens(
    model: Any,
    batch: MicroBatch,
    sampling: list[SamplingParams],
    *,
    want_hidden: bool = False,
    want_logits: bool = False,
    entropy_gradient: bool = False,
    keep: bool = True,
    mask: TokenMask | None = None,
) -> TokenOutputs:
    """Run ``model`` and return log-probabilities of the response tokens under the sampled distribution.

    Args:
        model: causal language model.
        batch: micro-batch on the model's device.
        sampling: [B] sampling parameters per sample; temperature 0 counts as 1 (greedy has no distribution).
        want_hidden: also return the last hidden states (for value heads).
        want_logits: also return all logits, which takes memory.
        entropy_gradient: let gradients flow through the entropy.
        keep: keep probabilities for the backward pass, which else computes all slices again.
        mask: what grammars allow at the response tokens.
    """
    split = split_head(model)
    if split is None:
        outputs = _run(model, batch, want_logits=True, want_hidden=want_hidden)
        hidden = outputs[1] if want_hidden else None
        before, head = outputs[0], None
    else:
        before, head = _run(split[0], batch)[0], split[1]
        hidden = before if want_hidden else None

    # a head in parts may have no rows between passes
    width = before.shape[-1] if head is None else int(model.config.get_text_config().vocab_size)
    block = max(1, BLOCK_CELLS // width)

    def score_block(
        given: Tensor, sequence: Tensor, targets: Tensor, allowed: TokenMask | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = _before_filter(given, sampling, sequence, allowed)
        if entropy_gradient:
            filtered = _filtered(logits, sampling, sequence, targets)
            logprobs = filtered.log_softmax(dim=-1)
            entropy = -(logprobs.exp() * logprobs.clamp(min=LOWEST)).sum(dim=-1)
            return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy, logits
        with torch.no_grad():
            filtered = _filtered(logits, sampling, sequence, targets)
        picked, entropy = _Picked.apply(logits, filtered, targets, given.dtype)  # type: ignore[no-untyped-call]
        return picked, entropy, logits

    def score(
        part: Tensor, sequence: Tensor, targets: Tensor, allowed: TokenMask | None
    ) -> tuple[Tensor, ...]:
        given = part if head is None else head(part)
        if given.device.type != "cpu" or len(given) <= block:
            return score_block(given, sequence, targets, allowed)[:2]
        found = []
        blocks = zip(*(torch.split(one, block) for one in (given, sequence, targets)), strict=True)
        for number, (rows, samples, wanted) in enumerate(blocks):
            chosen = None if allowed is None else allowed.slice(number * block, (number + 1) * block)
            found.append(score_block(rows, samples, wanted, chosen)[:2])
        return tuple(torch.cat(one) for one in zip(*found, strict=True))

    if want_logits:
        given = before if head is None else head(before)
        logprobs, entropy, logits = score_block(given, batch.sequence, batch.targets, mask)
        return TokenOutputs(logprobs=logprobs, entropy=entropy, logits=logits, hidden=hidden)
    size = max(1, SLICE_CELLS // width)
    if len(before) <= size:
        logprobs, entropy = score(before, batch.sequence, batch.targets, mask)
        return TokenOutputs(logprobs=logprobs, entropy=entropy, hidden=hidden)
    slices = zip(*(torch.split(one, size) for one in (before, batch.sequence, batch.targets)), strict=True)
    kind = before.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else before.dtype
    # autocast casts a frozen head again for every slice, and each kept slice would keep a copy
    weight = None if head is None else head.weight
    is_cached = weight is not None and weight.requires_grad and torch.is_autocast_cache_enabled()
    is_cast = weight is not None and weight.dtype != dtype and not is_cached
    # with a gradient the entropy keeps several tensors of that size
    can_keep = keep and not entropy_gradient and not is_cast
    most = KEPT_BYTES // (width * _kept_type(dtype).itemsize) if can_keep else 0
    parts = []
    for number, given in enumerate(slices):
        own = (*given, None if mask is None else mask.slice(number * size, (number + 1) * size))
        # a grammar's mask keeps tensors of that size, too
        if own[-1] is None and number * size + len(given[0]) <= most:
            parts.append(score(*own))
            continue
        # it keeps its hidden states alone; the backward pass computes it again
        parts.append(checkpoint(score, *own, use_reentrant=False))
    return TokenOutputs(
        logprobs=torch.cat([p for p, _ in parts]), entropy=torch.cat([e for _, e in parts]), hidden=hidden
    )


def _before_filter(
    logits: Tensor, sampling: Sequence[SamplingParams], sequence: Tensor, mask: TokenMask | None
) -> Tensor:
    """Return ``logits`` [N, V] in float32 after grammar, suppressed ids and temperature.

    ``sequence`` [N] numbers the sample of each token.
    """
    is_own = logits.dtype != torch.float32  # a copy, which nothing else reads
    logits = logits.float()
    if mask is not None:
        logits = mask.apply(logits)
    for ids in {s.suppressed_ids for s in sampling if s.suppressed_ids}:
        chosen = _of_tokens([s.suppressed_ids == ids for s in sampling], sequence)
        logits = suppress(logits, torch.tensor(ids, device=sequence.device), chosen)
    temperatures = [s.temperature or 1.0 for s in sampling]
    if any(temperature != 1.0 for temperature in temperatures):
        factors = _of_tokens(temperatures, sequence).unsqueeze(-1)
        logits = logits.div_(factors) if is_own else logits / factors
    return logits


def _filtered(
    logits: Tensor, sampling: Sequence[SamplingParams], sequence: Tensor, targets: Tensor
) -> Tensor:
    """Return ``logits`` [N, V] after top-k and top-p; the sampled tokens ``targets`` [N] always stay."""
    for top_k, top_p in {(s.top_k, s.top_p) for s in sampling if s.top_k > 0 or s.top_p < 1.0}:
        chosen = _of_tokens([(s.top_k, s.top_p) == (top_k, top_p) for s in sampling], sequence)
        tokens = chosen.nonzero().squeeze(-1)
        kept = keep_top(logits[tokens], top_k, top_p, keep=targets[tokens])
        logits = logits.index_copy(0, tokens, kept)
    return logits


def _of_tokens(values: Sequence[float], sequence: Tensor) -> Tensor:
    return torch.tensor(values, device=sequence.device)[sequence]


def response_hidden(model: Any, batch: MicroBatch) -> Tensor:
    """Return the last hidden states [N, H] at the position before each response token."""
    split = split_head(model)
    return _run(model, batch, want_hidden=True)[0] if split is None else _run(split[0], batch)[0]


def _run(
    model: Any, batch: MicroBatch, *, want_logits: bool = False, want_hidden: bool = False
) -> tuple[Tensor, ...]:
    """Return the wanted outputs at the response tokens [N, ...]; of a decoder its last hidden states."""
    options: dict[str, Any] = {"output_hidden_states": True} if want_hidden else {}
    if want_hidden and not want_logits:
        options["logits_to_keep"] = 1

    def read(out: Any) -> tuple[Tensor, ...]:
        if not (want_logits or want_hidden):
            return (out.last_hidden_state,)
        logits = (out.logits,) if want_logits else ()
        return (*logits, out.hidden_states[-1]) if want_hidden else logits

    if batch.shared:
        return read_shared(model, batch.shared, read, want_logits=want_logits, **options)
    width = batch.input_ids.shape[1]
    if want_logits:
        # one part of a sequence may hold no response token
        options["logits_to_keep"] = width - int(batch.column.min()) if len(batch.column) else 1
    out = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **options)
    # logits come for the last columns only
    return tuple(one[batch.row, batch.column - (width - one.shape[1])] for one in read(out))


def split_head(model: Any) -> tuple[Any, Any] | None:
    """Return decoder and language-model head of ``model``; None if the logits are not the head's outputs.

    This is tried once. The model keeps the result, also its copies and the parts of it on other ranks.
    """
    if "can_split_head" not in vars(model):
        model.can_split_head = _can_split_head(model)
    return (model.get_decoder(), model.get_output_embeddings()) if model.can_split_head else None


def _can_split_head(model: Any) -> bool:
    handle: Any = None
    try:
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        if head is None or decoder is model or head.weight.dim() != 2:
            return False
        # large logits, so that a cap or scale after the head shows
        handle = head.register_forward_hook(lambda _module, _given, out: 1000.0 * out)
        ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
        given = {"input_ids": ids, "position_ids": ids, "use_cache": False}
        with torch.no_grad(), evaluating(model):
            whole = model(**given).logits.float()
            parts = head(decoder(**given).last_hidden_state).float()
    except TRIAL_ERRORS:
        return False
    finally:
        if handle is not None:
            handle.remove()
    return float((whole - parts).abs().max() / whole.abs().max().clamp(min=1e-6)) < 1e-2
