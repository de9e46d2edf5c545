"""Rank 0's connections to the other learner ranks: starts them, exchanges messages, notices lost ranks."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from multitask_rl.boundary.channel import Channel
from multitask_rl.errors import MultitaskRLError, TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_LIMIT_S = 180.0
REPORT_EVERY_S = 30.0


class Helper(Protocol):
    """The process of a learner rank that was started."""

    def ended(self) -> str:
        """Return how it ended; empty while it runs."""

    def kill(self) -> None:
        """End it. Idempotent."""


Launch = Callable[[dict[str, Any]], Helper]
"""Starts a process that calls ``replica.serve`` with these arguments."""


class RankConnections:
    """Starts the ranks 1 .. ``size`` - 1, which connect to this process at the address ``host``.

    Raises:
        TrainingError: a rank did not start.
    """

    def __init__(self, launch: Launch, size: int, host: str) -> None:
        self._others = range(1, size)
        self._inbox: queue.SimpleQueue[tuple[int, str, Any, float]] = queue.SimpleQueue()
        self._channels: dict[int, Channel] = {}
        self._helpers: dict[int, Helper] = {}
        self.arrived: dict[int, float] = {}
        """Rank -> when it was last ready for the sum of gradients (this process's clock)."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called in another thread when a rank has failed or hung up; ends what waits for that rank."""
        self._lost: MultitaskRLError | None = None
        """The first failure; the ranks cannot be used after it."""
        token = secrets.token_hex(16)
        try:
            with socket.create_server((host, 0)) as server:
                server.settimeout(0.2)
                where = {"host": host, "port": server.getsockname()[1], "token": token}
                for rank in self._others:
                    self._helpers[rank] = launch({**where, "rank": rank})
                deadline = time.monotonic() + START_LIMIT_S
                while len(self._channels) < len(self._others):
                    for rank, helper in self._helpers.items():
                        if rank not in self._channels and (end := helper.ended()):
                            raise TrainingError(f"learner rank {rank} did not start: it {end}")
                    if time.monotonic() > deadline:
                        missing = sorted(set(self._helpers) - set(self._channels))
                        raise TrainingError(
                            f"learner ranks {missing} did not connect within {START_LIMIT_S:g} s to {host}; "
                            "check that this address can be reached from where they run"
                        )
                    with contextlib.suppress(TimeoutError):
                        self._admit(server.accept()[0], token)
        except BaseException:
            self.close()
            raise

    def _admit(self, sock: socket.socket, token: str) -> None:
        """Accept the connection of a rank that sends the token; nothing is unpickled before."""
        sock.settimeout(2.0)
        greeting = b""
        with contextlib.suppress(OSError):
            while len(greeting) < len(token) + 9 and (more := sock.recv(len(token) + 9 - len(greeting))):
                greeting += more
        said, _, number = greeting.decode(errors="replace").partition(" ")
        if not secrets.compare_digest(said.encode(), token.encode()) or not number.isdigit():
            logger.warning("refused a connection without the token to the port of the learner ranks")
            sock.close()
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rank = int(number)
        channel = self._channels[rank] = Channel(sock)
        threading.Thread(
            target=self._read, args=(rank, channel), name=f"learner-rank-{rank}", daemon=True
        ).start()

    def _read(self, rank: int, channel: Channel) -> None:
        kind = ""
        while kind not in ("gone", "failed"):
            try:
                kind, content = channel.receive()
            except (EOFError, OSError):
                kind, content = "gone", None
            except Exception as error:  # noqa: BLE001 - unpickling can raise anything; ``receive`` raises it
                kind, content = "failed", (None, f"its message cannot be read: {error!r}")
            self._inbox.put((rank, kind, content, time.monotonic()))
        self.on_lost()

    @property
    def has_lost(self) -> bool:
        """Whether a rank has ended or a call was interrupted, so that every call fails."""
        return self._lost is not None

    def send(self, rank: int, message: Any) -> None:
        """Send ``message`` to ``rank``; errors as of ``receive``, and ``pickle.PicklingError``."""
        if self._lost is not None:
            raise self._lost
        try:
            self._channels[rank].send(message)
        except OSError as error:
            self.collect("done", "the start of a call", until=time.monotonic() + 5.0)
            raise TrainingError(f"learner rank {rank} cannot be reached: {error}") from error

    def collect(self, kind: str, what: str, until: float | None = None) -> dict[int, Any]:
        """Return by rank the message of ``kind`` of every other rank; of fewer at the time ``until``."""
        found: dict[int, Any] = {}
        while late := [rank for rank in self._others if rank not in found]:
            message = self.receive(what, late, until)
            if message is None:
                break
            rank, got, content = message
            if got == kind:
                found[rank] = content
        return found

    def receive(
        self, what: str, late: Sequence[int], until: float | None = None
    ) -> tuple[int, str, Any] | None:
        """Return the next message (rank, kind, content); None if there is none before ``until``.

        The log and errors name the present work, ``what``, and the ranks that have not answered, ``late``.

        Raises:
            MultitaskRLError: the error of a failed rank, by its type; ``TrainingError`` if the rank died.
        """
        if self._lost is not None:
            raise self._lost
        began = time.monotonic()
        while True:
            now = time.monotonic()
            left = REPORT_EVERY_S if until is None else max(0.0, until - now)
            try:
                rank, kind, content, at = self._inbox.get(timeout=min(left, REPORT_EVERY_S))
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    return None
                names = ", ".join(map(str, late))
                logger.warning("waiting for learner rank %s in %s for %.0f s", names, what, now - began)
                continue
            if kind in ("gone", "failed"):
                # a signal may interrupt ``_failure``, which waits, and the rank sends no second message
                self._lost = TrainingError(f"learner rank {rank} hung up during {what}")
                self._lost = self._failure(rank, what, content)
                raise self._lost
            if kind == "arrived":
                self.arrived[rank] = at
            return rank, kind, content

    def _failure(
        self, rank: int, what: str, content: tuple[type[MultitaskRLError] | None, str] | None
    ) -> MultitaskRLError:
        """Return the error of a rank that failed or (None) hung up."""
        if content is None:
            how = ""
            for _ in range(50):
                if rank not in self._helpers or (how := self._helpers[rank].ended()):
                    break
                time.sleep(0.1)
            return TrainingError(
                f"learner rank {rank} {how or 'hung up'} during {what}; the last checkpoint is intact. Less "
                "memory per rank: lower batch.tokens_per_microbatch"
            )
        error_class, text = content
        if error_class is not None:
            return error_class(text)
        return TrainingError(
            f"learner rank {rank} failed during {what}; the last checkpoint is intact\n{text}"
        )

    def meet(self, make: Callable[[], T], what: str) -> T:
        """Return the result of ``make``, which waits for all ranks; raises as ``receive`` if a rank is lost.

        torch notices a dead process only by its own time limit. Until then ``make`` stays in its thread.
        """
        meeting: Future[T] = Future()

        def run() -> None:
            try:
                meeting.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised below; without it the wait has no end
                meeting.set_exception(error)
            self._inbox.put((0, "met", None, time.monotonic()))

        threading.Thread(target=run, name="learner-ranks-meet", daemon=True).start()
        while not meeting.done():
            self.receive(what, self._others)
        return meeting.result()

    def give_up(self, why: str) -> None:
        """Make every later call fail: an interrupted call leaves the ranks in an unknown state."""
        self._lost = self._lost or TrainingError(f"a call of the learner ranks was interrupted: {why}")

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self._lost = TrainingError(
            "the learner ranks have ended and their parts of the optimizer's state with them; start again "
            "from the last checkpoint"
        )
        for channel in self._channels.values():
            channel.hang_up()
        for helper in self._helpers.values():
            helper.kill()
        self._helpers = {}
