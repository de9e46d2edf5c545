"""The trainer's side of one worker process: start, talk, kill; its output."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from multitask_rl.boundary.allowance import proc_value, thread_limit
from multitask_rl.boundary.channel import Channel
from multitask_rl.boundary.printable import printable
from multitask_rl.errors import MultitaskRLError, PluginError
from multitask_rl.records import Rollout
from multitask_rl.scoring.grader import PluginFacts, PluginPlan
from multitask_rl.scoring.results import Result

START_LIMIT_S = 180.0
"""Seconds for a plugin to become ready (imports, model downloads); afterwards the start fails."""
OUT_OF_MEMORY = 77
"""Exit status of a worker that was refused memory: its state is no longer to be trusted."""

BURST_BYTES, BYTES_PER_S = 256 << 10, 1 << 10
"""Most output of a plugin that reaches standard error: in a burst, and over time."""
_PROGRESS = struct.Struct("=II")
_OUTSIDE_SIGNALS = (signal.SIGKILL, signal.SIGTERM)


class Progress:
    """Call and rollout that a worker is scoring, in shared memory: readable after a hang or a crash."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, _PROGRESS.size)

    def set(self, call: int, index: int) -> None:
        """Note that the rollout ``index`` of ``call`` is begun."""
        _PROGRESS.pack_into(self._memory, 0, call, index)

    def get(self, call: int) -> int:
        """Return the index of the rollout of ``call`` that was begun last; 0 = none yet."""
        noted, index = _PROGRESS.unpack_from(self._memory, 0)
        return int(index) if noted == call else 0


class PluginOutput:
    """The output of all worker processes of the plugin ``source``.

    It goes to standard error, limited in size; one message says that the rest is dropped. Control characters
    are escaped, because a plugin may print text of a model.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._left, self._since = float(BURST_BYTES), time.monotonic()
        self._is_dropping = False

    def open(self) -> int:
        """Return the descriptor that a process writes to; the caller closes it."""
        reading, writing = os.pipe()
        name = f"output-{self._source}"
        threading.Thread(target=self._forward, args=(reading,), name=name, daemon=True).start()
        return writing

    def _forward(self, reading: int) -> None:
        try:
            while data := os.read(reading, 1 << 16):
                with self._lock:
                    now = time.monotonic()
                    self._left = min(BURST_BYTES, self._left + (now - self._since) * BYTES_PER_S)
                    self._since = now
                    data = printable(data.decode(errors="replace")).encode()
                    kept = data[: int(self._left)]
                    self._left -= len(kept)
                    if len(kept) < len(data) and not self._is_dropping:
                        limit = f"what is above {BYTES_PER_S} bytes/s is dropped"
                        kept += f"\n[{self._source} prints too much: {limit}]\n".encode()
                    self._is_dropping = self._left < BYTES_PER_S
                    if kept:
                        os.write(2, kept)
        except OSError:  # standard error is closed: the process must not wait for a reader
            while os.read(reading, 1 << 16):
                pass
        finally:
            os.close(reading)


def oom_kills() -> int:
    """Return how many processes the kernel has killed because memory ran out; 0 if it does not say."""
    return int(proc_value("/proc/vmstat", "oom_kill ") or 0)


class WorkerDiedError(Exception):
    """The process ended without being asked to; ``signal`` killed it (0 = it exited by itself).

    ``by_oom_killer``: it was SIGKILL, and during the call the kernel killed a process of this machine because
    memory ran out.
    """

    def __init__(self, returncode: int | None, *, by_oom_killer: bool = False) -> None:
        super().__init__(returncode)
        self.signal = -returncode if returncode is not None and returncode < 0 else 0
        self.returncode = returncode
        self.by_oom_killer = by_oom_killer and self.signal == signal.SIGKILL
        self.is_outside = self.signal in _OUTSIDE_SIGNALS and not self.by_oom_killer
        """SIGKILL or SIGTERM of another process, which is rarely the fault of the response it graded."""

    @property
    def reason(self) -> str:
        """How the process ended, in words."""
        if self.returncode == OUT_OF_MEMORY:
            return "ran out of memory"
        if self.by_oom_killer:
            return "was killed by the kernel because memory ran out"
        if self.signal:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(self.signal).name}"
        return f"ended with code {self.returncode}"


def start_interpreter(module: str, fds: Sequence[int], output: PluginOutput) -> subprocess.Popen[bytes]:
    """Start a clean interpreter that calls ``main`` of ``module``, with the descriptors ``fds``.

    Its arguments are the descriptors and the process id of this process. The kernel kills it when the
    calling thread ends (``worker.enter``), so the thread must outlive it.
    """
    boot = f"import sys, json; sys.path[:] = json.loads(sys.argv[-1]); from {module} import main; main()"
    printed = output.open()
    try:
        return subprocess.Popen(
            # -P: a file of the working directory named like a standard module must not take its place
            [sys.executable, "-P", "-c", boot, *map(str, [*fds, os.getpid()]), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=printed,  # a plugin's print must not end up in the program's output
            stderr=printed,
            env=os.environ | thread_limit(),
            pass_fds=fds,
            start_new_session=True,  # its own group: killed with its children, spared by Ctrl-C
        )
    finally:
        os.close(printed)


class WorkerProcess:
    """A clean interpreter with one plugin. Not thread-safe: one thread starts and uses it.

    The kernel kills the process when that thread ends. A method that needs the process raises
    ``WorkerDiedError`` when it has ended.
    """

    def __init__(self, plan: PluginPlan, output: PluginOutput) -> None:
        ours, theirs = socket.socketpair()
        # memory without a file: a write to a mapped file on a full disk ends the process by SIGBUS
        with theirs, open(os.memfd_create("progress"), "r+b") as memory:
            memory.truncate(mmap.PAGESIZE)
            fds = [theirs.fileno(), memory.fileno()]
            self._progress = Progress(memory.fileno())
            self._process = start_interpreter("multitask_rl.scoring.worker", fds, output)
        self._channel = Channel(ours)
        self._plan = plan
        self._calls = 0
        self._oom_kills = oom_kills()
        """``oom_kills`` before the call, or before the start."""
        self._text_only = False

    def wait_ready(self) -> PluginFacts:
        """Hand over the plan and wait until the plugin is built; ``MultitaskRLError`` if it cannot be."""
        plan = self._plan
        try:
            self._channel.send(plan)
            state, *answer = self._channel.receive(time.monotonic() + START_LIMIT_S)
        except TimeoutError as error:
            self.kill()
            raise PluginError(
                f"{plan.where}: {plan.kind} {plan.reference!r} was not ready after {START_LIMIT_S:g} s; "
                "let it load less when it is built"
            ) from error
        except (EOFError, OSError) as error:
            raise self._died() from error
        if state == "refused":
            self.kill()
            error_class: type[MultitaskRLError] = answer[0]
            raise error_class(answer[1])
        facts: PluginFacts = answer[0]
        self._text_only = facts.text_only
        return facts

    def submit(self, rollouts: Sequence[Rollout], failed_calls: Sequence[int], *, each: bool) -> None:
        """Begin a call; ``each``: rollout by rollout, results sent as they come.

        ``failed_calls``: how many calls for each rollout have failed.
        """
        self._calls += 1
        self._oom_kills = oom_kills()
        if self._text_only:  # token ids and log-probabilities are most of the cost of sending
            prompts = {id(r.prompt): r.prompt for r in rollouts}
            slim = {key: replace(prompt, prompt_ids=[]) for key, prompt in prompts.items()}
            rollouts = [
                replace(
                    rollout,
                    prompt=slim[id(rollout.prompt)],
                    response_ids=[],
                    rollout_logprobs=[],
                    turns=[replace(turn, given_ids=[], context_ids=None) for turn in rollout.turns],
                )
                for rollout in rollouts
            ]
        try:
            self._channel.send((self._calls, each, rollouts, failed_calls))
        except OSError as error:
            raise self._died() from error

    def results(self, deadline: float) -> list[Result]:
        """Return the next results of the call; ``TimeoutError`` at ``deadline`` (``time.monotonic()``)."""
        results: list[Result]
        try:
            call, results = self._channel.receive(deadline)
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise self._died() from error
        if call != self._calls:  # the plugin itself writes to the socket
            self.terminate()
            raise self._died()
        return results

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
        except subprocess.TimeoutExpired:  # its socket is closed, but it lives
            code = None
        self.terminate()  # its children may live
        self.kill()
        return WorkerDiedError(code, by_oom_killer=oom_kills() > self._oom_kills)
