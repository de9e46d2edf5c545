"""The tests' side of a function task: run the data set's own statements against a program elsewhere.

The judge is the only process that knows the expected values. The program is represented by ``Remote``
objects: calling one asks the other process and brings back a plain value, or another ``Remote`` for what
is no value. A ``Remote`` never compares, has no length, no truth and no items unless the task is about
operators: an object may not say of itself that it is equal.
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from .channel import Channel
from .peer import MESSAGE_LIMIT, CandidateGone, Peer, text_of

__all__ = ["judge"]


def judge(descriptor: int, results: int, job: bytes) -> None:
    """Run the tests of ``job`` and write one line per finished test to the descriptor ``results``.

    A line is ``[index, verdict, message]``; the first is ``["load", verdict, message]``.
    """
    task = json.loads(job)
    write = os.write

    def report(index: int | str, verdict: str, message: str = "") -> None:
        write(results, json.dumps([index, verdict, message[:MESSAGE_LIMIT]]).encode() + b"\n")

    peer = Peer(Channel(descriptor), allow_dunder=task["allow_dunder"])
    try:
        verdict, message = peer.await_load()
        report("load", verdict, message)
        if verdict != "passed":
            return
        names = _namespace(peer, task)
        if task["kind"] == "unittest":
            _run_unittests(task["tests"][0], names, report)
        else:
            _run_statements(task, names, report)
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


def _run_statements(task: dict[str, Any], names: dict[str, Any], report: Callable[..., None]) -> None:
    if task["setup"].strip():
        try:
            exec(compile(task["setup"], "<setup>", "exec"), names)
        except CandidateGone:
            raise
        except BaseException as error:  # noqa: BLE001 - statements of the data set
            report("setup", "runtime_error", f"setup: {type(error).__name__}: {text_of(error)}")
    for index, statement in enumerate(task["tests"]):
        try:
            exec(compile(statement, f"<test {index}>", "exec"), names)
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
    exec(compile(code, "<tests>", "exec"), names)
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
