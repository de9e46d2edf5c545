"""Endings from the reports of kernel and tester: pure functions, out of the program's reach."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .wire import COMPILE_STATUS, Exit

_MESSAGE_LIMIT = 500
MAX_LINES = 1 << 24
"""Bytes of the tester's lines that are read."""
_MAX_LINE, _MAX_COUNT_DIGITS = 1 << 13, 5
_TEST_ENDINGS = frozenset({"passed", "failed", "runtime_error"})
_LOAD_ENDINGS = frozenset({"passed", "compile_error", "memory_limit", "runtime_error", "gone"})
_TOKEN = re.compile(r"\S+")
_MAX_NUMBER = 400
_CPU_LIMIT_SHARE = 0.5
"""A SIGKILL after this share of the CPU limit enforces that limit. The kernel enforces on sampled ticks and
reports exactly; on a busy virtual machine the two differ. Process 1 of a namespace cannot kill itself: the
other source of a SIGKILL is the kernel when memory runs out."""


@dataclass(slots=True)
class Execution:
    """One process of a program after its end."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    stderr_end: bytes
    """The last bytes of standard error, also where the limit cuts them from ``stderr``."""
    stdout_length: int
    stderr_length: int
    is_full: bool
    """The output reached the largest file size."""
    is_killed_by_us: bool = False
    """The keeper ended it after its work."""


def of_execution(execution: Execution, limits: dict[str, Any]) -> tuple[str, str]:
    """Return (ending, message) of a process; ``ok`` for status 0 within all limits."""
    ended = execution.exit
    if ended.failure:
        return "infrastructure_error", ended.failure
    if ended.timed_out:
        return "timeout", f"wall-clock limit of {limits['wall_s']:g} s"
    if os.WIFSIGNALED(ended.status):
        return _of_signal(os.WTERMSIG(ended.status), ended, limits)
    status = os.WEXITSTATUS(ended.status)
    last = execution.stderr_end.decode("utf-8", "replace").rstrip().rpartition("\n")[2][:_MESSAGE_LIMIT]
    if execution.stdout_length > limits["stdout_bytes"] or (status and execution.is_full):
        return "output_limit", f"more than {limits['stdout_bytes']} bytes of output"
    if status == 0:
        return "ok", ""
    if status == COMPILE_STATUS and not execution.stdout_length:
        return "compile_error", last
    if last.startswith("MemoryError"):
        return "memory_limit", f"out of memory at {limits['mem_mb']} MiB"
    return "runtime_error", last or f"exit status {status}"


def _of_signal(number: int, ended: Exit, limits: dict[str, Any]) -> tuple[str, str]:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGXCPU or (
        number == signal.SIGKILL and ended.cpu_s >= limits["cpu_s"] * _CPU_LIMIT_SHARE
    ):
        return "timeout", f"CPU limit of {limits['cpu_s']:g} s"
    if number == signal.SIGSYS:
        return "violation", "a forbidden system call"
    if number == signal.SIGKILL:
        return "killed", name
    if number == signal.SIGXFSZ:
        return "output_limit", name
    return "runtime_error", name


def of_stdio_test(
    execution: Execution, limits: dict[str, Any], expected: bytes, tolerance: float | None
) -> tuple[str, str]:
    """Return (ending, message) of one test: the right text *and* a clean end."""
    ending, message = of_execution(execution, limits)
    if ending != "ok":
        return ending, message
    if same_text(execution.stdout, expected, tolerance):
        return "passed", ""
    return "failed", f"expected {_excerpt(expected)}, got {_excerpt(execution.stdout)}"


def _excerpt(text: bytes) -> str:
    shown = repr(text[:100].decode("utf-8", "replace"))
    return shown if len(text) <= 100 else f"{shown}... ({len(text)} bytes)"


def _lines(data: bytes) -> Iterator[str]:
    """Yield the lines without white space at their ends; one at a time, because there may be millions."""
    text = data.decode("utf-8", "surrogateescape").rstrip()
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end].rstrip()
        start = end + 1
    yield text[start:].rstrip()


def same_text(actual: bytes, expected: bytes, tolerance: float | None) -> bool:
    """Return whether two outputs are the same but for white space at line ends and at the end.

    ``tolerance``: absolute and relative, for tokens that are both numbers; None = their text counts.
    """
    for mine, theirs in itertools.zip_longest(_lines(actual), _lines(expected)):
        if mine == theirs:
            continue
        if mine is None or theirs is None or tolerance is None:
            return False
        for found, wanted in itertools.zip_longest(_TOKEN.finditer(mine), _TOKEN.finditer(theirs)):
            if found is None or wanted is None:
                return False
            a, b = found[0], wanted[0]
            if a == b:
                continue
            if max(len(a), len(b)) > _MAX_NUMBER:
                return False
            try:
                x, y = float(a), float(b)
            except ValueError:
                return False
            is_close = math.isclose(x, y, rel_tol=tolerance, abs_tol=tolerance)
            if not (is_close and math.isfinite(x) and math.isfinite(y)):
                return False
    return True


def of_function(
    job: dict[str, Any], lines: bytes, tester: Exit, program: Execution
) -> tuple[str, str, list[list[Any]]]:
    """Return (ending, message, tests) of a function task; ``tester``, ``program``: the ended processes."""
    limits = job["limits"]
    for ended in (tester, program.exit):
        if ended.failure:
            return "infrastructure_error", ended.failure, []
    load, message, broke_off, count = "", "", "", job["num_tests"]
    reported: dict[int, tuple[str, str]] = {}
    for line in lines.splitlines():
        try:
            entry = json.loads(line) if len(line) <= _MAX_LINE else None
        except (ValueError, RecursionError):
            break  # the tester was killed in the middle of a line
        match entry:
            case ["load", str(ending), str(text)] if ending in _LOAD_ENDINGS:
                if ending == "gone" and load:
                    broke_off = text  # during the tests: the next ones have no line
                else:
                    load, message = ending, text
            case ["count", str(number), str()] if number.isdecimal() and len(number) <= _MAX_COUNT_DIGITS:
                count = int(number)
            case ["setup", str(), str()]:
                continue
            case [int(index), str(ending), str(text)] if ending in _TEST_ENDINGS:
                reported[index] = (ending, text)
            case _:
                break  # no line of the tester: a program's return value may make tests write here
    count = max(1, count)
    cause, reason = "", ""  # why a process did not live to the end of the tests
    if not program.is_killed_by_us:
        cause, reason = of_execution(program, limits)
        if cause in ("ok", "compile_error"):
            cause, reason = "runtime_error", "the program ended before its tests"
    elif tester.timed_out:
        cause, reason = "timeout", "the tests did not end in time"
    elif os.WIFSIGNALED(tester.status):
        cause, told = _of_signal(os.WTERMSIG(tester.status), tester, limits)
        reason = f"the tests' process ended: {told}"
    if load != "passed":
        is_told = load not in ("gone", "")
        ending = load if is_told else cause or "runtime_error"
        told = message if is_told else ""
        why = told or reason or message or "the program's process ended while it was loaded"
        return ending, why, [[ending, why, 0.0, 0.0]] * count
    default = ("runtime_error", broke_off) if broke_off else ("failed", "the tests ended before this one")
    missing: list[Any] = [*((cause, reason) if cause else default), 0.0, 0.0]
    tests: list[list[Any]] = [[*reported[i], 0.0, 0.0] if i in reported else missing for i in range(count)]
    wrong = [test for test in tests if test[0] != "passed"]
    if not wrong:
        return "passed", "", tests
    ending = cause if cause and any(test is missing for test in tests) else wrong[0][0]
    return ending, wrong[0][1], tests


def result(
    ending: str,
    message: str,
    tests: list[list[Any]],
    executions: list[Execution],
    shown: Execution | None = None,
) -> dict[str, Any]:
    """Return the record of one program for the trainer; its keys are fields of ``Outcome``."""
    last = shown or executions[-1]
    status = last.exit.status
    signalled = os.WIFSIGNALED(status)
    return {
        "ending": ending,
        "message": message[:_MESSAGE_LIMIT],
        "tests": [[v, m[:_MESSAGE_LIMIT], wall, cpu] for v, m, wall, cpu in tests],
        "wall_s": sum(e.exit.wall_s for e in executions),
        "cpu_s": sum(e.exit.cpu_s for e in executions),
        "peak_mb": max(e.exit.peak_kb for e in executions) / 1024,
        "starved_s": sum(e.exit.starved_s for e in executions),
        "exit_code": None if signalled or last.is_killed_by_us else os.WEXITSTATUS(status),
        "signal": os.WTERMSIG(status) if signalled and not last.is_killed_by_us else None,
        "stdout_length": last.stdout_length,
        "stderr_length": last.stderr_length,
    }
