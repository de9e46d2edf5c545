"""Who gets which program: shares of a queue, spare programs of a stuck worker, suspects alone."""

import threading
from types import SimpleNamespace

import pytest

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import Ending, Outcome, Program
from multitask_rl.sandbox.backlog import Backlog

DONE = Outcome(ending=Ending.completed)


class Cell:
    """Remembers what it was told to give up."""

    def __init__(self):
        self.cancelled = []

    def cancel(self, identity):
        self.cancelled.append(identity)


def backlog_of(programs, workers=2, size=100):
    cells = [Cell() for _ in range(workers)]
    backlog = Backlog(size, [cell.cancel for cell in cells])
    return backlog, cells, [backlog.put(Program(source=str(n))) for n in range(programs)]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """A clock that the test moves: a worker is stuck after a twentieth of a second."""
    now = [0.0]
    monkeypatch.setattr("multitask_rl.sandbox.backlog.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def sources(items):
    return [item.program.source for item in items]


def test_a_worker_takes_a_share_in_order_and_no_more_than_a_handful():
    backlog, _, _ = backlog_of(40)
    first = backlog.take(0)
    assert sources(first) == [str(n) for n in range(8)]
    assert backlog.take(0) == []
    assert sources(backlog.take(1)) == [str(n) for n in range(8, 16)]


def test_a_short_queue_is_not_hoarded():
    backlog, _, _ = backlog_of(2)
    assert sources(backlog.take(0)) == ["0"]
    assert sources(backlog.take(1)) == ["1"]


def test_what_waits_behind_a_long_program_is_taken_over(clock):
    backlog, cells, _ = backlog_of(20)
    held = backlog.take(0)
    clock[0] += 0.1
    assert sources(backlog.take(1)) == sources(held[1:])
    assert len(cells[0].cancelled) == len(held) - 1
    assert backlog.finish(0, cells[0].cancelled[0]) is None  # answered there all the same: nobody's any more


def test_a_program_at_hand_that_is_cancelled_is_told_to_its_worker_once():
    backlog, cells, futures = backlog_of(1)
    (item,) = backlog.take(0)
    assert futures[0].running()
    assert futures[0].cancel()
    assert futures[0].cancel()
    assert cells[0].cancelled == [item.identity]
    assert backlog.finish(0, item.identity) is None


def test_an_outcome_that_comes_after_a_cancellation_is_dropped():
    backlog, _, (future,) = backlog_of(1)
    (item,) = backlog.take(0)
    future.cancel()
    item.future.give(DONE)
    assert future.cancelled()


def test_a_program_that_ended_cannot_be_cancelled():
    backlog, cells, (future,) = backlog_of(1)
    (item,) = backlog.take(0)
    backlog.finish(0, item.identity).future.give(DONE)
    assert not future.cancel()
    assert future.result() is DONE
    assert cells[0].cancelled == []


def test_a_cancelled_program_that_waits_is_skipped():
    backlog, _, futures = backlog_of(3, workers=1)
    futures[0].cancel()
    assert sources(backlog.take(0)) == ["1"]


def test_suspects_are_put_first_and_run_alone():
    backlog, _, _ = backlog_of(40, workers=1)
    lost = backlog.take(0)
    assert backlog.drop(0) == lost
    for item in lost:
        item.is_suspect = True
    backlog.put_back(lost)
    for n in range(len(lost)):
        (item,) = backlog.take(0)
        assert item.program.source == str(n)
        assert backlog.take(0) == []
        backlog.finish(0, item.identity)
    assert len(backlog.take(0)) == 8


def test_closing_wakes_everybody_and_returns_what_waits():
    backlog, _, futures = backlog_of(2, workers=1, size=2)
    problems = []

    def put():
        try:
            backlog.put(Program(source="late"))
        except SandboxError as error:
            problems.append(error)

    blocked = threading.Thread(target=put)
    blocked.start()
    assert [item.future for item in backlog.close()] == futures
    blocked.join(timeout=10)
    assert len(problems) == 1
    assert backlog.take(0) == []
    with pytest.raises(SandboxError, match="closed"):
        backlog.put(Program(source=""))
