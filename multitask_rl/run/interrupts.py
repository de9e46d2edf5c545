"""Signals that end a run: SIGINT, SIGTERM and SIGHUP raise an exception, and the run saves its state.

The update in progress is finished first. A second signal does not wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class _Waiting:
    depth = 0
    """Number of open ``finishing`` blocks."""
    number: int | None = None
    """The signal that came in one of them."""
    is_told = False
    """A signal was answered."""


_waiting = _Waiting()


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise ``Terminated`` in the block; ignored signals stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    _waiting.number, _waiting.is_told = None, False
    try:
        for number in before:
            signal.signal(number, _handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Delay a signal to the first ``check_interrupt`` after the block."""
    _waiting.depth += 1
    try:
        yield
    finally:
        _waiting.depth -= 1


def check_interrupt() -> None:
    """Raise ``Terminated`` if a signal came during a block of ``finishing``."""
    number, _waiting.number = _waiting.number, None
    if number is not None:
        raise Terminated(number)


def _handle(number: int, _frame: FrameType | None) -> None:
    # a print could enter the one that the signal interrupted
    if _waiting.depth and _waiting.number is None:
        _waiting.number = number
        os.write(
            2, b"\nstopping: the update in progress is finished and saved first; once more ends at once\n"
        )
        return
    if not _waiting.is_told:
        _waiting.is_told = True
        os.write(2, b"\nstopping: what was learned is saved first; once more ends at once\n")
    _waiting.number = None
    raise Terminated(number)
