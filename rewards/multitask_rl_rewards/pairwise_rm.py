"""``pairwise_rm``: how often would the reward model prefer the response to the one in the data?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from multitask_rl.config.schema.ranges import Positive
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.rm_hf import RewardModel
from multitask_rl_rewards.text import value_of


class PairwiseRewardModel(RewardModel):
    """sigmoid((r(response) - r(opponent)) / temperature): the Bradley-Terry win probability.

    Source: Bradley and Terry (1952); the model of arXiv:2203.02155, Eq. 1. Unlike the raw value of ``rm_hf``
    it lies in [0, 1] and compares over prompts: 0.5 is as good as the opponent.
    """

    traits: ClassVar[PluginTraits] = replace(RewardModel.traits, low=0.0, high=1.0)

    @dataclass(kw_only=True, slots=True)
    class Config(RewardModel.Config):
        """Keys of ``pairwise_rm`` in a tasks file."""

        opponent_column: str = "chosen"
        """Column with the response to compare with."""
        temperature: Positive = 1.0
        """Units of the reward model's logit that count as one."""

    config: Config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one win probability per rollout; a row without an opponent is a ``data`` failure."""
        opponents = [value_of(r.row, self.config.opponent_column, "pairwise_rm") for r in rollouts]
        asked = [i for i, text in enumerate(opponents) if not isinstance(text, Failure)]
        rivals = [replace(rollouts[i], response=str(opponents[i])) for i in asked]
        values = super().score([*(rollouts[i] for i in asked), *rivals])
        results: list[RewardResult] = [
            text if isinstance(text, Failure) else Score(value=0.0) for text in opponents
        ]
        for position, i in enumerate(asked):
            results[i] = self._win(values[position], values[position + len(asked)])
        return results

    def _win(self, own: RewardResult, rival: RewardResult) -> RewardResult:
        for result in (own, rival):
            if not isinstance(result, Score):
                return result
        assert isinstance(own, Score)
        assert isinstance(rival, Score)
        cut = max(own.components["truncated"], rival.components["truncated"])
        margin = (own.value - rival.value) / self.config.temperature
        return Score(
            value=0.5 * (1.0 + math.tanh(margin / 2)), components={"margin": margin, "truncated": cut}
        )
