"""The connection between trainer and keeper; a message is a JSON header followed by byte strings."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

MAX_FRAME = 1 << 28
"""Bytes of one message."""
_HEAD = struct.Struct("<II")
_READ_BYTES = 1 << 16
IDENTITY = struct.Struct("<Q")
"""A job on the cancellation channel."""
_MAX_HELD = 4
_HOLD_MS = 4
"""So many results wait for so long at most, to leave together, while there is more work."""


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
        """Return the next message; ``TimeoutError`` if a part takes over ``patience_s`` (None = for ever).

        ``EOFError`` when the other side closed; ``OSError`` for a message larger than ``MAX_FRAME``.
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
        """Return whether a whole message has arrived, so that ``receive`` does not wait."""
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


class JobCancelled(Exception):
    """The trainer gave up the job."""


class TrainerConversation:
    """The keeper's end of the conversation with one thread of the trainer.

    Jobs come on ``connection`` and results go there in the same order. Identities of jobs to give up come on
    ``cancel_fd``; the answer to such a job is ``cancelled``.
    """

    def __init__(self, connection: socket.socket, cancel_fd: int) -> None:
        self._connection = connection
        self._inbox = Inbox(connection)
        self._cancel_fd = cancel_fd
        self._cancelled: set[int] = set()
        self._job = -1
        self._held: list[bytes] = []
        os.set_blocking(cancel_fd, False)

    def receive(self) -> tuple[dict[str, Any], list[bytes]]:
        """Return the next job; before a wait it sends what ``answer`` held. ``EOFError``: no more jobs."""
        if not self._inbox.has_message():
            self._flush()
        return self._inbox.receive()

    def begin(self, job: int) -> None:
        """Make ``job`` the current one; ``JobCancelled`` if the trainer has given it up."""
        self._job = job
        # identities grow and jobs come in order: older ones have an answer
        self._cancelled = {identity for identity in self._cancelled if identity >= job}
        if job in self._cancelled:
            raise JobCancelled

    def answer(self, header: dict[str, Any], blobs: list[bytes], *, at_once: bool = False) -> None:
        """Send a result, or hold it for a moment while there is more to do."""
        self._held.append(pack_frame(header, blobs))
        if at_once or len(self._held) >= _MAX_HELD:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            self._connection.sendall(b"".join(self._held))
            self._held.clear()

    def poll_for(self, descriptor: int) -> select.poll:
        """Return the poll object for ``wait``: it watches ``descriptor`` and the trainer's cancellations."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._cancel_fd, select.POLLIN)
        return poll

    def wait(self, poll: select.poll, descriptor: int, patience_s: float | None) -> None:
        """Wait until ``descriptor`` can be read; results that ``answer`` held are sent meanwhile.

        Raises:
            TimeoutError: ``patience_s`` seconds have passed (None: never).
            JobCancelled: the trainer gave up the current job.
            EOFError: the trainer ended.
        """
        patience_ms = None if patience_s is None else 1000 * patience_s
        while True:
            ready = poll.poll(_HOLD_MS if self._held else patience_ms)
            if not ready and self._held:
                self._flush()
                continue
            if not ready:
                raise TimeoutError("the cell is silent")
            for found, _ in ready:
                if found == self._cancel_fd:
                    data = os.read(self._cancel_fd, 512 * IDENTITY.size)
                    if not data:
                        raise EOFError("the trainer ended")
                    self._cancelled.update(identity for (identity,) in IDENTITY.iter_unpack(data))
                    if self._job in self._cancelled:
                        raise JobCancelled
            if any(found == descriptor for found, _ in ready):
                return

    def reader(self, channel: int) -> Callable[[int, int], bytes]:
        """Return a function like ``os.read`` for ``channel`` that raises ``JobCancelled``, too."""
        poll = self.poll_for(channel)

        def read(descriptor: int, count: int) -> bytes:
            self.wait(poll, descriptor, None)
            return os.read(descriptor, count)

        return read
