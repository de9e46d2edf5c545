"""The contract suite of environments: worlds in worker processes, as a run has them, without an actor."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Opening, StepResult
from multitask_rl.environments.pool import Answer, WorldPool
from multitask_rl.environments.worker import CLOSING_S, Ended
from multitask_rl.records import Failure, FailureKind
from multitask_rl.testing.contract import NON_ANSWERS, Finding, asserting, by_message, run_check

LATE_S = CLOSING_S - 0.1
"""A process that takes so many seconds to end is killed."""
WRONG_CALLS = {
    "unknown tool": '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    "broken call": '<tool_call>{"name": "',
}
"""Answers with calls that no tool takes, by name."""
_VALUES: dict[str, Sequence[Any]] = {
    "string": ("a", "", "x" * 5000),
    "integer": (1, -1, 10**12),
    "number": (0.5, -1.0, 1e300),
    "boolean": (True, False, True),
    "array": ([], [], []),
    "object": ({}, {}, {}),
}
"""Values of an argument of each type, for three calls."""


def check_environment(
    plugin: str, config: Mapping[str, Any] | None = None, *, row: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Return the findings about an environment of either shape (``environment`` of a task).

    Args:
        plugin: reference as in a tasks file.
        config: ``environment_config``.
        row: a row of its data; None = a sum, and what needs a column beyond that is not tried.
    """
    spec = WorldSpec(reference=plugin, config=dict(config or {}))
    given = {"prompt": "What is 2 + 2?", "reference": "4"} if row is None else dict(row)
    with _Worlds(spec) as worlds, _Worlds(spec) as others:
        findings = [run_check("is built and closed in a worker process", worlds.check)]
        if not findings[0].passed:
            return findings
        begins = "begins an episode on a row"
        (first,) = worlds.play([given], ["a"])
        opening = first[0]
        if isinstance(opening, Failure):
            problem = f"{opening.kind.value} failure: {opening.message}"
            is_untried = row is None and opening.kind is FailureKind.data
            told = f"not tried, give --row ({problem})" if is_untried else problem
            return [*findings, Finding(begins, is_untried, told)]
        assert isinstance(opening, Opening)
        names = [tool["function"]["name"] for tool in opening.tools]
        shape = f"tools: {', '.join(names)}" if names else "it answers messages"
        findings.append(Finding(begins, True, shape))
        calls = {
            f"{tool['function']['name']} ({i})": _call(tool, i) for tool in opening.tools for i in range(3)
        }
        answers = {**NON_ANSWERS, **WRONG_CALLS, **calls}
        began = time.monotonic()
        ends = worlds.play([given] * len(answers), *([text] for text in answers.values()))
        seconds = time.monotonic() - began
        failed = {
            name: end[-1].message
            for name, end in zip(answers, ends, strict=True)
            if isinstance(end[-1], Failure)
        }
        detail = by_message(failed, len(answers)) or f"{len(answers)} episodes at once, {seconds:.2f} s"
        findings.append(Finding("answers hostile texts and calls", not failed, detail))
        findings.append(Finding("episodes at once do not disturb each other", *_alone(others, given, calls)))
        (end,) = worlds.play([{}], [])
        lacks = isinstance(end[0], Failure) and end[0].kind is not FailureKind.data
        detail = end[0].message if isinstance(end[0], Failure) else "it reads no column, or has defaults"
        findings.append(Finding("a row without its columns is a data failure", not lacks, detail))
        late = worlds.close() or others.close()
        findings.append(Finding("its worlds close in time", not late, late))
    return findings


assert_environment_contract = asserting(check_environment)


def _alone(worlds: _Worlds, row: Mapping[str, Any], calls: Mapping[str, str]) -> tuple[bool, str]:
    """Play one episode in a new process, the same beside others, and once more in another new process."""
    texts = [*list(calls.values())[::3][:3], "1", "a"]
    (alone,) = worlds.play([row], texts)
    beside = worlds.play([row] * 4, *[texts] * 4)
    if all(end == alone for end in beside):
        return True, ""
    with _Worlds(worlds.spec) as others:
        (again,) = others.play([row], texts)
    if again != alone:
        return True, "not tried: equal answers have different replies in two processes"
    other = next(end for end in beside if end != alone)
    pairs = [(a, b) for a, b in zip(alone, other, strict=False) if a != b]
    here, there = pairs[0] if pairs else (alone[-1], other[-1])
    return False, f"alone {here!r}, later and beside others {there!r}; state belongs in self, set by reset"


def _call(tool: Mapping[str, Any], index: int) -> str:
    """Return an answer with a call of ``tool`` that fits its schema."""
    arguments = {}
    parameters = tool["function"]["parameters"]
    for name, schema in parameters.get("properties", {}).items():
        kinds = [schema, *schema.get("anyOf", ())]
        kind = next((one["type"] for one in kinds if one.get("type") in _VALUES), "string")
        values = [one["enum"] for one in kinds if "enum" in one]
        arguments[name] = values[0][0] if values else _VALUES[kind][index]
    call = {"name": tool["function"]["name"], "arguments": arguments}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


class _Worlds:
    """Worlds of one specification in one process."""

    def __init__(self, spec: WorldSpec) -> None:
        self.spec = spec
        self._pool = WorldPool({"": spec}, num_workers=1)

    def __enter__(self) -> _Worlds:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def check(self) -> None:
        """Build one."""
        self._pool.check("")

    def play(self, rows: Sequence[Mapping[str, Any]], *answers: Sequence[str]) -> list[list[Answer]]:
        """Play an episode per row, all at once, with the answers of each; return what the world said."""
        said: dict[int, list[Answer]] = {}
        left: dict[int, list[str]] = {}
        for row, texts in zip(rows, answers, strict=True):
            ticket = self._pool.open("", row)
            said[ticket], left[ticket] = [], list(texts)
        under_way = set(said)
        while under_way:
            for ticket, answer in self._pool.poll(60.0):
                said[ticket].append(answer)
                if isinstance(answer, Ended | Failure):
                    under_way.discard(ticket)
                elif left[ticket] and not (isinstance(answer, StepResult) and answer.done):
                    self._pool.step(ticket, {"role": "assistant", "content": left[ticket].pop(0)})
                else:
                    self._pool.finish(ticket)
        return list(said.values())

    def close(self) -> str:
        """Close the pool; return what is wrong."""
        began = time.monotonic()
        self._pool.close()
        is_late = time.monotonic() - began > LATE_S
        return (
            "its process does not end: a call or close() hangs, or it left a thread at work"
            if is_late
            else ""
        )
