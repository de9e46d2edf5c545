"""Costs of constraints in an advantage: one multiplier each, combined after scaling."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from multitask_rl.algorithms.base import CreditBatch

__all__ = ["subtract_costs"]


def subtract_costs(
    advantages: Tensor, batch: CreditBatch, of_cost: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return ``(A - sum_i lambda_i A_i) / (1 + sum_i lambda_i)``; ``A`` where every lambda is 0.

    Source: Stooke et al. (arXiv:2007.03964) for one constraint; several: the same sum.

    Args:
        advantages: of the reward, per response or per token.
        batch: its costs and multipliers.
        of_cost: costs [B] of one constraint and its index -> their advantages, shaped as ``advantages``;
            asked only for constraints with a multiplier above 0.
    """
    if batch.costs is None or not any(batch.multipliers):
        return advantages
    for index, (cost, multiplier) in enumerate(zip(batch.costs.unbind(1), batch.multipliers, strict=True)):
        if multiplier > 0:
            advantages = advantages - multiplier * of_cost(cost, index)
    return advantages / (1.0 + math.fsum(batch.multipliers))
