"""Difficulty pools: how a task's draws are split between its easy and its hard prompts.

A group teaches in proportion to the spread of its rewards: with a 0/1 reward and pass rate ``p`` the expected
variance is ``p (1 - p)``. Draws follow it, with ``n_i`` prompts in pool ``i`` and ``L_i`` the mean variance
of the rewards within its groups:

    share_i = floor * n_i / n + (1 - floor) * n_i L_i / sum_j n_j L_j

Sources: learnability ``p (1 - p)``: Rutherford et al., "No Regrets" (arXiv:2408.15099), Eq. 2; Foster et al.,
"Learning to Reason at the Frontier of Learnability" (arXiv:2502.12272).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from multitask_rl.curriculum.signal import ShownRange, place

MAX_LEARNABILITY = 0.25
"""p (1 - p) at p = 0.5: the optimistic learnability of a pool before it is measured."""

_PRIOR_GROUPS = 4
"""Weight of the optimistic start, in groups."""
_GAIN = 0.05
"""Weight of the newest group once warmed up: a memory of about 20 groups."""


@dataclass(kw_only=True, slots=True)
class RewardRange(ShownRange):
    """The scale that turns rewards into pass rates: [0, 1], or the observed range if it goes beyond."""

    def observe(self, groups: Iterable[Sequence[float]]) -> None:
        """Add the rewards of further groups, at least one reward per group."""
        ends = [(min(rewards), max(rewards)) for rewards in groups]
        self.widen([low for low, _ in ends], [high for _, high in ends])

    @property
    def scale(self) -> tuple[float, float]:
        """The ends of the range, ``low < high``."""
        low, high = self.ends or (min(self.lowest, default=0.0), max(self.highest, default=1.0))
        if low >= 0.0 and high <= 1.0:
            return 0.0, 1.0
        return low, high if high > low else low + 1.0

    def clip(self, rewards: Sequence[float]) -> list[float]:
        """Return ``rewards`` clipped to the range."""
        low, high = self.scale
        return [min(high, max(low, reward)) for reward in rewards]


@dataclass(kw_only=True, slots=True)
class PoolEstimate:
    """Reward statistics of the groups drawn from one pool, in the reward's own unit; all fields are state."""

    groups: int = 0
    mean: float = 0.0
    """Moving average of the groups' mean rewards."""
    variance: float = 0.0
    """Moving average of the unbiased variance of the rewards within groups."""
    spreads: int = 0
    """Number of groups with two or more rewards, which have a variance."""

    def observe(self, rewards: Sequence[float]) -> None:
        """Add the rewards of one group, at least one."""
        self.groups += 1
        mean = math.fsum(rewards) / len(rewards)
        self.mean += max(_GAIN, 1.0 / self.groups) * (mean - self.mean)
        if len(rewards) > 1:
            self.spreads += 1
            variance = math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
            self.variance += max(_GAIN, 1.0 / self.spreads) * (variance - self.variance)

    def pass_rate(self, scale: RewardRange) -> float:
        """Return the pool's pass rate in [0, 1]; NaN before its first group."""
        return place(self.mean, *scale.scale) if self.groups else math.nan

    def learnability(self, scale: RewardRange) -> float:
        """Return the mean within-group variance, mixed with the optimistic start while groups are few.

        Groups of one rollout have no variance: ``p (1 - p)`` of the pool's pass rate replaces it.
        """
        if self.spreads:
            low, high = scale.scale
            measured = self.variance / (high - low) ** 2
        else:
            p = self.pass_rate(scale) if self.groups else 0.5
            measured = p * (1.0 - p)
        weight = self.groups / (self.groups + _PRIOR_GROUPS)
        return weight * measured + (1.0 - weight) * MAX_LEARNABILITY


def pool_shares(
    sizes: Mapping[str, int], learnability: Mapping[str, float], floor: float
) -> dict[str, float]:
    """Return each pool's share of the draws (see the module), sum 1; ``floor`` of them stays uniform.

    >>> pool_shares({"easy": 30, "hard": 10}, {"easy": 0.0, "hard": 0.2}, 0.4)
    {'easy': 0.3, 'hard': 0.7}
    """
    total = sum(sizes.values())
    gains = {pool: size * learnability[pool] for pool, size in sizes.items()}
    gain = math.fsum(gains.values())
    if not gain > 0.0:
        return {pool: size / total for pool, size in sizes.items()}
    return {pool: floor * sizes[pool] / total + (1.0 - floor) * gains[pool] / gain for pool in sizes}
