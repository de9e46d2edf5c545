"""The trainer's side of one worker process: start, talk, kill."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from multitask_rl.boundary.channel import Channel
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import MultitaskRLError, PluginError
from multitask_rl.records import Rollout
from multitask_rl.scoring.grader import Result, decode
from multitask_rl.scoring.output import PluginOutput
from multitask_rl.scoring.worker.main import OUT_OF_MEMORY, WorkerTask
from multitask_rl.scoring.worker.progress import Progress
from multitask_rl.scoring.worker.wire import without_tokens

__all__ = ["START_LIMIT_S", "WorkerDiedError", "WorkerProcess"]

START_LIMIT_S = 180.0
"""Seconds for a plugin to become ready (imports, model downloads); afterwards the start fails."""

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[4]); from multitask_rl.scoring.worker import main; "
)


class WorkerDiedError(Exception):
    """The process ended without being asked to; ``signal`` is what killed it (0 = it exited by itself)."""

    def __init__(self, returncode: int | None) -> None:
        super().__init__(returncode)
        self.signal = -returncode if returncode is not None and returncode < 0 else 0
        self.returncode = returncode

    @property
    def reason(self) -> str:
        """How it ended, in words."""
        if self.returncode == OUT_OF_MEMORY:
            return "ran out of memory"
        if self.signal:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with code {self.returncode}"


class WorkerProcess:
    """A clean interpreter with one plugin. Not thread-safe: one thread starts and uses it.

    The kernel kills the process when that thread ends (see ``worker``), so the thread must outlive it.
    """

    def __init__(self, task: WorkerTask, output: PluginOutput) -> None:
        ours, theirs = socket.socketpair()
        # -P: a file of the working directory named like a standard module must not be imported in its place.
        command = [sys.executable, "-P", "-c", _BOOT + "main.main()"]
        with theirs, tempfile.TemporaryFile() as memory:
            memory.truncate(mmap.PAGESIZE)
            fds = [theirs.fileno(), memory.fileno()]
            self._progress = Progress(memory.fileno())
            printed = output.open()
            try:
                self._process = subprocess.Popen(
                    [*command, *map(str, [*fds, os.getpid()]), json.dumps(sys.path)],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,  # a plugin's print must not end up in the program's output
                    stderr=printed,
                    pass_fds=fds,
                    start_new_session=True,  # its own group: killed with its children, spared by Ctrl-C
                )
            finally:
                os.close(printed)
        self._channel = Channel(ours)
        self._task = task
        self._calls = 0
        self.traits = PluginTraits()
        self.one_by_one = False
        self._text_only = False
        self.waits = False
        self.independent = False

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Hand over the plugin and wait until it is built.

        Raises:
            MultitaskRLError: the plugin cannot be built, by its type.
            WorkerDiedError: the process ended.
        """
        task = self._task
        try:
            self._channel.send(task)
            answer = self._channel.receive(time.monotonic() + START_LIMIT_S)
        except TimeoutError as error:
            self.kill()
            raise PluginError(
                f"{task.where}: {task.kind} {task.reference!r} was not ready after {START_LIMIT_S:g} s"
            ) from error
        except (EOFError, OSError) as error:
            raise self._died() from error
        if answer[0] == "ready":
            self.traits, self.one_by_one, self._text_only, self.waits, self.independent = answer[1:]
            return
        self.kill()
        if answer[0] == "refused":
            error_class: type[MultitaskRLError] = answer[1]
            raise error_class(answer[2])
        raise PluginError(f"{task.where}: {task.kind} {task.reference!r} failed its warm-up: {answer[1]}")

    def submit(self, rollouts: Sequence[Rollout], *, each: bool) -> None:
        """Begin a call; ``each``: rollout by rollout, every result sent at once.

        Raises:
            WorkerDiedError: the process ended.
        """
        self._calls += 1
        sent = without_tokens(rollouts) if self._text_only else rollouts
        try:
            self._channel.send((self._calls, each, sent))
        except OSError as error:
            raise self._died() from error

    def results(self, deadline: float) -> list[Result]:
        """Return the next results of the call under way.

        Raises:
            TimeoutError: none arrived before ``deadline`` (``time.monotonic()``).
            WorkerDiedError: the process ended.
        """
        try:
            call, encoded = self._channel.receive(deadline)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise self._died() from error
        if call != self._calls:  # something else of the plugin writes to its socket
            self.terminate()
            raise self._died()
        return [decode(parts) for parts in encoded]

    def at(self) -> int:
        """Return the index of the rollout being scored in the call under way (with ``each``)."""
        return self._progress.get(self._calls)

    def terminate(self) -> None:
        """Kill the process and its children; a waiting call raises ``WorkerDiedError``. Thread-safe."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and its children, and free everything. Idempotent."""
        if self._process.returncode is None:
            self.terminate()
            self._process.wait()
        self._channel.close()

    def _died(self) -> WorkerDiedError:
        try:
            code: int | None = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its socket and lives on
            code = None
        self.terminate()  # its children may live on
        self.kill()
        return WorkerDiedError(code)
