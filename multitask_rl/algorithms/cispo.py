"""Algorithm ``cispo``."""

from __future__ import annotations

from dataclasses import dataclass

from multitask_rl.algorithms.base import LossOutput, TokenBatch
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.policy_loss import bounded_log_ratio, with_corrections


class CISPO(GRPO):
    """CISPO: clip the importance weight, keep every token's gradient.

    ``L = -stop_gradient(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi``.

    PPO's clip removes the gradient of tokens whose ratio has moved, among them the rare ones that start a new
    line of thought; here the weight is bounded and no token is dropped. The dual clip has no effect.

    Source: MiniMax-M1 (arXiv:2506.13585); bounds as in ScaleRL (arXiv:2510.13786).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``CISPO``."""

        clip_low: float = 1.0
        """Lower bound of the weight: 1 - clip_low; 1 = no lower bound, as in the paper."""
        clip_high: float = 4.0
        """Upper bound of the weight: 1 + clip_high."""
        normalisation: str = "group"

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return the weighted log-likelihood loss per token."""
        log_ratio = bounded_log_ratio(batch.logprobs, batch.old_logprobs).detach()
        ratio = log_ratio.exp()
        weight = ratio.clamp(1.0 - self.config.clip_low, 1.0 + self.config.clip_high)
        metrics = {
            "ratio": ratio,
            "clip_fraction": (weight != ratio).to(ratio.dtype),
            "approx_kl": ratio - 1.0 - log_ratio,
        }
        surrogate = LossOutput(loss=-weight * batch.advantages * batch.logprobs, metrics=metrics)
        return with_corrections(surrogate, batch, self.config)
