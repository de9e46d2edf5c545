"""Policy gradient under a ``reject`` constraint: every attempt is a sample, rejected attempts too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.config.schema.ranges import Finite
from multitask_rl.records import Scored


class ConstrainedDecoding(GRPO):
    """GRPO on all attempts of reject-and-resample decoding, each under its own log-probability.

    Each attempt is one draw from the unconstrained policy pi and gives the term ``r_j grad log pi(y_j)``,
    with ``r_j = rejected_reward`` for a rejected one. Whether attempt j happens depends on earlier attempts
    only; by Wald's identity the sum over a slot has the mean ``E[attempts] E_pi[r grad log pi]``: the true
    gradient, times a positive number.

    Training on accepted responses alone is biased. They come from ``pi(y) 1[accepted] / Z``; ``grad log pi``
    alone drops ``grad log Z``, the gradient of the acceptance probability.

    Limits: a prompt with many refusals has more samples and so more weight; a group may be larger than
    ``group_size``; dividing by the realised number of tokens is unbiased only in the limit of many samples.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``ConstrainedDecoding``."""

        rejected_reward: Finite = 0.0
        """Reward of a rejected attempt; choose it below the reward of an acceptable response."""

    trains_rejected: ClassVar[bool] = True
    config: Config

    def outcome(self, scored: Scored) -> float:
        """Return the scored reward, or ``rejected_reward`` of a rejected attempt."""
        return self.config.rejected_reward if scored.rollout.rejected else super().outcome(scored)
