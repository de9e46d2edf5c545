"""Streaming constraints: partial responses are judged during generation; a violation ends the response.

The kept tokens are an ordinary sample of the policy, with the cost that ended it. Only mode ``reject``
samples the response again: otherwise the policy would not learn from the violation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from multitask_rl.config.task import TaskSpec
from multitask_rl.records import FLAGGED, Failure, Rollout, Verdict
from multitask_rl.rollout.base import Watch

Judge = Callable[[Sequence[Rollout], Sequence[Collection[str]]], list[dict[str, Verdict | Failure]]]
"""Returns each rollout's verdicts on the constraints named for it (``RewardPool.judge``)."""


class StreamJudge:
    """The monitor (``rollout.base``) of one call to an engine; ``text`` maps a slot and token ids to text.

    A check without a violation, or a failed one, has no effect: the complete response is judged again.
    """

    def __init__(self, judge: Judge, text: Callable[[Rollout, Sequence[int]], str]) -> None:
        self._judge = judge
        self._text = text
        self._slots: dict[int, tuple[Rollout, TaskSpec]] = {}
        self.verdicts: dict[int, dict[str, Verdict | Failure]] = {}
        """Seed of an ended response -> verdicts that ended it."""

    def watch(self, seed: int, slot: Rollout, spec: TaskSpec) -> Watch | None:
        """Watch the response with ``seed``; None if its task has no streaming constraint."""
        intervals = [c.stream_every for c in spec.constraints if c.stream_every]
        if not intervals:
            return None
        self._slots[seed] = (slot, spec)
        return Watch(monitor=self, every=math.gcd(*intervals))

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> list[bool]:
        """Return whether each response violates a constraint that is due at its length."""
        # a seed may be there twice: of an episode that began again while the lost answer is still sampled
        due: list[tuple[int, set[str]]] = []
        rollouts: list[Rollout] = []
        for seed, ids in partial:
            slot, spec = self._slots[seed]
            streaming = [c for c in spec.constraints if c.stream_every]
            if names := {c.name for c in streaming if len(ids) % c.stream_every == 0}:
                due.append((seed, names))
                text = self._text(slot, ids)
                rollouts.append(replace(slot, response_ids=ids, response=text, finish_reason=FLAGGED))
        ended: set[int] = set()
        found = self._judge(rollouts, [names for _, names in due])
        for (seed, _), verdicts in zip(due, found, strict=True):
            if violated := {n: v for n, v in verdicts.items() if isinstance(v, Verdict) and v.violated}:
                self.verdicts[seed] = {**violated}
                ended.add(seed)
        return [seed in ended for seed, _ in partial]
