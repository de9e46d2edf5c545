"""The conversation with a program's process: length-prefixed messages on a stream socket."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

from .codec import MAX_MESSAGE, CodecError

_LENGTH = struct.Struct("<I")
_READ_AHEAD = 4096


class ChannelClosed(Exception):
    """The other side has closed the channel."""


class CellChannel:
    """One end of a conversation on a socket; ``ChannelClosed`` when the other side is gone.

    It reads with ``read``, by default ``os.read``, so that the kernel drops descriptors in a message.
    """

    def __init__(self, descriptor: int, read: Callable[[int, int], bytes] | None = None) -> None:
        self._descriptor = descriptor
        self._read, self._write = read or os.read, os.write
        self._ahead = b""

    def send(self, *payloads: bytes) -> None:
        """Send ``payloads`` in order, each as a message; blocks until they are written."""
        data = memoryview(b"".join([part for p in payloads for part in (_LENGTH.pack(len(p)), p)]))
        try:
            while data:
                data = data[self._write(self._descriptor, data) :]
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> bytes:
        """Return the next message; ``CodecError`` if it announces more than ``MAX_MESSAGE`` bytes."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_MESSAGE + 4096:
            raise CodecError(f"a message of {length} bytes")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        parts = [self._ahead]
        missing = count - len(self._ahead)
        while missing > 0:
            try:
                part = self._read(self._descriptor, max(_READ_AHEAD, min(missing, 1 << 20)))
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("end of stream")
            parts.append(part)
            missing -= len(part)
        data = b"".join(parts)
        self._ahead = data[count:]
        return data[:count]


def load_ending(report: Any) -> tuple[str, str] | None:
    """Return how a program's loading ended, and its error's message; None if ``report`` says nothing of it.

    Endings: ``passed``, ``compile_error``, ``memory_limit``, ``runtime_error``.
    """
    match report:
        case ["ready"]:
            return "passed", ""
        case ["compile", str(), str(name), str(message)]:
            return "compile_error", f"{name}: {message}"
        case ["load", str(base), str(name), str(message)]:
            return "memory_limit" if base == "MemoryError" else "runtime_error", f"{name}: {message}"
    return None
