"""The worker process of worlds: many episodes at once, each in a thread of its own, until its socket closes.

``pool.WorldPool`` starts it. An order is ``(order, ticket, ...)``: ``open`` with a ``WorldSpec``, a row and a
seed, ``step`` with a message, ``finish``, ``cancel``, ``check`` with a ``WorldSpec``, or ``retire``. An
answer is ``(ticket, answer)``: ``BUILT``, what the world says, a ``Failure``, ``CLOSED`` at the end of the
episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from multitask_rl.boundary.channel import Channel
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Earned, Opening, StepResult, World
from multitask_rl.environments.calls import CALL_FACTS
from multitask_rl.errors import DataError, MultitaskRLError, PluginError, described
from multitask_rl.records import ROLES, Failure, FailureKind
from multitask_rl.scoring.results import place_of
from multitask_rl.scoring.worker import PR_SET_PDEATHSIG, enter

BUILT, CLOSED = "built", "closed"
"""The world exists: from here its calls have their time limit. The world is closed: its ticket is free."""
CLOSING_S = 3.0
"""Seconds that worlds have to close after the trainer has closed its end."""
_LARGEST = 1e30
"""Largest reward: sums and squares of rewards stay finite."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an episode: what it earned beside the rewards of its steps."""

    earned: Earned


def main() -> None:
    """Serve the trainer. Arguments: descriptor of the socket, process id of the trainer."""
    enter(int(sys.argv[2]))
    if sys.platform == "linux":
        # When the trainer dies, worlds have time to close; the kernel then ends this process, even in a hang:
        # the handler alarm(SIGTRAP) is alarm(5), and SIGALRM has no handler.
        libc = ctypes.CDLL(None)
        libc.signal(int(signal.SIGTRAP), ctypes.cast(libc.alarm, ctypes.c_void_p))
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTRAP))
        if os.getppid() != int(sys.argv[2]):
            os._exit(1)
    WorldWorker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    sys.stdout.flush()
    sys.stderr.flush()
    os.killpg(0, signal.SIGKILL)  # with threads that hang and processes that worlds have left


class WorldWorker:
    """The episodes of one process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._orders: dict[int, queue.SimpleQueue[tuple[Any, ...]]] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._hanging: set[int] = set()
        """Episodes whose call is too late. The process ends with the last other one."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._keep_loop, daemon=True).start()

    def serve(self) -> None:
        """Pass orders to the threads of their episodes until the trainer closes its end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                order, ticket, *given = self._channel.receive()
                if order in ("open", "check"):
                    self._orders[ticket] = queue.SimpleQueue()
                    target = self._live if order == "open" else self._check
                    thread = threading.Thread(target=target, args=(ticket, *given), daemon=True)
                    self._threads[ticket] = thread
                    try:
                        thread.start()
                    except RuntimeError as error:  # the system gives no more threads
                        self._send(ticket, _failure(error))
                        self._end(ticket)
                elif order == "retire":
                    self._hanging.add(ticket)
                    self._end_if_retired()
                elif (orders := self._orders.get(ticket)) is not None:
                    orders.put((order, *given))
        for orders in list(self._orders.values()):
            orders.put(("cancel",))
        deadline = time.monotonic() + CLOSING_S
        for thread in list(self._threads.values()):
            thread.join(max(0.0, deadline - time.monotonic()))

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, also an async one, and return its result; all async ones share an event loop."""
        result = function(*args, **kwargs)
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def _keep_loop(self) -> None:
        while True:
            with contextlib.suppress(BaseException):  # SystemExit of a task leaves the loop
                self._loop.run_forever()

    def _live(self, ticket: int, spec: WorldSpec, row: dict[str, Any], seed: int) -> None:
        """Live one episode: reset, steps, end. The world is closed once, whatever happens."""
        orders = self._orders[ticket]
        world: World | None = None
        try:
            world = spec.build(self.run, seed)
            self._send(ticket, BUILT)
            self._send(ticket, _checked(world.reset(row), Opening))
            while True:
                order, *given = orders.get()
                if order == "cancel":
                    break
                if order == "finish":
                    self._send(ticket, Ended(_checked_earned(world.earned())))
                    break
                self._send(ticket, _checked(world.step(*given), StepResult))
        except BaseException as error:  # noqa: BLE001 - foreign code
            self._send(ticket, _failure(error))
        if world is not None:
            try:
                world.close()
            except BaseException as error:  # noqa: BLE001 - the episode is over
                sys.stderr.write(f"{spec.where}: close failed: {described(error)}\n")
        self._end(ticket)

    def _check(self, ticket: int, spec: WorldSpec) -> None:
        try:
            spec.build(self.run).close()
        except MultitaskRLError as error:
            self._send(ticket, error)
        except BaseException as error:  # noqa: BLE001 - foreign code
            message = f"{spec.where}: {described(error)}{place_of(error)}"
            self._send(ticket, PluginError(message))
        self._end(ticket)

    def _send(self, ticket: int, answer: Any) -> None:
        if os.getpid() != self._pid:  # a fork of the worker that a world let return
            os._exit(0)
        with self._sending, contextlib.suppress(OSError):
            self._channel.send((ticket, answer))

    def _end(self, ticket: int) -> None:
        self._orders.pop(ticket, None)
        self._threads.pop(ticket, None)
        self._send(ticket, CLOSED)
        self._end_if_retired()

    def _end_if_retired(self) -> None:
        if self._hanging and not self._threads.keys() - self._hanging:
            os.killpg(0, signal.SIGKILL)


def _failure(error: BaseException) -> Failure:
    kind = FailureKind.data if isinstance(error, DataError) else FailureKind.infra
    message = f"{described(error)}{place_of(error)}"
    return Failure(kind=kind, message=message, source="environment")


def _checked(answer: Any, expected: type[Opening] | type[StepResult]) -> Opening | StepResult:
    """Return the answer of a world with values that JSON has: the trainer knows no classes of a world.

    Raises:
        TypeError, ValueError: it is no such answer.
    """
    if not isinstance(answer, expected):
        raise TypeError(
            f"the world returned {answer!r}; expected a {expected.__name__} of {expected.__module__}"
        )
    for message in answer.messages:
        is_message = isinstance(message, Mapping)
        if not (is_message and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise TypeError(
                f"{message!r:.500} is no message; expected a mapping with the texts 'role' and 'content'"
            )
        if message["role"] not in ROLES:
            raise TypeError(f"the role {message['role']!r:.100} is none of {', '.join(ROLES)}")
    messages = _plain([dict(message) for message in answer.messages])
    # a text is a sequence of letters, and every answer holds the empty text
    if isinstance(answer.stop, str) or not all(isinstance(text, str) and text for text in answer.stop):
        raise TypeError(f"stop is {answer.stop!r:.200}; expected a list of texts that are not empty")
    stop = tuple(_plain(list(answer.stop)))
    if isinstance(answer, Opening):
        return Opening(
            messages=messages,
            suffix=_plain(answer.suffix),
            tools=_plain(list(answer.tools)),
            is_whole=answer.is_whole,
            max_tokens=int(answer.max_tokens),
            stop=stop,
        )
    anew = None if answer.anew is None else _checked(answer.anew, Opening)
    assert not isinstance(anew, StepResult)
    done: Any = answer.done
    if isinstance(done, str):  # "no" would end the episode
        raise TypeError(f"done is the text {done!r:.100}, expected True or False")
    if not (answer.done or messages or anew):
        raise ValueError("step(message) returned no message; an episode that is over has done=True")
    info = _plain(dict(answer.info))
    for key in CALL_FACTS & info.keys():
        counts = info[key].values() if isinstance(info[key], Mapping) else [None]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise TypeError(f"info[{key!r}] is {info[key]!r:.200}, expected how often, by name")
    return StepResult(
        messages=messages,
        done=bool(answer.done),
        reward=_checked_earned(answer.reward),
        info=info,
        anew=anew,
        max_tokens=int(answer.max_tokens),
        stop=stop,
    )


def _checked_earned(earned: Any) -> Earned:
    """Return numbers of usual size; a part of None is unscored and left out."""
    try:
        if isinstance(earned, Mapping):
            parts = {str(name): _number(value) for name, value in earned.items() if value is not None}
        else:
            parts = {} if earned is None else {"": _number(earned)}
    except (TypeError, ValueError) as error:
        raise TypeError(f"the reward {earned!r} is no number, no mapping of numbers, and not None") from error
    if not all(abs(value) <= _LARGEST for value in parts.values()):
        raise ValueError(f"the reward {earned!r} is not finite, or larger than {_LARGEST:g}")
    return parts.get("") if not isinstance(earned, Mapping) else parts or None


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):  # as in a reward's result
        raise TypeError("text")
    return float(value)


def _plain(value: Any) -> Any:
    """Return ``value`` as JSON holds it; halves of surrogate pairs, which no tokenizer takes, become "?"."""

    def known(part: Any) -> Any:
        if isinstance(part, Mapping):
            return dict(part)
        try:
            return part.tolist()  # a number or an array of numpy or torch
        except AttributeError as error:
            raise TypeError(f"{part!r} of an environment has no JSON form") from error

    return json.loads(json.dumps(value, ensure_ascii=False, default=known).encode("utf-8", "replace"))
