"""Confirmation of an alarm: a paired test of the current weights against weights that were judged good."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multitask_rl.guard.paired import compare_paired
from multitask_rl.guard.settings import SafetyGuardConfig
from multitask_rl.guard.watch import MetricWatch
from multitask_rl.records import TaskEvaluation

__all__ = ["Confirmation"]

_OVERWHELMING = 2.0
"""Evidence above this multiple of the limit needs no agreement of the stored evaluations."""


class Confirmation:
    """Paired tests of an alarmed metric; keeps the evaluation of the weights last judged good.

    A fresh evaluation uses new prompts or seeds for both weights. It is independent of the detector, so a
    false alarm must happen twice by chance. During an alarm fresh evaluations are pooled, so that two or
    three of them find a fall that one is too small to show.
    """

    def __init__(self, config: SafetyGuardConfig) -> None:
        self._config = config
        self._good: dict[str, list[float]] = {}
        self._fresh: dict[str, tuple[list[float], list[float]]] = {}

    def remember_good(
        self, watches: Sequence[MetricWatch], evaluations: Mapping[str, TaskEvaluation]
    ) -> None:
        """Keep the values per prompt of weights judged good, of every watched metric."""
        self._good = {}
        for watch in watches:
            if watch.task in evaluations and (found := watch.find(evaluations[watch.task])) is not None:
                self._good[watch.key] = list(found.values)

    def forget_fresh(self) -> None:
        """Drop the pooled fresh evaluations when an alarm is over."""
        self._fresh = {}

    def test(
        self,
        watch: MetricWatch,
        evaluation: TaskEvaluation,
        statistics: Mapping[str, float],
        confirm: Callable[[str], tuple[TaskEvaluation, TaskEvaluation] | None] | None,
    ) -> tuple[bool, dict[str, float]]:
        """Return whether the fall is confirmed, and the numbers of the test.

        Without values per prompt to compare (no weights were judged good yet) the detector alone decides.
        """
        stored = watch.find(evaluation)
        if not self._config.confirm or stored is None:
            return True, {}
        fresh = confirm(watch.task) if confirm is not None else None
        pair = (watch.find(fresh[0]), watch.find(fresh[1])) if fresh is not None else (None, None)
        if pair[0] is not None and pair[1] is not None:
            current, reference = self._fresh.setdefault(watch.key, ([], []))
            current.extend(pair[0].values)
            reference.extend(pair[1].values)
            limit = self._config.confirm_z
        elif self._good.get(watch.key):
            current, reference = list(stored.values), self._good[watch.key]
            limit = self._config.stored_z
        else:
            return True, {}
        test = compare_paired(current, reference, direction=stored.direction)
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

    def load_state_dict(self, state: Mapping[str, Any], rename: Callable[[str], str]) -> None:
        """Restore ``state_dict``; ``rename`` maps old keys to new ones."""
        self._good = {rename(key): _with_nan(values) for key, values in state["good"].items()}
        self._fresh = {
            rename(key): (_with_nan(now), _with_nan(then)) for key, (now, then) in state["fresh"].items()
        }


def _without_nan(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _with_nan(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
