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
    """The output of all worker processes of the plugin ``source``.

    At most ``BURST_BYTES`` at once and ``BYTES_PER_S`` over time are passed on. The rest is dropped, with one
    message per drop. Control characters are escaped, because a plugin may print text of a model.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._left, self._since = float(BURST_BYTES), time.monotonic()
        self._is_dropping = False

    def open(self) -> int:
        """Return the descriptor that a process writes to; the caller closes it."""
        reading, writing = os.pipe()
        name = f"output-{self._source}"
        threading.Thread(target=self._forward, args=(reading,), name=name, daemon=True).start()
        return writing

    def _forward(self, reading: int) -> None:
        try:
            while data := os.read(reading, 1 << 16):
                with self._lock:
                    now = time.monotonic()
                    self._left = min(BURST_BYTES, self._left + (now - self._since) * BYTES_PER_S)
                    self._since = now
                    data = printable(data.decode(errors="replace")).encode()
                    kept = data[: int(self._left)]
                    self._left -= len(kept)
                    if len(kept) < len(data) and not self._is_dropping:
                        limit = f"what is above {BYTES_PER_S} bytes/s is dropped"
                        kept += f"\n[{self._source} prints too much: {limit}]\n".encode()
                    self._is_dropping = self._left < BYTES_PER_S
                    if kept:
                        os.write(2, kept)
        except OSError:  # standard error is closed: the process must not wait for a reader
            while os.read(reading, 1 << 16):
                pass
        finally:
            os.close(reading)
