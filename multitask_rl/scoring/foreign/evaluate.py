"""Metrics of Hugging Face ``evaluate``: ``evaluate:<metric or path>``, one response at a time."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.errors import MissingExtraError, PluginError
from multitask_rl.records import Rollout
from multitask_rl.scoring.foreign.base import ForeignReward, column

__all__ = ["EvaluateReward"]


class EvaluateReward(ForeignReward):
    """A metric of Hugging Face ``evaluate``, computed for one response at a time."""

    one_by_one = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Which number of the metric, and what it reads."""

        key: str = ""
        """Key of the metric's result; empty = the one named like the metric, or its only number."""
        reference: str = "reference"
        """Column of the row that holds the reference (text or list of texts)."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments of ``compute``."""

    def __init__(self, config: EvaluateReward.Config) -> None:
        super().__init__()
        self.config = config
        try:
            library = importlib.import_module("evaluate")
        except ImportError as error:
            raise MissingExtraError(
                f"{self.where}: 'evaluate:{self.target}' needs the package evaluate: "
                "pip install 'multitask-rl[eval]'"
            ) from error
        try:
            self._metric = library.load(self.target)
        except Exception as error:
            raise PluginError(
                f"{self.where}: the metric {self.target!r} cannot be loaded "
                f"({type(error).__name__}: {error}); metrics come from the Hugging Face hub; without a "
                "network, give the path of the metric's "
                "script or directory (evaluate:path/to/metric)"
            ) from error

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return the metric's number per rollout; its other numbers are components."""
        return self._each(self._one, rollouts)

    def _one(self, rollout: Rollout) -> dict[str, Any]:
        reference = column(rollout.row, (self.config.reference,))
        result = self._metric.compute(
            predictions=[rollout.response], references=[reference], **self.config.arguments
        )
        key = self._key(result)
        others = {k: v for k, v in result.items() if k != key and isinstance(v, (int, float))}
        return {"score": result[key], **others}

    def _key(self, result: Mapping[str, Any]) -> str:
        name = self.config.key or str(getattr(self._metric, "name", ""))
        if name in result:
            return name
        numbers = [k for k, v in result.items() if isinstance(v, (int, float))]
        if not self.config.key and len(numbers) == 1:
            return numbers[0]
        raise ValueError(f"no number {name!r} in the metric's result {sorted(result)}; set config.key")
