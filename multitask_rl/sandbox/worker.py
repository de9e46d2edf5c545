"""The trainer's handle of one monitor process: started by exec, reached by a socket, replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Limits, Outcome, Program, Verdict
from multitask_rl.sandbox.cell import linux
from multitask_rl.sandbox.cell.frames import MAX_FRAME, Inbox, pack_frame
from multitask_rl.sandbox.cell.trainer import IDENTITY
from multitask_rl.sandbox.cell.wire import LONGEST_WAIT
from multitask_rl.sandbox.cgroups import CellCgroup
from multitask_rl.sandbox.host_processes import descendants
from multitask_rl.sandbox.jobs import outcome_of, to_job

__all__ = ["Worker", "WorkerLostError", "cell_config"]

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_SEND_TIMEOUT_S = 60
_GRACE_S = 20.0
_SENT_AHEAD = 1 << 16
"""Bytes a monitor may have unread: less than a socket holds, so that sending does not wait."""
_HERE = Path(__file__).parent
_PROBE = Program(source="print(6 * 7)")


class WorkerLostError(RuntimeError):
    """The monitor or its cell died or does not answer."""


@dataclass(slots=True)
class _Frame:
    data: bytes
    patience_s: float
    limits: Limits


def cell_config(packages: Sequence[str], level: str) -> dict[str, Any]:
    """Return what a monitor needs to know of this machine.

    Args:
        packages: third-party packages programs may import; one that is not installed is left out.
        level: the isolation to build.
    """
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    found = {name: _package_directories(name) for name in packages}
    return {
        "executable": executable,
        "prefix": os.path.realpath(sys.base_prefix),
        "packages": [path for paths in found.values() for path in paths],
        "variants": {name: [name] for name, paths in found.items() if paths},
        "level": level,
        "bwrap": shutil.which("bwrap") or "",
    }


def _package_directories(name: str) -> list[str]:
    """Return the package's directory and the one with its bundled libraries."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return []
    directory = Path(next(iter(spec.submodule_search_locations))).resolve()
    return [str(path) for path in (directory, directory.with_name(f"{name}.libs")) if path.is_dir()]


class Worker:
    """A monitor process and the connection to it; used by one thread, ``cancel`` and ``interrupt`` by any.

    Args:
        index: its number in the sandbox.
        config: what ``cell_config`` returned.
        cgroup_parent: where the cell gets a cgroup of its own; None = nowhere.
        cpu: the one it and its programs run on; None = any.
    """

    def __init__(
        self, index: int, config: dict[str, Any], cgroup_parent: Path | None = None, cpu: int | None = None
    ) -> None:
        self.index = index
        self._config = {**config, "cpu": cpu}
        self._cgroup_parent = cgroup_parent
        self._cgroup: CellCgroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._inbox: Inbox | None = None
        self._cancel_fd = -1
        self._cancel_lock = threading.Lock()
        self._sent: deque[_Frame] = deque()
        self._unsent: deque[_Frame] = deque()
        self.restarts = -1
        self.cell_pid = 0

    @property
    def pid(self) -> int:
        """Process id of the monitor; 0 before it was started."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start the monitor and wait until its cell is up.

        Raises:
            SandboxError: this machine cannot build the cell; the message says which step failed.
        """
        if not linux.is_supported():
            raise SandboxError("the sandbox needs Linux on x86_64: run the code rewards on such a machine")
        self.stop()
        self.restarts += 1
        try:
            self._launch()
        except OSError as error:
            self.stop()
            raise SandboxError(
                f"the sandbox's monitor cannot be started: {error}. Where it is too many open files or "
                "processes, raise the limit before the start (ulimit -n, ulimit -u)"
            ) from error
        self._greet()

    def _launch(self) -> None:
        """Start the process and connect to it."""
        ours, theirs = socket.socketpair()
        self._connection = ours
        cancelled, cancel = os.pipe()
        with self._cancel_lock:
            self._cancel_fd = cancel
        os.set_blocking(cancel, False)
        starter = (
            f"import sys; sys.path.insert(0, {str(_HERE)!r}); from cell.monitor import main; "
            f"main({theirs.fileno()}, {cancelled}, {os.getpid()})"
        )
        executable = self._config["executable"]
        try:
            self._process = subprocess.Popen(
                [executable, "-I", "-S", "-X", "utf8", "-c", starter],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), cancelled],
                cwd="/",
                env=_environment(self._config["prefix"]),
            )
        finally:
            theirs.close()
            os.close(cancelled)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_TIMEOUT_S, 0))

    def _greet(self) -> None:
        """Tell the monitor what it is to build, and wait until it has."""
        if self._connection is None:
            raise SandboxError("the sandbox's monitor was stopped")
        self._inbox = Inbox(self._connection)
        try:
            self._connection.sendall(pack_frame(self._config))
            header, _ = self._inbox.receive(_START_TIMEOUT_S)
        except (OSError, EOFError) as error:
            self.stop()
            raise SandboxError(
                f"the sandbox's monitor did not start: {error or type(error).__name__}"
            ) from error
        if "error" in header:
            self.stop()
            raise SandboxError(f"this machine cannot build a sandbox cell: {header['error']}")
        self.cell_pid = header["cell"]
        if self._cgroup_parent is not None:
            self._cgroup = CellCgroup(self._cgroup_parent, self.index)
            self._cgroup.take([self.cell_pid, *descendants(self.cell_pid)])
        self._check()

    def _check(self) -> None:
        """Run a program that works wherever the cell does.

        Raises:
            SandboxError: it does not work here.
        """
        try:
            outcome = self.run(_PROBE, 0)
        except WorkerLostError as error:
            self.stop()
            raise SandboxError(f"the sandbox cell ended at once: {error}") from error
        if outcome.verdict is not Verdict.completed or outcome.stdout != b"42\n":
            self.stop()
            raise SandboxError(
                f"the sandbox cell cannot run a program: {outcome.verdict}: {outcome.message} "
                f"{outcome.stderr_text[:200]}"
            )

    def run(self, program: Program, retries: int) -> Outcome:
        """Run one program and wait for its outcome; for a worker nobody else uses.

        Raises:
            WorkerLostError: the monitor is gone; the program may be run again elsewhere.
        """
        self.hand_over(0, program)
        self.send()
        outcome = self.receive()[1]
        if outcome is None:
            raise WorkerLostError("the program was cancelled")
        return replace(outcome, retries=retries)

    def hand_over(self, identity: int, program: Program) -> None:
        """Take a program; what was taken runs, and is answered, in this order once ``send`` was called.

        Raises:
            ValueError: program and tests together are too large.
        """
        header, blobs = to_job(program)
        frame = pack_frame({**header, "id": identity}, blobs)
        if len(frame) > MAX_FRAME:
            raise ValueError(
                f"a program and its tests take {len(frame) >> 20} MiB; at most {MAX_FRAME >> 20} MiB can be "
                "judged: give the row fewer or smaller tests"
            )
        self._unsent.append(_Frame(frame, _patience_s(program), program.limits))

    def send(self) -> None:
        """Send what the monitor's socket surely takes: it may be busy, or waiting for us to read.

        Raises:
            WorkerLostError: the monitor is gone.
        """
        ready: list[bytes] = []
        size = sum(len(frame.data) for frame in self._sent)
        while self._unsent and (not self._sent or size + len(self._unsent[0].data) <= _SENT_AHEAD):
            frame = self._unsent.popleft()
            if self._cgroup is not None:
                self._cgroup.allow(frame.limits)
            ready.append(frame.data)
            size += len(frame.data)
            self._sent.append(frame)
        if not ready:
            return
        if self._connection is None:
            raise WorkerLostError("not started")
        try:
            self._connection.sendall(b"".join(ready))
        except OSError as error:
            raise WorkerLostError(f"{type(error).__name__}: {error}") from error

    @property
    def owes(self) -> bool:
        """A job has no answer yet."""
        return bool(self._sent or self._unsent)

    def receive(self) -> tuple[int, Outcome | None]:
        """Return identity and outcome of the next job that ended; None of one that was cancelled.

        Raises:
            WorkerLostError: the monitor is gone, or is silent for longer than the job's patience.
        """
        if self._connection is None or self._inbox is None or not self._sent:
            raise WorkerLostError("not started")
        try:
            header, outputs = self._inbox.receive(self._sent[0].patience_s)
            identity: int = header["id"]
            outcome = None if "cancelled" in header else outcome_of(header, outputs, self.index)
        except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
            raise WorkerLostError(f"{type(error).__name__}: {error}") from error
        self._sent.popleft()
        self.send()
        return identity, outcome

    @property
    def has_answer(self) -> bool:
        """``receive`` would not wait."""
        return self._inbox is not None and self._inbox.has_message()

    def cancel(self, identity: int) -> None:
        """Give up a job wherever it is: it is answered as cancelled unless it ends first."""
        with self._cancel_lock, contextlib.suppress(OSError):
            if self._cancel_fd >= 0:
                os.write(self._cancel_fd, IDENTITY.pack(identity))

    def stop(self) -> None:
        """End the monitor; its cell and every program in it die with it."""
        connection, process = self._connection, self._process
        self._connection = self._process = self._inbox = None
        self._sent.clear()
        self._unsent.clear()
        with self._cancel_lock:
            cancel_fd, self._cancel_fd = self._cancel_fd, -1
        if cancel_fd >= 0:
            os.close(cancel_fd)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is not None:
            process.kill()
            process.wait()
        if self._cgroup is not None:
            self._cgroup.close()
            self._cgroup = None

    def interrupt(self) -> None:
        """Kill the monitor from another thread; ``run`` there raises ``WorkerLostError``."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _patience_s(program: Program) -> float:
    """Return for how long a monitor may be silent over a program before it is given up."""
    tests = getattr(program.task, "tests", ())
    # the judge and the zygote have their own grace
    return LONGEST_WAIT * program.limits.wall_s * max(1, len(tests)) + _GRACE_S


def _environment(prefix: str) -> dict[str, str]:
    """Return the whole environment of a monitor: nothing of the trainer's."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
    if prefix != "/usr":
        environment["LD_LIBRARY_PATH"] = f"{prefix}/lib"
    return environment
