"""Verifiers of reasoning-gym: ``reasoning_gym:<data set>``; the row holds ``answer`` and ``metadata``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.contracts import PluginTraits
from multitask_rl.data.reasoning_gym import create_generator, entry_of
from multitask_rl.records import Rollout
from multitask_rl.scoring.foreign.base import ForeignReward

__all__ = ["ReasoningGymReward"]


class ReasoningGymReward(ForeignReward):
    """The verifier of a reasoning-gym data set."""

    one_by_one = True
    traits = PluginTraits(low=0.0, high=1.0, needs=("answer", "metadata"))

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Which part of the response is the answer."""

        answer_tag: str = "answer"
        """The answer is what the last ``<answer>...</answer>`` holds; without one, or with an empty tag
        name, it is the whole response."""
        dataset: dict[str, Any] = field(default_factory=dict)
        """Settings of the data set, where its verifier depends on them."""

    def __init__(self, config: ReasoningGymReward.Config) -> None:
        super().__init__()
        self.config = config
        self._dataset = create_generator(self.target, {"size": 1, "seed": 0, **config.dataset}, self.where)

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return the verifier's score in [0, 1] per rollout."""
        return self._each(self._one, rollouts)

    def _one(self, rollout: Rollout) -> float:
        answer = _last_tag(rollout.response, self.config.answer_tag)
        return float(self._dataset.score_answer(answer=answer.strip() or None, entry=entry_of(rollout.row)))


def _last_tag(text: str, tag: str) -> str:
    """Return what the last ``<tag>`` holds, the whole text without one; no regex, the text may be hostile."""
    if not tag:
        return text
    start = text.rfind(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return text[start + len(tag) + 2 : end] if start >= 0 and end >= 0 else text
