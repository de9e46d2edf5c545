"""The rollouts of one batch on their way through the rewards, taken back group by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from multitask_rl.records import Rollout, Scored
from multitask_rl.scoring.pending import Pending, Span

__all__ = ["RewardBatch"]


class RewardBatch:
    """Filled while rollouts end; a group is taken when all of its rollouts are scored, and only once.

    Args:
        pending: the open round of the reward pool.
        finish: turns the pool's record into the stage's (costs of constraints).
    """

    def __init__(self, pending: Pending[Scored], finish: Callable[[Scored], Scored]) -> None:
        self._pending, self._finish = pending, finish
        self._rollouts: list[Rollout] = []
        self._asked: list[int] = []
        """Per rollout its index in ``pending``; -1: refused by a constraint, not scored."""
        self._num_asked = 0
        self._num_parts = 0
        self._place: dict[int, int] = {}
        self._groups: dict[str, list[int]] = {}
        """Group id -> rollouts not yet taken, in the order of the batch."""

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Begin to score rollouts; refused ones are not scored, what they earn is the algorithm's."""
        self._num_parts += 1
        for rollout in rollouts:
            self._rollouts.append(rollout)
            self._asked.append(-1 if rollout.rejected else self._num_asked)
            self._num_asked += not rollout.rejected
        self._pending.add([r for r in rollouts if not r.rejected])

    def seal(self) -> None:
        """Say that nothing more is added."""
        order = list(range(len(self._rollouts)))
        if self._num_parts > 1:
            order.sort(key=lambda index: self._rollouts[index].order)
        self._place = {index: place for place, index in enumerate(order)}
        self._pending.seal([self._asked[i] for i in order if self._asked[i] >= 0])
        for index in order:
            self._groups.setdefault(self._rollouts[index].group_id, []).append(index)

    @property
    def num_open(self) -> dict[str, int]:
        """Groups not yet taken, by task."""
        counts: dict[str, int] = {}
        for indices in self._groups.values():
            task = self._rollouts[indices[0]].task
            counts[task] = counts.get(task, 0) + 1
        return counts

    def wait(self, quorum: float = 1.0) -> str:
        """Return when the share ``quorum`` of the groups is scored; the task waited for last, if any."""
        if quorum >= 1.0:
            return self._pending.wait()
        needed = math.ceil(quorum * len(self._groups) - 1e-9)
        return self._pending.wait(lambda: sum(map(self._is_done, self._groups.values())) >= needed)

    def take(self) -> list[Scored]:
        """Return the records of the groups that are scored by now, in the order of the batch.

        Raises:
            RewardError: a task's error budget is spent.
        """
        done = [name for name, indices in self._groups.items() if self._is_done(indices)]
        indices = sorted((i for name in done for i in self._groups.pop(name)), key=self._place.__getitem__)
        scored = iter(self._pending.results([self._asked[i] for i in indices if self._asked[i] >= 0]))
        return [
            self._finish(
                Scored(rollout=self._rollouts[i], reward=None) if self._asked[i] < 0 else next(scored)
            )
            for i in indices
        ]

    def drop(self, is_unwanted: Callable[[Rollout], bool]) -> dict[str, int]:
        """Give up the open groups that are unwanted; return how many of each task."""
        dropped: dict[str, int] = {}
        for name, indices in list(self._groups.items()):
            rollout = self._rollouts[indices[0]]
            if is_unwanted(rollout):
                self._pending.cancel([self._asked[i] for i in self._groups.pop(name) if self._asked[i] >= 0])
                dropped[rollout.task] = dropped.get(rollout.task, 0) + 1
        return dropped

    def spans(self) -> dict[str, Span]:
        """Return per task from its first to its last answer; what is open runs until now."""
        return self._pending.spans([i for i in self._asked if i >= 0])

    def _is_done(self, indices: Sequence[int]) -> bool:
        return all(self._asked[i] < 0 or self._pending.is_done(self._asked[i]) for i in indices)
