"""Reward functions of other libraries, used as they are.

``trl:``, ``verl:``: a function by module or file. ``reasoning_gym:<data set>``: its verifier.
``verifiers:<taskset>``: the scoring of an installed taskset. ``evaluate:<metric or path>``: a metric.
Each becomes a class with ``Config`` whose instances are rewards like any other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.data.reasoning_gym import answer_in, create_generator, entry_of, score_of
from multitask_rl.errors import DataError, PluginError, import_extra
from multitask_rl.plugins import REWARDS, Located, locate
from multitask_rl.records import Rollout
from multitask_rl.scoring.results import each, failure_of, no_column
from multitask_rl.scoring.shapes import UNDECLARED, EventLoop


class ForeignReward:
    """Base of the adapters; ``build_foreign`` makes a subclass that has the target."""

    traits: PluginTraits = UNDECLARED
    expects: ClassVar[str]
    """What a reference must look like, for messages."""
    target: ClassVar[str] = ""
    """What follows the prefix."""
    where: ClassVar[str] = ""
    one_by_one = False
    independent = False
    is_function: ClassVar[bool] = False
    """The target is a function: building the reward loads no data or model."""
    columns: tuple[str, ...] = ()
    """Columns that every row must have, as far as they are known."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._loop = EventLoop()

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return one value per rollout, in the form that the library gives it."""
        return each(self._one, rollouts, self.target)

    def close(self) -> None:
        """Free the event loop."""
        self._loop.close()

    def _one(self, rollout: Rollout) -> Any:
        raise NotImplementedError

    def _function(self) -> Callable[..., Any]:
        found = locate(self.target, REWARDS, self.where).value
        if not callable(found):
            raise PluginError(f"{self.where}: {self.target!r} is {found!r}, not a function")
        traits = getattr(found, "traits", None)
        if isinstance(traits, PluginTraits):
            self.traits = traits
        function: Callable[..., Any] = found
        return function


class TrlReward(ForeignReward):
    """A TRL reward function, called once per batch with a list of each column of the rows."""

    expects = "'trl:package.module:function' or 'trl:file.py:function'"
    is_function = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How rows become arguments."""

        conversational: bool | None = None
        """Completions as lists of messages; None = where the row's ``prompt`` is a list of messages."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Further keyword arguments of the function, the same for all rows."""

    def __init__(self, config: TrlReward.Config) -> None:
        super().__init__(config)
        self.function = self._function()
        parameters = list(inspect.signature(self.function).parameters.values())
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._names = {p.name for p in parameters}
        if not {"completions", "prompts"} & self._names and not self._takes_all:
            raise PluginError(
                f"{self.where}: {self.target!r} has no parameter 'completions'; a TRL reward function is "
                f"f(prompts, completions, **columns), got {inspect.signature(self.function)}"
            )
        given = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
        given |= set(config.arguments)
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.columns = tuple(p.name for p in named if p.default is p.empty and p.name not in given)
        self.traits = replace(self.traits, needs=tuple(dict.fromkeys([*self.traits.needs, *self.columns])))

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[Any]:
        """Return one value per rollout; None means that the function does not apply to the sample."""
        names = dict.fromkeys(name for r in rollouts for name in r.row if name != "prompt")
        arguments: dict[str, Any] = {name: [r.row.get(name) for r in rollouts] for name in names}
        arguments["prompts"] = prompts = [r.row.get("prompt", r.prompt.text) for r in rollouts]
        arguments["completions"] = completions = []
        for index, rollout in enumerate(rollouts):
            prompt, as_messages = prompts[index], self.config.conversational
            if as_messages is None:
                as_messages = isinstance(rollout.row.get("prompt"), list)
            said = rollout.messages if as_messages or rollout.turns else rollout.response
            if isinstance(prompt, list) and isinstance(said, list) and prompt:
                begun, first = prompt[-1], said[0]
                if begun.get("role") == first["role"] == "assistant":  # as in TRL: one message, the answer
                    prompts[index] = prompt[:-1]
                    said[0] = {**first, "content": f"{begun['content']}{first['content']}"}
            completions.append(said)
        arguments["completion_ids"] = [_completion_ids(r) for r in rollouts]
        arguments["trainer_state"] = SimpleNamespace(global_step=max(r.policy_version for r in rollouts))
        arguments["log_extra"] = arguments["log_metric"] = lambda *_args, **_keywords: None
        arguments |= self.config.arguments
        accepted = {k: v for k, v in arguments.items() if self._takes_all or k in self._names}
        values = self._loop.value_of(self.function(**accepted))
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise TypeError(f"a reward function of TRL returns a list, got {type(values).__name__}")
        return list(values)


def _completion_ids(rollout: Rollout) -> list[int]:
    """Return everything after the prompt, as TRL does: of an episode also what the world said in between."""
    if not rollout.turns:
        return list(rollout.response_ids)
    parts = zip(rollout.turns, rollout.answers(), strict=True)
    return [token for turn, answer in parts for token in (*turn.given_ids, *answer.response_ids)]


class VerlReward(ForeignReward):
    """A verl ``compute_score``; the row holds verl's columns or a plain reference."""

    expects = "'verl:file.py:compute_score' or 'verl:package.module:function'"
    is_function = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """How rows become arguments."""

        ground_truth: str = ""
        """Column; empty = ``reward_model.ground_truth``, ``ground_truth``, ``reference`` or ``answer``."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Further keyword arguments (verl's ``reward_kwargs``)."""

    def __init__(self, config: VerlReward.Config) -> None:
        super().__init__(config)
        self.function = self._function()
        self.columns = (config.ground_truth,) if config.ground_truth else ()
        try:
            inspect.signature(self.function).bind(
                data_source="", solution_str="", ground_truth="", extra_info={}, **config.arguments
            )
        except TypeError as error:
            wanted = "f(data_source, solution_str, ground_truth, extra_info)"
            raise PluginError(
                f"{self.where}: {self.target!r} is not a verl reward function ({error}); expected {wanted}, "
                f"got {inspect.signature(self.function)}"
            ) from error

    def _one(self, rollout: Rollout) -> Any:
        row, nested = rollout.row, rollout.row.get("reward_model")
        if not self.columns and isinstance(nested, Mapping) and "ground_truth" in nested:
            truth = nested["ground_truth"]
        else:
            truth = _column(row, self.columns or ("ground_truth", "reference", "answer"))
        # verl counts the prompt, each answer and what the world says to it
        added = {"num_turns": 2 * max(1, len(rollout.turns)), "rollout_reward_scores": {}}
        value = self.function(
            data_source=row.get("data_source", rollout.task),
            solution_str=rollout.response,
            ground_truth=truth,
            extra_info={**(row.get("extra_info") or {}), **added},
            **self.config.arguments,
        )
        return self._loop.value_of(value)


class VerifiersReward(ForeignReward):
    """The weighted rewards of a taskset (verifiers >= 0.4, its v1 API); each part is a component.

    The response is the one assistant message of a trace whose prompt is the task's. A taskset that needs more
    is refused: tools, a container, a hook around the agent, a runtime for a reward, metric or judge (a reward
    may read a metric), or an environment of its own, which may take several turns and give rewards.
    """

    expects = "'verifiers:<taskset id>'"
    independent = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The taskset and how a row finds its task."""

        taskset: dict[str, Any] = field(default_factory=dict)
        """Keys of the taskset's own configuration."""
        column: str = "idx"
        """Column that holds the task's ``idx`` or ``id``; a row without it is matched by its prompt."""

    def __init__(self, config: VerifiersReward.Config) -> None:
        super().__init__(config)
        self._library, loaders = import_verifiers(f"{self.where}: 'verifiers:{self.target}'")
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
        self._refuse_more_than_a_response(taskset, tasks, loaders.environment_class(self.target))
        self._by_key = {key: task for task in tasks for key in (task.data.idx, task.data.id)}
        self._by_key.pop(None, None)
        self._by_prompt = {task.data.prompt_text: task for task in tasks}

    def _one(self, rollout: Rollout) -> Any:
        try:
            return self._loop.value_of(self._score(rollout))
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
        column = self.config.column
        if column in row:
            if row[column] in self._by_key:
                return self._by_key[row[column]]
            raise DataError(f"the taskset {self.target!r} has no task {row[column]!r} (column {column!r})")
        task = self._by_prompt.get(row["prompt"]) if isinstance(row.get("prompt"), str) else None
        if task is None:
            raise DataError(no_column(f"{column!r}, and its prompt is none of the taskset's", row))
        return task

    def _refuse_more_than_a_response(self, taskset: Any, tasks: Sequence[Any], environment: type) -> None:
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


class ReasoningGymReward(ForeignReward):
    """The verifier of a reasoning-gym data set, in [0, 1]; the row holds ``answer`` and ``metadata``."""

    expects = "'reasoning_gym:<data set>'"
    one_by_one = True
    traits = PluginTraits(low=0.0, high=1.0, needs=("answer", "metadata"))

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The part of the response that is the answer."""

        answer_tag: str = "answer"
        """The answer is the content of the last ``<answer>...</answer>``; without the tag, or with an empty
        tag name, it is the whole response."""
        dataset: dict[str, Any] = field(default_factory=dict)
        """Settings of the data set, where its verifier depends on them."""

    def __init__(self, config: ReasoningGymReward.Config) -> None:
        super().__init__(config)
        self._dataset = create_generator(self.target, {"size": 1, "seed": 0, **config.dataset}, self.where)

    def _one(self, rollout: Rollout) -> float:
        answer = answer_in(rollout.response, self.config.answer_tag)
        return score_of(self._dataset, answer, entry_of(rollout.row))


class EvaluateReward(ForeignReward):
    """A metric of Hugging Face ``evaluate``, computed for one response at a time."""

    expects = "'evaluate:<metric or path>'"
    one_by_one = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """The number of the metric, and the column it reads."""

        key: str = ""
        """Key of the metric's result; empty = the one named like the metric, or its only number."""
        reference: str = "reference"
        """Column of the row that holds the reference (text or list of texts)."""
        arguments: dict[str, Any] = field(default_factory=dict)
        """Keyword arguments of ``compute``."""

    def __init__(self, config: EvaluateReward.Config) -> None:
        super().__init__(config)
        needs = f"{self.where}: 'evaluate:{self.target}' needs evaluate"
        library = import_extra("evaluate", "eval", needs)
        try:
            self._metric = library.load(self.target)
        except Exception as error:
            raise PluginError(
                f"{self.where}: the metric {self.target!r} cannot be loaded "
                f"({type(error).__name__}: {error}); metrics come from the Hugging Face hub; without a "
                "network, give the path of the metric's script or directory (evaluate:path/to/metric)"
            ) from error

    def _one(self, rollout: Rollout) -> dict[str, Any]:
        reference = _column(rollout.row, (self.config.reference,))
        result = self._metric.compute(
            predictions=[rollout.response], references=[reference], **self.config.arguments
        )
        numbers = {k: v for k, v in result.items() if isinstance(v, (int, float))}
        key = self.config.key or str(getattr(self._metric, "name", ""))
        if key not in result:
            if self.config.key or len(numbers) != 1:
                raise ValueError(f"no number {key!r} in the metric's result {sorted(result)}; set config.key")
            (key,) = numbers
        numbers.pop(key, None)
        return {"score": result[key], **numbers}


FOREIGN: dict[str, type[ForeignReward]] = {
    "trl": TrlReward,
    "verl": VerlReward,
    "verifiers": VerifiersReward,
    "reasoning_gym": ReasoningGymReward,
    "evaluate": EvaluateReward,
}


def build_foreign(adapters: Mapping[str, Any], reference: str, where: str) -> Located:
    """Return a subclass, with ``target`` and ``where``, of the adapter for ``<prefix>:<target>``.

    Raises:
        PluginError: nothing follows the prefix.
    """
    prefix, _, target = reference.partition(":")
    base = adapters[prefix]
    if not target:
        raise PluginError(f"{where}: nothing follows {prefix!r}; expected {base.expects}")
    value = type(base.__name__, (base,), {"target": target, "where": where, "__module__": base.__module__})
    return Located(value, f"{prefix}:{target.rpartition(':')[2] or target}", "")


def import_verifiers(what: str) -> tuple[Any, Any]:
    """Return verifiers and its loaders, which ``what`` needs; ``MissingExtraError`` without the package."""
    names = ("verifiers.v1", "verifiers.v1.utils.loaders")
    library, loaders = (import_extra(name, "verifiers", f"{what} needs verifiers >= 0.4") for name in names)
    return library, loaders


def _column(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of the columns ``names`` that the row has."""
    for name in names:
        if name in row:
            return row[name]
    raise DataError(no_column(" or ".join(map(repr, names)), row))


def _own(value: Any, base: type, name: str) -> bool:
    """Whether the class of ``value`` does not override the method ``name`` of ``base``."""
    mine, theirs = getattr(type(value), name), getattr(base, name)
    return getattr(mine, "__func__", mine) is getattr(theirs, "__func__", theirs)
