"""Explanations of violations: asked for what is stored, in one call; a failure costs only the text."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from multitask_rl.config.run import ScoringConfig, TrackingConfig
from multitask_rl.config.task import ConstraintSpec, TaskSpec
from multitask_rl.records import Rollout, Turn
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing.builders import make_rollout
from run_builders import run_config, train, write_run

JUDGES = """
import os, time
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Verdict


class Judge:
    traits = PluginTraits(isolate=False)

    def judge(self, rollouts):
        return [Verdict(cost=1.0, violated=len(r.response) % 2 == 1, reason="odd") for r in rollouts]

    def explain(self, rollouts, verdicts):
        assert all(v.violated for v in verdicts)
        with open(__file__ + ".calls", "a") as file:
            file.write(f"{len(rollouts)}\\n")
        return [f"{len(r.response)} characters" for r in rollouts]


class Isolated(Judge):
    traits = PluginTraits(isolate=True)


class Raises(Judge):
    def explain(self, rollouts, verdicts):
        raise ValueError("no words")


class Exits(Judge):
    def explain(self, rollouts, verdicts):
        raise SystemExit(3)


class TooFew(Judge):
    def explain(self, rollouts, verdicts):
        return []


class Hangs(Judge):
    traits = PluginTraits(isolate=False, timeout_s=1.0)

    def explain(self, rollouts, verdicts):
        for _ in range(3000):  # half a minute at most
            if os.path.exists(__file__ + ".released"):
                break
            time.sleep(0.01)


class Silent(Judge):
    explain = None
"""


@pytest.fixture
def judges(tmp_path):
    (tmp_path / "judges.py").write_text(JUDGES)

    def pool(name: str) -> RewardPool:
        spec = ConstraintSpec(plugin=f"{tmp_path}/judges.py:{name}", name="own")
        tasks = {task: TaskSpec(name=task, constraints=[spec]) for task in ("a", "b")}
        return RewardPool(tasks, ScoringConfig(num_workers=1), seed=0, devices={})

    return pool


def judged(pool: RewardPool) -> list[Rollout]:
    rollouts = [make_rollout(text, task=task) for task in ("a", "b") for text in ("x", "xx", "xxx")]
    return [replace(r, verdicts=v) for r, v in zip(rollouts, pool.judge(rollouts), strict=True)]


def test_violations_of_all_tasks_are_explained_in_one_call(judges, tmp_path):
    with judges("Judge") as pool:
        texts = pool.explain(judged(pool))
    one, three = {"own": "1 characters"}, {"own": "3 characters"}
    assert texts == [one, {}, three, one, {}, three]
    assert (tmp_path / "judges.py.calls").read_text() == "4\n"


@pytest.mark.parametrize("name", ["Isolated", "Silent"])
def test_a_judge_in_a_worker_or_without_explanations_is_not_asked(judges, name, caplog):
    with judges(name) as pool:
        assert pool.explain(judged(pool)) == [{}] * 6
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Raises", "ValueError: no words"),
        ("Exits", "SystemExit"),
        ("TooFew", "0 explanations for 4 violations"),
        ("Hangs", "more than 1 s"),
    ],
)
def test_what_fails_or_hangs_costs_its_text_and_one_warning(judges, name, problem, caplog, tmp_path):
    with judges(name) as pool:
        rollouts = judged(pool)
        seconds = []
        for _ in range(6):
            began = time.monotonic()
            assert pool.explain(rollouts) == [{}] * 6
            seconds.append(time.monotonic() - began)
        # other programs may delay some of the five that follow; to wait for the hanging call takes each 1 s
        assert sorted(seconds[1:])[2] < 0.5, "a hanging call is waited for once"
        (tmp_path / "judges.py.released").touch()
        assert all(not hasattr(v["own"], "kind") for v in pool.judge([make_rollout("xxxxx", task="a")]))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "recorded without explanation" in warning
    assert problem in warning


TASKS = """
tasks:
  copy:
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    constraints: [{plugin: "judges.py:Judge", name: odd, mode: penalty}]
  digit:
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints: [{plugin: "judges.py:Judge", name: odd, mode: reject}]
"""


@pytest.mark.parametrize("stored", [0, 3])
def test_a_run_explains_the_violations_that_it_stores(tmp_path, stored):
    (tmp_path / "judges.py").write_text(JUDGES)
    write_run(tmp_path, TASKS)
    tracking = TrackingConfig(trackers=["jsonl"], store_rollouts=stored)
    train(run_config(tmp_path, "out", 2, tracking=tracking))
    calls = tmp_path / "judges.py.calls"
    if not stored:
        assert not calls.exists()
        return
    rows = [json.loads(line) for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * stored
    violated = [row for row in rows if row["verdicts"]["odd"]["violated"]]
    for row in rows:
        text = f"odd: {len(row['response'])} characters" if row in violated else "odd"
        assert row["verdicts"]["odd"]["reason"] == text
    assert sum(map(int, calls.read_text().split())) == len(violated) > 0


def test_the_violating_answer_of_an_episode_is_judged_and_explained(judges):
    pool = judges("Judge")
    pool.start()
    try:
        episode = make_rollout("xx", task="a")
        episode.turns = [Turn(num_tokens=0, response=text) for text in ("xx", "xxxxx", "xxx", "xx")]
        alone = make_rollout("x", task="b")
        rollouts = [
            replace(r, verdicts=v)
            for r, v in zip([episode, alone], pool.judge([episode, alone]), strict=True)
        ]
        verdict = rollouts[0].verdicts["own"]
        assert (verdict.violated, verdict.turn, verdict.reason) == (True, 2, "turn 2: odd")
        assert rollouts[1].verdicts["own"].reason == "odd"
        assert pool.explain(rollouts) == [{"own": "5 characters"}, {"own": "1 characters"}]
    finally:
        pool.close()


def test_the_turn_of_a_verdict_comes_back_from_a_worker(judges):
    pool = judges("Isolated")
    pool.start()
    try:
        episode = make_rollout("xx", task="a")
        episode.turns = [Turn(num_tokens=0, response=text) for text in ("xx", "x")]
        assert pool.judge([episode])[0]["own"].turn == 2
    finally:
        pool.close()
