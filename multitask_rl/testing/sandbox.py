"""The contract suite of sandboxes: ``assert_sandbox_contract(lambda: MySandbox(...))``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from typing import Any

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import (
    AssertsTask,
    Ending,
    Limits,
    Outcome,
    Program,
    Sandbox,
    ScriptTask,
    StdioTask,
    StdioTest,
    UnittestTask,
    open_sandbox,
)
from multitask_rl.testing.contract import Finding, run_check

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


def check_sandbox(plugin: str, config: Mapping[str, Any] | None = None) -> list[Finding]:
    """Return the finding about a sandbox (``open_sandbox(plugin, **config)``) that judges function tests."""

    def check() -> None:
        assert_sandbox_contract(lambda: open_sandbox(plugin, **(config or {})))

    return [run_check("runs programs, judges tests, holds limits, refuses escapes and closes", check)]


def assert_sandbox_contract(make: Callable[[], Sandbox], *, function_tasks: bool = True) -> None:
    """Assert that a sandbox keeps its contract.

    Args:
        make: returns a new sandbox.
        function_tasks: whether it judges ``AssertsTask`` and ``UnittestTask``; else it must refuse them.

    Raises:
        AssertionError: names the broken promise.
    """

    def run(
        source: str | bytes, task: ScriptTask | StdioTask | AssertsTask | UnittestTask | None = None
    ) -> Outcome:
        return sandbox.run(Program(source=source, task=task or ScriptTask(), limits=_LIMITS))

    def expect(outcome: Outcome, ending: Ending, claim: str) -> None:
        assert outcome.ending is ending, f"{claim}: {outcome.ending} ({outcome.message!r}), want {ending}"

    def twice(source: str, *asserts: str) -> Outcome:
        return run(source, AssertsTask(entry_point="twice", asserts=asserts))

    with make() as sandbox:
        assert isinstance(sandbox, Sandbox), (
            f"{type(sandbox).__name__} lacks a method of the Sandbox interface"
        )

        done = run("print(input())", ScriptTask(stdin="text\n"))
        expect(done, Ending.completed, "a script that exits with 0")
        assert done.stdout == b"text\n", f"standard output arrives whole, got {done.stdout!r}"
        assert done.pass_fraction == 0.0, "a script without tests earns nothing"
        assert done.wall_s > 0, "time is reported"
        expect(run("raise ValueError('x')"), Ending.runtime_error, "an uncaught exception")
        expect(run("import sys; sys.exit(3)"), Ending.runtime_error, "a non-zero status")
        expect(run("def f(:"), Ending.compile_error, "a syntax error")
        expect(run("x = bytearray(1 << 33)"), Ending.memory_limit, "more memory than allowed")
        expect(run("import time; time.sleep(60)"), Ending.timeout, "a program that sleeps")
        flood = run("print('x' * (1 << 17))")
        expect(flood, Ending.output_limit, "more output than allowed")
        assert flood.is_truncated, "cut output is flagged"
        assert len(flood.stdout) == 1 << 16, "output is cut at its limit"

        outcome = run(_SUM, StdioTask(tests=_TESTS))
        expect(outcome, Ending.failed, "one wrong test of three")
        endings = [test.ending.value for test in outcome.tests]
        assert endings == ["passed", "passed", "failed"], f"one ending per test, got {endings}"
        assert outcome.pass_fraction == 2 / 3, "partial credit is exact"
        late = run(_SUM + "\nraise SystemExit(1)", StdioTask(tests=_TESTS[:1]))
        expect(late, Ending.runtime_error, "the right output and then a failure")
        outcomes = sandbox.map(Program(source=f"print({n})", limits=_LIMITS) for n in range(12))
        assert [int(o.stdout) for o in outcomes] == list(range(12)), "map keeps the order of the programs"

        if function_tasks:
            half = twice("def twice(x): return x + x", "assert twice(2) == 4", "assert twice(2) == 5")
            assert half.pass_fraction == 0.5, f"half the asserts, got {half.pass_fraction}"
            liar = "class E:\n    def __eq__(s, o): return True\ndef twice(x): return E()"
            equal = twice(liar, "assert twice(2) == 4")
            assert equal.pass_fraction == 0.0, "an object may not call itself equal"
            leaver = "import os\ndef twice(x): os._exit(0)"
            early = twice(leaver, "assert twice(2) == 4", "assert twice(3) == 6")
            assert early.pass_fraction == 0.0, "leaving early passes nothing"
            assert len(early.tests) == 2, "leaving early skips no test"
            unit = UnittestTask(entry_point="twice", test_code=_UNITTEST)
            outcome = run("def twice(x): return x + x", unit)
            assert outcome.pass_fraction == 2 / 3, (
                f"a skipped test is not passed, got {outcome.pass_fraction}"
            )
            for source in _ESCAPES:
                expect(run(source), Ending.runtime_error, f"{source!r} has to be refused")
        else:
            try:
                twice("", "assert f()")
            except ValueError:
                pass
            else:
                raise AssertionError("a task it cannot judge has to be refused with ValueError")
        cancelled = sandbox.submit(Program(source="print(1)"))
        cancelled.cancel()
        with contextlib.suppress(CancelledError):
            cancelled.result(timeout=30)
    try:
        run("print(1)")
    except SandboxError:
        return
    raise AssertionError("a closed sandbox has to raise SandboxError")
