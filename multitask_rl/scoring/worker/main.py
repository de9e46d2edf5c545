"""The worker process: builds one plugin and grades what it is sent, until its socket closes.

Started by ``process.WorkerProcess`` as a clean interpreter, never forked: a trainer holds gigabytes and
threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from multitask_rl.boundary.channel import Channel
from multitask_rl.errors import MultitaskRLError
from multitask_rl.records import Rollout
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.grader import Grader, encode
from multitask_rl.scoring.results import is_out_of_memory
from multitask_rl.scoring.worker.progress import Progress

__all__ = ["WorkerTask", "main"]

OUT_OF_MEMORY = 77
"""Exit status of a worker that was refused memory: what it holds is not to be trusted any more."""
FLUSH_S = 0.003
"""Results are sent at least as often; those of a call that is killed meanwhile are computed again."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What a worker is for."""

    kind: str
    """``reward`` or ``constraint``."""
    reference: str
    config: dict[str, Any]
    source: str
    """Name of the plugin in failures."""
    where: str
    memory_mb: int = 0
    """MiB it may take for scoring, above what it holds when the plugin is ready; 0 = no limit."""


def main() -> None:
    """Serve the trainer. Arguments: descriptors of socket and progress file, process id of the trainer."""
    socket_fd, progress_fd, parent = map(int, sys.argv[1:4])
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    channel = Channel(socket.socket(fileno=socket_fd))
    _be_killed_first()
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed its end
        _serve(channel, Progress(progress_fd))
    # Threads and exit handlers of a plugin must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(channel: Channel, progress: Progress) -> None:
    own = os.getpid()
    task: WorkerTask = channel.receive()
    try:
        plugin = find_plugin(task.kind, task.reference, task.where).build(task.config)
        grader = Grader(task.kind, plugin, task.source)
        grader.warm_up()
    except MultitaskRLError as error:
        channel.send(("refused", type(error), str(error)))
        return
    except BaseException as error:  # noqa: BLE001 - foreign code; the trainer raises it as PluginError
        _end_fork(own)
        channel.send(("broken", f"{type(error).__name__}: {error}"))
        return
    _end_fork(own)
    flags = (grader.one_by_one, grader.text_only, grader.waits, grader.independent)
    channel.send(("ready", grader.traits, *flags))
    _limit_memory(task.memory_mb)

    def grade(rollouts: Sequence[Rollout]) -> list[tuple[Any, ...]]:
        results = grader.grade(rollouts)
        _end_fork(own)
        if any(map(is_out_of_memory, results)):
            os._exit(OUT_OF_MEMORY)
        return [encode(result) for result in results]

    while True:
        call, each, rollouts = channel.receive()
        if each:
            _grade_each(channel, grade, progress, call, rollouts)
        else:
            channel.send((call, grade(rollouts)))


def _grade_each(
    channel: Channel,
    grade: Callable[[Sequence[Rollout]], list[tuple[Any, ...]]],
    progress: Progress,
    call: int,
    rollouts: Sequence[Rollout],
) -> None:
    """Grade one by one; a message per result would cost more than most results."""
    results: list[tuple[Any, ...]] = []
    sent = time.monotonic()
    for index, rollout in enumerate(rollouts):
        progress.set(call, index)
        results += grade([rollout])
        now = time.monotonic()
        if now - sent >= FLUSH_S or index + 1 == len(rollouts):
            channel.send((call, results))
            results, sent = [], now


def _end_fork(own: int) -> None:
    """End this process if it is a fork of the worker that a plugin let return."""
    if os.getpid() != own:
        os._exit(0)


def _limit_memory(megabytes: int) -> None:
    """Refuse this process more private memory than it has now and ``megabytes`` (0 = no limit; Linux)."""
    if not megabytes or sys.platform != "linux":
        return
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        held = next((int(line.split()[1]) for line in file if line.startswith("VmData:")), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = (held << 10) + (megabytes << 20)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _be_killed_first() -> None:
    """When the machine runs out of memory the kernel ends this process and not the trainer."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even in a hang (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request took hold
        os._exit(1)
