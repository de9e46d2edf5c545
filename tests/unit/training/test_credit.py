"""From what plugins say to advantages: the pool, the stage of the rewards and the credit together."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from model_builders import build_actor
from multitask_rl.algorithms.gdpo import GDPO
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.kl import KLController
from multitask_rl.config.run import RunConfig, ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import PluginError
from multitask_rl.records import SamplingParams, Scored
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.step.stages import AdvantageStage, RewardStage
from multitask_rl.step.task_state import TaskState
from multitask_rl.testing.builders import make_rollout
from multitask_rl.training.backend import LearnerTask
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.credit import CreditAssigner
from multitask_rl.training.critic import Critic
from multitask_rl.training.runner import ModelRunner

PLUGINS = """
from multitask_rl.scoring.shapes import with_traits

@with_traits(isolate=False)
def correct(response):
    return float("good" in response)

@with_traits(isolate=False, higher_is_better=False)
def wordiness(response):
    return float(len(response.split()))

@with_traits(isolate=False)
def harm(response):
    return None if "exempt" in response else float("bad" in response)
"""


def advantages(
    spec: TaskSpec, algorithm: GRPO, responses: list[str], stage: Callable[[Scored], Scored] = lambda s: s
) -> list[float]:
    """Return the advantage of each response of one group; ``stage`` stands behind the rewards."""
    learner = LearnerTask(spec=spec, algorithm=algorithm)
    run = TaskState(
        spec=spec,
        algorithm=algorithm,
        sampling=SamplingParams(),
        group_size=len(responses),
        kl=KLController(spec.kl),
        learner=learner,
    )
    rollouts = [make_rollout(text, task="t", sample=i) for i, text in enumerate(responses)]
    with RewardPool({"t": spec}, ScoringConfig(num_workers=1), seed=0, devices={}) as pool:
        judged = zip(rollouts, pool.judge(rollouts), strict=True)
        scored = RewardStage(pool, {"t": run}, 1.0, ()).process([replace(r, verdicts=v) for r, v in judged])
    runner = ModelRunner(build_actor(), Critic(), RunConfig(), None)
    credit = CreditAssigner(
        InProcess(runner, {"t": learner}, RunConfig()), {"t": learner}, many_updates=False
    )
    return [
        float(c.advantages[0]) for c in AdvantageStage(credit, {"t": run}).process(list(map(stage, scored)))
    ]


@pytest.fixture
def plugins(tmp_path):
    (tmp_path / "plugins.py").write_text(PLUGINS)
    return f"{tmp_path / 'plugins.py'}:"


@pytest.mark.parametrize(("found", "told"), [(None, "NoneType"), (["a"], "str")])
def test_samples_that_are_none_are_an_error_that_names_the_task(found, told):
    algorithm = GRPO(GRPO.Config())
    algorithm.select = lambda scored: found
    spec = TaskSpec(name="t", type="own.py:Own", rewards=[RewardSpec(plugin="length")])
    with pytest.raises(PluginError, match=rf"task 't': select\(\) of own.py:Own returned {told}, expected a"):
        advantages(spec, algorithm, ["a", "bc"])


@pytest.mark.parametrize("algorithm", [GRPO, GDPO])
def test_a_reward_whose_lower_values_are_better_is_trained_downwards(algorithm, plugins):
    rewards = [
        RewardSpec(plugin=plugins + "correct", name="correct"),
        RewardSpec(plugin=plugins + "wordiness", name="wordiness", weight=0.1),
    ]
    spec = TaskSpec(name="t", rewards=rewards)
    short, long, middle = advantages(spec, algorithm(algorithm.Config()), ["good", "good a b c d", "good a"])
    assert short > middle > long


@pytest.mark.parametrize("algorithm", [GRPO, GDPO])
@pytest.mark.parametrize("number", [1, 2])
def test_a_penalty_is_subtracted_beside_any_number_of_rewards(algorithm, number, plugins):
    rewards = [RewardSpec(plugin=plugins + "correct", name=f"reward{i}") for i in range(number)]
    penalty = ConstraintSpec(plugin=plugins + "harm", name="harm", mode="penalty", weight=5.0)
    spec = TaskSpec(name="t", rewards=rewards, constraints=[penalty])
    responses = ["good bad", "good", "good bad exempt", "good"]
    harmful, fine, exempt, also_fine = advantages(spec, algorithm(algorithm.Config()), responses)
    assert harmful < 0.0 < fine == also_fine
    assert exempt > harmful


def test_a_reward_that_a_stage_has_set_counts_in_place_of_its_terms(plugins):
    rewards = [
        RewardSpec(plugin=plugins + "correct", name="correct"),
        RewardSpec(plugin=plugins + "wordiness", name="wordiness", weight=0.1),
    ]
    spec, responses = TaskSpec(name="t", rewards=rewards), ["good", "good a b c d", "good a"]
    plain = advantages(spec, GDPO(GDPO.Config()), responses)
    turned = advantages(spec, GDPO(GDPO.Config()), responses, lambda s: replace(s, reward=-(s.reward or 0.0)))
    assert plain[0] > plain[2] > plain[1]
    assert turned[0] < turned[2] < turned[1]
