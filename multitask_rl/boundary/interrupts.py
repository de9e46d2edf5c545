"""Signals that end a run: those in ``ENDING`` raise an exception, and the run saves its state.

The first signal waits for the update in progress and its records: it raises where sampling or an evaluation
begins. A second signal raises at once. If code of a user or library swallows the exception, it is raised
again where the next sampling or evaluation begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from multitask_rl.boundary.allowance import proc_value

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run. Many Slurm jobs ask for SIGUSR1 as the warning before their end."""


class Terminated(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class _Waiting:
    is_handling = False
    """A block of ``stopping_on_signals`` is open."""
    depth = 0
    """Number of open ``finishing`` blocks."""
    is_between: bool = False
    """A block of ``between_stages`` is open, and inside of it none of ``interruptible``."""
    number: int | None = None
    """The signal that came in one of these blocks."""
    is_told = False
    """A signal was answered."""
    raised: Any = None
    """The last signal of this block of ``stopping_on_signals`` for which ``Terminated`` was raised."""
    show: Callable[[str], bool] | None = None
    """Shows an answer; it returns whether the answer was shown."""


_waiting = _Waiting()


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let the signals in ``ENDING`` raise ``Terminated`` in the block; ignored signals stay ignored.

    Inside of another such block, and in other threads than the main one, it changes nothing.
    """
    if threading.current_thread() is not threading.main_thread() or _waiting.is_handling:
        yield
        return
    _waiting.is_told, _waiting.is_handling = False, True
    try:
        with _handled_by(_handle):
            yield
    except KeyboardInterrupt as error:
        # inside Ray's waits a handler's exception becomes a plain KeyboardInterrupt
        came: int | None = _waiting.raised
        if came is None or isinstance(error, Terminated):
            raise
        raise Terminated(came) from error
    finally:
        _waiting.is_handling = False
        # what has ended does not stop what comes next
        _waiting.number, _waiting.raised, _waiting.show = None, None, None


@contextlib.contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let ``handle`` answer ``ENDING`` in the block, without ignored ones and a SIGUSR1 of a script's own."""
    handlers = ((number, signal.getsignal(number)) for number in ENDING)
    # None: set by C code before Python started, and Python cannot set it again
    before = {n: handler for n, handler in handlers if handler not in (signal.SIG_IGN, None)}
    usr1 = before.get(signal.SIGUSR1)
    if usr1 is not _handle and (usr1 is not signal.SIG_DFL or _is_caught(signal.SIGUSR1)):
        before.pop(signal.SIGUSR1, None)
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_caught(number: int) -> bool:
    """Return whether the process handles the signal, be it by C code (``faulthandler``) unknown to Python."""
    return bool(int(proc_value("/proc/self/status", "SigCgt") or "0", 16) >> (number - 1) & 1)


@contextlib.contextmanager
def noting_signals() -> Iterator[list[int]]:
    """Note the signals in ``ENDING`` that come in the block in the yielded list, and do nothing else.

    In other threads than the main one, nothing changes and the list stays empty.
    """
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    with _handled_by(lambda number, _frame: came.append(number)) if is_main else contextlib.nullcontext():
        yield came


def answer_with(show: Callable[[str], bool]) -> None:
    """Let ``show`` say that the run stops, until ``stopping_on_signals`` ends.

    It is called in a signal handler. If it returns False, standard error says it.
    """
    _waiting.show = show


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Delay a signal to the first ``check_interrupt`` after the block."""
    _waiting.depth += 1
    try:
        yield
    finally:
        _waiting.depth -= 1


@contextlib.contextmanager
def between_stages() -> Iterator[None]:
    """Delay the first signal to the next block of ``interruptible``; a second signal raises at once."""
    _waiting.is_between = True
    try:
        yield
    finally:
        _waiting.is_between = False


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let signals raise in this part of a block of ``between_stages``.

    A signal that waits raises at the start. So does one whose exception was swallowed.
    """
    is_between, _waiting.is_between = _waiting.is_between, False
    try:
        if _waiting.raised is not None:
            raise Terminated(_waiting.raised)
        check_interrupt()
        yield
    finally:
        _waiting.is_between = is_between


def is_interrupted() -> bool:
    """Return whether a delayed signal has not raised yet."""
    return _waiting.number is not None


def check_interrupt() -> None:
    """Raise ``Terminated`` if a delayed signal waits. Inside of a block that delays signals, do nothing."""
    if _waiting.depth or _waiting.is_between or _waiting.number is None:
        return
    _waiting.raised, _waiting.number = _waiting.number, None
    raise Terminated(_waiting.raised)


def _handle(number: int, _frame: FrameType | None) -> None:
    # a print could enter the one that the signal interrupted
    # after the first signal was raised, the run saves: a second one ends that
    delays = _waiting.depth or (_waiting.is_between and _waiting.raised is None)
    if delays and _waiting.number is None:
        _waiting.number, _waiting.is_told = number, True
        saved = " and saved" if _waiting.show else ""  # a command that does not train saves nothing
        _answer(f"stopping: the update in progress is finished{saved} first; once more ends at once")
        return
    if not _waiting.is_told:
        _waiting.is_told = True
        saves = ": what was learned is saved first" if _waiting.show else ""
        _answer(f"stopping{saves}; once more ends at once")
    _waiting.number, _waiting.raised = None, number
    raise Terminated(number)


def _answer(text: str) -> None:
    if not (_waiting.show and _waiting.show(text)):
        with contextlib.suppress(OSError):  # Ctrl-C ends ``| tee``, too; a hang-up closes the terminal
            os.write(2, f"\n{text}\n".encode())
