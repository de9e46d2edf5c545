"""The worker process: builds one plugin and grades the rollouts it receives, until its socket closes.

``process.WorkerProcess`` starts a clean interpreter, no fork: a trainer holds gigabytes and threads.
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

from multitask_rl.boundary.allowance import proc_value
from multitask_rl.boundary.channel import Channel
from multitask_rl.errors import MultitaskRLError, PluginError
from multitask_rl.lazy import without_collector
from multitask_rl.scoring.grader import PluginPlan
from multitask_rl.scoring.process import OUT_OF_MEMORY, Progress
from multitask_rl.scoring.results import Result, is_out_of_memory
from multitask_rl.seeding import derive_seed, seed_generators

FLUSH_S = 0.003
"""Most seconds between messages: a message per result would cost more than most results."""
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the trainer. Arguments: descriptors of socket and progress, process id of the trainer."""
    socket_fd, progress_fd, parent = map(int, sys.argv[1:4])
    enter(parent)
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer closed its end
        _serve(Channel(socket.socket(fileno=socket_fd)), Progress(progress_fd))
    # Threads and exit handlers of a plugin must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def enter(parent: int) -> None:
    """Make this process a worker of the process ``parent``: it ends with its parent, and not by Ctrl-C."""
    if sys.platform == "linux":
        # the kernel kills this process, even in a hang, when the thread that started it ends
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the trainer died before the request took hold
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGUSR1):  # the trainer answers Ctrl-C and Slurm's warning
        signal.signal(number, signal.SIG_IGN)
    # When the machine runs out of memory, the kernel ends this process and not the trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")


def _serve(channel: Channel, progress: Progress) -> None:
    own = os.getpid()

    def end_fork() -> None:
        """End this process if it is a fork of the worker that a plugin let return."""
        if os.getpid() != own:
            os._exit(0)

    plan: PluginPlan = channel.receive()
    seed_generators(plan.seed)
    try:
        with without_collector():
            grader = plan.build()
    except BaseException as error:  # noqa: BLE001 - foreign code; the trainer raises the error
        end_fork()
        kind, message = type(error), str(error)
        if not isinstance(error, MultitaskRLError):
            kind, message = PluginError, plan.failed(error)
        channel.send(("refused", kind, message))
        return
    end_fork()
    channel.send(("ready", grader.facts))
    if plan.memory_mb and sys.platform == "linux":  # refuse private memory above what the ready plugin holds
        held = int(proc_value("/proc/self/status", "VmData").partition(" ")[0] or 0)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = (held << 10) + (plan.memory_mb << 20)
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    while True:
        call, each, rollouts, failed_calls = channel.receive()
        size = 1 if each else len(rollouts)
        results: list[Result] = []
        sent = time.monotonic()
        for start in range(0, len(rollouts), size):
            progress.set(call, start)
            one = rollouts[start]
            name = one.task, one.prompt.draw, one.sample, one.attempt, failed_calls[start]
            seed_generators(derive_seed(plan.seed, *name))
            graded = grader.grade(rollouts[start : start + size])
            end_fork()
            if any(map(is_out_of_memory, graded)):
                os._exit(OUT_OF_MEMORY)
            results += graded
            now = time.monotonic()
            if now - sent >= FLUSH_S or start + size >= len(rollouts):
                channel.send((call, results))
                results, sent = [], now
