"""Whole pickled messages over a stream socket, between the trainer and its own processes.

Only code that the user installed runs there, so pickle is safe here; text of the model is data.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import time
from collections import deque
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 18


class Channel:
    """One end of a stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._messages: deque[Any] = deque()

    def send(self, message: Any) -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
            pickle.PicklingError: ``message`` holds something that cannot travel.
        """
        try:
            body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise pickle.PicklingError(str(error)) from error
        self._sock.settimeout(None)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, deadline: float | None = None) -> Any:
        """Return the next message.

        Args:
            deadline: ``time.monotonic()`` value; None = wait for ever.

        Raises:
            EOFError: the other end is gone.
            TimeoutError: no whole message arrived in time.
        """
        while not self._messages:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._sock.settimeout(left)
            try:
                data = self._sock.recv(_CHUNK)
            except ConnectionError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._buffer += data
            buffer, start = self._buffer, 0
            while len(buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, start)
                end = start + _LENGTH.size + length
                if len(buffer) < end:
                    break
                self._messages.append(pickle.loads(memoryview(buffer)[start + _LENGTH.size : end]))
                start = end
            if start:
                del buffer[:start]
        return self._messages.popleft()

    def hang_up(self) -> None:
        """End the connection for both ends, though another thread waits in ``receive``. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._sock.close()
