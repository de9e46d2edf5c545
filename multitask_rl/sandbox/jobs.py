"""Programs as messages to the monitor, and its answers as outcomes."""

from __future__ import annotations

import ast
import functools
import json
from dataclasses import asdict
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.sandbox.base import (
    AssertsTask,
    Outcome,
    Program,
    ScriptTask,
    StdioTask,
    TestResult,
    UnittestTask,
    Verdict,
    count_test_methods,
    imported_modules,
)
from multitask_rl.sandbox.cell.codec import CodecError, Encoder

_limits = functools.lru_cache(maxsize=64)(asdict)


def to_job(program: Program) -> tuple[dict[str, Any], list[bytes]]:
    """Return header and byte strings of the message that runs ``program``."""
    header: dict[str, Any] = {"limits": _limits(program.limits)}
    texts: list[str | bytes] = [program.source]
    match program.task:
        case ScriptTask(stdin=stdin):
            header["kind"] = "script"
            texts.append(stdin)
        case StdioTask(tests=tests, float_tolerance=tolerance):
            header.update(kind="stdio", float_tolerance=tolerance)
            for test in tests:
                texts += [test.stdin, test.stdout]
        case AssertsTask(entry_point=entry, exported=exported, allow_dunder=allow_dunder) as task:
            asserts = tuple(task.asserts)
            header.update(kind="asserts", num_tests=len(asserts))
            texts.append(_judge_task("asserts", entry, exported, task.setup, asserts, allow_dunder))
            if not task.setup.strip() and not allow_dunder:
                header["literals"] = _literal_tests(entry, asserts)
        case UnittestTask(entry_point=entry, exported=exported, allow_dunder=allow_dunder) as task:
            header.update(kind="unittest", num_tests=count_test_methods(task.test_code))
            texts.append(_judge_task("unittest", entry, exported, "", (task.test_code,), allow_dunder))
    return header, [t if isinstance(t, bytes) else t.encode("utf-8", "surrogatepass") for t in texts]


def outcome_of(header: dict[str, Any], blobs: list[bytes], worker: int) -> Outcome:
    """Return the outcome in a monitor's answer, whose header is a record of ``cell.verdicts.result``."""
    stdout, stderr = blobs
    tests = tuple(
        TestResult(verdict=Verdict(v), message=m, wall_s=w, cpu_s=c) for v, m, w, c in header["tests"]
    )
    fields = {**header, "verdict": Verdict(header["verdict"]), "tests": tests}
    del fields["id"]
    return Outcome(**fields, stdout=stdout, stderr=stderr, worker=worker)


@functools.lru_cache(maxsize=1024)
def _judge_task(
    kind: str, entry: str, exported: tuple[str, ...], setup: str, tests: tuple[str, ...], allow_dunder: bool
) -> bytes:
    """Return what the judge reads; cached, because all answers to one prompt have the same tests."""
    task = {
        "kind": kind,
        "entry_point": entry,
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

    def refuse(value: Any) -> tuple[str, Any]:
        raise CodecError(f"{type(value).__name__} is no literal")

    found: list[list[Any]] = []
    for test in tests:
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
                    given = [ast.literal_eval(argument) for argument in arguments]
                    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
                    encoder = Encoder(refuse)
                    request = encoder.dumps(["call", name, encoder.encode(given), encoder.encode(named)])
                    answer = encoder.dumps(encoder.encode(wanted))
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return None
                is_identity = isinstance(operator, ast.Is)
                # ``**mapping``; identity of other literals is the interpreter's choice
                if None in named or (is_identity and not (wanted is None or isinstance(wanted, bool))):
                    return None
                found.append([request, "is" if is_identity else "==", answer])
            case _:
                return None
    return found
