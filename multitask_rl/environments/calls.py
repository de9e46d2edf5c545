"""Calls of tools in the actor's text, and what is counted of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

_DECODER = json.JSONDecoder()
_TAG, _FUNCTION, _LIST = "<tool_call>", "<function=", "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[ARGS\])?\s*(?=\{)")
_CALL = r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>|<function=(?:(?!<function=).)*?</function>"
_THOUGHT = re.compile(
    # the prompt ended with <think>; atomic: no </think> in a call ends the thought
    rf"\A(?>{_CALL}|(?!<think>).)*?</think>"
    rf"|<think>.*?(?:</think>|\Z)|</think>|(?P<call>{_CALL})",
    re.DOTALL,
)
_CUT = re.compile(r"\[?\s*\{\s*\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(arguments|parameters)\"")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool; ``problem`` says what is wrong with its form."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    """The arguments as they are written, where the form has no types (``<parameter=name>``)."""


def read_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text before the first call, and the calls in order; calls in a ``<think>`` block are none.

    A block without ``<think>`` begins where the text begins, one without ``</think>`` ends where it ends.
    Inside ``<tool_call>`` or ``<function=name>`` these marks belong to the call.

    A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Qwen, Hermes, SmolLM),
    ``<function=name>`` with ``<parameter=name>`` (Qwen Coder), a list or ``name[ARGS]{...}`` behind
    ``[TOOL_CALLS]`` (Mistral). Without such marks the text behind thoughts may begin with calls:
    ``{"name": ..., "parameters": {...}}`` (Llama 3), several of them, or a list; or it is ``name{...}``
    (Mistral, whose mark is a special token).
    """
    shown = _THOUGHT.sub(lambda found: found[0] if found["call"] else " " * len(found[0]), text)
    first, mark = min(
        ((at, mark) for mark in (_TAG, _FUNCTION, _LIST) if (at := shown.find(mark)) >= 0),
        default=(-1, ""),
    )
    if not mark:
        whole = shown.replace("<|python_tag|>", "").strip()
        thoughts = text[: len(shown) - len(shown.lstrip())].strip()
        calls = _read_list(whole)
        if calls and not any(call.problem for call in calls):
            return thoughts, calls
        if _CUT.match(whole):
            return thoughts, [ToolCall(problem="a call has to be whole JSON, this is cut")]
        return text.strip(), []
    calls = []
    for part in shown[first:].split(mark)[1:]:
        if mark == _TAG:
            part = part.partition("</tool_call>")[0]
        if mark == _FUNCTION or _FUNCTION in part:
            calls += [_read_function(one) for one in part.split(_FUNCTION)[mark == _TAG :]]
        else:
            calls += _read_list(part)
    return text[:first].strip(), calls


def _read_list(text: str) -> list[ToolCall]:
    """Return the calls at the beginning of ``text``: JSON objects, a list of them, or ``name{...}``."""
    text = text.strip()
    if named := _NAMED.match(text):
        arguments = _parsed(text[named.end() :])
        return [_read({"name": named[1], "arguments": arguments})]
    found: list[Any] = []
    while not found or text.startswith(("{", "[")):
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError) as error:
            problem = f"a call has to be a JSON object, this is none: {error}"
            return [*map(_read, found), ToolCall(problem=problem)]
        found += value if isinstance(value, list) else [value]
        text = text[end:].lstrip(" \n\t;,")
    return [_read(one) for one in found]


def _parsed(text: str) -> Any:
    """Return the JSON value of ``text``; ``text`` itself if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read(data: Any) -> ToolCall:
    if isinstance(data, dict) and isinstance(data.get("function"), dict):
        data = data["function"]
    if isinstance(data, dict):
        name, arguments = data.get("name"), data.get("arguments", data.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if isinstance(name, str) and isinstance(arguments, dict):
            return ToolCall(name, arguments)
    return ToolCall(problem='a call has to be {"name": text, "arguments": object}')


def _read_function(text: str) -> ToolCall:
    name, _, body = text.partition("</function>")[0].partition(">")
    if body.lstrip().startswith("{"):
        return _read({"name": name.strip(), "arguments": _parsed(body.strip())})
    texts = {}
    for part in body.split("<parameter=")[1:]:
        key, _, value = part.partition(">")
        texts[key.strip()] = value.partition("</parameter>")[0].strip("\n")
    return ToolCall(name.strip(), {key: _parsed(value) for key, value in texts.items()}, texts=texts)


CALL_FACTS = frozenset({"tool_calls", "wrong_calls", "tool_errors"})
"""Keys of ``StepResult.info`` that hold counts by name."""


@dataclass(slots=True)
class CallCounts:
    """Calls of one message: how often by name, and how often wrong."""

    left: int | None = None
    """Calls that may still be made in the episode; None = any number."""
    called: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def check(self, call: ToolCall, names: Collection[str]) -> str:
        """Count ``call`` and return what is wrong with it, for the actor; empty = it may be made."""
        if self.left == 0:
            self.wrong["over_limit"] += 1
            return "Error: the limit of tool calls is reached; answer now, without a call"
        if call.problem:
            self.wrong["bad_json"] += 1
            return f"Error: {call.problem}"
        if call.name not in names:
            self.wrong["unknown_tool"] += 1
            return f"Error: there is no tool {call.name!r}; there are: {', '.join(sorted(names))}"
        self.called[call.name] += 1
        if self.left is not None:
            self.left -= 1
        return ""

    def refuse(self, call: ToolCall) -> None:
        """Count a call as wrong that ``check`` let pass: its arguments do not fit."""
        self.called[call.name] -= 1
        self.wrong["bad_arguments"] += 1
        if self.left is not None:
            self.left += 1

    @property
    def info(self) -> dict[str, dict[str, int]]:
        """The facts for ``StepResult.info``."""
        facts = {"tool_calls": self.called, "wrong_calls": self.wrong, "tool_errors": self.failed}
        return {name: dict(+counts) for name, counts in facts.items() if +counts}
