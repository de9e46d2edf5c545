"""Tools of an environment: their schemas, and a ``World`` that makes the calls of an answer."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from multitask_rl.environments.base import Earned, Message, Opening, StepResult, World
from multitask_rl.environments.calls import CallCounts, ToolCall, read_calls
from multitask_rl.errors import DataError, PluginError, SandboxError

NO_TOOLS = ("reset", "get_reward", "close")
"""Public methods of an environment that are no tools."""


class Tool:
    """A method that the actor may call, with its JSON schema.

    Raises:
        PluginError: no docstring, an argument without a type, or a type that has no JSON schema.
    """

    def __init__(self, method: Callable[..., Any], where: str) -> None:
        from pydantic import ConfigDict, Field, create_model

        self.method = method
        self.name = method.__name__
        here = f"{where}: the tool {self.name!r}"
        text = inspect.getdoc(method)
        if not text:
            raise PluginError(
                f"{here} has no docstring; the actor is told what a tool does by its docstring. A method "
                "that is no tool begins its name with _"
            )
        parameters = inspect.signature(method).parameters
        try:
            hints = typing.get_type_hints(method)
        except Exception as error:
            raise PluginError(f"{here}: its types cannot be read: {error}") from error
        fields: dict[str, Any] = {}
        for number, (name, parameter) in enumerate(parameters.items()):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in hints:
                raise PluginError(
                    f"{here}: the argument {name!r} needs a name and a type, e.g. '{name}: str'"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            # a model reserves names that an argument may have
            fields[f"argument{number}"] = (hints[name], Field(default, alias=name))
        try:
            self._model = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
            schema = self._model.model_json_schema()
        except Exception as error:
            raise PluginError(f"{here}: its arguments have no JSON schema: {error}") from error
        summary, *rest = re.split(r"\n\s*(?:Args|Arguments|Parameters):\s*\n", text, maxsplit=1)
        described = _described(rest[0], parameters) if rest else {}
        for name, field in schema.setdefault("properties", {}).items():
            field.pop("title", None)
            if name in described:
                field["description"] = described[name]
        self.schema = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": re.split(r"\n\s*(?:Returns|Raises):", summary)[0].strip(),
                "parameters": {k: v for k, v in schema.items() if k not in ("title", "additionalProperties")},
            },
        }
        self._texts = {
            name
            for name, field in schema["properties"].items()
            if "string" in [field.get("type"), *(part.get("type") for part in field.get("anyOf", ()))]
        }
        """Arguments that may be a text."""

    def bind(self, call: ToolCall) -> dict[str, Any]:
        """Return the arguments by name, of the declared types.

        Raises:
            ValueError: one is missing, unknown or of another type.
        """
        from pydantic import ValidationError

        written = {name: text for name, text in call.texts.items() if name in self._texts}
        try:
            read = self._model.model_validate({**call.arguments, **written})
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ValueError("; ".join(problems)) from error
        return {field.alias or "": getattr(read, own) for own, field in self._model.model_fields.items()}


def _described(text: str, names: Collection[str]) -> dict[str, str]:
    """Return the descriptions of arguments in the section of a docstring (Google's format)."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        begin = re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
        if begin and begin[1] in names:
            name = begin[1]
            found[name] = begin[2].strip()
        elif not line.strip() or re.match(r"\s*(?:Returns|Raises|Yields|Examples?):\s*$", line):
            name = ""
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def tools_of(environment: Any, where: str) -> dict[str, Tool]:
    """Return the tools of an environment by name; raises as ``Tool``, and if there is none."""
    names = [
        name
        for name, value in inspect.getmembers(type(environment), callable)
        if not name.startswith("_") and name not in NO_TOOLS and not isinstance(value, type)
    ]
    if not names:
        raise PluginError(
            f"{where}: {type(environment).__name__} has no tool: every public method but reset, get_reward "
            "and close is one; an environment that answers messages has a method step(message)"
        )
    return {name: Tool(getattr(environment, name), where) for name in names}


class AuthorWorld(World):
    """An author's environment as a ``World``; ``run`` calls a method, also an async one."""

    def __init__(self, environment: Any, run: Callable[..., Any]) -> None:
        self._environment = environment
        self._run = run

    def earned(self) -> Earned:
        """Return ``get_reward()`` of the environment; None if it has no such method."""
        earned: Earned = self._optional("get_reward")
        return earned

    def close(self) -> None:
        """Close the environment, if it has that method."""
        self._optional("close")

    def _optional(self, name: str) -> Any:
        method = getattr(self._environment, name, None)
        return None if method is None else self._run(method)


class ToolWorld(AuthorWorld):
    """An environment of tools as a ``World``."""

    def __init__(self, environment: Any, where: str, run: Callable[..., Any]) -> None:
        super().__init__(environment, run)
        self._tools = tools_of(environment, where)

    def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin the episode; a ``reset`` without ``**row`` gets the columns that it names."""
        reset = self._environment.reset
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = {p.name: p.default is p.empty for p in parameters if p.kind is not p.VAR_KEYWORD}
        for name, is_needed in named.items():
            if is_needed and name not in row:
                raise DataError(
                    f"reset() needs a row with {name!r}, it has: {', '.join(map(str, row)) or 'no column'}"
                )
        text = self._run(reset, **{str(k): v for k, v in row.items() if takes_all or k in named})
        if not isinstance(text, str | None):
            raise TypeError(f"reset() of an environment with tools returned {text!r}, expected text or None")
        return Opening(suffix=text or "", tools=[tool.schema for tool in self._tools.values()])

    def step(self, message: Message) -> StepResult:
        """Make the calls of the answer, in order; an answer without one ends the episode."""
        _, calls = read_calls(message["content"])
        if not calls:
            return StepResult(done=True)
        counts = CallCounts(left=self.calls_left)
        messages: list[Message] = []
        for call in calls:
            content = counts.check(call, self._tools)
            if not content:
                tool = self._tools[call.name]
                try:
                    arguments = tool.bind(call)
                except ValueError as error:
                    counts.refuse(call)
                    content = f"Error: wrong arguments of {call.name}: {error}"
                else:
                    try:
                        result = self._run(tool.method, **arguments)
                        is_text = isinstance(result, str)
                        content = result if is_text else json.dumps(result, default=str, ensure_ascii=False)
                    except (SandboxError, MemoryError):  # not the actor's fault
                        raise
                    except (Exception, SystemExit) as error:  # noqa: BLE001 - the actor is told
                        counts.failed[call.name] += 1
                        content = f"Error: {type(error).__name__}: {error}"
            messages.append({"role": "tool", "name": call.name, "content": content})
        self.calls_left = counts.left
        return StepResult(messages=messages, info=counts.info)
