"""The monitor's connection to the trainer: jobs and cancellations in, results out."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

from .frames import Inbox, pack_frame

__all__ = ["IDENTITY", "JobCancelled", "TrainerConversation"]

IDENTITY = struct.Struct("<Q")
"""A job on the cancellation channel."""
_MAX_HELD = 4
_HOLD_MS = 4
"""So many results wait for so long at most, to leave together, while there is more work."""


class JobCancelled(Exception):
    """The trainer gave up the job."""


class TrainerConversation:
    """The conversation with one thread of the trainer.

    Args:
        connection: jobs come and results go here, in the same order.
        cancel_fd: identities of jobs to give up come here; the answer to such a job is ``cancelled``.
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
        """Return the next job; held results leave before a wait for it.

        Raises:
            EOFError: the trainer closed the connection.
        """
        if not self._inbox.has_message():
            self._flush()
        return self._inbox.receive()

    def begin(self, job: int) -> None:
        """Note that a job begins.

        Raises:
            JobCancelled: the trainer gave it up.
        """
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
        """Return what ``wait`` polls to wait for ``descriptor``."""
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self._cancel_fd, select.POLLIN)
        return poll

    def wait(self, poll: select.poll, descriptor: int, patience_s: float | None) -> None:
        """Wait until ``descriptor`` can be read; held results do not wait for that.

        Raises:
            TimeoutError: it cannot be read within ``patience_s`` (None = for ever).
            JobCancelled: the trainer gave up the job.
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
