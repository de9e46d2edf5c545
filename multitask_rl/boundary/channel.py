"""Whole pickled messages over a stream socket, between the trainer and its own processes.

Only code that the user installed runs there, so pickle is safe here; text of the model is data.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 18


class Channel:
    """One end of a connection on a stream socket: sends and receives whole pickled objects.

    Both ends must trust each other, because unpickling can run code.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, message: Any) -> None:
        """Send ``message``, any object that can be pickled; blocks until it is written.

        Raises:
            OSError: the other end is gone.
            pickle.PicklingError: a part of ``message`` cannot be pickled.
        """
        try:
            body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise pickle.PicklingError(str(error)) from error
        self._sock.settimeout(None)
        self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, deadline: float | None = None) -> Any:
        """Return the next message; wait until ``deadline``, a ``time.monotonic()`` value (None = for ever).

        Raises:
            EOFError: the other end is gone.
            TimeoutError: no whole message arrived in time.
        """
        buffer, end = self._buffer, _LENGTH.size
        while True:
            if len(buffer) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
            if len(buffer) >= end:
                message = pickle.loads(memoryview(buffer)[_LENGTH.size : end])
                del buffer[:end]
                return message
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
            buffer += data

    def has_news(self) -> bool:
        """Whether a message, a part of one or the end of the connection has arrived."""
        watch = select.poll()
        watch.register(self._sock, select.POLLIN)
        return bool(self._buffer or watch.poll(0))

    def hang_up(self) -> None:
        """End the connection for both ends; a thread in ``receive`` gets ``EOFError``. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._sock.close()
