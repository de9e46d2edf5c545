"""Constraint costs in advantages: one multiplier per constraint, combined after scaling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.ragged import broadcast


def subtract_costs(
    advantages: Tensor,
    batch: CreditBatch,
    of_cost: Callable[[CreditBatch, int], Tensor],
    *,
    per_token: bool = False,
) -> Tensor:
    """Return ``(A - sum_i lambda_i A_i) / (1 + sum_i lambda_i)``; ``A`` where every lambda is 0.

    ``advantages`` ``A`` of the reward are [B], or [N] if ``per_token``. ``of_cost`` returns ``A_i`` from the
    samples to which constraint i applies, with costs as rewards, and from i; it is called for multipliers
    above 0 only. Other samples are in none of its statistics and have ``A_i = 0``.

    Source: Stooke et al. (arXiv:2007.03964) for one constraint; several: the same sum.
    """
    if batch.costs is None or not any(batch.multipliers):
        return advantages
    for index, (cost, multiplier) in enumerate(zip(batch.costs.unbind(1), batch.multipliers, strict=True)):
        if multiplier > 0:
            concerned = ~cost.isnan()
            tokens = broadcast(concerned, batch.lengths)
            own = CreditBatch(
                rewards=cost[concerned],
                groups=batch.groups[concerned],
                lengths=batch.lengths[concerned],
                choices=None if batch.choices is None else batch.choices[tokens],
            )
            where = tokens if per_token else concerned
            of_all = torch.zeros_like(advantages)
            of_all[where] = of_cost(own, index).to(advantages.dtype)
            advantages = advantages - multiplier * of_all
    return advantages / (1.0 + math.fsum(batch.multipliers))
