"""Reward functions of verl: ``fn(data_source, solution_str, ground_truth, extra_info) -> float | dict``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.errors import PluginError
from multitask_rl.records import Rollout
from multitask_rl.scoring.foreign.base import ForeignReward, awaited, column

__all__ = ["VerlReward"]

_GROUND_TRUTH = ("ground_truth", "reference", "answer")


class VerlReward(ForeignReward):
    """A verl ``compute_score``; the row holds verl's columns or a plain reference."""

    is_function = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How rows become arguments."""

        ground_truth: str = ""
        """Column; empty = ``reward_model.ground_truth``, ``ground_truth``, ``reference`` or ``answer``."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Further keyword arguments (verl's ``reward_kwargs``)."""

    def __init__(self, config: VerlReward.Config) -> None:
        super().__init__()
        self.config = config
        self.function = self._function()
        self.columns = (config.ground_truth,) if config.ground_truth else ()
        """Columns that every row must have, as far as they are named."""
        try:
            inspect.signature(self.function).bind(
                data_source="", solution_str="", ground_truth="", extra_info={}, **config.arguments
            )
        except TypeError as error:
            raise PluginError(
                f"{self.where}: {self.target!r} is not a verl reward function ({error}); expected "
                "f(data_source, solution_str, ground_truth, extra_info), got "
                f"{inspect.signature(self.function)}"
            ) from error

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return one value or mapping with ``score`` per rollout."""
        return self._each(self._one, rollouts)

    def _one(self, rollout: Rollout) -> Any:
        value = self.function(
            data_source=rollout.row.get("data_source", rollout.task),
            solution_str=rollout.response,
            ground_truth=self._ground_truth(rollout.row),
            extra_info=rollout.row.get("extra_info", {}),
            **self.config.arguments,
        )
        return self._loop.run(awaited(value)) if inspect.isawaitable(value) else value

    def _ground_truth(self, row: Mapping[str, Any]) -> Any:
        nested = row.get("reward_model")
        if not self.config.ground_truth and isinstance(nested, Mapping) and "ground_truth" in nested:
            return nested["ground_truth"]
        wanted = (self.config.ground_truth,) if self.config.ground_truth else _GROUND_TRUTH
        return column(row, wanted)
