"""Rewards that begin while the rest is generated give what they give all at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.errors import EngineError
from multitask_rl.executor.scorer import DealtRound
from multitask_rl.records import Scored
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.step.stages import RewardBatch
from multitask_rl.testing.builders import make_prompt, make_rollout

PLUGINS = """
import asyncio
from multitask_rl.scoring.shapes import with_traits

def length(response):
    return float(len(response))

@with_traits(batch_size=100, deterministic=False)
def call_size(responses):
    return [float(len(responses)) + 0.001 * i for i in range(len(responses))]

async def patient(response):
    await asyncio.sleep(0.4)
    return 1.0
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugins") / "plugins.py"
    file.write_text(PLUGINS)
    specs = {
        name: TaskSpec(name=name, rewards=[RewardSpec(plugin=f"{file}:{name}", name=name)])
        for name in ("length", "call_size", "patient")
    }
    with RewardPool(specs, ScoringConfig(num_workers=1), seed=0, devices={}) as pool:
        yield pool


def batch_of(task, number, group_size=2):
    """Rollouts of ``number`` prompts in the order of their batch."""
    rollouts = []
    for position in range(number):
        prompt = make_prompt(task=task, draw=position)
        prompt.position = position
        rollouts += [make_rollout("x" * (position + 1), prompt=prompt, sample=i) for i in range(group_size)]
    return rollouts


def streamed(pool, parts):
    batch = RewardBatch(pool.begin_scoring(), lambda scored: scored)
    for part in parts:
        batch.add(part)
    batch.seal()
    batch.wait()
    return batch.take()


@pytest.mark.parametrize("task", ["length", "call_size"])
def test_rollouts_that_end_in_any_order_are_scored_as_all_at_once(pool, task):
    rollouts = batch_of(task, 6)
    together = pool.score(rollouts)
    parts = [[rollout] for rollout in reversed(rollouts)]
    assert streamed(pool, parts) == together
    assert [s.rollout for s in together] == rollouts


def test_what_is_asked_after_the_pool_was_closed_fails_at_once(tmp_path):
    """A run may end while a thread still samples: that thread asks on, and must not wait for ever."""
    (tmp_path / "plugins.py").write_text(PLUGINS)
    reward = RewardSpec(plugin=f"{tmp_path / 'plugins.py'}:length", name="length")
    specs = {"length": TaskSpec(name="length", rewards=[reward])}
    with RewardPool(specs, ScoringConfig(num_workers=1), seed=0, devices={}) as own:
        pending = own.begin_scoring()
    pending.add(batch_of("length", 2))
    pending.seal()
    until = time.monotonic() + 10
    pending.wait(lambda: time.monotonic() > until)
    assert [scored.failure and scored.failure.kind for scored in pending.results(range(4))] == ["infra"] * 4


def test_a_plugin_that_takes_batches_sees_the_same_batch_and_one_by_one_begins_at_once(pool):
    batch = pool.begin_scoring()
    early, late = batch_of("length", 1), batch_of("call_size", 3)
    batch.add(early)
    batch.add(late[:2])
    deadline = time.monotonic() + 60
    while not batch.is_done(0) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert batch.is_done(0)
    assert not batch.is_done(2)
    batch.add(late[2:])
    batch.seal()
    batch.wait()
    values = [s.reward for s in batch.results(range(2, 8))]
    assert values == [6.0 + 0.001 * i for i in range(6)], "one call of six"


def test_calls_of_a_function_that_waits_are_not_cut_for_the_time_they_take(pool):
    for _ in range(3):
        scored = pool.score(batch_of("patient", 20))
        assert [s.reward for s in scored] == [1.0] * 40
    lane = next(j.lane for j in pool._rewards["patient"])
    assert lane._call_size() == lane.facts.traits.batch_size


class Scripted:
    """A ``Pending`` whose answers come when the test says so."""

    def __init__(self):
        self.done, self.cancelled, self.rollouts = set(), [], []

    def add(self, rollouts):
        self.rollouts += rollouts

    def seal(self, order=None):
        self.order = order

    def is_done(self, index):
        return index in self.done

    def wait(self, is_enough=None):
        assert is_enough is None or is_enough()
        return ""

    def results(self, indices):
        assert set(indices) <= self.done
        return [Scored(rollout=self.rollouts[i], reward=float(i)) for i in indices]

    def spans(self, indices):
        return {}

    def cancel(self, indices):
        self.cancelled += indices


def test_groups_are_taken_whole_once_and_in_the_order_of_the_batch():
    pending = Scripted()
    batch = RewardBatch(pending, lambda scored: scored, quorum=2 / 3)
    rollouts = batch_of("t", 3)
    rollouts[3].rejected = True
    for part in (rollouts[4:], rollouts[:4]):  # asked: 4 5 0 1 2
        batch.add(part)
    batch.seal()
    assert pending.order == [2, 3, 4, 0, 1]
    pending.done = {0, 1, 4}
    batch.wait()
    taken = batch.take()
    assert [s.rollout for s in taken] == rollouts[2:], "the first group is not complete"
    assert taken[1].reward is None
    assert batch.open_groups == {rollouts[0].group_id: "t"}
    pending.done |= {2, 3}
    assert [s.rollout for s in batch.take()] == rollouts[:2]
    assert batch.take() == []


def test_open_groups_are_given_up_by_their_age():
    pending = Scripted()
    batch = RewardBatch(pending, lambda scored: scored)
    rollouts = batch_of("t", 2)
    for rollout in rollouts[1:]:  # the oldest response of a group counts
        rollout.policy_version = 3
    batch.add(rollouts)
    batch.seal()
    assert batch.drop(3) == {"t": 1}
    assert pending.cancelled == [0, 1]
    assert batch.open_groups == {rollouts[2].group_id: "t"}


class OneActor:
    """A group of one actor, in this process: it answers with ``answer``."""

    def __init__(self, answer):
        self.answer, self.given = answer, {}

    def __len__(self):
        return 1

    def submit(self, pool, call, number, kind, rollouts, places):
        self.given.update(zip(places, rollouts, strict=True))
        return number, tuple(places)

    def first(self, sent):
        sent.popitem()

    def call(self, call, work):
        _, order = work[0]
        return {0: self.answer([self.given[place] for place in order])}, []


def dealt(answer):
    actors = OneActor(answer)
    return DealtRound(lambda: actors, "scoring", answer, ThreadPoolExecutor(1))


def test_actors_get_the_rollouts_in_the_order_of_the_batch():
    seen = []

    def score(rollouts):
        seen.extend(rollouts)
        return [Scored(rollout=r, reward=float(len(r.response))) for r in rollouts]

    rollouts = batch_of("t", 3, group_size=1)
    batch = RewardBatch(dealt(score), lambda scored: scored)
    for rollout in reversed(rollouts):
        batch.add([rollout])
    batch.seal()
    batch.wait()
    assert [s.reward for s in batch.take()] == [1.0, 2.0, 3.0]
    assert seen == rollouts


def test_an_error_of_the_actors_is_raised_where_its_results_are_wanted():
    def score(rollouts):
        raise ZeroDivisionError

    pending = dealt(score)
    pending.add(batch_of("t", 1))
    pending.seal()
    pending.wait()
    with pytest.raises(ZeroDivisionError):
        pending.results([0])


def test_answers_of_actors_that_are_closed_before_the_end_of_a_round_are_refused():
    """They may be failures: a pool that closes answers so for what it has not scored."""
    opened = iter([OneActor(lambda rollouts: list(rollouts))])

    def open_group():
        actors = next(opened, None)
        if actors is None:
            raise EngineError("closed")
        return actors

    pending = DealtRound(open_group, "scoring", None, ThreadPoolExecutor(1))
    pending.add(batch_of("t", 1))
    pending.seal()
    pending.wait()
    with pytest.raises(EngineError, match="closed"):
        pending.results([0])


def test_a_round_that_waits_for_its_turn_when_the_actors_are_closed_fails():
    """``RayScorer.close`` cancels what waits in the background; a thread of the run may wait for it."""
    gate, background = threading.Event(), ThreadPoolExecutor(1)
    background.submit(gate.wait)
    actors = OneActor(None)
    pending = DealtRound(lambda: actors, "scoring", None, background)
    pending.add(batch_of("t", 1))
    pending.seal()
    background.shutdown(wait=False, cancel_futures=True)
    gate.set()
    until = time.monotonic() + 10
    pending.wait(lambda: time.monotonic() > until)
    assert pending.is_done(0)
    with pytest.raises(EngineError, match="closed"):
        pending.results([0])
