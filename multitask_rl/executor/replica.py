"""One engine in its Ray actor: samples are fetched as they end, monitors are asked where they are.

The engine decodes in a thread and never waits for the caller, except for the answer to a look: a monitor asks
reward pools and reads texts, and stays with the caller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from multitask_rl.rollout.base import Ended, GenerationRequest, Monitor, RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor

    from multitask_rl.models.actor import Actor

__all__ = ["EngineReplica", "Look", "without_monitors"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Responses that the caller's monitor ``monitor`` is to judge (``rollout.base.Monitor.check``)."""

    monitor: int
    partial: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class _Absent:
    """Stands for the caller's monitor ``number`` in a request on its way."""

    number: int

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> Sequence[bool]:
        """Never called: the replica puts an ``_Asking`` in its place."""
        raise NotImplementedError


def without_monitors(
    requests: Sequence[GenerationRequest],
) -> tuple[list[GenerationRequest], list[Monitor]]:
    """Return the requests as they may travel, and the monitors, by the number that stands for each."""
    numbers: dict[int, int] = {}
    monitors: list[Monitor] = []
    travelling = []
    for request in requests:
        if request.watch is not None:
            monitor = request.watch.monitor
            if id(monitor) not in numbers:
                numbers[id(monitor)] = len(monitors)
                monitors.append(monitor)
            absent = _Absent(numbers[id(monitor)])
            request = replace(request, watch=replace(request.watch, monitor=absent))
        travelling.append(request)
    return travelling, monitors


class EngineReplica:
    """An engine in a process of its own, with the copy of the actor it was built from."""

    def __init__(self, engine: RolloutEngine, actor: Actor) -> None:
        self._engine = engine
        # an engine that samples from the actor's own tensors follows the copy; another needs it no more
        self._model: Any = actor.model if engine.shares_weights else None
        self._run: _Run | None = None

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Start to generate; what is under way is given up."""
        self.stop()
        self._run = _Run(self._engine, requests)

    def advance(self, answer: Sequence[bool] | None) -> tuple[list[list[Ended] | Look], bool]:
        """Return what happened since the last call, at least one event, and whether that was all.

        Args:
            answer: to the ``Look`` that was the last event, if it was one.
        """
        assert self._run is not None, "begin comes first"
        return self._run.advance(answer)

    def stop(self) -> None:
        """Give up what is under way."""
        if self._run is not None:
            self._run.stop()
            self._run = None

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


class _Stopped(BaseException):
    """The caller gave the stream up while a monitor was asked."""


class _Run:
    """A stream of the engine, in a thread."""

    def __init__(self, engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
        self._events: SimpleQueue[list[Ended] | Look | BaseException | None] = SimpleQueue()
        self._answers: SimpleQueue[Sequence[bool] | None] = SimpleQueue()
        self._is_stopped = False
        self._asking: dict[int, _Asking] = {}
        arguments = engine, [self._watched(request) for request in requests]
        self._thread = Thread(target=self._work, args=arguments, name="replica", daemon=True)
        self._thread.start()

    def _watched(self, request: GenerationRequest) -> GenerationRequest:
        if request.watch is None:
            return request
        absent = request.watch.monitor
        assert isinstance(absent, _Absent)
        asking = self._asking.setdefault(absent.number, _Asking(self, absent.number))
        return replace(request, watch=replace(request.watch, monitor=asking))

    def _work(self, engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> None:
        try:
            for part in engine.generate_stream(requests):
                self._events.put(part)
                if self._is_stopped:
                    break  # drops the stream, which ends it in the engine
            self._events.put(None)
        except BaseException as error:  # noqa: BLE001 - raised where the events are fetched
            self._events.put(error)

    def ask(self, look: Look) -> Sequence[bool]:
        """Return the caller's answer."""
        self._events.put(look)
        answer = self._answers.get()
        if answer is None:
            raise _Stopped
        return answer

    def advance(self, answer: Sequence[bool] | None) -> tuple[list[list[Ended] | Look], bool]:
        """See ``EngineReplica``."""
        if answer is not None:
            self._answers.put(answer)
        found: list[list[Ended] | Look] = []
        while not found or not self._events.empty():
            event = self._events.get()
            if event is None:
                return found, True
            if isinstance(event, BaseException):
                raise event
            found.append(event)
        return found, False

    def stop(self) -> None:
        """End the thread: at once if it waits for an answer, else when the next sample ends."""
        self._is_stopped = True
        self._answers.put(None)
        self._thread.join()


class _Asking:
    """A monitor's place in the replica."""

    def __init__(self, run: _Run, number: int) -> None:
        self._run = run
        self._number = number

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> Sequence[bool]:
        """Have the caller's monitor look."""
        return self._run.ask(Look(monitor=self._number, partial=list(partial)))
