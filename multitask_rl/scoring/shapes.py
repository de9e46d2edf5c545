"""Rewards written as functions: one response, a batch, or async, turned into the ``Reward`` contract.

How a function is read (by the names of its parameters, nothing else):

* A parameter named ``responses`` or ``rollouts`` makes it a **batch** function: every argument is a list,
  the result is a list. Any other function is asked about **one response** at a time.
* ``response`` / ``responses`` is the text, ``rollout`` / ``rollouts`` the record, ``prompt`` / ``prompts``
  the row's ``prompt`` column or, without one, the text the model saw. If no parameter is called ``response``
  or ``rollout``, the first one takes the response.
* Every other parameter is a column of the row; one with a default may be missing. ``**row`` takes the rest.
* A key of the tasks file's ``config`` fills the parameter of that name instead.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from multitask_rl.config.schema.build import check_keys
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import PluginError
from multitask_rl.records import Failure, FailureKind, Rollout
from multitask_rl.scoring.results import failure_of

__all__ = ["UNDECLARED", "EventLoop", "FunctionPlugin", "Signature", "with_traits"]

F = TypeVar("F", bound=Callable[..., Any])

UNDECLARED = PluginTraits(deterministic=False)
"""Traits of a function that declares none. It may draw or read a clock, so it is not cached."""

_BATCH = {"responses": "response", "rollouts": "rollout", "prompts": "prompt"}
_SPECIAL = ("response", "rollout", "prompt")
_FOREIGN_HINTS = {"completions": "trl:", "solution_str": "verl:"}


def with_traits(**traits: Any) -> Callable[[F], F]:
    """Declare the traits of a function: ``@with_traits(low=0, high=1, timeout_s=5, deterministic=True)``.

    What is not named stays as it is of a function without traits: it is not cached.

    Raises:
        PluginError: a name that ``PluginTraits`` does not have.
    """
    try:
        declared = replace(UNDECLARED, **traits)
    except TypeError as error:
        raise PluginError(f"with_traits: {error}; fields: {', '.join(PluginTraits.__slots__)}") from error

    def attach(function: F) -> F:
        function.traits = declared  # type: ignore[attr-defined]
        return function

    return attach


@dataclass(frozen=True, slots=True)
class Signature:
    """What a reward function asks for."""

    batch: bool
    positional: tuple[str, ...]
    """Positional-only parameters, in order."""
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_row: bool
    """It has ``**row``."""
    response_parameter: str
    """Which parameter takes the response; empty = by the special names."""

    @classmethod
    def of(cls, function: Callable[..., Any], reference: str, where: str = "") -> Signature:
        """Read ``function``.

        Args:
            function: the reward or constraint.
            reference: how the tasks file names it.
            where: place for messages.

        Raises:
            PluginError: it cannot be called with a response.
        """
        label = f"{where}: {reference}" if where else reference
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise PluginError(f"{label}: its signature cannot be read ({error}); wrap it in a def") from error
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        names = [p.name for p in named]
        for name, prefix in _FOREIGN_HINTS.items():
            if name in names:
                raise PluginError(
                    f"{label}: the parameter {name!r} belongs to another library's reward functions; write "
                    f"the plugin as '{prefix}{reference}' and it is used unchanged"
                )
        if not named:
            raise PluginError(
                f"{label}: it takes no response; expected f(response, reference, ...), a batch function "
                f"f(responses, ...), or a class with score(rollouts); got {inspect.signature(function)}"
            )
        batch = "responses" in names or "rollouts" in names
        first = "" if batch or "response" in names or "rollout" in names else names[0]
        return cls(
            batch=batch,
            positional=tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY),
            required=tuple(p.name for p in named if p.default is p.empty),
            optional=tuple(p.name for p in named if p.default is not p.empty),
            takes_row=any(p.kind is p.VAR_KEYWORD for p in parameters),
            response_parameter=first,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """All named parameters."""
        return (*self.required, *self.optional)


class EventLoop:
    """One event loop for all calls of a plugin: clients it keeps between calls stay usable."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` to its end."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def __del__(self) -> None:
        self.close()  # a reward built in a script or notebook has no pool to close it

    def close(self) -> None:
        """Close the loop. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


class FunctionPlugin:
    """A function as a reward and as a constraint: both ask the same question, one reads it as a cost."""

    def __init__(
        self,
        function: Callable[..., Any],
        label: str,
        config: Mapping[str, Any],
        where: str,
        reference: str,
    ) -> None:
        self.function = function
        self.label = label
        self.signature = Signature.of(function, reference, where)
        self.traits: PluginTraits = getattr(function, "traits", UNDECLARED)
        self.is_async = inspect.iscoroutinefunction(function)
        self.one_by_one = not self.signature.batch and not self.is_async
        """Whether a call with many rollouts is only a loop."""
        self.independent = not self.signature.batch
        self.text_only = not {"rollout", "rollouts"} & set(self.signature.names)
        """It never sees token ids, so none need to be sent to it."""
        self._loop = EventLoop()
        self._bound = dict(config)
        reserved = {*_SPECIAL, *_BATCH, self.signature.response_parameter}
        check_keys(config, set(self.signature.names) - reserved, Where(path=(f"{where}.config",)))

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        given = {*_SPECIAL, *self._bound, self.signature.response_parameter}
        given |= set(_BATCH) if self.signature.batch else set()
        return tuple(name for name in self.signature.required if name not in given)

    def score(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Return what the function says, one per rollout; a row that lacks a column is a ``data`` failure."""
        results: list[Any] = [None] * len(rollouts)
        calls: list[tuple[int, dict[str, Any]]] = []
        for index, rollout in enumerate(rollouts):
            arguments = self._arguments(rollout)
            if isinstance(arguments, Failure):
                results[index] = arguments
            else:
                calls.append((index, arguments))
        for (index, _), value in zip(calls, self._call_all([a for _, a in calls]), strict=True):
            results[index] = value
        return results

    judge = score

    def close(self) -> None:
        """Free the event loop."""
        self._loop.close()

    def _call_all(self, arguments: list[dict[str, Any]]) -> list[Any]:
        if not arguments:
            return []
        if self.signature.batch:
            return self._call_batch(arguments)
        if self.is_async:
            return list(self._loop.run(self._gather(arguments)))
        if len(arguments) == 1:  # its own errors reach the caller, who types them
            return [self._call(arguments[0])]
        return [self._try(one) for one in arguments]

    def _call(self, arguments: dict[str, Any]) -> Any:
        if not self.signature.positional:
            return self.function(**arguments)
        positional = [arguments.pop(name) for name in self.signature.positional if name in arguments]
        return self.function(*positional, **arguments)

    def _try(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._call(arguments)
        except Exception as error:  # noqa: BLE001 - the boundary where a plugin's error becomes data
            return failure_of(error, self.label)

    def _call_batch(self, arguments: list[dict[str, Any]]) -> list[Any]:
        columns = {name: [one.get(name) for one in arguments] for name in _all_keys(arguments)}
        columns.update(self._bound)
        values = self._call(columns)
        if inspect.isawaitable(values):
            values = self._loop.run(_awaited(values))
        values = _as_list(values, self.label)
        if len(values) != len(arguments):
            # Not raised: the responses one by one would each get what was meant for the batch.
            message = f"returned {len(values)} results for {len(arguments)} responses"
            return [Failure(kind=FailureKind.grader, message=message, source=self.label)] * len(arguments)
        return values

    async def _gather(self, arguments: list[dict[str, Any]]) -> list[Any]:
        async def one(keywords: dict[str, Any]) -> Any:
            try:
                return await asyncio.wait_for(self._call(keywords), self.traits.timeout_s)
            except TimeoutError:
                message = f"no answer within {self.traits.timeout_s:g} s"
                return Failure(kind=FailureKind.timeout, message=message, source=self.label)
            except Exception as error:  # noqa: BLE001 - the boundary where a plugin's error becomes data
                return failure_of(error, self.label)

        return await asyncio.gather(*(one(keywords) for keywords in arguments))

    def _arguments(self, rollout: Rollout) -> dict[str, Any] | Failure:
        """Return the keywords of one call, with the singular value under each parameter's own name."""
        signature, row = self.signature, rollout.row
        arguments: dict[str, Any] = {}
        for name in signature.names:
            meaning = _BATCH.get(name, name) if signature.batch else name
            if name == signature.response_parameter:
                arguments[name] = rollout.response
            elif name in self._bound:
                arguments[name] = self._bound[name]
            elif meaning in _SPECIAL:
                arguments[name] = _special(meaning, rollout)
            elif name in row:
                arguments[name] = row[name]
            elif name in signature.required:
                return Failure(
                    kind=FailureKind.data,
                    message=f"the row has no column {name!r} (columns: {', '.join(map(str, row)) or 'none'})",
                    source=self.label,
                )
        if signature.takes_row:
            arguments.update({str(k): v for k, v in row.items() if k not in arguments})
        return arguments


def _special(meaning: str, rollout: Rollout) -> Any:
    if meaning == "response":
        return rollout.response
    if meaning == "rollout":
        return rollout
    return rollout.row.get("prompt", rollout.prompt.text)


def _all_keys(arguments: list[dict[str, Any]]) -> dict[str, None]:
    """Return the union of the keys in order of appearance; a column some rows lack is None there."""
    return dict.fromkeys(name for one in arguments for name in one)


def _as_list(values: Any, label: str) -> list[Any]:
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise TypeError(f"a batch function returns a list, {label} returned {type(values).__name__}")
    return list(values)


async def _awaited(value: Any) -> Any:
    return await value
