"""On-policy distillation: the actor learns a teacher's distribution on its own samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from multitask_rl.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    Credit,
    CreditBatch,
    LossOutput,
    TokenBatch,
)
from multitask_rl.algorithms.kl import estimate_kl
from multitask_rl.algorithms.policy_loss import policy_loss, with_corrections


class Distill(Algorithm):
    """Minimises KL(actor || teacher) at every token of the actor's own samples.

    ``exact``: ``L_t = sum_v pi(v) (log pi(v) - log teacher(v))`` over the vocabulary at sampled positions.
    Otherwise the sampled token alone: ``A_t = log teacher(y_t) - log old(y_t)`` with PPO's clipped ratio.
    Both have the same expected gradient at the first update, unless ``top_k`` or ``top_p`` drop tokens: the
    exact sum is over all tokens, the other over those that were kept. Neither has the effect of a token on
    later positions. The exact sum has no variance from the choice of the token: an actor that never samples
    the teacher's token learns it too, and a stale sample needs no weight. It needs the logits of both models
    at once, as wide as the vocabulary.

    Rewards of the task are measured and do not train. Source: GKD (arXiv:2306.13649), with samples of the
    actor only and the reverse KL of MiniLLM (arXiv:2306.08543); the sampled form: Lu et al., "On-Policy
    Distillation" (Thinking Machines Lab, 2025).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AlgorithmConfig):
        """Settings of ``Distill``; with ``exact``, clips and ``truncated_is`` have no effect."""

        exact: bool = True
        """Whether the KL is summed over the vocabulary; false takes less memory and has more variance."""

    needs_reward: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = True
    config: Config

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self.wants_exact_kl = self.config.exact

    def credit(self, batch: CreditBatch) -> Credit:
        """Return ones or, if not ``exact``, ``log teacher - log old`` of every token.

        Raises:
            ValueError: the batch lacks one of the two.
        """
        if self.config.exact:
            return Credit(advantages=torch.ones(int(batch.lengths.sum()), device=batch.lengths.device))
        if batch.old_logprobs is None or batch.ref_logprobs is None:
            raise ValueError("distillation needs old_logprobs [N] and the teacher's as ref_logprobs [N]")
        kl = estimate_kl(batch.old_logprobs, batch.ref_logprobs, "k1")
        trained = kl if batch.choices is None else kl[batch.choices]
        metrics = {"teacher_kl": float(trained.mean())} if len(trained) else {}
        return Credit(advantages=-kl, metrics=metrics)

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return the KL or the clipped policy loss per token.

        Raises:
            ValueError: ``exact`` without ``exact_kl``.
        """
        if not self.config.exact:
            return policy_loss(batch, self.config)
        if batch.exact_kl is None:
            raise ValueError("exact distillation needs exact_kl [N]")
        found = LossOutput(loss=batch.exact_kl, metrics={"teacher_kl": batch.exact_kl.detach()})
        unweighted = replace(batch, rollout_logprobs=None)  # the sum does not depend on the sampled token
        return with_corrections(found, unweighted, self.config)
