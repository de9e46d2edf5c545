"""Streaming constraints: partial responses are judged while they are generated; the first violation ends one.

What is generated after a violation costs time and earns nothing, so it never comes to be. The kept tokens
were sampled from the policy as ever: their log-probabilities are its own, and the truncated response counts
with the cost of the look that ended it. It is not sampled again (that would hide the violation from the
policy), unless the constraint's mode is ``reject``.
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
    """What is needed of the reward pool."""

    def judge(
        self, rollouts: Sequence[Rollout], only: Sequence[Collection[str]] | None = None
    ) -> list[dict[str, Verdict | Failure]]:
        """Return the verdicts of each rollout, of the constraints named in ``only`` (default: all)."""
        ...


def streams(spec: TaskSpec) -> bool:
    """Whether a constraint of the task looks at partial responses."""
    return any(c.stream_every for c in spec.constraints)


class StreamJudge:
    """The monitor (``rollout.base``) of one call to an engine.

    A look at which the constraint fails, or has nothing to object to, changes nothing: the whole response is
    judged once more, like any other.

    Args:
        scorer: asked about the partial responses, all that are due at once.
        text: from a slot and token ids to the text a judge reads.
    """

    def __init__(self, scorer: Judging, text: Callable[[Rollout, Sequence[int]], str]) -> None:
        self._scorer = scorer
        self._text = text
        self._slots: dict[int, tuple[Rollout, TaskSpec]] = {}
        self.verdicts: dict[int, dict[str, Verdict | Failure]] = {}
        """Of the responses that were ended, by seed: what ended them."""

    def watch(self, seed: int, slot: Rollout, spec: TaskSpec) -> Watch | None:
        """Look after the response with ``seed``; None if no constraint of its task streams."""
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
