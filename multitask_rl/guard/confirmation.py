"""The second opinion: is what the screen saw there on the same prompts, against weights known to be good?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multitask_rl.guard.paired import compare_paired
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.guard.watch import Watch
from multitask_rl.records import TaskEvaluation

__all__ = ["Confirmation"]

_OVERWHELMING = 2.0
"""Times the limit: evidence that needs no agreement of the stored evaluations."""


class Confirmation:
    """Paired tests of an alarmed metric; remembers the evaluation of the weights last judged good.

    A fresh evaluation (new prompts or seeds, both weights) is independent of the screen, so that a false
    alarm has to be drawn twice. While an alarm lasts, fresh evaluations are pooled, which finds in two or
    three of them what one is too small for.
    """

    def __init__(self, config: SafetyGuardConfig) -> None:
        self._config = config
        self._good: dict[str, list[float]] = {}
        self._fresh: dict[str, tuple[list[float], list[float]]] = {}

    def remember_good(self, evaluations: Mapping[str, TaskEvaluation]) -> None:
        """Keep the values per prompt of weights judged good."""
        self._good = {task: list(evaluation.values) for task, evaluation in evaluations.items()}

    def forget_fresh(self) -> None:
        """The alarm is over; a later one starts with evaluations of its own."""
        self._fresh = {}

    def test(
        self,
        watch: Watch,
        evaluation: TaskEvaluation,
        statistics: Mapping[str, float],
        confirm: Callable[[str], tuple[TaskEvaluation, TaskEvaluation] | None] | None,
    ) -> tuple[bool, dict[str, float]]:
        """Return whether the fall is confirmed, and the numbers of the test.

        A metric of which only means are known has no pairs: the screen alone decides.
        """
        if not self._config.confirm or watch.metric:
            return True, {}
        fresh = confirm(watch.task) if confirm is not None else None
        if fresh is not None:
            current, reference = self._fresh.setdefault(watch.task, ([], []))
            current.extend(fresh[0].values)
            reference.extend(fresh[1].values)
            limit = self._config.confirm_z
        elif watch.task in self._good:
            current, reference = list(evaluation.values), self._good[watch.task]
            limit = self._config.stored_z
        else:
            return True, {}
        test = compare_paired(current, reference, higher_is_better=watch.higher_is_better)
        numbers = {
            "z": test.z,
            "z_limit": limit,
            "paired_drop": test.drop,
            "paired_prompts": float(test.num_prompts),
        }
        overwhelming = fresh is None and statistics["cusum"] > _OVERWHELMING * statistics["cusum_limit"]
        return test.z > limit or overwhelming, numbers

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able (a prompt that failed is None)."""
        return {
            "good": {task: _without_nan(values) for task, values in self._good.items()},
            "fresh": {task: [_without_nan(side) for side in pair] for task, pair in self._fresh.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        """Restore ``state_dict``."""
        self._good = {renamed.get(task, task): _with_nan(values) for task, values in state["good"].items()}
        self._fresh = {
            renamed.get(task, task): (_with_nan(now), _with_nan(then))
            for task, (now, then) in state["fresh"].items()
        }


def _without_nan(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _with_nan(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
