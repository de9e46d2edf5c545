"""The trainer's side of the worlds: killable worker processes that each hold many episodes."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from multitask_rl.boundary.channel import Channel
from multitask_rl.boundary.printable import counted
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Message, Opening, StepResult
from multitask_rl.environments.worker import BUILT, CLOSED, Ended
from multitask_rl.environments.worker import CLOSING_S as WORKER_CLOSING_S
from multitask_rl.errors import MultitaskRLError, PluginError
from multitask_rl.records import Failure, FailureKind
from multitask_rl.scoring.process import START_LIMIT_S, PluginOutput, WorkerDiedError, start_interpreter

CLOSING_S = WORKER_CLOSING_S + 2.0
"""Seconds that a worker has to end when the pool closes."""
MOST_EPISODES = 1024
"""Most episodes of a worker at once."""
CLEAN_ENDS = 8
"""Episodes that must end in order before a worker may hold twice as many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lost(Failure):
    """The process of the world ended, perhaps because of another episode in it."""


class LostAlone(Lost):
    """The process of the world ended, with no other episode in it."""


Answer = Opening | StepResult | Ended | Failure


class _Worker:
    """A worker process. One thread starts it and reads its answers, another sends it orders.

    So a process that does not read does not block the pool's thread, and the process may live longer than
    that thread (see ``start_interpreter``).
    """

    def __init__(self, arrived: queue.SimpleQueue[Arrival], output: PluginOutput) -> None:
        self.tickets: set[int] = set()
        """Tickets of its episodes, also of those that are being closed."""
        self.is_retired = False
        """It holds a call that hangs: it gets no new episode, and is killed when its others have ended."""
        self.has_ended = False
        self._arrived = arrived
        self._output = output
        self._orders: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_started = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="world-worker", daemon=True)
        self._keeper.start()

    def send(self, *order: Any) -> None:
        """Send an order; nothing happens if the process has ended."""
        self._orders.put(order)

    def hang_up(self) -> None:
        """Let the process close its worlds and end."""
        self._orders.put(None)

    def kill(self) -> None:
        """Kill the process and its children. Idempotent."""
        self._is_started.wait()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing of the process is left; return whether that is so."""
        self._keeper.join(timeout_s)
        return not self._keeper.is_alive()

    def _keep(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                fds = [theirs.fileno()]
                self._process = start_interpreter("multitask_rl.environments.worker", fds, self._output)
        except OSError as error:
            ours.close()
            self._put(0, f"could not be started: {error}")
            return
        finally:
            self._is_started.set()
        channel = Channel(ours)
        sender = threading.Thread(target=self._send, args=(channel, ours), daemon=True)
        sender.start()
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._put(*channel.receive())
        with contextlib.suppress(subprocess.TimeoutExpired):  # its socket is closed, but it lives
            self._process.wait(timeout=5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its children may live
        reason = WorkerDiedError(self._process.wait()).reason
        self._orders.put(None)
        sender.join()
        channel.close()
        self._put(0, reason)

    def _put(self, ticket: int, answer: Any) -> None:
        self._arrived.put((self, ticket, answer, time.monotonic()))

    def _send(self, channel: Channel, sock: socket.socket) -> None:
        while (order := self._orders.get()) is not None:
            try:
                channel.send(order)
            except pickle.PicklingError as error:
                message = f"a row or message cannot be sent to the environment: {error}"
                failure = Failure(kind=FailureKind.data, message=message, source="environment")
                self._put(order[1], failure)
                if order[0] == "open":
                    self._put(order[1], CLOSED)
            except OSError:
                return
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)


Arrival = tuple[_Worker, int, Any, float]
"""Worker, ticket (0 = the process has ended), answer, and when it arrived."""


@dataclass(slots=True)
class _Episode:
    task: str
    order: tuple[Any, ...]
    """Order that begins the episode, kept until it has a worker."""
    worker: _Worker | None = None
    asked_at: float | None = field(default_factory=time.monotonic)
    """Time at which the call under way began; its wait for a worker counts."""
    deadline: float | None = None
    """Time at which the call under way is too late."""
    is_open: bool = True
    """The caller has neither cancelled it nor got its last answer."""
    is_built: bool = False
    error: MultitaskRLError | None = None
    """Why a check failed."""


class WorldPool:
    """Opens worlds in worker processes and passes messages to them; used by one thread at a time.

    A call that takes too long ends its episode and retires its worker: the other episodes there go on, new
    ones go elsewhere. The death of a worker ends all of its episodes; after it, new ones share a worker with
    few others until some have ended in order.

    Args:
        specs: task -> its environment.
        num_workers: processes; each starts when it is first needed. As many retired ones may still run.
        in_lockstep: for ``RolloutStage``: see ``rollout.lockstep``.
    """

    def __init__(
        self, specs: Mapping[str, WorldSpec], *, num_workers: int = 2, in_lockstep: bool = False
    ) -> None:
        self.in_lockstep = in_lockstep
        self._specs = specs
        self._num_workers = num_workers
        self._workers: list[_Worker] = []
        self._episodes: dict[int, _Episode] = {}
        self._waiting: deque[int] = deque()
        """Tickets of episodes without a worker."""
        self._limit = MOST_EPISODES
        """Episodes of a worker."""
        self._paused: set[int] = set()
        self._num_clean = 0
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._seconds: dict[int, float] = {}
        self._answers: list[tuple[int, Answer]] = []
        """Answers that ``poll`` has not returned yet."""
        self._numbers = itertools.count(1)
        self._output = PluginOutput("environment")

    @property
    def num_queued(self) -> int:
        """Episodes that wait for a place in a worker."""
        return len(self._waiting)

    def check(self, task: str) -> None:
        """Build the task's environment once, in a worker, and close it.

        Raises:
            MultitaskRLError: it cannot be built, by its type.
        """
        ticket = self._begin("check", task, self._specs[task])
        episode = self._episodes[ticket]
        while ticket in self._episodes:
            self._collect(1.0)
        for answered, answer in list(self._answers):
            if answered == ticket:
                self._answers.remove((ticket, answer))
                assert isinstance(answer, Failure)
                raise PluginError(f"{self._specs[task].where}: {answer.message}")
        if episode.error is not None:
            raise episode.error

    def open(self, task: str, row: Mapping[str, Any], seed: int = 0) -> int:
        """Begin an episode of ``task`` on ``row``; return its ticket. ``poll`` gives its ``Opening``."""
        return self._begin("open", task, self._specs[task], dict(row), seed)

    def step(self, ticket: int, message: Message) -> None:
        """Pass the actor's message to the world; ``poll`` gives its ``StepResult``."""
        self._order(ticket, "step", dict(message))

    def finish(self, ticket: int) -> None:
        """Ask what the episode earned, and close its world; ``poll`` gives ``Ended``."""
        self._order(ticket, "finish")

    def cancel(self, ticket: int) -> None:
        """Close the world of an episode; ``poll`` returns no answer for it. Idempotent."""
        self._answers = [(one, answer) for one, answer in self._answers if one != ticket]
        self._seconds.pop(ticket, None)
        episode = self._episodes.get(ticket)
        if episode is None or not episode.is_open:
            return
        episode.is_open = False
        if episode.worker is None:
            self._waiting.remove(ticket)
            del self._episodes[ticket]
        else:
            self._order(ticket, "cancel")

    def pause(self, tickets: Collection[int]) -> None:
        """Let the episodes ``tickets`` take no place in their workers while nothing is sampled for them.

        A later call replaces ``tickets``; with none, all episodes take a place again.
        """
        self._paused = set(tickets)

    def take_seconds(self, ticket: int) -> float:
        """Return how long the calls of an episode took since this was last asked."""
        return self._seconds.pop(ticket, 0.0)

    def poll(self, timeout_s: float, tickets: Collection[int] | None = None) -> list[tuple[int, Answer]]:
        """Return the answers that have arrived: (ticket, answer). Waits for one, at most ``timeout_s``.

        With ``tickets`` the answers of other episodes stay for a later call. A ``Failure`` ends its episode:
        the world raised, its process ended, or its call took too long.
        """
        until = time.monotonic() + timeout_s
        self._collect(0.0)
        while True:
            answers = [(t, a) for t, a in self._answers if tickets is None or t in tickets]
            left = until - time.monotonic()
            if answers or left <= 0:
                break
            self._collect(left)
        self._answers = [] if tickets is None else [(t, a) for t, a in self._answers if t not in tickets]
        return answers

    def close(self) -> None:
        """End every world and every worker. Idempotent."""
        self._episodes.clear()
        self._waiting.clear()
        self._answers.clear()
        self._seconds.clear()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up()
        until = time.monotonic() + CLOSING_S
        for worker in workers:
            if not worker.join(max(0.0, until - time.monotonic())):
                worker.kill()
                worker.join()

    def _begin(self, kind: str, task: str, *given: Any) -> int:
        ticket = next(self._numbers)
        self._episodes[ticket] = _Episode(task, (kind, ticket, *given))
        self._waiting.append(ticket)
        self._place()
        return ticket

    def _place(self) -> None:
        """Give waiting episodes to workers."""
        while self._waiting:
            serving = [w for w in self._workers if not (w.is_retired or w.has_ended)]
            worker = min(serving, key=lambda w: len(w.tickets - self._paused), default=None)
            if (worker is None or worker.tickets) and len(serving) < self._num_workers:
                worker = _Worker(self._arrived, self._output)
                self._workers.append(worker)
            if worker is None or len(worker.tickets - self._paused) >= self._limit:
                return
            ticket = self._waiting.popleft()
            episode = self._episodes[ticket]
            episode.worker, order, episode.order = worker, episode.order, ()
            worker.tickets.add(ticket)
            episode.deadline = time.monotonic() + START_LIMIT_S
            worker.send(*order)

    def _order(self, ticket: int, order: str, *given: Any) -> None:
        episode = self._episodes.get(ticket)
        if episode is not None and episode.worker is not None:  # else its failure is on the way
            episode.asked_at = time.monotonic()
            episode.deadline = time.monotonic() + self._time_limit(episode)
            episode.worker.send(order, ticket, *given)

    def _time_limit(self, episode: _Episode) -> float:
        return self._specs[episode.task].timeout_s if episode.is_built else START_LIMIT_S

    def _collect(self, timeout_s: float) -> None:
        """Take what has arrived into ``_answers``; wait for it at most ``timeout_s``."""
        now = time.monotonic()
        deadlines = [e.deadline for e in self._episodes.values() if e.deadline is not None]
        wait = min([timeout_s, *(deadline - now for deadline in deadlines)])
        try:
            arrival = self._arrived.get(timeout=max(0.0, wait))
            while True:
                self._take(*arrival)
                arrival = self._arrived.get_nowait()
        except queue.Empty:
            pass
        now = time.monotonic()
        for ticket, episode in list(self._episodes.items()):
            if episode.deadline is not None and episode.deadline <= now:
                self._give_up(ticket, episode)
        self._place()

    def _take(self, worker: _Worker, ticket: int, answer: Any, at: float) -> None:
        if ticket == 0:
            self._lose(worker, answer)
            return
        episode = self._episodes.get(ticket)
        if episode is None:  # too late
            return
        if answer == BUILT:
            episode.is_built = True
            episode.deadline = time.monotonic() + self._time_limit(episode)
        elif answer == CLOSED:
            self._release(ticket)
            if episode.error is None and self._limit < MOST_EPISODES:
                self._num_clean += 1
                if self._num_clean >= CLEAN_ENDS:
                    self._limit, self._num_clean = 2 * self._limit, 0
        elif isinstance(answer, MultitaskRLError):
            episode.error = answer
        else:
            if episode.is_open:
                self._answer(ticket, answer, at)
                episode.is_open = not isinstance(answer, Ended | Failure)
            # a world that is closed now, because of this answer or of ``cancel``, has a time limit as well
            episode.deadline = None if episode.is_open else time.monotonic() + self._time_limit(episode)

    def _lose(self, worker: _Worker, reason: str) -> None:
        """Fail the episodes of a worker that has ended."""
        worker.has_ended = True
        self._workers.remove(worker)
        if worker.tickets:
            self._num_clean = 0
        if len(worker.tickets) > 1 and not worker.is_retired:
            self._limit = 1
        if worker.is_retired:
            reason = "was killed because another call in it hangs"
        num_others = len(worker.tickets) - 1
        shared = f" with those of {counted(num_others, 'other episode')}" if num_others > 0 else ""
        for ticket in list(worker.tickets):
            message = f"the process of this world{shared} {reason}"
            self._fail(ticket, FailureKind.infra, message, Lost if shared or worker.is_retired else LostAlone)

    def _give_up(self, ticket: int, episode: _Episode) -> None:
        """Fail an episode whose call is too late, and retire its worker: a thread cannot be killed."""
        spec, worker = self._specs[episode.task], episode.worker
        assert worker is not None
        if episode.is_built:
            message = f"a call took longer than turn_timeout_s = {spec.timeout_s:g} s"
        else:
            message = f"{spec.reference!r} was not ready after {START_LIMIT_S:g} s"
        worker.is_retired = True
        worker.send("retire", ticket)
        self._fail(ticket, FailureKind.timeout, message)
        retired = [w for w in self._workers if w.is_retired and not w.has_ended]
        if not worker.tickets:
            worker.kill()
        elif len(retired) > self._num_workers:
            min(retired, key=lambda w: len(w.tickets)).kill()

    def _fail(self, ticket: int, kind: FailureKind, message: str, cls: type[Failure] = Failure) -> None:
        if self._episodes[ticket].is_open:
            failure = cls(kind=kind, message=message, source="environment")
            self._answer(ticket, failure, time.monotonic())
        self._release(ticket)

    def _answer(self, ticket: int, answer: Answer, at: float) -> None:
        self._answers.append((ticket, answer))
        episode = self._episodes[ticket]
        if episode.asked_at is not None:  # a worker may end while no call is under way
            self._seconds[ticket] = self._seconds.get(ticket, 0.0) + at - episode.asked_at
            episode.asked_at = None

    def _release(self, ticket: int) -> None:
        worker = self._episodes.pop(ticket).worker
        assert worker is not None
        worker.tickets.discard(ticket)
        if worker.is_retired and not worker.tickets:
            worker.kill()
