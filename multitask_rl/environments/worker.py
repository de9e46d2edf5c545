"""The worker process of worlds: many episodes at once, each in a thread of its own, until its socket closes.

``pool.WorldPool`` starts it. A message is ``(order, ticket, ...)``: ``open`` with a ``WorldSpec`` and a row,
``step`` with a message, ``finish``, ``cancel``, or ``check`` with a ``WorldSpec``. An answer is ``(ticket,
result)``.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from multitask_rl.boundary.channel import Channel
from multitask_rl.environments.adapt import WorldSpec, check_earned
from multitask_rl.environments.base import World
from multitask_rl.errors import DataError, MultitaskRLError
from multitask_rl.records import Failure, FailureKind
from multitask_rl.scoring.worker import enter

CLOSING_S = 2.0
"""Seconds that worlds have to close after the trainer is gone."""


def main() -> None:
    """Serve the trainer. Arguments: descriptor of the socket, process id of the trainer."""
    enter(int(sys.argv[2]))
    WorldWorker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that hang must not keep the process


class WorldWorker:
    """The episodes of one process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._orders: dict[int, queue.SimpleQueue[tuple[Any, ...]]] = {}
        self._threads: list[threading.Thread] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def serve(self) -> None:
        """Pass orders to the threads of their episodes until the trainer closes its end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                order, ticket, *given = self._channel.receive()
                if order in ("open", "check"):
                    self._threads = [t for t in self._threads if t.is_alive()]
                    self._orders[ticket] = queue.SimpleQueue()
                    target = self._live if order == "open" else self._check
                    thread = threading.Thread(target=target, args=(ticket, *given), daemon=True)
                    self._threads.append(thread)
                    thread.start()
                elif ticket in self._orders:
                    self._orders[ticket].put((order, *given))
        for orders in list(self._orders.values()):
            orders.put(("cancel",))
        deadline = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, also an async one, and return its result; all async ones share an event loop."""
        result = function(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _live(self, ticket: int, spec: WorldSpec, row: dict[str, Any]) -> None:
        """Live one episode: reset, steps, end. The world is closed once, whatever happens."""
        orders = self._orders[ticket]
        world: World | None = None
        try:
            world = spec.build(self.run)
            self._answer(ticket, world.reset(row))
            while True:
                order, *given = orders.get()
                if order == "cancel":
                    break
                if order == "finish":
                    self._answer(ticket, ("ended", check_earned(world.earned())))
                    break
                self._answer(ticket, world.step(*given))
        except Exception as error:  # noqa: BLE001 - foreign code
            kind = FailureKind.data if isinstance(error, DataError) else FailureKind.infra
            message = f"{spec.where}: {type(error).__name__}: {error}"
            self._answer(ticket, Failure(kind=kind, message=message, source="environment"))
        finally:
            del self._orders[ticket]
            if world is not None:
                try:
                    world.close()
                except Exception as error:  # noqa: BLE001 - the episode is over
                    sys.stderr.write(f"{spec.where}: close failed: {type(error).__name__}: {error}\n")

    def _check(self, ticket: int, spec: WorldSpec) -> None:
        result: tuple[Any, ...] = ("checked",)
        try:
            spec.build(self.run).close()
        except MultitaskRLError as error:
            result = ("refused", type(error), str(error))
        except Exception as error:  # noqa: BLE001 - foreign code
            result = ("refused", MultitaskRLError, f"{spec.where}: {type(error).__name__}: {error}")
        del self._orders[ticket]
        self._answer(ticket, result)

    def _answer(self, ticket: int, result: Any) -> None:
        with self._sending, contextlib.suppress(OSError):
            try:
                self._channel.send((ticket, result))
            except pickle.PicklingError as error:
                message = f"what the environment returned cannot be sent to the trainer: {error}"
                failure = Failure(kind=FailureKind.infra, message=message, source="environment")
                self._channel.send((ticket, failure))
