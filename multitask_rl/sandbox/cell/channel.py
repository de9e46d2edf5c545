"""Length-prefixed messages on a stream socket given by its descriptor."""

from __future__ import annotations

import os
import struct

from .codec import MAX_MESSAGE, CodecError

__all__ = ["Channel", "ChannelClosed"]

_LENGTH = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end of a conversation. Reads with ``read``: descriptors sent along are dropped by the kernel."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._read, self._write = os.read, os.write

    def send(self, payload: bytes) -> None:
        """Send one message.

        Raises:
            ChannelClosed: nobody reads any more.
        """
        data = memoryview(_LENGTH.pack(len(payload)) + payload)
        try:
            while data:
                data = data[self._write(self._descriptor, data) :]
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> bytes:
        """Return the next message.

        Raises:
            ChannelClosed: the other side is gone.
            CodecError: it announces more than ``MAX_MESSAGE`` bytes.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > MAX_MESSAGE + 4096:
            raise CodecError(f"a message of {length} bytes")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            try:
                part = self._read(self._descriptor, min(count, 1 << 20))
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not part:
                raise ChannelClosed("end of stream")
            parts.append(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
