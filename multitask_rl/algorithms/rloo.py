"""Algorithm ``rloo``."""

from __future__ import annotations

from torch import Tensor

from multitask_rl.algorithms import group
from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.dr_grpo import DrGRPO


class RLOO(DrGRPO):
    """RLOO: REINFORCE whose baseline is the mean of the other responses.

    Advantages ``r_i - mean of r_j, j != i`` = ``G / (G - 1)`` times those of Dr.GRPO.

    The factor matters where groups differ in size; the baseline does not contain the sample, so it is
    unbiased.

    Source: "Back to Basics" (arXiv:2402.14740).
    """

    def centre(self, values: Tensor, batch: CreditBatch) -> Tensor:
        """Return values [B] minus the mean of the others in their group."""
        return group.centre(values, batch.groups, leave_one_out=True)
