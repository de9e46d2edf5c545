"""What worlds may do to their workers, and what may happen to the workers: nothing hangs, nothing is left."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from multitask_rl.environments import pool as pool_module
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Opening, StepResult
from multitask_rl.environments.pool import WorldPool
from multitask_rl.environments.worker import Ended
from multitask_rl.records import Failure, FailureKind

WORLDS = """
import asyncio, dataclasses, os, re, signal, subprocess, sys, threading, time
from pathlib import Path
from multitask_rl.environments.base import StepResult


class Own:
    pass


def said(text="", **more):
    return StepResult(messages=[{"role": "user", "content": text}], **more)


class World:
    def __init__(self, log):
        self.log = Path(log)
        self.note("born")

    def note(self, what):
        with self.log.open("a") as file:
            file.write(what + "\\n")

    def reset(self, row):
        if "do" in row:
            getattr(self, row["do"])()
        return str(os.getpid())

    def step(self, message):
        return getattr(self, message["content"])()

    def close(self):
        self.note("closed")
        if self.is_stuck:
            time.sleep(1000)

    is_stuck = False

    def speak(self):
        return said("yes", reward=1)

    def sleep(self):
        self.note("sleeps")
        time.sleep(1000)

    def hold_everything(self):
        self.note("holds")
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter for hours

    def exit(self):
        sys.exit("no")

    def interrupt(self):
        raise KeyboardInterrupt

    def end(self):
        os._exit(5)

    def crash(self):
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(20)  # the signal may come in another thread, a little later

    def fork(self):
        os.fork()
        return said("forked")

    def child(self):
        child = subprocess.Popen(["sleep", "1000"])
        return said(str(child.pid))

    def own_class(self):
        return said(info={"x": Own()})

    def wrong(self):
        return "hello"

    def no_message(self):
        return StepResult(messages=["hello"])

    def wrong_role(self):
        return StepResult(messages=[{"role": "human", "content": "go on"}])

    def silent(self):
        return StepResult()

    def stop_is_text(self):
        return StepResult(messages=[{"role": "user", "content": "go on"}], stop="END")

    def stop_is_empty(self):
        return StepResult(messages=[{"role": "user", "content": "go on"}], stop=["END", ""])

    def nan(self):
        return said(reward=float("nan"))

    def no_in_words(self):
        return StepResult(messages=said().messages, done="no")

    def words(self):
        return said(reward={"a": "much"})

    def digits(self):
        return said(reward="1")

    def surrogate(self):
        import numpy
        info = {"n": numpy.int64(3), 4: (1, 2)}
        return said("a\\ud800b", info=info, reward={"a": numpy.float32(1), "b": None})

    def prints(self):
        os.write(1, b"\\0\\0\\0\\0")
        print("noise")
        sys.stderr.write("more noise")
        return said("printed")

    def signals(self):
        for number in (signal.SIGINT, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            os.killpg(0, number)
        return said("alive")

    def stuck_close(self):
        self.is_stuck = True
        return said("will be")

    def task_exits(self):
        async def leave():
            async def go():
                sys.exit(3)
            asyncio.get_running_loop().create_task(go())
            await asyncio.sleep(0.01)
            return said("left")
        return leave()
"""


OTHERS = set()


def children():
    """Return the processes that the test has started; those of other files' fixtures are left alone."""
    return {process.pid for process in psutil.Process().children(recursive=True)} - OTHERS


@pytest.fixture(autouse=True)
def _others():
    OTHERS.clear()
    OTHERS.update(children())


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


@pytest.fixture
def make(tmp_path):
    (tmp_path / "worlds.py").write_text(WORLDS)
    pools, before, fds = [], children(), psutil.Process().num_fds()
    threads = threading.active_count()

    def build(*, num_workers=1, hasty_s=20.0):
        """A pool for two tasks of the same worlds: ``a``, which a busy machine may delay, and ``hasty``."""
        specs = {
            task: WorldSpec(
                reference=f"{tmp_path / 'worlds.py'}:World",
                config={"log": str(tmp_path / "log")},
                where=f"tasks.{task}.environment",
                timeout_s=timeout_s,
            )
            for task, timeout_s in (("a", 20.0), ("hasty", hasty_s))
        }
        pools.append(WorldPool(specs, num_workers=num_workers))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()
        pool.close()
    until(lambda: children() == before)
    # what tests before this one left may end meanwhile
    until(lambda: psutil.Process().num_fds() <= fds)
    until(lambda: threading.active_count() <= threads)


def answers(pool, count, timeout_s=60.0):
    found = {}
    end = time.monotonic() + timeout_s
    while len(found) < count and time.monotonic() < end:
        found.update(pool.poll(1.0))
    assert len(found) == count
    return found


def begin(pool, count=1):
    """Open episodes and return them by ticket, with the process of each."""
    tickets = [pool.open("a", {}) for _ in range(count)]
    found = {}
    while not found.keys() >= set(tickets):
        found.update(pool.poll(10.0))
    return {ticket: int(found[ticket].messages[0]["content"]) for ticket in tickets}


def ask(pool, ticket, what):
    pool.step(ticket, {"role": "assistant", "content": what})
    return answers(pool, 1)[ticket]


def logged(tmp_path):
    lines = (tmp_path / "log").read_text().split()
    return lines.count("born"), lines.count("closed")


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("exit", "SystemExit: no"),
        ("interrupt", "KeyboardInterrupt"),
        ("own_class", "has no JSON form"),
        ("wrong", "expected a StepResult"),
        ("no_message", "is no message"),
        ("wrong_role", "the role 'human' is none of system, developer, user"),
        ("silent", "returned no message"),
        ("stop_is_text", "stop is 'END'"),
        ("stop_is_empty", "stop is ['END', '']"),
        ("nan", "is not finite"),
        ("words", "is no number"),
        ("digits", "is no number"),
        ("no_in_words", "done is the text 'no'"),
    ],
)
def test_an_answer_that_is_none_ends_its_episode_alone(make, tmp_path, what, says):
    pool = make()
    first, second = begin(pool, 2)
    failure = ask(pool, first, what)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind.infra
    assert says in failure.message
    assert ask(pool, second, "speak").reward == 1.0
    pool.close()
    assert logged(tmp_path) == (2, 2)


@pytest.mark.parametrize(("what", "says"), [("end", "ended with code 5"), ("crash", "killed by SIGSEGV")])
def test_the_end_of_a_process_fails_all_its_episodes_and_says_so(make, what, says):
    pool = make()
    first, second = begin(pool, 2)
    pool.step(first, {"content": what})
    found = answers(pool, 2)
    assert [f.kind for f in found.values()] == [FailureKind.infra] * 2, found
    assert all(says in f.message for f in found.values()), found
    assert "1 other episode" in found[second].message
    pool.step(first, {"content": "speak"})  # too late, and no error
    pool.finish(second)
    pool.cancel(first)
    assert len(begin(pool)) == 1


@pytest.mark.parametrize("what", ["fork", "prints", "signals", "task_exits"])
def test_what_a_world_does_to_its_process_does_not_reach_the_channel(make, what):
    pool = make()
    (ticket,) = begin(pool)
    assert isinstance(ask(pool, ticket, what), StepResult)
    assert ask(pool, ticket, "speak").messages[0]["content"] == "yes"
    pool.finish(ticket)
    assert answers(pool, 1)[ticket] == Ended(None)


def test_a_place_of_a_paused_episode_is_free_for_others_and_its_answer_stays(make):
    pool = make(num_workers=1)
    first, _ = begin(pool, 2)
    pool.step(first, {"content": "end"})
    answers(pool, 2)
    (paused,) = begin(pool)
    pool.step(paused, {"content": "speak"})
    other = pool.open("a", {})
    assert pool.poll(0.3, [other]) == [], "after a death of several a worker holds one episode"
    pool.pause([paused])
    assert [ticket for ticket, _ in pool.poll(30.0, [other])] == [other]
    ((ticket, answer),) = pool.poll(10.0, [paused])
    assert (ticket, answer.reward) == (paused, 1.0)


def test_answers_arrive_as_json_holds_them(make):
    pool = make()
    (ticket,) = begin(pool)
    said = ask(pool, ticket, "surrogate")
    assert said.messages[0]["content"] == "a?b"
    assert said.info == {"n": 3, "4": [1, 2]}
    assert said.reward == {"a": 1.0}


def test_children_of_a_world_end_with_its_worker(make):
    pool = make()
    ((ticket, process),) = begin(pool).items()
    child = int(ask(pool, ticket, "child").messages[0]["content"])
    os.kill(process, signal.SIGKILL)
    assert isinstance(answers(pool, 1)[ticket], Failure)
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")
    (ticket,) = begin(pool)
    child = int(ask(pool, ticket, "child").messages[0]["content"])
    pool.close()
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie")


def test_a_worker_whose_interpreter_is_held_does_not_stop_the_trainer(make, tmp_path):
    pool = make(hasty_s=1.0)
    opened = {}
    while not all(isinstance(opening, Opening) for opening in opened.values()) or not opened:
        tickets = [pool.open("hasty", {}) for _ in range(2)]  # a busy machine may make one too late
        opened = answers(pool, 2)
    first, second = tickets
    pool.step(first, {"content": "hold_everything"})
    until(lambda: "holds" in (tmp_path / "log").read_text())
    pool.step(second, {"content": "sleep", "more": "x" * 5_000_000})  # more than the socket holds
    found = answers(pool, 2)
    assert {f.kind for f in found.values()} == {FailureKind.timeout}
    assert len(begin(pool)) == 1


def test_cancelled_calls_that_hang_and_worlds_that_do_not_close_end_their_worker(make):
    pool = make(hasty_s=0.5)
    ((stays, process),) = begin(pool).items()
    for what in ("sleep", "stuck_close"):
        pool.cancel(pool.open("hasty", {"do": what}))

    def goes_elsewhere():
        ticket = pool.open("a", {})
        elsewhere = answers(pool, 1)[ticket].messages[0]["content"] != str(process)
        pool.finish(ticket)
        assert answers(pool, 1) == {ticket: Ended(None)}
        return elsewhere

    until(goes_elsewhere)
    assert len(children()) == 2, "the retired one serves the first"
    assert ask(pool, stays, "speak").reward == 1.0
    pool.finish(stays)
    answers(pool, 1)
    until(lambda: len(children()) == 1)


def test_calls_that_hang_one_after_the_other_leave_few_processes(make):
    pool = make(num_workers=2, hasty_s=0.3)
    for _ in range(4):
        begin(pool, 2)
        hangs = pool.open("hasty", {"do": "sleep"})
        found = {}
        while hangs not in found:
            found.update(pool.poll(10.0))
        assert found.pop(hangs).kind is FailureKind.timeout
        assert all("another call in it hangs" in f.message for f in found.values())
        until(lambda: len(children()) <= 4)  # as many retired ones as serve
    pool.close()


def test_the_thread_that_opens_an_episode_may_end(make):
    pool = make()
    opened = []
    thread = threading.Thread(target=lambda: opened.extend(begin(pool)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert ask(pool, *opened, "speak").reward == 1.0


def test_after_a_death_episodes_share_a_worker_with_few_others(make, monkeypatch):
    monkeypatch.setattr(pool_module, "CLEAN_ENDS", 2)
    pool = make()
    first, *_ = begin(pool, 4)
    pool.step(first, {"content": "end"})
    answers(pool, 4)
    sizes = []
    for _ in range(4):
        tickets = [pool.open("a", {}) for _ in range(4)]
        sizes.append(4 - pool.num_queued)
        found = answers(pool, sizes[-1])
        for ticket in set(tickets) - set(found):
            pool.cancel(ticket)
        for ticket in found:
            pool.finish(ticket)
        answers(pool, len(found))
        until(lambda: not (pool.poll(0.01) or pool._episodes))
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1


def test_killed_workers_lose_no_episode_of_many(make, tmp_path):
    """Every episode ends or fails as ``infra``; one that begins again often enough ends."""
    pool, chance = make(num_workers=2), random.Random(3)
    tries, steps, ended = {}, {}, 0
    for _ in range(40):
        tries[pool.open("a", {})] = 1
    kills = 0
    end = time.monotonic() + 120
    while ended < 40 and time.monotonic() < end:
        for ticket, answer in pool.poll(1.0):
            if isinstance(answer, Failure):
                assert answer.kind is FailureKind.infra
                tries[pool.open("a", {})] = tries.pop(ticket) + 1
            elif isinstance(answer, Ended):
                ended += 1
                tries.pop(ticket)
            elif isinstance(answer, StepResult) and steps[ticket] == 2:
                pool.finish(ticket)
            else:
                steps[ticket] = steps.get(ticket, 0) + 1
                pool.step(ticket, {"content": "speak"})
                if kills < 8 and chance.random() < 0.1 and (workers := sorted(children())):
                    kills += 1
                    os.kill(chance.choice(workers), signal.SIGKILL)
    assert ended == 40
    assert kills == 8
    pool.close()


SCRIPT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.pool import WorldPool
spec = WorldSpec(reference=sys.argv[1], config={"log": sys.argv[2]}, timeout_s=1000.0)
pool = WorldPool({"a": spec})
tickets = [pool.open("a", {}) for _ in range(3)]
pids, count = set(), 0
while count < 3:
    for _, opening in pool.poll(10.0):
        pids.add(opening.messages[0]["content"])
        count += 1
for ticket, what in zip(tickets, sys.argv[3].split(",")):
    pool.step(ticket, {"content": what})
print(*pids, flush=True)
time.sleep(1000)
"""


def test_worlds_are_closed_and_processes_end_when_the_trainer_dies(tmp_path):
    """Four trainers die at once; calls that hang close no world, nor does a held interpreter any."""
    (tmp_path / "worlds.py").write_text(WORLDS)
    trainers = []
    for number, (how, what, closed) in enumerate(
        (
            (signal.SIGKILL, "speak,speak,child", 3),
            (signal.SIGINT, "speak,speak,speak", 3),
            (signal.SIGKILL, "sleep,speak", 2),
            (signal.SIGKILL, "hold_everything", None),  # the kernel ends it
        )
    ):
        log = tmp_path / f"log{number}"
        trainer = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, f"{tmp_path / 'worlds.py'}:World", str(log), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        trainers.append((trainer, how, log, closed))
    everything = []
    for trainer, *_ in trainers:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.stdout.close()
        everything += pids
    until(lambda: "sleeps" in (tmp_path / "log2").read_text())
    until(lambda: "holds" in (tmp_path / "log3").read_text())
    everything += [c.pid for pid in everything for c in psutil.Process(pid).children(recursive=True)]
    for trainer, how, *_ in trainers:
        trainer.send_signal(how)
    for trainer, *_ in trainers:
        trainer.wait()
    until(lambda: not any(map(psutil.pid_exists, everything)), 30.0)
    for _, _, log, closed in trainers:
        lines = log.read_text().split()
        assert lines.count("born") == 3
        assert closed in (None, lines.count("closed"))


def test_the_first_answer_is_an_opening(make):
    pool = make()
    ticket = pool.open("a", {"name": threading.Lock()})
    failure = answers(pool, 1)[ticket]
    assert failure.kind is FailureKind.data
    assert "cannot be sent" in failure.message
    ticket = pool.open("a", {"name": Path("x")})
    assert isinstance(answers(pool, 1)[ticket], Opening)


AGENT = """
import json, time, urllib.error, urllib.request


def run(base_url, api_key, row):
    for _ in range(2):
        body = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        try:
            urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers))
        except urllib.error.HTTPError:
            time.sleep(4)  # goes on for longer than a call may take
"""


def test_a_slow_end_of_an_agent_after_a_limit_is_no_failure_of_its_world(tmp_path):
    """A failure would be tried again and masked: an endless episode would be better than a low reward."""
    (tmp_path / "agent.py").write_text(AGENT)
    pool = WorldPool({"a": WorldSpec(reference=f"agent:{tmp_path / 'agent.py'}:run", timeout_s=3.0)})
    try:
        ticket = pool.open("a", {})
        assert isinstance(answers(pool, 1)[ticket], Opening)
        assert isinstance(ask(pool, ticket, "an answer"), StepResult)
        pool.finish(ticket)
        assert answers(pool, 1)[ticket] == Ended(None)
    finally:
        pool.close()
