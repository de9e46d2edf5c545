"""``environment``: what the environment of an episode gave it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.config.schema.ranges import Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import FLAGGED, NOT_APPLICABLE, RewardResult, Rollout, Score


class EnvironmentReward:
    """The sum of what the steps and the end of an episode gave.

    Rewards by name are components; their sum is the value, or the one called ``key``. An episode that the
    environment left unscored (None) has no value: it counts in no mean and is not 0. An episode that a limit
    (turns, tokens, tool calls) or a constraint (``stream_every``) ended before the environment gave anything
    has ``unfinished``: the actor ended it so, and to be unscored would be better than a low reward. So has
    one that the environment ended without a reward behind an answer that a token limit cut.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(isolate=False)

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``environment`` in a tasks file."""

        key: str = ""
        """Name of the reward to take, of those that the environment gives; empty = their sum."""
        unfinished: float = 0.0
        """Value of an episode that a limit or a constraint ended before the environment gave anything. If the
        environment gives negative rewards, set it to the worst one."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one value per episode."""
        return [self._score_one(rollout.earned, rollout.finish_reason) for rollout in rollouts]

    def _score_one(self, earned: float | Mapping[str, float] | None, reason: str) -> RewardResult:
        is_cut = reason in ("length", FLAGGED)
        nothing = Score(value=self.config.unfinished) if is_cut else NOT_APPLICABLE
        if earned is None:
            return nothing
        if not isinstance(earned, Mapping):
            return Score(value=float(earned))
        if not self.config.key:
            return Score(value=float(sum(earned.values())), components=dict(earned))
        if self.config.key not in earned:
            return nothing
        return Score(value=float(earned[self.config.key]), components=dict(earned))
