"""Conversion of programs and outcomes to and from messages of the monitor."""

from __future__ import annotations

import ast
import functools
import json
from dataclasses import asdict
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.sandbox.base import (
    AssertsTask,
    Limits,
    Outcome,
    Program,
    ScriptTask,
    StdioTask,
    TestResult,
    UnittestTask,
    Verdict,
    imported_modules,
)
from multitask_rl.sandbox.cell.codec import CodecError, Encoder

__all__ = ["Job", "outcome_of", "to_job"]

Job = tuple[dict[str, Any], list[bytes]]
"""Header and byte strings of the message that runs a program."""


def to_job(program: Program) -> Job:
    """Return the message that runs ``program``."""
    header: dict[str, Any] = {"limits": _limits(program.limits)}
    blobs = [_to_bytes(program.source)]
    match program.task:
        case ScriptTask(stdin=stdin):
            header["kind"] = "script"
            blobs.append(_to_bytes(stdin))
        case StdioTask(tests=tests, float_tolerance=tolerance):
            header.update(kind="stdio", float_tolerance=tolerance)
            for test in tests:
                blobs += [_to_bytes(test.stdin), _to_bytes(test.stdout)]
        case AssertsTask() as task:
            asserts = tuple(task.asserts)
            header.update(kind="asserts", num_tests=len(asserts))
            blobs.append(_judge_blob("asserts", task, task.setup, asserts))
            if not task.setup.strip() and not task.allow_dunder:
                header["literals"] = _literal_tests(task.entry_point, asserts)
        case UnittestTask() as task:
            header.update(kind="unittest", num_tests=_count_methods(task.test_code))
            blobs.append(_judge_blob("unittest", task, "", (task.test_code,)))
    return header, blobs


def outcome_of(header: dict[str, Any], blobs: list[bytes], worker: int) -> Outcome:
    """Return the outcome in a monitor's answer."""
    stdout, stderr = blobs
    tests = tuple(
        TestResult(verdict=Verdict(verdict), message=message, wall_s=wall_s, cpu_s=cpu_s)
        for verdict, message, wall_s, cpu_s in header["tests"]
    )
    return Outcome(
        verdict=Verdict(header["verdict"]),
        tests=tests,
        message=header["message"],
        wall_s=header["wall_s"],
        cpu_s=header["cpu_s"],
        peak_mb=header["peak_mb"],
        starved_s=header["starved_s"],
        exit_code=header["exit_code"],
        signal=header["signal"],
        stdout=stdout,
        stderr=stderr,
        stdout_length=header["stdout_length"],
        stderr_length=header["stderr_length"],
        worker=worker,
    )


@functools.lru_cache(maxsize=64)
def _limits(limits: Limits) -> dict[str, Any]:
    return asdict(limits)


def _to_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _judge_blob(kind: str, task: AssertsTask | UnittestTask, setup: str, tests: tuple[str, ...]) -> bytes:
    return _judge_task(kind, task.entry_point, task.exported, setup, tests, task.allow_dunder)


@functools.lru_cache(maxsize=1024)
def _judge_task(
    kind: str,
    entry_point: str,
    exported: tuple[str, ...],
    setup: str,
    tests: tuple[str, ...],
    allow_dunder: bool,
) -> bytes:
    """Return what the judge reads; remembered, since all answers to one prompt have the same tests."""
    task = {
        "kind": kind,
        "entry_point": entry_point,
        "exports": exported,
        "modules": imported_modules([setup, *tests], exported),
        "setup": setup,
        "tests": tests,
        "allow_dunder": allow_dunder,
    }
    return json.dumps(task).encode()


@functools.lru_cache(maxsize=1024)
def _literal_tests(entry_point: str, tests: tuple[str, ...]) -> list[list[Any]] | None:
    """Return the tests as ``cell.literals`` takes them; None unless all are of its shape."""
    found = [_literal_test(entry_point, test) for test in tests]
    return None if None in found else [test for test in found if test is not None]


def _literal_test(entry_point: str, test: str) -> list[Any] | None:
    match parse_python(test.strip()).body:
        case [
            ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords),
                    ops=[ast.Eq() | ast.Is() as operator],
                    comparators=[expected],
                )
            )
        ] if name == entry_point:
            try:
                wanted = ast.literal_eval(expected)
                if isinstance(operator, ast.Is) and not (wanted is None or isinstance(wanted, bool)):
                    return None  # identity of other literals is the interpreter's choice
                given = [ast.literal_eval(argument) for argument in arguments]
                named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
                if None in named:
                    return None
                encoder = Encoder(_no_handle)
                request = ["call", name, encoder.encode(given), encoder.encode(named)]
                word = "is" if isinstance(operator, ast.Is) else "=="
                return [encoder.dumps(request), word, encoder.dumps(encoder.encode(wanted))]
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                return None
    return None


def _no_handle(value: Any) -> tuple[str, Any]:
    raise CodecError(f"{type(value).__name__} is no literal")


@functools.lru_cache(maxsize=1024)
def _count_methods(code: str) -> int:
    classes = [node for node in ast.walk(parse_python(code)) if isinstance(node, ast.ClassDef)]
    return sum(isinstance(m, ast.FunctionDef) and m.name.startswith("test") for c in classes for m in c.body)
