"""Processor time of a call, for tests that hold how it grows."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from typing import Any


def least_seconds(call: Callable[..., Any], *arguments: Any, tries: int = 3) -> float:
    """CPU seconds of this thread in the quickest of ``tries`` calls.

    Other threads of the process, other programs and the garbage of earlier tests only add to a time.
    """
    times = []
    gc.disable()
    try:
        for _ in range(tries):
            began = time.thread_time()
            call(*arguments)
            times.append(time.thread_time() - began)
    finally:
        gc.enable()
    return min(times)


def is_linear(call: Callable[[int], Any], size: int) -> bool:
    """Whether ``call(4 * size)`` takes at most 8 times as long as ``call(size)``; a square takes 16 times.

    Calls of less than 50 ms pass: their times are mostly noise.
    """
    large = small = math.inf
    for _ in range(4):  # a busy machine may have slowed all tries of one
        large = min(large, least_seconds(call, 4 * size))
        if large < 0.05:
            return True
        small = min(small, least_seconds(call, size))
        if large < 8 * small:
            return True
    return False
