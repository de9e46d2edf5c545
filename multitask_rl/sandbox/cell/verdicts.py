"""Verdicts from the reports of kernel and judge. Pure functions; the program has no influence here."""

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

__all__ = ["MAX_LINES", "Execution", "of_execution", "of_function", "of_stdio_test", "result", "same_text"]

_MESSAGE_LIMIT = 500
MAX_LINES = 1 << 24
"""Bytes of the judge's lines that are looked at."""
_MAX_LINE, _MAX_COUNT_DIGITS = 1 << 13, 5
_TEST_VERDICTS = frozenset({"passed", "failed", "runtime_error"})
_LOAD_VERDICTS = frozenset({"passed", "compile_error", "memory_limit", "runtime_error", "gone"})
_TOKEN = re.compile(r"\S+")
_MAX_NUMBER = 400
_CPU_LIMIT_SHARE = 0.5
"""The kernel enforces the limit on sampled ticks, the report is exact: on a busy virtual machine they differ.
Process 1 of a namespace cannot kill itself, so what else sends SIGKILL is the kernel out of memory."""


@dataclass(slots=True)
class Execution:
    """One process of a program after its end."""

    exit: Exit
    stdout: bytes
    stderr: bytes
    stderr_end: bytes
    """The last bytes it wrote to standard error, cut or not."""
    stdout_length: int
    stderr_length: int
    is_full: bool
    """It ran into the largest file size."""
    is_killed_by_us: bool = False
    """It was ended because its work was done."""


def of_execution(execution: Execution, limits: dict[str, Any]) -> tuple[str, str]:
    """Return (verdict, message) of a process; ``ok`` for status 0 within all limits."""
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
    """Return (verdict, message) of one test: the right text *and* a clean end."""
    verdict, message = of_execution(execution, limits)
    if verdict != "ok":
        return verdict, message
    if same_text(execution.stdout, expected, tolerance):
        return "passed", ""
    return "failed", f"expected {_excerpt(expected)}, got {_excerpt(execution.stdout)}"


def _excerpt(text: bytes) -> str:
    shown = repr(text[:100].decode("utf-8", "replace"))
    return shown if len(text) <= 100 else f"{shown}... ({len(text)} bytes)"


def _lines(data: bytes) -> Iterator[str]:
    """Yield the lines without white space at their ends; one at a time, since there may be millions."""
    text = data.decode("utf-8", "surrogateescape").rstrip()
    start = 0
    while (end := text.find("\n", start)) >= 0:
        yield text[start:end].rstrip()
        start = end + 1
    yield text[start:].rstrip()


def same_text(actual: bytes, expected: bytes, tolerance: float | None) -> bool:
    """Return whether two outputs are the same but for white space at line ends and at the end.

    Args:
        actual: what the program wrote.
        expected: what it should have written.
        tolerance: absolute and relative, for tokens that are both numbers; None = as text.
    """
    pairs = itertools.zip_longest(_lines(actual), _lines(expected))
    return all(_same_line(mine, theirs, tolerance) for mine, theirs in pairs)


def _same_line(actual: str | None, expected: str | None, tolerance: float | None) -> bool:
    if actual == expected:
        return True
    if actual is None or expected is None or tolerance is None:
        return False
    pairs = itertools.zip_longest(_TOKEN.finditer(actual), _TOKEN.finditer(expected))
    return all(_same_token(mine and mine[0], theirs and theirs[0], tolerance) for mine, theirs in pairs)


def _same_token(actual: str | None, expected: str | None, tolerance: float) -> bool:
    if actual == expected:
        return True
    if actual is None or expected is None or max(len(actual), len(expected)) > _MAX_NUMBER:
        return False
    try:
        a, b = float(actual), float(expected)
    except ValueError:
        return False
    return math.isfinite(a) and math.isfinite(b) and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)


def of_function(
    job: dict[str, Any], lines: bytes, judge: Exit, program: Execution
) -> tuple[str, str, list[list[Any]]]:
    """Return (verdict, message, tests) of a function task from the judge's lines and both ends."""
    limits = job["limits"]
    for ended in (judge, program.exit):
        if ended.failure:
            return "infrastructure_error", ended.failure, []
    load, message, count, reported, broke_off = _read_lines(lines, job["num_tests"])
    cause, reason = _why_it_ended(program, judge, limits)
    if load != "passed":
        verdict = load if load not in ("gone", "") else cause or "runtime_error"
        why = reason or message or "the program's process ended while it was loaded"
        return verdict, why, [[verdict, why, 0.0, 0.0]] * count
    default = ("runtime_error", broke_off) if broke_off else ("failed", "the tests ended before this one")
    missing: list[Any] = [*((cause, reason) if cause else default), 0.0, 0.0]
    tests: list[list[Any]] = [[*reported[i], 0.0, 0.0] if i in reported else missing for i in range(count)]
    wrong = [test for test in tests if test[0] != "passed"]
    if not wrong:
        return "passed", "", tests
    verdict = cause if cause and any(test is missing for test in tests) else wrong[0][0]
    return verdict, wrong[0][1], tests


def _read_lines(lines: bytes, count: int) -> tuple[str, str, int, dict[int, tuple[str, str]], str]:
    """Return how loading went (verdict, message), the count of tests, their results, why they broke off."""
    load, message, broke_off = "", "", ""
    reported: dict[int, tuple[str, str]] = {}
    for line in lines.splitlines():
        try:
            entry = json.loads(line) if len(line) <= _MAX_LINE else None
        except (ValueError, RecursionError):
            break  # the judge was killed in the middle of a line
        match entry:
            case ["load", str(verdict), str(text)] if verdict in _LOAD_VERDICTS:
                if verdict == "gone" and load:
                    broke_off = text  # during the tests: those that follow are not reported
                else:
                    load, message = verdict, text
            case ["count", str(number), str()] if number.isdecimal() and len(number) <= _MAX_COUNT_DIGITS:
                count = int(number)
            case ["setup", str(), str()]:
                continue
            case [int(index), str(verdict), str(text)] if verdict in _TEST_VERDICTS:
                reported[index] = (verdict, text)
            case _:
                break  # no line of the judge: tests can be made to run what a program returns
    return load, message, max(1, count), reported, broke_off


def _why_it_ended(program: Execution, judge: Exit, limits: dict[str, Any]) -> tuple[str, str]:
    """Return (verdict, message) when a process did not live to the end of the tests, else empty strings."""
    if not program.is_killed_by_us:
        verdict, message = of_execution(program, limits)
        if verdict in ("ok", "compile_error"):
            verdict, message = "runtime_error", "the program ended before its tests"
        return verdict, message
    if judge.timed_out:
        return "timeout", "the tests did not end in time"
    if os.WIFSIGNALED(judge.status):
        verdict, message = _of_signal(os.WTERMSIG(judge.status), judge, limits)
        return verdict, f"the tests' process ended: {message}"
    return "", ""


def result(
    verdict: str,
    message: str,
    tests: list[list[Any]],
    executions: list[Execution],
    shown: Execution | None = None,
) -> dict[str, Any]:
    """Return the record of one program as the trainer gets it."""
    last = shown or executions[-1]
    status = last.exit.status
    signalled = os.WIFSIGNALED(status)
    return {
        "verdict": verdict,
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
