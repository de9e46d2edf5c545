"""The policy-gradient loss per token that every ratio-based algorithm shares.

Three policies appear: the engine's ``rollout`` (what sampled), the trainer's ``old`` (start of the step) and
the policy now. The clipped ratio is now/old; truncated importance sampling corrects old/rollout, the
mismatch of two implementations of the same weights (or of stale weights).
"""

from __future__ import annotations

import torch
from torch import Tensor

from multitask_rl.algorithms.base import AlgorithmConfig, LossOutput, TokenBatch
from multitask_rl.algorithms.kl import MAX_LOG_RATIO, estimate_kl


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``log(now / old)`` [N], bounded so that ``exp`` of it is finite."""
    if logprobs.shape != old_logprobs.shape:
        raise ValueError(
            f"logprobs {list(logprobs.shape)} and old_logprobs {list(old_logprobs.shape)} differ"
        )
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> LossOutput:
    """Return PPO's pessimistic surrogate per token, as a loss.

    ``L = max(-rho A, -clip(rho, 1 - clip_low, 1 + clip_high) A)``, and for A < 0 at most ``-c A``.

    Source: PPO (arXiv:1707.06347) Eq. 7; separate bounds: DAPO (arXiv:2503.14476) Eq. 8; dual clip: Ye et al.
    (arXiv:1912.09729).

    ``ratio`` [N] is now/old, with gradient, ``advantages`` [N], ``dual_clip`` c > 1; 0 = off. Metrics:
    ``clip_fraction`` (tokens whose gradient the clip removed), ``dual_clip_fraction``.
    """
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    metrics = {"clip_fraction": (clipped > plain).to(loss.dtype)}
    if dual_clip > 0:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = torch.where(beyond, bound, loss)
        metrics["dual_clip_fraction"] = beyond.to(loss.dtype)
    return LossOutput(loss=loss, metrics=metrics)


def truncated_is_weight(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """Return ``w = min(old / rollout, cap)`` per token, without gradient; 1 where the rollout is NaN.

    ``old_logprobs`` [N] are the trainer's, ``rollout_logprobs`` [N] the engine's, nats. Truncation trades
    variance for a bias that is real (cap 2 gives .828 for .936 in the tests' example).

    Source: Ionides, "Truncated Importance Sampling" (2008); Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training" (2025).
    """
    known = ~torch.isnan(rollout_logprobs)
    # Mask before exp: a NaN that meets exp() cannot be masked out of a gradient afterwards.
    log_weight = torch.where(known, old_logprobs.detach() - rollout_logprobs, 0.0)
    capped = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(max=cap)
    return torch.where(known, capped, 1.0)


def with_corrections(surrogate: LossOutput, batch: TokenBatch, config: AlgorithmConfig) -> LossOutput:
    """Return ``L = w L_surrogate + beta KL - c_H entropy``, with w the engine-mismatch weight.

    Raises:
        ValueError: a KL coefficient without reference log-probabilities, or an entropy bonus without entropy.
    """
    loss, metrics = surrogate.loss, dict(surrogate.metrics)
    if config.truncated_is > 0 and batch.rollout_logprobs is not None:
        weight = truncated_is_weight(batch.old_logprobs, batch.rollout_logprobs, config.truncated_is)
        loss = loss * weight
        metrics["is_weight"] = weight
    if batch.kl_coefficient > 0:
        kl = batch.exact_kl
        if kl is None:
            if batch.ref_logprobs is None:
                raise ValueError("kl_coefficient > 0 in the loss needs ref_logprobs [N]")
            kl = estimate_kl(batch.logprobs, batch.ref_logprobs, batch.kl_estimator)
        loss = loss + batch.kl_coefficient * kl
        metrics["kl_loss"] = kl.detach()
    if config.entropy_coefficient > 0:
        if batch.entropy is None:
            raise ValueError("entropy_coefficient > 0 needs entropy [N]")
        loss = loss - config.entropy_coefficient * batch.entropy
    return LossOutput(loss=loss, metrics=metrics)


def policy_loss(batch: TokenBatch, config: AlgorithmConfig, ratio: Tensor | None = None) -> LossOutput:
    """Return the clipped loss per token [N] with all corrections.

    At the first update of a step ``ratio`` is 1 and the gradient is that of REINFORCE, ``-A grad log pi``.
    Metrics: ``ratio``, ``approx_kl`` (k3 of old against now, nats), those of ``clipped_surrogate`` and
    ``with_corrections``. ``ratio`` [N], with gradient, replaces the importance ratio of each token.
    """
    log_ratio = bounded_log_ratio(batch.logprobs, batch.old_logprobs)
    of_token = log_ratio.exp()
    ratio = of_token if ratio is None else ratio
    clips = {"clip_low": config.clip_low, "clip_high": config.clip_high, "dual_clip": config.dual_clip}
    surrogate = clipped_surrogate(ratio, batch.advantages, **clips)
    surrogate.metrics["ratio"] = ratio.detach()
    surrogate.metrics["approx_kl"] = (of_token - 1.0 - log_ratio).detach()
    return with_corrections(surrogate, batch, config)
