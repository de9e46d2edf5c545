"""Programs and outcomes as the messages a monitor understands."""

from __future__ import annotations

import ast
from dataclasses import asdict
from typing import Any

from multitask_rl.sandbox.base import (
    AssertsTask,
    Outcome,
    Program,
    ScriptTask,
    StdioTask,
    TestResult,
    UnittestTask,
    Verdict,
    imported_modules,
)

__all__ = ["outcome_of", "to_job"]


def to_job(program: Program) -> tuple[dict[str, Any], list[bytes]]:
    """Return header and byte strings of the message that runs ``program``."""
    header: dict[str, Any] = {"limits": asdict(program.limits)}
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
            header.update(kind="asserts", num_tests=len(task.asserts))
            header["judge"] = _judge(task, task.setup, list(task.asserts))
        case UnittestTask() as task:
            header.update(kind="unittest", num_tests=_count_methods(task.test_code))
            header["judge"] = _judge(task, "", [task.test_code])
    return header, blobs


def outcome_of(header: dict[str, Any], blobs: list[bytes], worker: int, retries: int) -> Outcome:
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
        retries=retries,
    )


def _to_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _judge(task: AssertsTask | UnittestTask, setup: str, tests: list[str]) -> dict[str, Any]:
    return {
        "kind": "unittest" if isinstance(task, UnittestTask) else "asserts",
        "entry_point": task.entry_point,
        "exports": list(task.exported),
        "modules": imported_modules([setup, *tests], task.exported),
        "setup": setup,
        "tests": tests,
        "allow_dunder": task.allow_dunder,
    }


def _count_methods(code: str) -> int:
    classes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)]
    return sum(isinstance(m, ast.FunctionDef) and m.name.startswith("test") for c in classes for m in c.body)
