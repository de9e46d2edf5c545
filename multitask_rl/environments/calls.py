"""Calls of tools in the actor's text, and what is counted of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool; ``problem`` says what is wrong with its form."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text before the first call, and the calls in order.

    A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, Hermes, SmolLM),
    ``<function=name>`` with ``<parameter=name>`` (Qwen Coder), a list behind ``[TOOL_CALLS]`` (Mistral), or
    the whole text is one object (Llama 3, with ``parameters``).
    """
    whole = text.replace("<|python_tag|>", "").strip()
    if whole.startswith("{") and '"name"' in whole:
        call = _read(_parsed(whole))
        if not call.problem:
            return "", [call]
    if "<function=" in text:
        said, *rest = text.replace(_OPEN, "").split("<function=")
        return said.strip(), [_read_function(part.partition("</function>")[0]) for part in rest]
    said, mark, rest_of_list = text.partition("[TOOL_CALLS]")
    if mark:
        listed = _parsed(rest_of_list)
        return said.strip(), [_read(one) for one in (listed if isinstance(listed, list) else [listed])]
    said, *rest = text.split(_OPEN)
    return said.strip(), [_read(_parsed(part.partition(_CLOSE)[0])) for part in rest]


def _parsed(text: str) -> Any:
    """Return the JSON value of ``text``, or the error."""
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError) as error:
        return error


def _read(data: Any) -> ToolCall:
    if isinstance(data, Exception):
        return ToolCall(problem=f"a call has to be a JSON object, this is none: {data}")
    name = data.get("name") if isinstance(data, dict) else None
    arguments = data.get("arguments", data.get("parameters", {})) if isinstance(data, dict) else None
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(problem='a call has to be {"name": text, "arguments": object}')
    return ToolCall(name, arguments)


def _read_function(text: str) -> ToolCall:
    name, _, body = text.partition(">")
    arguments = {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        value = value.partition("</parameter>")[0].strip("\n")
        found = _parsed(value)
        arguments[key.strip()] = value if isinstance(found, Exception) else found
    return ToolCall(name.strip(), arguments)


@dataclass(slots=True)
class CallCounts:
    """Calls of one message: how often by name, and how often wrong."""

    called: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def check(self, call: ToolCall, names: Collection[str]) -> str:
        """Count ``call`` and return what is wrong with it, for the actor; empty = it may be made."""
        if call.problem:
            self.wrong["bad_json"] += 1
            return f"Error: {call.problem}"
        if call.name not in names:
            self.wrong["unknown_tool"] += 1
            return f"Error: there is no tool {call.name!r}; there are: {', '.join(sorted(names))}"
        self.called[call.name] += 1
        return ""

    @property
    def info(self) -> dict[str, dict[str, int]]:
        """The facts for ``StepResult.info``."""
        facts = {"tool_calls": self.called, "wrong_calls": self.wrong, "tool_errors": self.failed}
        return {name: dict(+counts) for name, counts in facts.items() if +counts}
