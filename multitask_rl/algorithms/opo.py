"""Algorithm ``opo``."""

from __future__ import annotations

import torch
from torch import Tensor

from multitask_rl.algorithms import group
from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.dr_grpo import DrGRPO
from multitask_rl.algorithms.ragged import broadcast, segment_sum


class OPO(DrGRPO):
    """OPO: exact on-policy training with the length-weighted optimal baseline.

    Advantages ``r - sum(L r) / sum(L)`` of the group, with L the response lengths.

    A token that a grammar forced does not count in L. The baseline minimises the gradient's variance if the
    squared norm of a response's score is proportional to its length. Advantages weighted by length sum to
    zero, plain ones do not. The paper makes one update per batch (``num_epochs = num_minibatches = 1``): the
    ratio is then 1 and the clip without effect.

    Source: "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585).
    """

    def centre(self, values: Tensor, batch: CreditBatch) -> Tensor:
        """Return values [B] minus the length-weighted mean of their group."""
        lengths = batch.lengths
        if batch.choices is not None:
            samples = broadcast(torch.arange(len(lengths), device=lengths.device), lengths)
            lengths = segment_sum(batch.choices.long(), samples, len(lengths))
        return group.centre(values, batch.groups, lengths=lengths)
