"""Group-relative credit: rewards relative to the other responses of the group; constraint costs in it.

A group is the rollouts of one draw of one prompt. Statistics are in float64 and per group; the only response
of a group of one gets 0 (not its raw reward). Axes: ``B`` samples, ``M`` groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.ragged import broadcast, segment_sum

ROUNDING = 1e-7
"""A difference of rewards up to this share of the largest is rounding: credit has them in float32."""


def _index(values: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's group number [B] in 0 .. M - 1 and the group sizes [M]."""
    if values.ndim != 1 or values.shape != groups.shape:
        raise ValueError(f"values {list(values.shape)} and groups {list(groups.shape)} must both be [B]")
    _, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, sizes


def centre(
    values: Tensor, groups: Tensor, *, lengths: Tensor | None = None, leave_one_out: bool = False
) -> Tensor:
    """Return ``r - mean of its group`` [B] (Dr.GRPO, arXiv:2503.20783); 0 where it is rounding.

    ``leave_one_out``: ``r - mean of the others in its group = G / (G - 1) (r - mean)`` (RLOO,
    arXiv:2402.14740). That baseline is independent of the sample, so it adds no bias.

    ``lengths`` L [B]: ``r - sum(L r) / sum(L)`` (OPO, arXiv:2505.23585), the variance-optimal baseline when
    the score's squared norm grows with the length. A group of empty responses gets 0.

    >>> centre(torch.tensor([1.0, 0.0, 7.0]), torch.tensor([3, 3, 8])).tolist()
    [0.5, -0.5, 0.0]
    """
    index, sizes = _index(values, groups)
    wide = values.double()
    # relative to the group's smallest: equal values are exact zeros, a large common shift costs no digits
    zeros = wide.new_zeros(len(sizes))
    lowest = zeros.scatter_reduce(0, index, wide, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, wide, "amax", include_self=False)
    largest = torch.maximum(highest, -lowest)
    is_equal = highest - lowest <= ROUNDING * largest
    wide = torch.where(is_equal[index], 0.0, wide - lowest[index])
    weight = torch.ones_like(wide) if lengths is None else lengths.double()
    total = segment_sum(weight, index, len(sizes))
    baseline = segment_sum(weight * wide, index, len(sizes)) / total.clamp(min=1.0)
    deviation = wide - baseline[index]
    is_zero = (deviation.abs() <= ROUNDING * largest[index]) | (total[index] <= 0)
    deviation = torch.where(is_zero, 0.0, deviation)
    if leave_one_out:
        size = sizes[index].double()
        deviation = deviation * size / (size - 1.0).clamp(min=1.0)
    return deviation.to(values.dtype)


def divide_by_group_std(deviations: Tensor, groups: Tensor, *, epsilon: float = 1e-6) -> Tensor:
    """Return ``d / (std of its group + epsilon)`` for deviations that are already centred [B].

    Source: GRPO (arXiv:2402.03300) sec. 4.1.2; n - 1 and ``epsilon = 1e-6`` as commonly implemented.
    """
    index, sizes = _index(deviations, groups)
    wide = deviations.double()
    square = segment_sum(wide.square(), index, len(sizes))
    std = (square / (sizes - 1).clamp(min=1)).sqrt()
    return (wide / (std[index] + epsilon)).to(deviations.dtype)


def mean_square_deviation(deviations: Tensor, groups: Tensor) -> float:
    """Return the mean unbiased variance of groups with variance, ``sum d^2 / sum (G - 1)``; 0 if none.

    ``deviations`` [B] are centred in their group.
    """
    index, sizes = _index(deviations, groups)
    square = segment_sum(deviations.double().square(), index, len(sizes))
    varied = square > 0
    degrees = (sizes[varied] - 1).clamp(min=1).sum()
    return float(square[varied].sum() / degrees) if bool(varied.any()) else 0.0


def whiten(values: Tensor, *, floor: float = 0.0, among: Tensor | None = None) -> Tensor:
    """Return ``(x - mean) / max(std, floor)`` of the values of one task; zeros where they do not vary.

    ``among`` (bool, shape of ``values``) marks the values that mean and std are taken over; None = all.
    """
    wide = values.double()
    counted = wide if among is None else wide[among]
    if counted.numel() < 2:
        return torch.zeros_like(values)
    mean = counted.mean()
    std = (counted - mean).square().mean().sqrt()
    # Rounding error of equal values must not be scaled to unit variance.
    negligible = 1e-12 * wide.abs().max()
    scaled = (wide - mean) / std.clamp(min=max(floor, 1e-300))
    return torch.where(std > negligible, scaled, 0.0).to(values.dtype)


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


def has_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ: only then is there a group-relative gradient.

    A relative difference up to ``ROUNDING`` is none.
    """
    values = [float(r) for r in rewards]
    return len(values) > 1 and max(values) - min(values) > ROUNDING * max(map(abs, values))
