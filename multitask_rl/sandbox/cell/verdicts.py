"""From what the kernel and the judge reported to a verdict. Pure functions; the program has no word here."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import dataclass
from typing import Any

from .wire import COMPILE_STATUS, Exit

__all__ = ["Execution", "of_execution", "of_function", "of_stdio_test", "result", "same_text"]

_MESSAGE_LIMIT = 500
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


def _lines(text: bytes) -> list[str]:
    return [line.rstrip() for line in text.decode("utf-8", "surrogateescape").rstrip().split("\n")]


def same_text(actual: bytes, expected: bytes, tolerance: float | None) -> bool:
    """Return whether two outputs are the same but for white space at line ends and at the end.

    Args:
        actual: what the program wrote.
        expected: what it should have written.
        tolerance: absolute and relative, for tokens that are both numbers; None = as text.
    """
    mine, theirs = _lines(actual), _lines(expected)
    if mine == theirs:
        return True
    if tolerance is None or len(mine) != len(theirs):
        return False
    for left, right in zip(mine, theirs, strict=True):
        ours, others = left.split(), right.split()
        if len(ours) != len(others):
            return False
        if not all(_same_token(a, b, tolerance) for a, b in zip(ours, others, strict=True)):
            return False
    return True


def _same_token(actual: str, expected: str, tolerance: float) -> bool:
    if actual == expected:
        return True
    if max(len(actual), len(expected)) > _MAX_NUMBER:
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
    load, message, count, reported = _read_lines(lines, job["num_tests"])
    cause, reason = _why_it_ended(program, judge, limits)
    if load != "passed":
        verdict = load if load not in ("gone", "") else cause or "runtime_error"
        why = reason or message or "the program's process ended while it was loaded"
        return verdict, why, [[verdict, why, 0.0, 0.0]] * count
    missing: list[Any] = [
        cause or "failed",
        reason or "the program's process ended before this test",
        0.0,
        0.0,
    ]
    tests: list[list[Any]] = [[*reported[i], 0.0, 0.0] if i in reported else missing for i in range(count)]
    wrong = [test for test in tests if test[0] != "passed"]
    if not wrong:
        return "passed", "", tests
    verdict = cause if cause and any(test is missing for test in tests) else wrong[0][0]
    return verdict, wrong[0][1], tests


def _read_lines(lines: bytes, count: int) -> tuple[str, str, int, dict[int, tuple[str, str]]]:
    load, message = "", ""
    reported: dict[int, tuple[str, str]] = {}
    for line in lines.splitlines():
        try:
            index, verdict, text = json.loads(line)
        except ValueError:
            break  # the judge was killed in the middle of a line
        if index == "load":
            # a program that goes away during the tests leaves those that follow unreported, not this line
            if verdict != "gone" or not load:
                load, message = verdict, text
        elif index == "count":
            count = int(verdict)
        elif isinstance(index, int):
            reported[index] = (verdict, text)
    return load, message, max(1, count), reported


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
