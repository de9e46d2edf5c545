"""One engine in its Ray actor.

The engine generates in a thread. Monitors need the reward pools and run in the caller's process, so the
engine waits while a monitor checks responses. ``advance`` returns regularly while the engine makes steps: if
it does not return, the engine hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import MergedWeights
from multitask_rl.rollout.base import Ended, GenerationRequest, Monitor, RolloutEngine

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
    """An engine in a process of its own, with the copy of the actor it is built from.

    Args:
        build: returns the engine and its actor; called by ``load``.
        beat_s: seconds without an ended sample after which ``advance`` returns, if the engine made a step.
    """

    _engine: RolloutEngine

    def __init__(self, build: Callable[[], tuple[RolloutEngine, Actor]], beat_s: float) -> None:
        self._build = build
        self._beat_s = beat_s
        self._model: Any = None
        self._counts_steps = False
        self._num_steps = self._num_told = 0
        self._events: SimpleQueue[list[Ended] | Look | BaseException | None] = SimpleQueue()
        """None: the stream is at its end."""
        self._answers: SimpleQueue[Sequence[bool] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._is_stopped = False

    def load(self) -> None:
        """Build the engine."""
        self._engine, actor = self._build()
        if self._engine.shares_weights:  # no other needs the copy of the actor
            self._model = actor.model
        self._counts_steps = self._engine.call_between_steps(self._between_steps)

    def _between_steps(self) -> None:
        self._num_steps += 1
        if self._is_stopped:
            raise _Stopped

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
        """Return the samples that ended, a ``Look`` to answer or None, and whether the stream has ended.

        It returns

        - at once with a ``Look``, at the end of the stream, and with an exception of the engine;
        - after ``SLICE_S`` seconds, or at the first sample if that is later: a call per sample would cost as
          much as a decode step of a small model;
        - without samples, if none ended in ``beat_s`` seconds but the engine made a step. If it made none,
          the call goes on and the caller's time limit finds the hang. Before its first step an engine may
          compile, and some engines report no steps: then the call returns.

        Args:
            answer: the answer to the last ``Look``.
        """
        assert self._thread is not None, "begin comes first"
        if answer is not None:
            self._answers.put(answer)
        found: list[Ended] = []
        until = time.monotonic() + SLICE_S
        while True:
            try:
                left = max(0.0, until - time.monotonic()) if found else self._beat_s
                event = self._events.get(timeout=left)
            except Empty:
                told, self._num_told = self._num_told, self._num_steps
                if found or not self._counts_steps or not told or self._num_steps > told:
                    return found, None, False
                continue
            if isinstance(event, BaseException):
                raise event
            if event is None or isinstance(event, Look):
                return found, event, event is None
            found += event

    def stop(self) -> None:
        """End the open stream before its next step; in an engine that counts none, when a sample ends."""
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
        if isinstance(weights, MergedWeights):
            weights.to_device()
        if self._model is None:
            self._engine.update_weights(weights, policy_version)
            return
        own = self._model.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)
        self._engine.update_weights({}, policy_version)
