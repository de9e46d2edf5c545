"""The engine inside a replica, without Ray: what a call for its samples returns, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from multitask_rl.executor.replica import SLICE_S, EngineReplica, Look, without_monitors
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine, Watch

PARTS = 60
ANSWER = Generation(response_ids=[5], rollout_logprobs=[-1.0], finish_reason="length")


class Slow(RolloutEngine):
    """An engine with a sample every few milliseconds; it waits after half of them, then shows one."""

    can_watch = True

    def __init__(self) -> None:
        self.may_go_on = Event()
        self.answers: list[Sequence[bool]] = []

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        for sample in range(PARTS):
            time.sleep(SLICE_S / 20)
            yield [(0, sample, ANSWER)]
            if sample == PARTS // 2 - 1:
                assert self.may_go_on.wait(60)
                watch = requests[0].watch
                assert watch is not None
                self.answers.append(watch.monitor.check([(9, [5, 6])]))


class Never:
    """A monitor of the caller that ends nothing."""

    def check(self, partial: Sequence[tuple[int, list[int]]]) -> list[bool]:
        return [False] * len(partial)


@pytest.fixture
def engine() -> Slow:
    return Slow()


@pytest.fixture
def replica(engine: Slow) -> Iterator[EngineReplica]:
    actor: Any = SimpleNamespace(model=None)
    made = EngineReplica(lambda: (engine, actor), beat_s=60)
    made.load()
    watch = Watch(monitor=Never(), every=1)
    request = GenerationRequest(
        prompt_ids=[3], sampling=SamplingParams(), seeds=list(range(PARTS)), watch=watch
    )
    made.begin(without_monitors([request])[0])
    yield made
    engine.may_go_on.set()
    made.stop()


def test_samples_of_a_slice_of_time_travel_in_one_call(engine: Slow, replica: EngineReplica) -> None:
    began, calls, found = time.monotonic(), 0, 0
    while found < PARTS // 2:
        ended, look, is_all = replica.advance(None)
        calls, found = calls + 1, found + len(ended)
        assert ended
        assert look is None
        assert not is_all
    # a call that a slow machine delays returns more: the limit holds under any load
    assert calls <= (time.monotonic() - began) / SLICE_S + 1
    assert not engine.may_go_on.is_set(), "the engine is at work, and half of its samples are here"


def test_a_look_and_the_end_are_returned_with_what_ended_before(engine: Slow, replica: EngineReplica) -> None:
    engine.may_go_on.set()
    seen: list[int] = []
    look, is_all = None, False
    while look is None:
        ended, look, is_all = replica.advance(None)
        seen += [sample for _, sample, _ in ended]
        assert not is_all
    assert look == Look(monitor=0, partial=[(9, [5, 6])])
    assert seen == list(range(PARTS // 2)), "all that ended before the look, and nothing after it"
    answer: Sequence[bool] | None = [True]
    while not is_all:
        ended, look, is_all = replica.advance(answer)
        answer = None
        seen += [sample for _, sample, _ in ended]
        assert look is None
    assert engine.answers == [[True]]
    assert seen == list(range(PARTS))


class Stepping(RolloutEngine):
    """An engine that makes a step when it may, and never ends a sample."""

    def __init__(self) -> None:
        self.steps: SimpleQueue[None] = SimpleQueue()
        self.made: SimpleQueue[None] = SimpleQueue()
        self.hook: Callable[[], None] = lambda: None
        self.has_ended = Event()

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        self.hook = hook
        return True

    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        try:
            while True:
                self.steps.get()
                self.hook()
                self.made.put(None)
        finally:
            self.has_ended.set()
        yield []


def test_a_call_returns_while_steps_are_made_and_is_silent_when_none_is() -> None:
    engine, actor = Stepping(), SimpleNamespace(model=None)
    replica = EngineReplica(lambda: (engine, actor), beat_s=0.05)  # type: ignore[arg-type, return-value]
    replica.load()
    replica.begin([GenerationRequest(prompt_ids=[3], sampling=SamplingParams(), seeds=[1])])
    nothing = ([], None, False)
    for _ in range(3):
        assert replica.advance(None) == nothing, "before its first step an engine may compile"
    for _ in range(3):
        engine.steps.put(None)
        engine.made.get(timeout=60)
        assert replica.advance(None) == nothing
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(replica.advance, None)
        assert not wait([waiting], timeout=0.5).done, "the engine hangs, and so does the call"
        engine.steps.put(None)
        assert waiting.result(timeout=60) == nothing
        stopped = thread.submit(replica.stop)
        until = time.monotonic() + 60
        while not stopped.done() and time.monotonic() < until:
            engine.steps.put(None)  # one before the call to stop would be an ordinary step
            time.sleep(0.01)
        stopped.result(timeout=1)
    assert engine.has_ended.is_set(), "a stream that is given up ends at its next step"
