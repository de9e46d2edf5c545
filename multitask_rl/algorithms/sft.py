"""Algorithm ``sft``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from multitask_rl.algorithms.base import Algorithm, Credit, CreditBatch, LossOutput, TokenBatch
from multitask_rl.algorithms.policy_loss import with_corrections
from multitask_rl.records import Scored, TrainSample


class SFT(Algorithm):
    """Supervised fine-tuning: cross entropy on the answers of the rows, beside other tasks.

    ``L = -log pi(y_t | x, y_<t)`` for every token of the row's answer and its end token.

    Nothing is sampled or scored in training. Importance settings have no effect.
    """

    on_policy: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = False

    def select(self, scored: Sequence[Scored]) -> list[TrainSample]:
        """Return the answers as samples without an importance ratio."""
        return [replace(sample, rollout_logprobs=[]) for sample in super().select(scored)]

    def credit(self, batch: CreditBatch) -> Credit:
        """Return ones: every token counts alike."""
        return Credit(advantages=torch.ones(int(batch.lengths.sum()), device=batch.lengths.device))

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return the negative log-likelihood per token."""
        likelihood = LossOutput(loss=-batch.logprobs, metrics={"nll": -batch.logprobs.detach()})
        return with_corrections(likelihood, batch, self.config)
