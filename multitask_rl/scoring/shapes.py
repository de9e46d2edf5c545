"""Rewards written as functions: of one response, of a batch, or async.

The names of its parameters decide what a function gets; docs/write-a-reward.md has the table. A parameter
``responses`` or ``rollouts`` makes it a batch function: every argument is a list, the result is a list. So
does the parameter for responses if it is annotated ``list[str]``, or named like several texts
(``texts``, ``completions``, ``decoded_outputs``).
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from multitask_rl.boundary.printable import counted
from multitask_rl.config.schema.build import check_keys
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import PluginError
from multitask_rl.records import Failure, FailureKind, Rollout
from multitask_rl.scoring.results import each, failed, failure_of, no_column

F = TypeVar("F", bound=Callable[..., Any])

UNDECLARED = PluginTraits(deterministic=False)
"""Traits of a function that declares none: it may draw or read a clock, so it is not cached."""

_BATCH = {"responses": "response", "rollouts": "rollout", "prompts": "prompt"}
_SPECIAL = ("response", "rollout", "prompt")
_PLURALS = {
    *("texts", "completions", "generations", "outputs", "predictions", "samples"),
    *("candidates", "answers", "replies", "solutions"),
}
"""Last words in the name of a parameter that takes all responses; another does if annotated as a list."""
_LISTS = ("list", "List", "Sequence", "Iterable")
FOREIGN_PARAMETERS = {"completions": "trl:", "solution_str": "verl:"}
"""Parameters of the reward functions of other libraries, and the prefix that calls such a function."""


def foreign_parameter(names: Collection[str]) -> str:
    """Return which of a function's parameters says that it is of another library; empty = none.

    TRL gives more keywords than ``completions``: a function with no other parameter is not of TRL.
    """
    return next((n for n in FOREIGN_PARAMETERS if n in names and (len(names) > 1 or n != "completions")), "")


def with_traits(**traits: Any) -> Callable[[F], F]:
    """Declare the traits of a function: ``@with_traits(low=0, high=1, timeout_s=5, deterministic=True)``.

    A trait that is not named has the value of a function without traits: ``deterministic`` is False.
    ``PluginError`` for a name that ``PluginTraits`` does not have.
    """
    try:
        declared = replace(UNDECLARED, **traits)
    except TypeError as error:
        raise PluginError(f"with_traits: {error}; fields: {', '.join(PluginTraits.__slots__)}") from error

    def attach(function: F) -> F:
        function.traits = declared  # type: ignore[attr-defined]
        return function

    return attach


class EventLoop:
    """One event loop for all calls of a plugin, so that its clients stay usable between calls."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()  # it makes the loop at the first call

    def close(self) -> None:
        """End the loop, in another thread if this one runs a loop, as that of a notebook does. Idempotent."""
        if asyncio._get_running_loop() is None:
            self._runner.close()
        else:
            with ThreadPoolExecutor(1) as other:
                other.submit(self._runner.close).result()

    def value_of(self, value: Any) -> Any:
        """Return ``value``, or its result if it is awaitable."""

        async def wait() -> Any:
            return await value

        return self._runner.run(wait()) if inspect.isawaitable(value) else value

    def __del__(self) -> None:
        self.close()  # a reward built in a script or notebook has no pool to close it


class FunctionPlugin:
    """A function as a reward, or as a constraint, whose value is a cost.

    Raises:
        PluginError: the function cannot be called with a response.
        ConfigError: a key of ``config`` is no parameter for a column.
    """

    def __init__(
        self, function: Callable[..., Any], label: str, config: Mapping[str, Any], where: str, reference: str
    ) -> None:
        what = f"{where}: {reference}"
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise PluginError(f"{what}: its signature cannot be read ({error}); wrap it in a def") from error
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = self._names = [p.name for p in named]
        if foreign := foreign_parameter([p.name for p in parameters]):
            raise PluginError(
                f"{what}: the parameter {foreign!r} belongs to another library's reward functions; write the "
                f"plugin as '{FOREIGN_PARAMETERS[foreign]}{reference}' and it is used unchanged"
            )
        # without a parameter of that name, the response is the first that nothing else fills
        first = next((p for p in named if p.name not in {"prompt", "prompts", *config}), None)
        takes_first = not {"response", "responses", "rollout", "rollouts"} & set(names)
        if takes_first and first is None:
            raise PluginError(
                f"{what}: it takes no response; expected f(response, reference, ...), a batch function "
                f"f(responses, ...), or a class with score(rollouts); got {inspect.signature(function)}"
            )
        self.function = function
        self.label = label
        self.traits: PluginTraits = getattr(function, "traits", UNDECLARED)
        self.is_async = inspect.iscoroutinefunction(function)
        annotation = first.annotation if first else None
        if isinstance(annotation, str):  # from __future__ import annotations
            is_list = annotation.rpartition(".")[2].partition("[")[0] in _LISTS
        else:
            is_list = (typing.get_origin(annotation) or annotation) in (list, tuple, Sequence, Iterable)
        self._response_name = first.name if first and takes_first else ""
        plural = self._response_name.rpartition("_")[2] in _PLURALS
        all_at_once = takes_first and (plural or is_list)
        self.independent = not (all_at_once or {"responses", "rollouts"} & set(names))
        """It is no batch function: it gets each response alone."""
        self.one_by_one = self.independent and not self.is_async
        """A call with many rollouts is only a loop."""
        self.text_only = not {"rollout", "rollouts"} & set(names)
        """It does not see token ids, so none are sent to it."""
        self._positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
        self._required = [p.name for p in named if p.default is p.empty]
        self._takes_row = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._loop = EventLoop()
        self._bound = dict(config)
        reserved = {*_SPECIAL, *_BATCH, self._response_name}
        check_keys(config, set(names) - reserved, Where(path=(f"{where}.config",)))
        given = {*_SPECIAL, *(() if self.independent else _BATCH), self._response_name, *config}
        self.columns = tuple(name for name in self._required if name not in given)
        """Columns that every row must have."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return the function's value per rollout; a row that lacks a column is a ``data`` failure."""
        asked = [self._arguments(rollout) for rollout in rollouts]
        arguments = [one for one in asked if not isinstance(one, Failure)]
        if not arguments:
            values = []
        elif not self.independent:
            values = self._call_batch(arguments)
        elif self.is_async:
            values = self._loop.value_of(self._gather(arguments))
        else:
            values = each(lambda one: self._loop.value_of(self._call(one)), arguments, self.label)
        answers = iter(values)
        return [one if isinstance(one, Failure) else next(answers) for one in asked]

    judge = score

    def close(self) -> None:
        """Free the event loop."""
        self._loop.close()

    def _arguments(self, rollout: Rollout) -> dict[str, Any] | Failure:
        """Return the arguments by name; those of a batch function are still single values."""
        row = rollout.row
        special = {"response": rollout.response, "rollout": rollout}
        special["prompt"] = row.get("prompt", rollout.prompt.text)
        arguments: dict[str, Any] = {}
        for name in self._names:
            meaning = name if self.independent else _BATCH.get(name, name)
            if name == self._response_name:
                arguments[name] = rollout.response
            elif name in self._bound:
                arguments[name] = self._bound[name]
            elif meaning in special:
                arguments[name] = special[meaning]
            elif name in row:
                arguments[name] = row[name]
            elif name in self._required:
                return failed(no_column(repr(name), row), self.label, FailureKind.data)
        if self._takes_row:
            arguments.update({str(k): v for k, v in row.items() if k not in arguments})
        return arguments

    def _call(self, arguments: dict[str, Any]) -> Any:
        positional = [arguments.pop(name) for name in self._positional if name in arguments]
        return self.function(*positional, **arguments)

    def _call_batch(self, arguments: list[dict[str, Any]]) -> list[Any]:
        names = dict.fromkeys(name for one in arguments for name in one)
        columns = {name: [one.get(name) for one in arguments] for name in names}
        columns.update(self._bound)
        values = self._loop.value_of(self._call(columns))
        if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
            raise TypeError(f"a batch function returns a list, {self.label} returned {type(values).__name__}")
        values = list(values)
        if len(values) != len(arguments):
            # Not raised: after an error the grader would divide the batch.
            message = f"returned {counted(len(values), 'result')} for {counted(len(arguments), 'response')}"
            return [failed(message, self.label)] * len(arguments)
        return values

    async def _gather(self, arguments: list[dict[str, Any]]) -> list[Any]:
        async def one(keywords: dict[str, Any]) -> Any:
            try:
                return await asyncio.wait_for(self._call(keywords), self.traits.timeout_s)
            except TimeoutError:
                message = f"no answer within {self.traits.timeout_s:g} s"
                return failed(message, self.label, FailureKind.timeout)
            except Exception as error:  # noqa: BLE001 - the boundary where a plugin's error becomes data
                return failure_of(error, self.label)

        return await asyncio.gather(*(one(keywords) for keywords in arguments))
