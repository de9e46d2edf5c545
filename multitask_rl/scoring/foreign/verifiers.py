"""Rubrics of installed single-turn ``verifiers`` environments: ``verifiers:<environment id>``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.errors import MissingExtraError, PluginError
from multitask_rl.records import Failure, FailureKind, Rollout
from multitask_rl.scoring.foreign.base import ForeignReward
from multitask_rl.scoring.results import failure_of

__all__ = ["VerifiersReward"]


class VerifiersReward(ForeignReward):
    """The rubric of an installed single-turn ``verifiers`` environment."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Arguments of the environment."""

        arguments: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments of the environment's ``load_environment``."""

    def __init__(self, config: VerifiersReward.Config) -> None:
        super().__init__()
        try:
            library = importlib.import_module("verifiers")
        except ImportError as error:
            raise MissingExtraError(
                f"{self.where}: 'verifiers:{self.target}' needs the package verifiers: pip install verifiers"
            ) from error
        try:
            self._rubric = library.load_environment(self.target, **config.arguments).rubric
        except Exception as error:
            raise PluginError(
                f"{self.where}: the verifiers environment {self.target!r} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return the rubric's weighted reward per rollout, its functions as components."""
        results = self._loop.run(self._all(rollouts))
        return list(results)

    async def _all(self, rollouts: Sequence[Rollout]) -> list[Any]:
        return [await self._one(rollout) for rollout in rollouts]

    async def _one(self, rollout: Rollout) -> Any:
        state = _verifiers_state(rollout)
        try:
            await self._rubric.score_rollout(state)
        except Exception as error:  # noqa: BLE001 - the boundary where a plugin's error becomes data
            return failure_of(error, self.target)
        if state.get("reward") is None:
            return Failure(kind=FailureKind.grader, message="the rubric set no reward", source=self.target)
        metrics = state.get("metrics") or {}
        return {"score": state["reward"], **{k: v for k, v in metrics.items() if v is not None}}


def _verifiers_state(rollout: Rollout) -> dict[str, Any]:
    row = rollout.row
    prompt = row.get("prompt", rollout.prompt.text)
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return {
        "prompt": messages,
        "completion": [{"role": "assistant", "content": rollout.response}],
        "answer": row.get("answer", row.get("reference", "")),
        "info": row.get("info", {}),
        "task": row.get("task", rollout.task),
        "input": dict(row),
        "example_id": rollout.prompt.draw,
        "trajectory": [],
        "timing": {"generation_ms": 0.0, "scoring_ms": 0.0, "total_ms": 0.0},
    }
