"""Worlds in worker processes: many at once, failures typed, nothing left."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest

from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Opening, StepResult
from multitask_rl.environments.pool import WorldPool
from multitask_rl.environments.worker import Ended
from multitask_rl.errors import PluginError
from multitask_rl.records import Failure, FailureKind

WORLDS = """
import asyncio, os, time
from pathlib import Path
from multitask_rl.environments.base import StepResult


class Echo:
    def __init__(self, log="", wait=0.0, bad_reset=False):
        self.log, self.wait, self.bad_reset = log, wait, bad_reset
        self.note("born")

    def note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(what + "\\n")

    def reset(self, row):
        if self.bad_reset:
            raise OSError("no such world")
        if row.get("name") == "hang":
            time.sleep(1000)
        self.row = row
        return f"hello {row['name']} {os.getpid()}"

    def step(self, message):
        text = message["content"]
        if text == "die":
            os._exit(3)
        if text == "raise":
            raise ValueError("broken")
        time.sleep(self.wait)
        return StepResult(messages=[{"role": "user", "content": text}], done=text == "bye", reward=1.0)

    def close(self):
        self.note("closed")


class Slow(Echo):
    async def reset(self, row):
        await asyncio.sleep(0.01)
        return "hi"

    async def step(self, message):
        await asyncio.sleep(self.wait)
        return StepResult(done=True, reward={"a": 1.0})
"""


@pytest.fixture
def make(tmp_path):
    (tmp_path / "worlds.py").write_text(WORLDS)
    pools = []
    before = children()

    def build(cls="Echo", *, num_workers=1, **config):
        reference = f"{tmp_path / 'worlds.py'}:{cls}"
        spec = WorldSpec(reference=reference, config=config, where="tasks.a.environment", timeout_s=20.0)
        hasty = replace(spec, where="tasks.hasty.environment", timeout_s=0.5)
        pools.append(WorldPool({"a": spec, "hasty": hasty}, num_workers=num_workers))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()
    assert children() == before


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def wait_for(pool, count):
    found = {}
    until = time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        found.update(pool.poll(10.0))
    return found


def test_an_episode_is_opened_stepped_and_closed_once(make, tmp_path):
    pool = make(log=str(tmp_path / "log"))
    ticket = pool.open("a", {"name": "x"})
    opening = wait_for(pool, 1)[ticket]
    assert isinstance(opening, Opening)
    assert opening.messages[0]["content"].startswith("hello x")
    pool.step(ticket, {"role": "assistant", "content": "bye"})
    assert wait_for(pool, 1)[ticket] == StepResult(
        messages=[{"role": "user", "content": "bye"}], done=True, reward=1.0
    )
    pool.finish(ticket)
    assert wait_for(pool, 1)[ticket] == Ended(None)
    pool.close()
    assert (tmp_path / "log").read_text().split() == ["born", "closed"]


def test_worlds_that_wait_wait_together(make):
    pool = make("Slow", wait=1.0)
    tickets = [pool.open("a", {}) for _ in range(40)]
    wait_for(pool, 40)
    began = time.monotonic()
    for ticket in tickets:
        pool.step(ticket, {"content": ""})
    answers = wait_for(pool, 40)
    assert len(answers) == 40
    assert answers[tickets[0]].reward == {"a": 1.0}
    assert time.monotonic() - began < 20.0  # one after the other: 40 s
    assert 1.0 < pool.take_seconds(tickets[0]) < 20.0
    assert pool.take_seconds(tickets[0]) == 0.0


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("raise", FailureKind.infra, "ValueError: broken (worlds.py:30)"),
        ("die", FailureKind.infra, "the process of this world ended with code 3"),
    ],
)
def test_a_world_that_fails_is_a_typed_failure_of_its_episode(make, text, kind, says):
    pool = make()
    ticket = pool.open("a", {"name": "x"})
    wait_for(pool, 1)
    pool.step(ticket, {"content": text})
    failure = wait_for(pool, 1)[ticket]
    assert isinstance(failure, Failure)
    assert failure.kind is kind
    assert failure.message.startswith(says), "the message does not name the task"
    again = pool.open("a", {"name": "y"})
    assert isinstance(wait_for(pool, 1)[again], Opening)


def test_a_call_that_hangs_ends_its_own_episode_alone(make):
    before = children()
    pool = make()
    goes_on = pool.open("a", {"name": "x"})
    wait_for(pool, 1)
    hangs = pool.open("hasty", {"name": "hang"})
    failure = wait_for(pool, 1)[hangs]
    assert failure.kind is FailureKind.timeout
    assert "turn_timeout_s = 0.5 s" in failure.message
    pool.step(goes_on, {"content": "still here"})
    assert wait_for(pool, 1)[goes_on].messages[0]["content"] == "still here"
    pool.finish(goes_on)
    assert wait_for(pool, 1)[goes_on] == Ended(None)
    until = time.monotonic() + 60.0
    while children() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert children() == before  # the process with the hanging call is gone, also if nothing is asked of it


def test_a_killed_worker_fails_its_episodes_and_is_replaced(make):
    pool = make()
    tickets = [pool.open("a", {"name": str(i)}) for i in range(3)]
    pids = {a.messages[0]["content"].split()[-1] for a in wait_for(pool, 3).values()}
    os.kill(int(pids.pop()), signal.SIGKILL)
    answers = wait_for(pool, 3)
    assert set(answers) == set(tickets)
    assert all("was killed by SIGKILL" in a.message for a in answers.values())
    again = pool.open("a", {"name": "z"})
    assert isinstance(wait_for(pool, 1)[again], Opening)


def test_a_cancelled_episode_is_closed_and_answers_no_more(make, tmp_path):
    pool = make(log=str(tmp_path / "log"))
    ticket = pool.open("a", {"name": "x"})
    wait_for(pool, 1)
    pool.cancel(ticket)
    pool.cancel(ticket)
    assert pool.poll(0.2) == []
    pool.close()
    assert (tmp_path / "log").read_text().split() == ["born", "closed"]


def test_the_worlds_of_a_pool_that_closes_are_closed(make, tmp_path):
    pool = make(log=str(tmp_path / "log"))
    for i in range(3):
        pool.open("a", {"name": str(i)})
    assert {type(answer) for answer in wait_for(pool, 3).values()} == {Opening}
    pool.close()
    assert sorted((tmp_path / "log").read_text().split()) == ["born"] * 3 + ["closed"] * 3


def test_what_cannot_be_built_is_refused_with_its_place(make):
    with pytest.raises(PluginError, match=r"tasks\.a\.environment_config\.speed: Echo.*speed"):
        make(speed=3).check("a")
    with pytest.raises(PluginError, match="has no 'Nope'"):
        make("Nope").check("a")
    make().check("a")
    failure = None
    pool = make(bad_reset=True)
    ticket = pool.open("a", {"name": "x"})
    failure = wait_for(pool, 1)[ticket]
    assert "OSError: no such world" in failure.message
