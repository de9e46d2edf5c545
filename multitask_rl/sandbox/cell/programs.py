"""The last steps of a program's own process: confine it, run it, leave.

This code touches few pages: after a fork each page that is written to, if only by a reference count, is
copied, and those copies are most of the cost of an execution. Hence system calls are prepared as argument
tuples, and a warm-up runs all of this in the zygote with harmless arguments, which fills the interpreter's
caches.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

from . import candidate, tester
from .linux import raw_syscall
from .wire import COMPILE_STATUS, Mode

_ABOVE_ALL = 1 << 16
_ASIDE = 90
WARM_UP = 255
"""A mode in which nothing is confined and nothing ends."""


def enter(
    descriptors: Sequence[int],
    mode: int,
    has_stdin: bool,
    has_output: bool,
    source_bytes: int,
    calls: tuple[tuple[Any, ...], ...],
    report: int,
    leave: Callable[[int], Any],
) -> None:
    """Become the program: take its descriptors, make ``calls``, run it, ``leave`` (in a warm-up it returns).

    Args:
        descriptors: source; standard input if ``has_stdin``; output and error if ``has_output``; channels.
        mode: a ``Mode``.
        has_stdin: else standard input is empty.
        has_output: else standard output and error stay as they are.
        source_bytes: size of the source.
        calls: system calls that confine this process, the filter last.
        report: gets the error when confining fails; it is closed before the program runs.
        leave: ends the process.
    """
    try:
        source = os.pread(descriptors[0], source_bytes, 0)
        position = 1
        if has_stdin:
            os.dup2(descriptors[1], 0)
            position = 2
        elif mode != WARM_UP:
            os.close(0)  # flags are kept with an open file: one shared by all programs would carry them over
            os.open("/dev/null", os.O_RDONLY)
        if has_output:
            os.dup2(descriptors[position], 1)
            os.dup2(descriptors[position + 1], 2)
            position += 2
        keep = 3
        if mode != Mode.script:
            for descriptor in [fcntl.fcntl(d, fcntl.F_DUPFD, _ASIDE) for d in descriptors[position:]]:
                os.dup2(descriptor, keep)
                keep += 1
        for call in calls:
            if raw_syscall(*call) == -1:
                raise OSError(ctypes.get_errno(), f"system call {call[0].value}")
    except BaseException as error:  # noqa: BLE001 - whatever it is, the program must not run
        os.write(report, f"{type(error).__name__}: {error}".encode())
        leave(1)
        return
    if mode != WARM_UP:
        os.closerange(keep, _ABOVE_ALL)
        gc.enable()
    # run, flush and leave, whatever the program does to the interpreter
    status = 1
    try:
        if mode == Mode.candidate:
            candidate.serve(3, source)
        elif mode == Mode.tester:
            tester.run_tests(3, 4, source)
        else:
            status = _run_script(source)
    except BaseException:  # noqa: BLE001 - a program can break any of our own steps
        status = 1
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:  # noqa: BLE001 - a full file, a closed one, None, an object posing as one
            status = status or (120 if sys.stdout is not None else 0)
        leave(status & 0xFF)


def _run_script(source: bytes) -> int:
    """Run a program the way ``python main.py`` would; return its exit status."""
    module = types.ModuleType("__main__")
    names = module.__dict__
    names["__file__"] = "main.py"
    names["__builtins__"] = builtins
    sys.modules["__main__"] = module
    status = 0
    try:
        code = compile(source, "main.py", "exec", dont_inherit=True)
    except BaseException:  # noqa: BLE001 - whatever stops the compiler is the program's
        _show_error()
        return COMPILE_STATUS
    try:
        exec(code, names)  # the program itself; the cell is the fence
    except SystemExit as exit_request:
        given = exit_request.code
        status = int(given) & 0xFF if isinstance(given, int) else int(given is not None)
        if not isinstance(given, int | None):
            with contextlib.suppress(BaseException):  # the object's text is the program's
                sys.stderr.write(f"{given}\n")
    except BaseException:  # noqa: BLE001 - as the interpreter does: a traceback and status 1
        _show_error()
        status = 1
    # as at interpreter exit: threads, exit functions, then the module's objects (files flush themselves)
    try:
        if len(threading._active) > 1:  # type: ignore[attr-defined]
            threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:  # noqa: BLE001 - the program's threads and patches
        status = status or 1
    for step in (atexit._run_exitfuncs, names.clear):
        try:
            step()
        except BaseException:  # noqa: BLE001 - exit functions and finalizers are the program's
            _show_error()  # as Python does: the status stays
    return status


def _show_error() -> None:
    try:
        sys.excepthook(*sys.exc_info())
    except BaseException:  # noqa: BLE001 - hook and exception are the program's
        return
