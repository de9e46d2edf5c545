"""Signals that end a run: the trained state is saved first.

Ctrl-C, and the SIGTERM or SIGHUP of a scheduler that wants the machine back, end a run like an exception. The
update in progress is finished first. A second signal does not wait.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Terminated", "check_interrupt", "finishing", "stopping_on_signals"]


class Terminated(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class _Waiting:
    """The signal that came while something was being finished."""

    def __init__(self) -> None:
        self.depth = 0
        self.number: int | None = None


_waiting = _Waiting()


@contextlib.contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise ``Terminated`` in the block; those that are ignored stay so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    _waiting.number = None
    try:
        for number in before:
            signal.signal(number, _handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Let a signal wait for the end of the block, and then for ``check_interrupt``."""
    _waiting.depth += 1
    try:
        yield
    finally:
        _waiting.depth -= 1


def check_interrupt() -> None:
    """Raise ``Terminated`` if a signal came in ``finishing``."""
    number, _waiting.number = _waiting.number, None
    if number is not None:
        raise Terminated(number)


def _handle(number: int, _frame: FrameType | None) -> None:
    if _waiting.depth and _waiting.number is None:
        _waiting.number = number
        return
    _waiting.number = None
    raise Terminated(number)
