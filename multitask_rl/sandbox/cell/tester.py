"""The tests' side of a function task: run the data set's own statements against a program elsewhere.

The tester knows the expected values; the program does not. ``Remote`` objects represent objects of the
program: a call asks the other process and returns a plain value, or another ``Remote`` for what is no value.
A ``Remote`` does not compare and has no length, truth or items, unless the task is about operators: no object
judges itself.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import re
import sys
import types
import unittest
from typing import Any

from .channel import CellChannel
from .peer import MESSAGE_LIMIT, CandidateGone, Peer, text_of

_APPLY_CHANGES = "__apply_changes__"
_HAS_STATEMENTS = re.compile(r"[\n;]|^(?:async|class|def|for|if|try|while|with|match)\b|^@")
"""Finds text that may be more than one simple statement."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LEAVING = (ast.Return, ast.Raise, ast.Break, ast.Continue, ast.Pass, ast.Global, ast.Nonlocal)


def run_tests(descriptor: int, results: int, job: bytes) -> None:
    """Run the tests of ``job``; write ``["load", ending, message]``, then ``[index, ...]`` for each."""
    task = json.loads(job)
    write = os.write

    def report(index: int | str, ending: str, message: str = "") -> None:
        write(results, json.dumps([index, ending, message[:MESSAGE_LIMIT]]).encode() + b"\n")

    peer = Peer(CellChannel(descriptor), allow_dunder=task["allow_dunder"])
    try:
        ending, message = peer.await_load()
        report("load", ending, message)
        if ending != "passed":
            return
        module = types.ModuleType("tests")
        sys.modules["tests"] = module
        names = module.__dict__
        for name in task["modules"]:
            with contextlib.suppress(ImportError):
                names[name] = importlib.import_module(name)
        # a builtin wins over the program's name: the program must not lend the tests its own ``len``
        entry_point = task["entry_point"]
        names.update(peer.names([n for n in task["exports"] if n == entry_point or not hasattr(builtins, n)]))
        names[_APPLY_CHANGES] = peer.apply_changes
        if task["kind"] == "unittest":
            names["__name__"] = "tests"  # a main guard at the end of the tests must not run them twice
            exec(_compile(task["tests"][0], "<tests>"), names)
            loader = unittest.TestLoader()
            cases: list[unittest.TestCase] = []
            for value in list(names.values()):
                if (
                    isinstance(value, type)
                    and issubclass(value, unittest.TestCase)
                    and value.__module__ == "tests"
                ):
                    cases.extend(loader.loadTestsFromTestCase(value))  # type: ignore[arg-type]
            report("count", str(len(cases)))
            for index, case in enumerate(cases):
                result = _Result()
                unittest.TestSuite([case]).run(result)
                report(index, *result.outcome)
            return
        if task["setup"].strip():
            try:
                exec(_compile(task["setup"], "<setup>"), names)
            except CandidateGone:
                raise
            except BaseException as error:  # noqa: BLE001 - statements of the data set
                report("setup", "runtime_error", f"setup: {type(error).__name__}: {text_of(error)}")
        for index, statement in enumerate(task["tests"]):
            peer.apply_changes()
            try:
                exec(_compile(statement, f"<test {index}>"), names)
            except CandidateGone:
                raise
            except BaseException as error:  # noqa: BLE001 - whatever it raises, the test did not pass
                is_wrong = isinstance(error, AssertionError) and not getattr(error, "from_candidate", False)
                ending = "failed" if is_wrong else "runtime_error"
                report(index, ending, f"{type(error).__name__}: {text_of(error)}")
            else:
                report(index, "passed")
    except CandidateGone as gone:
        report("load", "gone", str(gone))
    except Exception as error:  # noqa: BLE001 - nonsense from the program must not end the tester silently
        report("load", "runtime_error", f"{type(error).__name__}: {text_of(error)}")


def _compile(source: str, name: str) -> types.CodeType:
    """Compile tests; ``Peer.apply_changes()`` follows each statement, and in a branch also precedes it."""
    if not _HAS_STATEMENTS.search(source.strip()):
        return compile(source, name, "exec")

    def call_at(statement: ast.stmt) -> ast.stmt:
        call = ast.Expr(ast.Call(ast.Name(_APPLY_CHANGES, ast.Load()), [], []))
        return ast.copy_location(call, statement)

    tree = ast.parse(source, name)
    for node in ast.walk(tree):
        for part in ("body", "orelse", "finalbody"):
            body = getattr(node, part, None)
            if type(body) is not list or not body:
                continue
            steps = [] if isinstance(node, _SCOPES) else [call_at(body[0])]
            for statement in body:
                steps.append(statement)
                # a docstring has to stay the first statement
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if not is_text and not isinstance(statement, (*_DEFINITIONS, *_LEAVING)):
                    steps.append(call_at(statement))
            setattr(node, part, steps)
    return compile(ast.fix_missing_locations(tree), name, "exec")


class _Result(unittest.TestResult):
    """The outcome of one test. A test passes if it runs to its end without a skip or an expected failure."""

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
