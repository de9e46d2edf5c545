"""Algorithm ``gspo``."""

from __future__ import annotations

from dataclasses import dataclass

from multitask_rl.algorithms.base import LossOutput, TokenBatch
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.policy_loss import bounded_log_ratio, policy_loss
from multitask_rl.algorithms.ragged import segment_mean


class GSPO(GRPO):
    """GSPO: one importance ratio per response instead of one per token.

    PPO's clip on ``s_i = (pi(y_i) / pi_old(y_i))^(1 / L_i)``, the geometric mean of the token ratios.

    Every token of a response carries the response's loss, so that the mean over its tokens (aggregation
    ``sequence``) is the paper's objective. Needs all tokens of a response in one micro-batch. An episode has
    one ratio, over the sampled tokens of all its turns; if its context was rewritten, so that it is several
    training samples, each of them has one.

    Source: GSPO (arXiv:2507.18071) Eq. 5-7; clip bounds of its sec. 5.1.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``GSPO``; its clip bounds are two orders below those of token ratios."""

        clip_low: float = 3e-4
        clip_high: float = 4e-4
        dual_clip: float = 0.0
        normalisation: str = "group"
        aggregation: str = "sequence"

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return the sequence-clipped loss, repeated over the tokens of each response."""
        log_ratio = bounded_log_ratio(batch.logprobs, batch.old_logprobs)
        of_sequence = segment_mean(log_ratio, batch.sequence, batch.num_sequences).exp()
        return policy_loss(batch, self.config, of_sequence[batch.sequence])
