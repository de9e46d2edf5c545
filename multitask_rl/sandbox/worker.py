"""One monitor process as the trainer sees it: started by exec, spoken to over a socket, replaced."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Outcome, Program, Verdict
from multitask_rl.sandbox.cell import linux
from multitask_rl.sandbox.cell.frames import receive_frame, send_frame
from multitask_rl.sandbox.jobs import outcome_of, to_job

__all__ = ["Worker", "WorkerLostError", "cell_config"]

_log = logging.getLogger(__name__)
_START_TIMEOUT_S = 30.0
_GRACE_S = 20.0
_HERE = Path(__file__).parent
_PROBE = Program(source="print(6 * 7)")


class WorkerLostError(RuntimeError):
    """The monitor or its cell died or does not answer."""


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
    """A monitor process and the connection to it; used by one thread at a time."""

    def __init__(self, index: int, config: dict[str, Any]) -> None:
        self.index = index
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
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
        ours, theirs = socket.socketpair()
        starter = (
            f"import sys; sys.path.insert(0, {str(_HERE)!r}); from cell.monitor import main; "
            f"main({theirs.fileno()}, {os.getpid()})"
        )
        executable = self._config["executable"]
        self._process = subprocess.Popen(
            [executable, "-I", "-S", "-X", "utf8", "-c", starter],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd="/",
            env=_environment(self._config["prefix"]),
        )
        theirs.close()
        self._connection = ours
        ours.settimeout(_START_TIMEOUT_S)
        try:
            send_frame(ours, self._config)
            header, _ = receive_frame(ours)
        except (OSError, EOFError) as error:
            self.stop()
            raise SandboxError(
                f"the sandbox's monitor did not start: {error or type(error).__name__}"
            ) from error
        if "error" in header:
            self.stop()
            raise SandboxError(f"this machine cannot build a sandbox cell: {header['error']}")
        self.cell_pid = header["cell"]
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
        """Run one program.

        Raises:
            WorkerLostError: the monitor is gone; the program may be run again elsewhere.
        """
        if self._connection is None:
            raise WorkerLostError("not started")
        job, blobs = to_job(program)
        limits = program.limits
        num_tests = max(1, len(blobs) // 2)
        # twice: a starved program gets its time back once; the judge and the zygote have their own grace
        self._connection.settimeout(2 * limits.wall_s * num_tests + _GRACE_S)
        try:
            send_frame(self._connection, {**job, "id": 0}, blobs)
            header, outputs = receive_frame(self._connection)
        except (OSError, EOFError, ValueError) as error:
            raise WorkerLostError(f"{type(error).__name__}: {error}") from error
        return outcome_of(header, outputs, self.index, retries)

    def stop(self) -> None:
        """End the monitor; its cell and every program in it die with it."""
        connection, process = self._connection, self._process
        self._connection = self._process = None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is not None:
            process.kill()
            process.wait()

    def interrupt(self) -> None:
        """Kill the monitor from another thread; ``run`` there raises ``WorkerLostError``."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _environment(prefix: str) -> dict[str, str]:
    """Return the whole environment of a monitor: nothing of the trainer's."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
    if prefix != "/usr":
        environment["LD_LIBRARY_PATH"] = f"{prefix}/lib"
    return environment
