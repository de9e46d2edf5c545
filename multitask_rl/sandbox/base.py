"""Interface of sandboxes: programs, limits, outcomes; how one is opened.

A program is judged from outside. Its tests are never in the process that runs it, and only the plain value of
what it prints, returns or raises is trusted.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import functools
import math
import os
import re
import sys
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, Self, runtime_checkable

from multitask_rl.boundary.allowance import usable_cores
from multitask_rl.boundary.python_source import parse_python
from multitask_rl.errors import ConfigError
from multitask_rl.plugins import SANDBOXES, load_plugin


class Ending(StrEnum):
    """How a program, or one test of it, ended."""

    passed = "passed"
    """Every test passed."""
    completed = "completed"
    """A script without tests that exited with status 0."""
    failed = "failed"
    """A wrong answer."""
    runtime_error = "runtime_error"
    """An uncaught exception, a non-zero exit or a fatal signal."""
    compile_error = "compile_error"
    """The source is not a Python program."""
    timeout = "timeout"
    """The CPU or the wall-clock limit passed."""
    memory_limit = "memory_limit"
    """It ran out of memory."""
    output_limit = "output_limit"
    """It wrote more than it may."""
    violation = "violation"
    """The kernel killed it for a forbidden system call."""
    killed = "killed"
    """A SIGKILL that the sandbox did not send ended it (its own, or the kernel's when memory runs out), or it
    ended the sandbox's worker twice while no other program ran there."""
    infrastructure_error = "infrastructure_error"
    """The sandbox failed. This is the one ending without a score (``pass_fraction`` is None)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one execution: each test of a stdio task is one; any other task is a single one."""

    cpu_s: float = 5.0
    """CPU seconds, rounded up to whole seconds (RLIMIT_CPU)."""
    wall_s: float = 11.0
    """Wall-clock seconds, measured outside the program."""
    mem_mb: int = 512
    """Address space above the interpreter's own, MiB."""
    stdout_bytes: int = 8 << 20
    """Bytes on standard output; more is ``output_limit``. Also the largest file it may write."""
    stderr_bytes: int = 1 << 16
    """Bytes of standard error that are kept; the rest is cut and flagged."""
    disk_mb: int = 16
    """Size of the private file system, MiB."""
    inodes: int = 1024
    """Files and directories in the private file system."""
    nproc: int = 32
    """Threads (processes are never allowed)."""
    nofile: int = 64
    """Open descriptors."""

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 40:
                raise ValueError(f"limit {limit.name} must be a positive number, got {value!r}")
            if limit.name not in ("cpu_s", "wall_s") and not isinstance(value, int):
                raise ValueError(f"limit {limit.name} must be a whole number, got {value!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptTask:
    """Run the program once, without a test; the fraction is 0."""

    stdin: str | bytes = b""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdioTest:
    """What the program reads and what it must print."""

    stdin: str | bytes
    stdout: str
    """Compared after stripping white space at the end of each line and of the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StdioTask:
    """Run the program once per test, each time in a fresh process and directory."""

    tests: Sequence[StdioTest]
    float_tolerance: float | None = None
    """Absolute and relative tolerance for tokens that are both numbers; None = text must be equal."""

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError("a stdio task needs at least one test: a program cannot pass an empty list")
        tolerance = self.float_tolerance
        if tolerance is not None and not (math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(f"float_tolerance must be finite and >= 0, got {tolerance!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _FunctionTask:
    """What tasks share whose tests call the program from another process."""

    entry_point: str
    """The function or class under test."""
    exports: Sequence[str] = ()
    """Further names that the tests take from the program, for example classes of the arguments."""
    allow_dunder: bool = False
    """The tests are about the program's own operators: ``==``, ``len`` and so on of its objects count."""

    def __post_init__(self) -> None:
        for name in (self.entry_point, *self.exports):
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"{name!r} is not a name a program can define")

    @property
    def exported(self) -> tuple[str, ...]:
        """Names that the tests take from the program, the entry point first."""
        return tuple(dict.fromkeys([self.entry_point, *self.exports]))


@dataclass(frozen=True, kw_only=True, slots=True)
class AssertsTask(_FunctionTask):
    """Import the program, then run statements against it in another process, in order.

    Each statement is one test and passes when it raises no exception. All share one namespace and one process
    of the program; when that process dies, the remaining tests count as failed.
    """

    asserts: Sequence[str]
    setup: str = ""
    """Statements before the first test, in the same namespace."""

    def __post_init__(self) -> None:
        if not self.asserts:
            raise ValueError("an asserts task needs at least one statement: a program cannot pass no test")
        _parse(self.setup, "setup")
        for position, statement in enumerate(self.asserts):
            if not _parse(statement, where := f"asserts[{position}]").body:
                raise ValueError(f"{where} holds no statement: {statement!r}")
        _FunctionTask.__post_init__(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnittestTask(_FunctionTask):
    """Import the program, then run ``unittest.TestCase`` classes against it in another process.

    A skipped test and an expected failure are failed tests.
    """

    test_code: str

    def __post_init__(self) -> None:
        if not count_test_methods(self.test_code):
            raise ValueError("test_code holds no test method: a program cannot pass no test")
        _FunctionTask.__post_init__(self)


Task = ScriptTask | StdioTask | AssertsTask | UnittestTask


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Untrusted source with the task it is run for."""

    source: str | bytes
    """Any bytes: what is not Python becomes ``compile_error``, never an exception here."""
    task: Task = field(default_factory=ScriptTask)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    """The result of one test of a program."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    ending: Ending
    message: str = ""
    """Why it did not pass, at most 500 characters. The program may have written it: never interpret it."""
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Whether the test passed."""
        return self.ending is Ending.passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The record of one program after it ran; there is exactly one per program."""

    ending: Ending
    tests: tuple[TestResult, ...] = ()
    """One per test asked for, in order; empty for a script."""
    message: str = ""
    """What went wrong; for ``infrastructure_error`` what broke in the sandbox."""
    wall_s: float = 0.0
    """Sum over all executions, in seconds, measured outside the program."""
    cpu_s: float = 0.0
    """CPU seconds as the kernel counted them."""
    peak_mb: float = 0.0
    """Largest resident set above the interpreter's own, MiB, as the kernel counted it."""
    starved_s: float = 0.0
    """Seconds it waited for a busy CPU; they extend the wall limit (by three times itself at most)."""
    exit_code: int | None = None
    """Exit status; None when a signal ended it."""
    signal: int | None = None
    stdout: bytes = b""
    """What it wrote, cut at the limit; for a stdio task, in the first failing (else the last) test."""
    stderr: bytes = b""
    stdout_length: int = 0
    """Bytes that it wrote, with those that were cut."""
    stderr_length: int = 0
    worker: int = -1
    """Number of the worker that ran it."""
    retries: int = 0
    """How often it ran again because its worker died."""

    @property
    def pass_fraction(self) -> float | None:
        """Passed tests over tests asked for; 0.0 for a script; None for ``infrastructure_error`` alone."""
        if self.ending is Ending.infrastructure_error:
            return None
        return sum(test.is_passed for test in self.tests) / len(self.tests) if self.tests else 0.0

    @property
    def stdout_text(self) -> str:
        """``stdout`` as UTF-8; invalid bytes are replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """``stderr`` as UTF-8; invalid bytes are replaced."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def is_truncated(self) -> bool:
        """Whether ``stdout`` or ``stderr`` was cut."""
        return self.stdout_length > len(self.stdout) or self.stderr_length > len(self.stderr)


@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted programs. Each gives exactly one outcome. Safe to share between threads."""

    def submit(self, program: Program) -> Future[Outcome]:
        """Queue one program; blocks while the queue is full. A cancelled program does not run.

        Raises:
            SandboxError: the sandbox is closed.
            ValueError: this sandbox does not take such a task.
        """
        ...

    def close(self) -> None:
        """Kill running programs, cancel queued ones and end every process. Safe to call twice."""
        ...

    def run(self, program: Program) -> Outcome:
        """Run one program and wait for its outcome; raises as ``submit`` does."""
        return self.submit(program).result()

    def map(self, programs: Iterable[Program]) -> list[Outcome]:
        """Run programs concurrently; outcomes in the order of the programs."""
        futures = [self.submit(program) for program in programs]
        wait(futures)  # one wake-up instead of one per outcome
        return [future.result() for future in futures]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _parse(source: str, where: str) -> ast.Module:
    try:
        return parse_python(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{where} is not Python: {error}: {source[:200]!r}") from error


@functools.lru_cache(maxsize=1024)
def count_test_methods(test_code: str) -> int:
    """Return how many test methods ``test_code`` defines; ``ValueError`` if it is not Python."""
    classes = [node for node in ast.walk(_parse(test_code, "test_code")) if isinstance(node, ast.ClassDef)]
    methods = [node for found in classes for node in found.body if isinstance(node, ast.FunctionDef)]
    return sum(method.name.startswith("test") for method in methods)


def undefined_names(sources: Sequence[str]) -> list[str]:
    """Return names that tests read and nothing defines; empty if a ``from ... import *`` may define them."""
    if any(re.search(r"import\s+\(?\s*\*", source) for source in sources):
        return []
    defined = {*dir(builtins), *sys.stdlib_module_names}
    return [name for name in unbound_names(map(parse_python, sources)) if name not in defined]


def imported_modules(sources: Sequence[str], exported: Sequence[str]) -> list[str]:
    """Return the standard modules that tests use without an import of their own."""
    names = unbound_names(map(parse_python, sources))
    return [name for name in names if name in sys.stdlib_module_names and name not in exported]


def unbound_names(trees: Iterable[ast.AST]) -> list[str]:
    """Return names that programs read and nowhere bind, builtins among them."""
    used: dict[str, None] = {}
    bound: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    used[name] = None
                case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                    bound.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound.add(name)
                case ast.alias(name=name, asname=alias):
                    bound.add((alias or name).split(".")[0])
    return [name for name in used if name not in bound]


def open_sandbox(name: str = "namespaces", **config: Any) -> Sandbox:
    """Return the sandbox behind the entry point ``name`` of the group ``multitask_rl.sandboxes``.

    Raises:
        PluginError: no such sandbox is installed.
        ConfigError: it does not take these settings.
        SandboxError: it cannot run on this machine.
    """
    factory = load_plugin(SANDBOXES, name, expects=("run", "submit", "map", "close"))
    try:
        sandbox: Sandbox = factory(**config)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sandbox {name!r} refuses its settings {config!r}: {error}") from error
    return sandbox


def shared_sandbox(packages: tuple[str, ...] = ("numpy",)) -> Sandbox:
    """Return the built-in sandbox of this process; the first call opens it, the exit closes it.

    Any number of threads may use it at once. A forked child gets its own. There is one for each choice of
    third-party ``packages``.

    Raises:
        SandboxError: this machine cannot run it.
    """
    with _lock:
        if packages not in _shared:
            _shared[packages] = open_sandbox(workers=min(8, usable_cores()), packages=packages)
            atexit.register(_shared[packages].close)  # in a forked child it does nothing
        return _shared[packages]


_lock = threading.Lock()
_shared: dict[tuple[str, ...], Sandbox] = {}
os.register_at_fork(after_in_child=lambda: globals().update(_lock=threading.Lock(), _shared={}))
