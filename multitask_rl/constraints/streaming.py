"""Streaming constraints: partial responses are judged during generation; a violation ends the response.

Tokens after a violation would cost time and earn nothing. The kept tokens are ordinary samples of the policy
with its log-probabilities, and the cost of the truncated response is the cost that ended it. The response is
sampled again only in mode ``reject``: resampling would hide the violation from the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from multitask_rl.config.task import TaskSpec
from multitask_rl.records import FLAGGED, Failure, Rollout, Verdict
from multitask_rl.rollout.base import Watch

__all__ = ["StreamJudge", "streams"]


class Judging(Protocol):
    """The part of the reward pool that ``StreamJudge`` uses."""

    def judge(
        self, rollouts: Sequence[Rollout], only: Sequence[Collection[str]] | None = None
    ) -> list[dict[str, Verdict | Failure]]:
        """Return each rollout's verdicts on the constraints named in ``only`` (default: all)."""
        ...


def streams(spec: TaskSpec) -> bool:
    """Whether a constraint of the task judges partial responses."""
    return any(c.stream_every for c in spec.constraints)


class StreamJudge:
    """The monitor (``rollout.base``) of one call to an engine.

    A check that finds no violation, or that fails, has no effect: the complete response is judged again, like
    any other.

    Args:
        scorer: judges the partial responses, all that are due in one call.
        text: maps a slot and token ids to the text that the constraint reads.
    """

    def __init__(self, scorer: Judging, text: Callable[[Rollout, Sequence[int]], str]) -> None:
        self._scorer = scorer
        self._text = text
        self._slots: dict[int, tuple[Rollout, TaskSpec]] = {}
        self.verdicts: dict[int, dict[str, Verdict | Failure]] = {}
        """By seed of an ended response: the verdicts that ended it."""

    def watch(self, seed: int, slot: Rollout, spec: TaskSpec) -> Watch | None:
        """Watch the response with ``seed``; None if its task has no streaming constraint."""
        intervals = [c.stream_every for c in spec.constraints if c.stream_every]
        if not intervals:
            return None
        self._slots[seed] = (slot, spec)
        return Watch(monitor=self, every=math.gcd(*intervals))

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> list[bool]:
        """Return whether each response violates a constraint that is due at its length."""
        rollouts, due = [], []
        for seed, ids in partial:
            slot, spec = self._slots[seed]
            text = self._text(slot, ids)
            rollouts.append(replace(slot, response_ids=ids, response=text, finish_reason=FLAGGED))
            due.append(
                {
                    c.name or c.plugin
                    for c in spec.constraints
                    if c.stream_every and len(ids) % c.stream_every == 0
                }
            )
        asked = [i for i, names in enumerate(due) if names]
        judged = self._scorer.judge([rollouts[i] for i in asked], only=[due[i] for i in asked])
        ended = [False] * len(partial)
        for index, verdicts in zip(asked, judged, strict=True):
            violated = {n: v for n, v in verdicts.items() if isinstance(v, Verdict) and v.violated}
            if violated:
                ended[index] = True
                self.verdicts[partial[index][0]] = dict(violated)
        return ended
