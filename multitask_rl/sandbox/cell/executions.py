"""The keeper's side of executions: it sends descriptors and limits and gets exit status and output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from .endings import Execution
from .trainer import JobCancelled, TrainerConversation
from .wire import EXIT, KILL, LIMITS, LONGEST_WAIT, OP_KILL, OP_SPAWN, OP_VARIANT, SPAWN, Exit, Mode

_GRACE_S = 5.0
"""How much later than a limit the zygote may report before the cell is given up."""
_LAST_BREATH_S = 0.5
_F_ADD_SEALS, _ALL_SEALS = 1033, 15


@contextlib.contextmanager
def memory(content: bytes = b"", *, seal: bool = False) -> Iterator[int]:
    """Open an anonymous file; the context value is its descriptor. ``seal`` makes it read-only for ever."""
    descriptor = os.memfd_create("io", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if seal else 0))
    try:
        view = memoryview(content)
        done = 0
        while done < len(view):  # not ``write``: the reader shares the offset, which must stay at the start
            done += os.pwrite(descriptor, view[done:], done)
        if seal:
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _ALL_SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


class ZygoteProcess:
    """The keeper's connection to one zygote: it starts executions there and collects their ends."""

    def __init__(self, control: socket.socket, trainer: TrainerConversation) -> None:
        self._control = control
        self._trainer = trainer
        self._poll = trainer.poll_for(control.fileno())
        self._running: set[int] = set()
        self._exits: dict[int, Exit] = {}
        self._last = 0

    def spawn(
        self,
        mode: Mode,
        limits: dict[str, Any],
        source_bytes: int,
        descriptors: list[int],
        *,
        has_stdin: bool = False,
        has_output: bool = True,
    ) -> int:
        """Let the zygote start one process; return the identity of the execution.

        Args:
            mode: what the process runs.
            limits: the fields of ``Limits`` by name.
            source_bytes: size of the source, the first descriptor.
            descriptors: what the process gets, in the order of ``programs.enter``.
            has_stdin: ``descriptors`` hold standard input; else it is empty.
            has_output: ``descriptors`` hold standard output and error.
        """
        self._last = (self._last + 1) % (1 << 32)
        head = SPAWN.pack(OP_SPAWN, self._last, mode, has_stdin, has_output, source_bytes, limits["wall_s"])
        cpu_s, counts = (
            max(1, -int(-limits["cpu_s"] // 1)),
            [limits[n] for n in ("inodes", "nproc", "nofile")],
        )
        rest = LIMITS.pack(cpu_s, limits["mem_mb"], limits["disk_mb"] << 20, *counts, _largest_file(limits))
        socket.send_fds(self._control, [head + rest], descriptors)
        self._running.add(self._last)
        return self._last

    def become(self, package: str) -> ZygoteProcess:
        """Return a new zygote, forked from this one, that has ``package`` loaded."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._control, [bytes([OP_VARIANT]) + package.encode()], [theirs.fileno()])
        theirs.close()
        return ZygoteProcess(ours, self._trainer)

    def wait(self, identity: int, wall_s: float) -> Exit:
        """Wait for the end of the execution ``identity`` and return it.

        Raises as ``TrainerConversation.wait``; the time-out is several times ``wall_s`` (seconds), because
        the zygote itself ends a program that exceeds its limit.
        """
        deadline = time.monotonic() + LONGEST_WAIT * wall_s + _GRACE_S  # the limit of a starved program
        while identity not in self._exits:
            self._receive_exit(max(0.01, deadline - time.monotonic()))
        return self._exits.pop(identity)

    def end(
        self, program: int, limits: dict[str, Any], stdout: int, stderr: int, *, is_gone: bool
    ) -> Execution:
        """Kill the execution ``program`` after its tests and return it with its output.

        With ``is_gone`` (the program has closed its channel) it first gets a moment to end by itself.
        """
        if is_gone and program not in self._exits:
            with contextlib.suppress(TimeoutError):
                self._receive_exit(_LAST_BREATH_S)
        is_killed_by_us = program not in self._exits
        if is_killed_by_us:
            self._control.send(KILL.pack(OP_KILL, program))
        execution = collect(self.wait(program, limits["wall_s"]), stdout, stderr, limits)
        execution.is_killed_by_us = is_killed_by_us
        return execution

    def end_all(self) -> None:
        """Kill every execution of this zygote."""
        for identity in self._running:
            self._control.send(KILL.pack(OP_KILL, identity))
        while self._running:
            with contextlib.suppress(JobCancelled):
                self._receive_exit(_GRACE_S)
        self._exits.clear()

    def _receive_exit(self, patience_s: float) -> None:
        self._trainer.wait(self._poll, self._control.fileno(), patience_s)
        data = self._control.recv(4096)
        if not data:
            raise EOFError("the zygote ended")
        ended = Exit._make((*EXIT.unpack_from(data), data[EXIT.size :].decode("utf-8", "replace")))
        self._exits[ended.identity] = ended
        self._running.discard(ended.identity)


def collect(ended: Exit, stdout: int, stderr: int, limits: dict[str, Any]) -> Execution:
    """Return the ended process with its output, read from the files ``stdout`` and ``stderr``."""
    stdout_length, stderr_length = os.fstat(stdout).st_size, os.fstat(stderr).st_size
    return Execution(
        exit=ended,
        stdout=os.pread(stdout, min(stdout_length, limits["stdout_bytes"]), 0) if stdout_length else b"",
        stderr=os.pread(stderr, min(stderr_length, limits["stderr_bytes"]), 0) if stderr_length else b"",
        stderr_end=os.pread(stderr, 512, max(0, stderr_length - 512)) if stderr_length else b"",
        stdout_length=stdout_length,
        stderr_length=stderr_length,
        is_full=max(stdout_length, stderr_length) >= _largest_file(limits),
    )


def _largest_file(limits: dict[str, Any]) -> int:
    return int(max(limits["stdout_bytes"], limits["stderr_bytes"], limits["disk_mb"] << 20)) + 1
