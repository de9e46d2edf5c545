"""GDPO: several rewards in one task, each normalised before they are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multitask_rl.algorithms import group
from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig

_SUM_FLOOR = 0.01
"""Smallest divisor of the sums, as a part of the sum of the weights."""


def decoupled_advantages(component_rewards: Tensor, weights: Tensor, groups: Tensor) -> Tensor:
    """Return ``sum_k w_k (r_k - mean r_k) / (std r_k + eps)`` with mean and std over the group.

    ``component_rewards`` is [B, R], ``weights`` [R], ``groups`` [B]; the result is [B]. A sample to which
    reward k does not apply (NaN) is left out of k's statistics and gets nothing from k.
    """
    if component_rewards.shape != (len(groups), len(weights)):
        raise ValueError(
            f"component_rewards must be [B, R] = [{len(groups)}, {len(weights)}], "
            f"got {list(component_rewards.shape)}"
        )
    total = torch.zeros_like(component_rewards[:, 0])
    for values, weight in zip(component_rewards.unbind(1), weights.tolist(), strict=True):
        applies = ~values.isnan()
        members = groups[applies]
        deviations = group.centre(values[applies], members)
        total[applies] += weight * group.divide_by_group_std(deviations, members)
    return total


class GDPO(GRPO):
    """GRPO whose rewards are normalised one by one, added by weight, then whitened over the task's batch.

    Normalising the sum collapses different outcomes: with two binary rewards the groups {(0,0), (0,1)} and
    {(0,0), (1,1)} both give +-0.707; decoupled they give +-0.707 and +-1.414. Weights then act on every
    reward as given, whatever its spread. A constraint of mode ``penalty`` is one reward more, its cost with a
    negative weight.

    Components may cancel; only rounding error remains in the sums then. The divisor of the whitening is
    therefore at least 0.01 of the sum of the weights.

    Source: GDPO (arXiv:2601.05242); whitening per task, not over the mixed batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``GDPO``; ``normalisation`` applies to constraint costs only."""

        normalisation: str = "group"

    def is_informative(self, rewards: Sequence[float]) -> bool:
        """Always True: equal sums may hide different components, and this method gets the sums only."""
        return True

    def reward_advantages(self, batch: CreditBatch) -> Tensor:
        """Return whitened sums of decoupled advantages [B]."""
        components, weights = batch.component_rewards, batch.component_weights
        if components is None or weights is None:
            components, weights = batch.rewards.unsqueeze(1), batch.rewards.new_ones(1)
        decoupled = decoupled_advantages(components, weights, batch.groups)
        # their mean is 0 in every group; its rounding error would give groups without variance a gradient
        std = decoupled.double().square().mean().sqrt()
        floor = max(_SUM_FLOOR * float(weights.abs().sum()), 1e-30)  # above 0, also if every weight is 0
        return decoupled / std.clamp(min=floor).to(decoupled.dtype)
