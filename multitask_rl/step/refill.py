"""Refill: groups without a gradient are replaced by more prompts of the same task.

Filtering alone shifts the mix towards tasks whose groups are easy to keep (MT-GRPO, arXiv:2602.05547). Here
each task gets back what its filter took, within a bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from multitask_rl.records import Scored
from multitask_rl.step.metrics import Groups, by_group, is_informative
from multitask_rl.step.task_state import TaskState

MIN_RATE = 0.05
"""Below this share of groups with a gradient, no refill is tried."""
PRIOR_GROUPS = 4.0
"""Weight, in groups, of the task's smoothed rate beside the step's own rate."""
MAX_OVERSAMPLING = 3.0
"""Prompts drawn per missing group at most."""


class Refill:
    """Draws until each task has its quota of groups with a gradient, or the rounds are used up.

    Args:
        rounds: extra rounds at most; 0 = none.
        informative_rate: task -> smoothed share of its groups that give a gradient.
    """

    def __init__(
        self, tasks: Mapping[str, TaskState], rounds: int, informative_rate: Callable[[str], float]
    ) -> None:
        self._tasks = tasks
        self._rounds = rounds
        self._informative_rate = informative_rate

    def collect(
        self,
        quotas: Mapping[str, int],
        experience: Callable[[Mapping[str, int]], list[Scored]],
        late: Callable[[], Mapping[str, int]] = dict,
    ) -> tuple[list[Scored], list[Scored]]:
        """Return ``(all records drawn, those to train on)``.

        ``experience`` draws and scores so many prompts per task. Groups per task in ``late`` are not scored
        yet; they may still give a gradient.
        """
        drawn = experience(quotas)
        for _ in range(self._rounds):
            groups, open_groups = by_group(drawn), late()
            missing: dict[str, int] = {}
            for name, found in self._num_informative(groups).items():
                lacking, known = quotas[name] - found - open_groups.get(name, 0), self._informative_rate(name)
                rate = (found + PRIOR_GROUPS * known) / (len(groups[name]) + PRIOR_GROUPS)
                if lacking > 0 and rate >= MIN_RATE:
                    # the rate is rounded: 2.0000000000000004 prompts are 2
                    missing[name] = math.ceil(lacking * min(1.0 / rate, MAX_OVERSAMPLING) - 1e-9)
            if not missing:
                break
            drawn = drawn + experience(missing)
        return drawn, self.keep(drawn, quotas)

    def shortfall(self, kept: Sequence[Scored], quotas: Mapping[str, int]) -> dict[str, int]:
        """Return how many groups of each task's quota gave no gradient; nothing without rounds.

        A task below ``MIN_RATE`` is not counted: its debt would only grow.
        """
        if not self._rounds:
            return {}
        found = self._num_informative(by_group(kept))
        short = {name: number - found.get(name, 0) for name, number in quotas.items()}
        return {n: s for n, s in short.items() if s > 0 and self._informative_rate(n) >= MIN_RATE}

    def _num_informative(self, groups: Mapping[str, Groups]) -> dict[str, int]:
        return {n: sum(is_informative(self._tasks[n], g) for g in own.values()) for n, own in groups.items()}

    def keep(self, drawn: Sequence[Scored], quotas: Mapping[str, int]) -> list[Scored]:
        """Return the groups to train on, by task, at least the quota of each if so many were drawn.

        - Without a KL or entropy term: the quota, groups with a gradient first, in order of drawing.
        - With one: all groups in order of drawing, up to the last that the quota of groups with a gradient
          needs. The term then sees prompts as the stream draws them, not only those that are not solved yet.
        """
        kept: list[Scored] = []
        for name, own in by_group(drawn).items():
            task, groups = self._tasks[name], list(own.values())
            informative = [is_informative(task, group) for group in groups]
            if task.learner.is_regularised:
                found = itertools.accumulate(informative, initial=0)
                chosen = [
                    group for group, before in zip(groups, found, strict=False) if before < quotas[name]
                ]
            else:
                order = sorted(range(len(groups)), key=lambda i: not informative[i])
                chosen = [groups[i] for i in order[: quotas[name]]]
            kept.extend(s for group in chosen for s in group)
        return kept
