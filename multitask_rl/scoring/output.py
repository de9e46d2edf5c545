"""Output of plugins, passed to the trainer's standard error: limited in size, control characters escaped."""

from __future__ import annotations

import os
import threading
import time

from multitask_rl.boundary.printable import printable

__all__ = ["PluginOutput"]

BURST_BYTES = 256 << 10
BYTES_PER_S = 1 << 10


class PluginOutput:
    """The output of all worker processes of one plugin.

    At most ``BURST_BYTES`` at once and ``BYTES_PER_S`` over time are passed on. The rest is dropped, with one
    message per drop. Control characters are escaped, because a plugin may print text of a model.

    Args:
        source: the plugin's name.
        target: file descriptor that receives the output.
    """

    def __init__(self, source: str, target: int = 2) -> None:
        self._source, self._target = source, target
        self._lock = threading.Lock()
        self._left, self._since = float(BURST_BYTES), time.monotonic()
        self._is_dropping = False

    def open(self) -> int:
        """Return the descriptor that a process writes to; the caller closes it."""
        reading, writing = os.pipe()
        threading.Thread(
            target=self._forward, args=(reading,), name=f"output-{self._source}", daemon=True
        ).start()
        return writing

    def write(self, data: bytes) -> None:
        """Pass ``data`` on as far as the allowance goes."""
        with self._lock:
            now = time.monotonic()
            self._left = min(BURST_BYTES, self._left + (now - self._since) * BYTES_PER_S)
            self._since = now
            data = printable(data.decode(errors="replace")).encode()
            kept = data[: int(self._left)]
            self._left -= len(kept)
            if len(kept) < len(data) and not self._is_dropping:
                note = f"\n[{self._source} prints too much: what is above {BYTES_PER_S} bytes/s is dropped]\n"
                kept += note.encode()
            self._is_dropping = self._left < BYTES_PER_S
            if kept:
                os.write(self._target, kept)

    def _forward(self, reading: int) -> None:
        try:
            while data := os.read(reading, 1 << 16):
                self.write(data)
        except OSError:  # standard error is closed: the process must not wait for a reader
            while os.read(reading, 1 << 16):
                pass
        finally:
            os.close(reading)
