"""The scoring of installed ``verifiers`` tasksets: ``verifiers:<taskset id>`` (verifiers >= 0.4, its v1 API).

Single-turn: the response is the one assistant message of a trace whose prompt is the task's. Refused are
tasksets that need more: tools, a container, a hook around the agent, a runtime for a reward, metric or judge
(a reward may read a metric), or an environment of their own, which may take several turns and give rewards.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.errors import DataError, MissingExtraError, PluginError
from multitask_rl.records import Rollout
from multitask_rl.scoring.foreign.base import ForeignReward, awaited
from multitask_rl.scoring.results import failure_of

__all__ = ["VerifiersReward"]


class VerifiersReward(ForeignReward):
    """The weighted rewards of a taskset; its metrics and single rewards are components."""

    independent = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The taskset and how a row finds its task."""

        taskset: dict[str, Any] = field(default_factory=dict)
        """Keys of the taskset's own configuration."""
        column: str = "idx"
        """Column that holds the task's ``idx`` or ``id``; a row without it is matched by its prompt."""

    def __init__(self, config: VerifiersReward.Config) -> None:
        super().__init__()
        self.config = config
        try:
            self._library = importlib.import_module("verifiers.v1")
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
        except ImportError as error:
            raise MissingExtraError(
                f"{self.where}: 'verifiers:{self.target}' needs the package verifiers, version 0.4 or later: "
                "pip install 'verifiers>=0.4'"
            ) from error
        try:
            typed = loaders.taskset_config_type(self.target)(id=self.target, **config.taskset)
            taskset = loaders.taskset_class(self.target)(typed)
            if not taskset.bounded:
                raise ValueError("it has no end; only tasksets with a fixed list of tasks can be scored")
            tasks = list(taskset)
        except Exception as error:
            raise PluginError(
                f"{self.where}: the verifiers taskset {self.target!r} cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from error
        environment = loaders.environment_class(self.target)
        self._refuse_more_than_a_response(taskset, tasks, environment)
        self._by_key = {key: task for task in tasks for key in (task.data.idx, task.data.id)}
        self._by_key.pop(None, None)
        self._by_prompt = {task.data.prompt_text: task for task in tasks}

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return the weighted reward per rollout, with rewards and metrics as components."""
        return [self._typed(rollout) for rollout in rollouts]

    def _typed(self, rollout: Rollout) -> Any:
        try:
            return self._loop.run(awaited(self._score(rollout)))
        except Exception as error:  # noqa: BLE001 - the boundary where a plugin's error becomes data
            return failure_of(error.__cause__ or error, self.target)

    async def _score(self, rollout: Rollout) -> dict[str, Any]:
        library, task = self._library, self._task(rollout.row)
        prompt = library.MessageNode(message=library.UserMessage(content=task.data.prompt_text))
        answer = library.AssistantMessage(content=rollout.response)
        trace = library.Trace(
            task=library.TraceTask(type=type(task).__name__, data=task.data),
            agent=library.AgentInfo(config=library.AgentConfig()),
            nodes=[prompt, library.MessageNode(message=answer, parent=0, sampled=True)],
            is_completed=True,
            ok=True,
        )
        await task.score(trace)
        parts = {name: r.score for name, r in trace.rewards.items() if r is not None}
        parts.update({name: value for name, value in trace.metrics.items() if value is not None})
        parts.pop("score", None)
        return {"score": trace.reward, **parts}

    def _task(self, row: Mapping[str, Any]) -> Any:
        if self.config.column in row:
            key = row[self.config.column]
            if key in self._by_key:
                return self._by_key[key]
            raise DataError(
                f"the taskset {self.target!r} has no task {key!r} (column {self.config.column!r})"
            )
        task = self._by_prompt.get(row["prompt"]) if isinstance(row.get("prompt"), str) else None
        if task is None:
            raise DataError(
                f"the row has no column {self.config.column!r}, and its prompt is none of the taskset's "
                f"(columns: {', '.join(map(str, row)) or 'none'})"
            )
        return task

    def _refuse_more_than_a_response(self, taskset: Any, tasks: Sequence[Any], environment: type) -> None:
        """Refuse a taskset whose reward is of more than one response."""
        base = self._library.Task
        lacks = [] if _own(taskset, self._library.Taskset, "toolsets") else ["gives the model tools"]
        if environment is not self._library.SingleAgentEnv:
            lacks.append("has an environment of its own")
        for task in {type(task): task for task in tasks}.values():
            if not _own(task, base, "toolsets"):
                lacks.append("gives the model tools")
            lacks += ["needs a container"] * bool(task.NEEDS_CONTAINER)
            hooks = ("setup", "finalize", "stage_verifier")
            lacks += [f"overrides {name!r} of its task" for name in hooks if not _own(task, base, name)]
            rewards = [("reward", f.__name__, f) for f in task.hooks("reward")]
            rewards += [("reward", judge.reward_name, judge.score) for judge in task.plugged_judges()]
            lacks += [] if rewards else ["has no reward of its own (its environment gives it)"]
            for kind, name, signal in [*rewards, *(("metric", f.__name__, f) for f in task.hooks("metric"))]:
                parameter = inspect.signature(signal).parameters.get("runtime")
                if parameter is not None and parameter.default is parameter.empty:
                    lacks.append(f"has the {kind} {name!r}, which needs a runtime")
        if lacks:
            raise PluginError(
                f"{self.where}: the verifiers taskset {self.target!r} {' and '.join(dict.fromkeys(lacks))}; "
                "only tasksets that judge one response by itself can be used"
            )


def _own(value: Any, base: type, name: str) -> bool:
    """Whether ``value`` has the method ``name`` as ``base`` has it."""
    mine, theirs = getattr(type(value), name), getattr(base, name)
    return getattr(mine, "__func__", mine) is getattr(theirs, "__func__", theirs)
