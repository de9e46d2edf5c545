"""Which groups a quorum counts, and whose failures count in the error budget."""

import pytest

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import RewardError
from multitask_rl.records import Failure, FailureKind, Prompt, Rollout
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.step.stages import RewardBatch

PLUGINS = """
import time

from multitask_rl.scoring.shapes import with_traits


@with_traits(low=0, high=1, isolate=False)
def cost(response):
    return 0.0


@with_traits(low=0, high=1)
def late(response):
    time.sleep(0.5)
    return 1.0
"""


def rollout(task, draw, given=None, failure=None):
    prompt = Prompt(task=task, prompt_id=f"{task}/{draw}", draw=draw, row={}, text="", prompt_ids=[1])
    prompt.given_ids = given
    return Rollout(prompt=prompt, sample=0, response_ids=given or [2], response="x", failure=failure)


def test_a_quorum_waits_for_rewards_however_many_answers_are_given(tmp_path):
    (tmp_path / "plugins.py").write_text(PLUGINS)
    tasks = {
        "warm": TaskSpec(name="warm", type="sft", answer="{reference}"),
        "rl": TaskSpec(name="rl", rewards=[RewardSpec(plugin=f"{tmp_path}/plugins.py:late", name="late")]),
    }
    given = [rollout("warm", draw, [2, 3]) for draw in range(8)]
    sampled = [rollout("rl", draw) for draw in range(2)]
    with RewardPool(tasks, ScoringConfig(num_workers=1), seed=0, devices={}) as pool:
        batch = RewardBatch(pool.begin_scoring(), lambda s: s, 0.8)
        batch.counted = {r.group_id for r in sampled}
        batch.add([*given, *sampled])
        batch.seal()
        batch.wait()
        taken = batch.take()
    assert [s.rollout.task for s in taken].count("rl") == 2, "0.8 of two groups are two"
    assert len(taken) == 10


@pytest.mark.parametrize("later", [(), ("t",)])
def test_worlds_that_die_count_in_the_error_budget_whenever_constraints_judge(tmp_path, later):
    (tmp_path / "plugins.py").write_text(PLUGINS)
    constraint = ConstraintSpec(plugin=f"{tmp_path}/plugins.py:cost", name="cost", mode="penalty")
    reward = RewardSpec(plugin="environment", name="environment")
    spec = TaskSpec(name="t", environment="x:Y", rewards=[reward], constraints=[constraint])
    died = Failure(kind=FailureKind.infra, message="the world died", source="environment")
    with RewardPool(
        {"t": spec}, ScoringConfig(num_workers=1, max_failure_rate=0.2), seed=0, devices={}
    ) as pool:
        judging = pool.begin_judging() if later else None
        batch = RewardBatch(pool.begin_scoring(), lambda s: s, 0.8, judging=judging, later=later)
        batch.add([rollout("t", draw, failure=died) for draw in range(60)])
        batch.seal()
        batch.wait()
        with pytest.raises(RewardError, match="could not be scored"):
            batch.take()
