"""The tests' side of a function task: run the data set's own statements against a program elsewhere.

The judge is the only process that knows the expected values. The program is represented by ``Remote``
objects: calling one asks the other process and brings back a plain value, or another ``Remote`` for what
is no value. A ``Remote`` never compares, has no length, no truth and no items unless the task is about
operators: an object may not say of itself that it is equal.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from .channel import CellChannel
from .peer import MESSAGE_LIMIT, CandidateGone, Peer, text_of

__all__ = ["judge"]

_SETTLE = "__settle__"
_HAS_STATEMENTS = re.compile(r"[\n;]|^(?:async|class|def|for|if|try|while|with|match)\b|^@")
"""Text that may be more than one simple statement."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Pass, ast.Global, ast.Nonlocal)


def judge(descriptor: int, results: int, job: bytes) -> None:
    """Run the tests of ``job`` and write one line per finished test to the descriptor ``results``.

    A line is ``[index, verdict, message]``; the first is ``["load", verdict, message]``.
    """
    task = json.loads(job)
    write = os.write

    def report(index: int | str, verdict: str, message: str = "") -> None:
        write(results, json.dumps([index, verdict, message[:MESSAGE_LIMIT]]).encode() + b"\n")

    peer = Peer(CellChannel(descriptor), allow_dunder=task["allow_dunder"])
    try:
        verdict, message = peer.await_load()
        report("load", verdict, message)
        if verdict != "passed":
            return
        names = _namespace(peer, task)
        names[_SETTLE] = peer.settle
        if task["kind"] == "unittest":
            _run_unittests(task["tests"][0], names, report)
        else:
            _run_statements(task, names, peer.settle, report)
    except CandidateGone as gone:
        report("load", "gone", str(gone))
    except Exception as error:  # noqa: BLE001 - nonsense from the program must not end the judge silently
        report("load", "runtime_error", f"{type(error).__name__}: {text_of(error)}")


def _namespace(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    module = types.ModuleType("tests")
    sys.modules["tests"] = module
    names = module.__dict__
    for name in task["modules"]:
        try:
            names[name] = importlib.import_module(name)
        except ImportError:
            continue
    # a builtin wins over the program's name: it must not lend the tests its own ``len``
    exported = [
        name for name in task["exports"] if not hasattr(builtins, name) or name == task["entry_point"]
    ]
    names.update(peer.names(exported))
    return names


def _compile(source: str, name: str) -> types.CodeType:
    """Compile tests so that what calls did to their arguments is seen from the next statement on."""
    stripped = source.strip()
    if not _HAS_STATEMENTS.search(stripped):
        return compile(source, name, "exec")
    tree = ast.parse(source, name)
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            body = getattr(node, part, None)
            if type(body) is list and body:
                setattr(node, part, _settled(body, is_branch=not isinstance(node, _SCOPES)))
    return compile(ast.fix_missing_locations(tree), name, "exec")


def _settled(body: list[ast.stmt], *, is_branch: bool) -> list[ast.stmt]:
    """Return the statements of a body with ``Peer.settle()`` after each, in a branch also before all."""
    found: list[ast.stmt] = [_settle_at(body[0])] if is_branch else []
    for statement in body:
        found.append(statement)
        if not isinstance(statement, (*_DEFINITIONS, *_LEAVING)) and not _is_text(statement):
            found.append(_settle_at(statement))
    return found


def _settle_at(statement: ast.stmt) -> ast.stmt:
    call = ast.Expr(ast.Call(ast.Name(_SETTLE, ast.Load()), [], []))
    return ast.copy_location(call, statement)


def _is_text(statement: ast.stmt) -> bool:
    """Return whether it may be a docstring, which has to stay the first statement."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _run_statements(
    task: dict[str, Any], names: dict[str, Any], settle: Callable[[], None], report: Callable[..., None]
) -> None:
    if task["setup"].strip():
        try:
            exec(_compile(task["setup"], "<setup>"), names)
        except CandidateGone:
            raise
        except BaseException as error:  # noqa: BLE001 - statements of the data set
            report("setup", "runtime_error", f"setup: {type(error).__name__}: {text_of(error)}")
    for index, statement in enumerate(task["tests"]):
        settle()
        try:
            exec(_compile(statement, f"<test {index}>"), names)
        except CandidateGone:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it raises, the test did not pass
            is_wrong = isinstance(error, AssertionError) and not getattr(error, "from_candidate", False)
            verdict = "failed" if is_wrong else "runtime_error"
            report(index, verdict, f"{type(error).__name__}: {text_of(error)}")
        else:
            report(index, "passed")


class _Result(unittest.TestResult):
    """Passed means: ran to its end, not skipped, not expected to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome: tuple[str, str] = ("failed", "did not run")

    def startTest(self, test: unittest.TestCase) -> None:
        self.outcome = ("passed", "")

    def addSuccess(self, test: unittest.TestCase) -> None: ...

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.outcome = ("failed", f"{err[0].__name__}: {text_of(err[1])}")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        if isinstance(err[1], CandidateGone):
            raise err[1]
        self.outcome = ("runtime_error", f"{err[0].__name__}: {text_of(err[1])}")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.outcome = ("failed", f"skipped: {reason}")

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.outcome = ("failed", "expected failure")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self.outcome = ("failed", "unexpected success")

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            (self.addFailure if issubclass(err[0], AssertionError) else self.addError)(test, err)


def _run_unittests(code: str, names: dict[str, Any], report: Callable[..., None]) -> None:
    names["__name__"] = "tests"  # a main guard at the end of the tests must not run them twice
    exec(_compile(code, "<tests>"), names)
    loader = unittest.TestLoader()
    cases: list[unittest.TestCase] = []
    for value in list(names.values()):
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and value.__module__ == "tests":
            cases.extend(loader.loadTestsFromTestCase(value))  # type: ignore[arg-type]
    report("count", str(len(cases)))
    for index, case in enumerate(cases):
        result = _Result()
        unittest.TestSuite([case]).run(result)
        report(index, *result.outcome)
