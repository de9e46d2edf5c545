"""Reward functions of TRL: ``fn(prompts, completions, **columns) -> list[float | None]``, async or not."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from multitask_rl.errors import PluginError
from multitask_rl.records import Rollout
from multitask_rl.scoring.foreign.base import ForeignReward, awaited

__all__ = ["TrlReward"]

_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments that are no columns."""


class TrlReward(ForeignReward):
    """A TRL reward function: one call per batch, every column of the rows as a list."""

    is_function = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How rows become arguments."""

        conversational: bool | None = None
        """Completions as lists of messages; None = where the row's ``prompt`` is a list of messages."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Further keyword arguments of the function, the same for all rows."""

    def __init__(self, config: TrlReward.Config) -> None:
        super().__init__()
        self.config = config
        self.function = self._function()
        parameters = list(inspect.signature(self.function).parameters.values())
        self._open = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters}
        if not {"completions", "prompts"} & self._names and not self._open:
            raise PluginError(
                f"{self.where}: {self.target!r} has no parameter 'completions'; a TRL reward function is "
                f"f(prompts, completions, **columns), got {inspect.signature(self.function)}"
            )

        given = {*_GIVEN, *config.arguments}
        self.columns = tuple(
            p.name
            for p in parameters
            if p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
            and p.name not in given
        )
        """Columns that every row must have."""

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return one value per rollout; None says that the sample is not this function's."""
        columns: dict[str, list[Any]] = {}
        for name in dict.fromkeys(name for r in rollouts for name in r.row if name != "prompt"):
            columns[name] = [r.row.get(name) for r in rollouts]
        columns["prompts"] = [r.row.get("prompt", r.prompt.text) for r in rollouts]
        columns["completions"] = [self._completion(r) for r in rollouts]
        columns["completion_ids"] = [list(r.response_ids) for r in rollouts]
        extra: dict[str, Any] = {
            "trainer_state": SimpleNamespace(global_step=max(r.policy_version for r in rollouts)),
            "log_extra": _ignore,
            "log_metric": _ignore,
            **self.config.arguments,
        }
        accepted = {k: v for k, v in {**columns, **extra}.items() if self._open or k in self._names}
        values = self.function(**accepted)
        if inspect.isawaitable(values):
            values = self._loop.run(awaited(values))
        return list(values)

    def _completion(self, rollout: Rollout) -> Any:
        prompt = rollout.row.get("prompt")
        as_messages = self.config.conversational
        if as_messages is None:
            as_messages = isinstance(prompt, list)
        return [{"role": "assistant", "content": rollout.response}] if as_messages else rollout.response


def _ignore(*_args: Any, **_keywords: Any) -> None:
    """Take the place of TRL's logging callbacks."""
