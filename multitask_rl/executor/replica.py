"""One engine in its Ray actor.

The engine decodes in a thread and waits for the caller only when a monitor has to look at responses: monitors
ask reward pools, so they stay with the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from multitask_rl.rollout.base import Ended, GenerationRequest, Monitor, RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.models.actor import Actor

SLICE_S = 0.05
"""Samples that end within this time travel together; their scoring begins that much later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Unfinished responses that the caller's monitor number ``monitor`` must check (``Monitor.check``)."""

    monitor: int
    partial: list[tuple[int, list[int]]]


@dataclass(slots=True)
class _Proxy:
    """Replaces the caller's monitor ``number`` in a request that travels; the replica sets ``ask``."""

    number: int
    ask: Callable[[Look], Sequence[bool]] | None = None

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> Sequence[bool]:
        """See ``rollout.base.Monitor``."""
        assert self.ask is not None, "a proxy is asked in the replica only"
        return self.ask(Look(monitor=self.number, partial=list(partial)))


def without_monitors(
    requests: Sequence[GenerationRequest],
) -> tuple[list[GenerationRequest], list[Monitor]]:
    """Return the requests with a numbered proxy for each monitor, and the monitors in that order."""
    proxies: dict[int, _Proxy] = {}
    monitors: list[Monitor] = []
    travelling = []
    for request in requests:
        if request.watch is not None:
            monitor = request.watch.monitor
            if id(monitor) not in proxies:
                proxies[id(monitor)] = _Proxy(len(monitors))
                monitors.append(monitor)
            request = replace(request, watch=replace(request.watch, monitor=proxies[id(monitor)]))
        travelling.append(request)
    return travelling, monitors


class _Stopped(BaseException):
    """The caller gave the stream up while the engine waited for an answer."""


class EngineReplica:
    """An engine in a process of its own, with the copy of the actor it was built from."""

    def __init__(self, engine: RolloutEngine, actor: Actor) -> None:
        self._engine = engine
        # only an engine that samples from the actor's own tensors needs the copy of the actor
        self._model: Any = actor.model if engine.shares_weights else None
        self._events: SimpleQueue[list[Ended] | Look | BaseException | None] = SimpleQueue()
        """None: the stream is at its end."""
        self._answers: SimpleQueue[Sequence[bool] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_stopped = False

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Start to generate; a stream that is open is given up."""
        self.stop()
        for request in requests:
            if request.watch is not None:
                assert isinstance(request.watch.monitor, _Proxy)
                request.watch.monitor.ask = self._ask
        self._events, self._answers, self._is_stopped = SimpleQueue(), SimpleQueue(), False
        self._thread = Thread(target=self._generate, args=(requests,), name="replica", daemon=True)
        self._thread.start()

    def _generate(self, requests: Sequence[GenerationRequest]) -> None:
        try:
            for part in self._engine.generate_stream(requests):
                self._events.put(part)
                if self._is_stopped:
                    break  # drops the stream, which ends it in the engine
            self._events.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the events are fetched
            self._events.put(error)

    def _ask(self, look: Look) -> Sequence[bool]:
        self._events.put(look)
        answer = self._answers.get()
        if answer is None:
            raise _Stopped
        return answer

    def advance(self, answer: Sequence[bool] | None) -> tuple[list[Ended], Look | None, bool]:
        """Return what ended since the last call, a ``Look`` to answer, and whether the stream is at its end.

        It returns at once with a ``Look`` or the end, else with the samples of a slice of time, at least one:
        a call costs about as much as a decode step of a small model.

        Args:
            answer: to the last ``Look``.
        """
        assert self._thread is not None, "begin comes first"
        if answer is not None:
            self._answers.put(answer)
        found: list[Ended] = []
        until = time.monotonic() + SLICE_S
        while True:
            try:
                event = self._events.get(timeout=max(0.0, until - time.monotonic()) if found else None)
            except Empty:
                return found, None, False
            if isinstance(event, BaseException):
                raise event
            if event is None or isinstance(event, Look):
                return found, event, event is None
            found += event

    def stop(self) -> None:
        """End the open stream: at once if it waits for an answer, else when the next sample ends."""
        if self._thread is not None:
            self._is_stopped = True
            self._answers.put(None)
            self._thread.join()
            self._thread = None

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        self._engine.retain(conversations)

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Use ``weights`` from now on."""
        self.stop()
        if self._model is None:
            self._engine.update_weights(weights, policy_version)
            return
        import torch

        own = self._model.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self._engine.update_weights({}, policy_version)
