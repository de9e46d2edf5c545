"""A conformance suite for sandboxes: what every implementation of the interface has to do.

from multitask_rl.testing.sandbox import assert_sandbox_contract
assert_sandbox_contract(lambda: MySandbox(...))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import CancelledError

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import (
    AssertsTask,
    Limits,
    Outcome,
    Program,
    Sandbox,
    ScriptTask,
    StdioTask,
    StdioTest,
    UnittestTask,
    Verdict,
)

__all__ = ["assert_sandbox_contract"]

_LIMITS = Limits(cpu_s=1, wall_s=2, mem_mb=128, stdout_bytes=1 << 16, stderr_bytes=1 << 12)
_SUM = "n = int(input())\nprint(sum(map(int, input().split())))"
_TESTS = [
    StdioTest(stdin="2\n1 2\n", stdout="3\n"),
    StdioTest(stdin="1\n5\n", stdout="5  \n\n"),
    StdioTest(stdin="1\n7\n", stdout="8"),
]
_UNITTEST = """
import unittest
class TestTwice(unittest.TestCase):
    def test_two(self): self.assertEqual(twice(2), 4)
    def test_text(self): self.assertEqual(twice("a"), "aa")
    @unittest.skip("no")
    def test_skipped(self): pass
"""
_ESCAPES = (
    "import os; os.fork()",
    "import os; os.execv('/bin/sh', ['sh', '-c', 'true'])",
    "import socket; socket.create_connection(('127.0.0.1', 22), timeout=1)",
    "open('/etc/shadow').read()",
    "open('/usr/lib/mtrl-contract', 'w')",
)


def assert_sandbox_contract(open_sandbox: Callable[[], Sandbox], *, function_tasks: bool = True) -> None:
    """Check an implementation; the exception says which promise it broke.

    Args:
        open_sandbox: gives a fresh sandbox.
        function_tasks: whether it judges ``AssertsTask`` and ``UnittestTask``; else it has to refuse them.

    Raises:
        AssertionError: a promise is broken.
    """
    with open_sandbox() as sandbox:
        if not isinstance(sandbox, Sandbox):
            raise AssertionError(f"{type(sandbox).__name__} lacks a method of the Sandbox interface")
        _check_scripts(sandbox)
        _check_stdio(sandbox)
        _check_order(sandbox)
        if function_tasks:
            _check_functions(sandbox)
            for source in _ESCAPES:
                outcome = sandbox.run(Program(source=source, limits=_LIMITS))
                _expect(outcome, Verdict.runtime_error, f"{source!r} has to be refused")
        else:
            _check_refusal(sandbox)
        cancelled = sandbox.submit(Program(source="print(1)"))
        cancelled.cancel()
        with contextlib.suppress(CancelledError):
            cancelled.result(timeout=30)
    try:
        sandbox.run(Program(source="print(1)"))
    except SandboxError:
        return
    raise AssertionError("a closed sandbox has to raise SandboxError")


def _expect(outcome: Outcome, verdict: Verdict, claim: str) -> None:
    if outcome.verdict is not verdict:
        raise AssertionError(f"{claim}: {outcome.verdict} ({outcome.message!r}), want {verdict}")


def _claim(is_true: bool, claim: str) -> None:
    if not is_true:
        raise AssertionError(claim)


def _check_scripts(sandbox: Sandbox) -> None:
    def run(source: str | bytes, stdin: str = "") -> Outcome:
        return sandbox.run(Program(source=source, task=ScriptTask(stdin=stdin), limits=_LIMITS))

    done = run("print(input())", "text\n")
    _expect(done, Verdict.completed, "a script that exits with 0")
    _claim(done.stdout == b"text\n", f"standard output arrives whole, got {done.stdout!r}")
    _claim(done.pass_fraction == 0.0, "a script without tests earns nothing")
    _claim(done.wall_s > 0, "time is reported")
    _expect(run("raise ValueError('x')"), Verdict.runtime_error, "an uncaught exception")
    _expect(run("import sys; sys.exit(3)"), Verdict.runtime_error, "a non-zero status")
    _expect(run("def f(:"), Verdict.compile_error, "a syntax error")
    _expect(run("x = bytearray(1 << 33)"), Verdict.memory_limit, "more memory than allowed")
    _expect(run("import time; time.sleep(60)"), Verdict.timeout, "a program that sleeps")
    flood = run("print('x' * (1 << 17))")
    _expect(flood, Verdict.output_limit, "more output than allowed")
    _claim(flood.is_truncated and len(flood.stdout) == 1 << 16, "cut output is flagged")


def _check_stdio(sandbox: Sandbox) -> None:
    outcome = sandbox.run(Program(source=_SUM, task=StdioTask(tests=_TESTS), limits=_LIMITS))
    _expect(outcome, Verdict.failed, "one wrong test of three")
    verdicts = [test.verdict.value for test in outcome.tests]
    _claim(verdicts == ["passed", "passed", "failed"], f"one verdict per test, got {verdicts}")
    _claim(outcome.pass_fraction == 2 / 3, "partial credit is exact")
    late = Program(source=_SUM + "\nraise SystemExit(1)", task=StdioTask(tests=_TESTS[:1]), limits=_LIMITS)
    _expect(sandbox.run(late), Verdict.runtime_error, "the right output and then a failure")


def _check_order(sandbox: Sandbox) -> None:
    outcomes = sandbox.map(Program(source=f"print({n})", limits=_LIMITS) for n in range(12))
    _claim([int(o.stdout) for o in outcomes] == list(range(12)), "map keeps the order of the programs")


def _check_functions(sandbox: Sandbox) -> None:
    def judge(source: str, *asserts: str) -> Outcome:
        task = AssertsTask(entry_point="twice", asserts=asserts)
        return sandbox.run(Program(source=source, task=task, limits=_LIMITS))

    half = judge("def twice(x): return x + x", "assert twice(2) == 4", "assert twice(2) == 5")
    _claim(half.pass_fraction == 0.5, f"half the asserts, got {half.pass_fraction}")
    liar = "class E:\n    def __eq__(s, o): return True\ndef twice(x): return E()"
    _claim(judge(liar, "assert twice(2) == 4").pass_fraction == 0.0, "an object may not call itself equal")
    early = judge("import os\ndef twice(x): os._exit(0)", "assert twice(2) == 4", "assert twice(3) == 6")
    _claim(early.pass_fraction == 0.0 and len(early.tests) == 2, "leaving early passes nothing")
    task = UnittestTask(entry_point="twice", test_code=_UNITTEST)
    outcome = sandbox.run(Program(source="def twice(x): return x + x", task=task, limits=_LIMITS))
    _claim(outcome.pass_fraction == 2 / 3, f"a skipped test is not passed, got {outcome.pass_fraction}")


def _check_refusal(sandbox: Sandbox) -> None:
    try:
        sandbox.run(Program(source="", task=AssertsTask(entry_point="f", asserts=["assert f()"])))
    except ValueError:
        return
    raise AssertionError("a task it cannot judge has to be refused with ValueError")
