"""Kullback-Leibler divergence to the reference: estimators, the exact sum, the controller of beta.

What each estimator does as a *loss* on on-policy samples (expected gradient; "A Comedy of Estimators",
arXiv:2512.21852; the tests check it by enumeration):

=====  ==============================  ===========================  ==========================================
name   value, with r = ref/policy      mean under the policy        expected gradient as a loss
=====  ==============================  ===========================  ==========================================
k1     -log r                          KL(policy || ref), unbiased  0: it regularises nothing
k2     (log r)^2 / 2                   biased                       that of KL(policy || ref)
k3     r - 1 - log r                   KL(policy || ref), unbiased  that of KL(ref || policy): another optimum
=====  ==============================  ===========================  ==========================================

k1 *inside the reward* (detached) gives the gradient of KL(policy || ref) and is the default placement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.config.task import KLSpec
from multitask_rl.records import Event

KL_ESTIMATORS = ("k1", "k2", "k3")

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 keeps float32 finite, far above any meaningful ratio: every surrogate clips it."""
_MAX_ERROR = 0.2
_REPORTED_LOG_RATIO = math.log(1.25)


def estimate_kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """Return the estimate [N], nats, of KL(policy || reference) at the sampled tokens; differentiable.

    Source: Schulman, "Approximating KL Divergence" (2020); the table in this module's docstring.

    Raises:
        ValueError: unknown estimator or unequal shapes.
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(
            f"logprobs {list(logprobs.shape)} and ref_logprobs {list(ref_logprobs.shape)} differ"
        )
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return log_ratio.clamp(max=MAX_LOG_RATIO).exp() - 1.0 - log_ratio
    raise ValueError(f"kl_estimator must be one of {', '.join(KL_ESTIMATORS)}, got {estimator!r}")


def sampled_kl(batch: CreditBatch) -> Tensor:
    """Return k1, ``log old - log reference``, of every response token [N], for the penalty in the reward.

    Raises:
        ValueError: the batch lacks one of the two.
    """
    if batch.old_logprobs is None or batch.ref_logprobs is None:
        raise ValueError("a KL penalty inside the reward needs old_logprobs [N] and ref_logprobs [N]")
    return estimate_kl(batch.old_logprobs, batch.ref_logprobs, "k1")


def exact_kl(policy_logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(policy || reference) summed over the vocabulary, ``sum_v p_v (log p_v - log q_v)``.

    Tokens the policy gives probability 0 (logit -inf under a mask) add 0, also to the gradient.

    The logits are [..., V], unnormalised or log-probabilities; the result is [...] nats, differentiable.
    """
    log_p, log_q = policy_logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    # masked before the product: -inf - -inf is NaN, and 0 * NaN is NaN in the gradient
    gap = (log_p - log_q).masked_fill(torch.isneginf(log_p), 0.0)
    return (log_p.exp() * gap).sum(dim=-1)


class KLController:
    """The coefficient beta of one task: fixed, or steered to a target KL.

    Adaptive update per step, with ``e = clip(observed / target - 1, -0.2, 0.2)``::

        beta <- beta * (1 + e / horizon)

    Source: Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (arXiv:1909.08593), sec. 2.2,
    with the horizon counted in steps.
    """

    def __init__(self, spec: KLSpec) -> None:
        self._spec = spec
        self.coefficient = float(spec.coefficient)
        """Beta for the next step."""
        self._reported = self.coefficient

    def update(self, observed: float, step: int) -> list[Event]:
        """Update ``coefficient`` from the KL of ``step``; return an event for a large change.

        ``observed`` is the mean over responses of the summed KL, nats; NaN (not measured) has no effect.
        """
        target = self._spec.target
        if target is None or not math.isfinite(observed):
            return []
        error = min(max(observed / target - 1.0, -_MAX_ERROR), _MAX_ERROR)
        self.coefficient *= 1.0 + error / self._spec.horizon
        old, new = self._reported, self.coefficient
        if old == 0.0 or abs(math.log(new / old)) <= _REPORTED_LOG_RATIO:
            return []
        self._reported = new
        reason = (
            f"KL of {observed:.4g} nats per response is {'above' if observed > target else 'below'} the "
            f"target {target:.4g}: coefficient {old:.4g} -> {new:.4g}"
        )
        data = {"from": old, "to": new, "observed": observed}
        return [Event(step=step, source="kl", kind="coefficient", reason=reason, data=data)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        start = self._spec.coefficient
        return {"coefficient": self.coefficient, "start": start, "reported": self._reported}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore an adaptive beta with the same configured start; otherwise keep the configured beta."""
        if self._spec.target is not None and state["start"] == self._spec.coefficient:
            self.coefficient, self._reported = state["coefficient"], state["reported"]
