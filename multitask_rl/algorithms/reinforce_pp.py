"""Algorithm ``reinforce_pp``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from multitask_rl.algorithms import group
from multitask_rl.algorithms.base import Credit, CreditBatch
from multitask_rl.algorithms.group import subtract_costs
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.kl import sampled_kl
from multitask_rl.algorithms.ragged import broadcast, check_tokens, discounted_suffix_sum


class ReinforcePP(GRPO):
    """REINFORCE++: whitening over the task's batch in place of a critic.

    ``A_t = (whiten(r) - lambda whiten(c)) / (1 + lambda) - beta (K_t - mean K)``.

    ``K_t = sum over t' >= t of log(old / reference)`` is the KL still to come. Whitening runs over the
    tokens of *this task* only: over a mixed batch, the task with the widest rewards would set the scale of
    all. Tokens that a grammar forced are left out. A mean over tokens is not 0 where lengths differ: a group
    of equal rewards, whose centred rewards are 0, then has the advantage ``-mean / std``.

    Deviation: the paper whitens reward and KL together; here KL is subtracted after whitening, for the
    reasons given at ``GRPO``, so beta is in units of the whitened reward.

    Source: REINFORCE++ (arXiv:2501.03262); per task: AgentRL (arXiv:2510.04206).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``ReinforcePP``; ``normalisation`` has no effect, whitening takes its place."""

        clip_high: float = 0.2
        group_baseline: bool = True
        """Subtract the group's mean first (REINFORCE++-baseline); False: one response a prompt is enough."""

    config: Config

    @property
    def min_group_size(self) -> int:
        """Two with the group baseline, else one."""
        return super().min_group_size if self.config.group_baseline else 1

    def is_informative(self, rewards: Sequence[float]) -> bool:
        """Whether the group's rewards differ; always True without the group baseline."""
        return super().is_informative(rewards) if self.config.group_baseline else True

    def centre(self, values: Tensor, batch: CreditBatch) -> Tensor:
        """Return values [B] minus their group's mean, or as they are without the group baseline."""
        return super().centre(values, batch) if self.config.group_baseline else values

    def credit(self, batch: CreditBatch) -> Credit:
        """Return whitened advantages per token."""
        check_tokens(batch.lengths, old_logprobs=batch.old_logprobs, ref_logprobs=batch.ref_logprobs)
        advantages = self._whitened(batch)
        metrics: dict[str, float] = {}
        advantages = subtract_costs(advantages, batch, lambda own, _: self._whitened(own), per_token=True)
        if batch.kl_coefficient > 0:
            kl = sampled_kl(batch)
            to_come = discounted_suffix_sum(kl, batch.lengths, 1.0)
            mean = to_come.mean() if batch.choices is None else to_come[batch.choices].mean()
            penalty = (to_come - mean).to(advantages.dtype)
            advantages = advantages - batch.kl_coefficient * penalty
            metrics["response_kl"] = float(kl.sum() / max(len(batch.lengths), 1))
        return Credit(advantages=advantages, metrics=metrics)

    def _whitened(self, batch: CreditBatch) -> Tensor:
        """Return the batch's rewards, centred and whitened over the tokens that had a choice: [N]."""
        values = broadcast(self.centre(batch.rewards, batch), batch.lengths)
        return group.whiten(values, among=batch.choices)
