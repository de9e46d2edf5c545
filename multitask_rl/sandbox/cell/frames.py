"""What the trainer and a monitor say to each other: a JSON header with byte strings behind it."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any

__all__ = ["receive_frame", "send_frame"]

_HEAD = struct.Struct("<II")


def send_frame(connection: socket.socket, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
    """Send one message; ``blobs`` arrive as they are, whatever bytes they hold."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    body = b"".join(blobs)
    connection.sendall(_HEAD.pack(len(text), len(body)) + text + body)


def receive_frame(connection: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    """Return the next message.

    Raises:
        EOFError: the other side closed.
    """
    text_length, body_length = _HEAD.unpack(_exactly(connection, _HEAD.size))
    data = _exactly(connection, text_length + body_length)
    header: dict[str, Any] = json.loads(data[:text_length])
    blobs, position = [], text_length
    for length in header.pop("blobs"):
        blobs.append(data[position : position + length])
        position += length
    return header, blobs


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side closed the connection")
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
