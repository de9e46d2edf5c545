"""Messages between trainer and monitor: a JSON header followed by byte strings."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["MAX_FRAME", "Inbox", "pack_frame"]

_HEAD = struct.Struct("<II")
_READ_BYTES = 1 << 16
MAX_FRAME = 1 << 28
"""Bytes of one message."""


def pack_frame(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Return one message; ``blobs`` hold any bytes."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join([_HEAD.pack(len(text), sum(map(len, blobs))), text, *blobs])


class Inbox:
    """The messages that arrive on a blocking connection; one read may bring several."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, patience_s: float | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Return the next message; waits at most ``patience_s`` for each part of it (None = for ever).

        Raises:
            EOFError: the other side closed.
            OSError: the connection broke, or a message is larger than ``MAX_FRAME``.
            TimeoutError: no part came in time.
        """
        while (needed := self._missing()) > 0:
            if patience_s is not None and not self._poll.poll(1000 * patience_s):
                raise TimeoutError(f"nothing came for {patience_s:g} s")
            self._read(needed, 0)
        text_length, _ = _HEAD.unpack_from(self._data)
        start = _HEAD.size + text_length
        header: dict[str, Any] = json.loads(self._data[_HEAD.size : start])
        blobs = []
        for length in header.pop("blobs"):
            blobs.append(bytes(self._data[start : start + length]))
            start += length
        del self._data[:start]
        return header, blobs

    def has_message(self) -> bool:
        """Return whether ``receive`` would not wait."""
        while (needed := self._missing()) > 0:
            try:
                self._read(needed, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except (EOFError, OSError):
                return True  # the next ``receive`` raises it
        return True

    def _missing(self) -> int:
        """Return how many bytes the next message still lacks, at least."""
        if len(self._data) < _HEAD.size:
            return _HEAD.size - len(self._data)
        text_length, body_length = _HEAD.unpack_from(self._data)
        length: int = _HEAD.size + text_length + body_length
        if length > MAX_FRAME:
            raise OSError(f"a message of {length} bytes")
        return length - len(self._data)

    def _read(self, needed: int, flags: int) -> None:
        part = self._connection.recv(max(_READ_BYTES, needed), flags)
        if not part:
            raise EOFError("the other side closed the connection")
        self._data += part
