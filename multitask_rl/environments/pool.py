"""The trainer's side of the worlds: killable worker processes that each hold many episodes."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.boundary.channel import Channel
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Earned, Message, Opening, StepResult
from multitask_rl.errors import MultitaskRLError, PluginError
from multitask_rl.records import Failure, FailureKind
from multitask_rl.scoring.process import START_LIMIT_S, PluginOutput, start_interpreter

CLOSING_S = 5.0
"""Seconds that a worker has to close its worlds when the pool closes."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an episode: what it earned beside the rewards of its steps."""

    earned: Earned


Answer = Opening | StepResult | Ended | Failure


@dataclass(slots=True, eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: Channel
    tickets: set[int] = field(default_factory=set)
    """Of its open episodes."""
    is_ready: bool = False
    """It has answered once."""
    is_retired: bool = False
    """It holds a call that hangs: it gets no new episode, and is killed when its others have ended."""

    def kill(self) -> None:
        """Kill the process and its children. Idempotent."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.channel.hang_up()


class WorldPool:
    """Opens worlds in worker processes and passes messages to them; used by one thread at a time.

    Args:
        specs: task -> its environment.
        num_workers: processes; each starts when it is first needed.
    """

    def __init__(self, specs: Mapping[str, WorldSpec], *, num_workers: int = 2) -> None:
        self._specs = specs
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._owners: dict[int, tuple[_Worker, str]] = {}
        """Ticket of an open episode -> its worker and task."""
        self._deadlines: dict[int, float] = {}
        """Ticket of a call under way -> when it is too late."""
        self._arrived: queue.SimpleQueue[tuple[_Worker, int, Any]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._output = PluginOutput("environment")

    def check(self, task: str) -> None:
        """Build the task's environment once, in a worker, and close it.

        Raises:
            MultitaskRLError: it cannot be built, by its type.
        """
        spec, ticket = self._specs[task], next(self._numbers)
        worker = self._pick()
        worker.tickets.add(ticket)
        self._owners[ticket] = worker, task
        worker.channel.send(("check", ticket, spec))
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                one, number, result = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                worker.kill()
                raise PluginError(
                    f"{spec.where}: {spec.reference!r} was not ready after {START_LIMIT_S:g} s"
                ) from None
            if number == ticket or (number == 0 and one is worker):
                break
        self._release(ticket)
        if number == 0:
            raise PluginError(f"{spec.where}: {spec.reference!r} ended its process {result}")
        if result[0] == "refused":
            error: type[MultitaskRLError] = result[1]
            raise error(result[2])

    def open(self, task: str, row: Mapping[str, Any]) -> int:
        """Begin an episode of ``task`` on ``row``; return its ticket. ``poll`` gives its ``Opening``."""
        ticket, worker = next(self._numbers), self._pick()
        worker.tickets.add(ticket)
        self._owners[ticket] = worker, task
        self._send(ticket, "open", self._specs[task], dict(row))
        return ticket

    def step(self, ticket: int, message: Message) -> None:
        """Pass the actor's message to the world; ``poll`` gives its ``StepResult``."""
        self._send(ticket, "step", dict(message))

    def finish(self, ticket: int) -> None:
        """Ask what the episode earned, and close its world; ``poll`` gives ``Ended``."""
        self._send(ticket, "finish")

    def cancel(self, ticket: int) -> None:
        """Close the world of an episode without an answer. Idempotent."""
        if ticket not in self._owners:
            return
        worker, _ = self._owners[ticket]
        with contextlib.suppress(OSError):
            worker.channel.send(("cancel", ticket))
        self._release(ticket)

    def poll(self, timeout_s: float) -> list[tuple[int, Answer]]:
        """Return the answers that have arrived: (ticket, answer). Waits for one, at most ``timeout_s``.

        A ``Failure`` ends its episode: the world raised, its process ended, or its call took too long.
        """
        until = time.monotonic() + timeout_s
        found: list[tuple[int, Answer]] = []
        while not found:
            now = time.monotonic()
            for ticket in [t for t, deadline in self._deadlines.items() if deadline <= now]:
                worker, task = self._owners[ticket]
                spec = self._specs[task]
                message = f"{spec.where}: a call took longer than turn_timeout_s = {spec.timeout_s:g} s"
                failure = Failure(kind=FailureKind.timeout, message=message, source="environment")
                found.append((ticket, failure))
                worker.is_retired = True  # a thread cannot be killed
                self._release(ticket)
            wait = 0.0 if found else max(0.0, min([until, *self._deadlines.values()]) - now)
            try:
                arrived = [self._arrived.get(timeout=wait) if wait else self._arrived.get_nowait()]
            except queue.Empty:
                if found or time.monotonic() >= until:
                    break
                continue
            with contextlib.suppress(queue.Empty):
                while True:
                    arrived.append(self._arrived.get_nowait())
            for worker, ticket, result in arrived:
                worker.is_ready = True
                if ticket == 0:  # the process ended
                    worker.kill()
                    for own in list(worker.tickets):
                        message = f"the process of the worlds of task {self._owners[own][1]!r} {result}"
                        failure = Failure(kind=FailureKind.infra, message=message, source="environment")
                        found.append((own, failure))
                        self._release(own)
                elif ticket in self._owners:
                    self._deadlines.pop(ticket, None)
                    answer: Answer = Ended(result[1]) if isinstance(result, tuple) else result
                    found.append((ticket, answer))
                    if isinstance(answer, Ended | Failure):
                        self._release(ticket)
        return found

    def close(self) -> None:
        """End every world and every worker. Idempotent."""
        workers, self._workers = self._workers, []
        self._owners.clear()
        self._deadlines.clear()
        for worker in workers:
            worker.channel.hang_up()  # the worker closes its worlds, then ends
        until = time.monotonic() + CLOSING_S
        for worker in workers:
            if not worker.is_retired:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.0, until - time.monotonic()))
            worker.kill()

    def _send(self, ticket: int, order: str, *given: Any) -> None:
        worker, task = self._owners[ticket]
        limit = self._specs[task].timeout_s + (0.0 if worker.is_ready else START_LIMIT_S)
        self._deadlines[ticket] = time.monotonic() + limit
        with contextlib.suppress(OSError):  # the process has ended: its reader reports it
            worker.channel.send((order, ticket, *given))

    def _release(self, ticket: int) -> None:
        worker, _ = self._owners.pop(ticket)
        worker.tickets.discard(ticket)
        self._deadlines.pop(ticket, None)
        if worker.is_retired and not worker.tickets:
            worker.kill()

    def _pick(self) -> _Worker:
        """Return the worker with the fewest episodes; start one if fewer than ``num_workers`` serve."""
        self._workers = [w for w in self._workers if w.process.returncode is None]
        serving = [w for w in self._workers if not w.is_retired and w.process.poll() is None]
        if len(serving) < self._num_workers:
            ours, theirs = socket.socketpair()
            with theirs:
                fd = theirs.fileno()
                process = start_interpreter("multitask_rl.environments.worker", [fd], self._output)
            worker = _Worker(process, Channel(ours))
            threading.Thread(target=self._read, args=(worker, ours.dup()), daemon=True).start()
            self._workers.append(worker)
            return worker
        return min(serving, key=lambda w: len(w.tickets))

    def _read(self, worker: _Worker, sock: socket.socket) -> None:
        """Hand on what a worker sends, until it ends."""
        channel = Channel(sock)
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._arrived.put((worker, *channel.receive()))
        channel.close()
        code = worker.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self._arrived.put((worker, 0, how))
