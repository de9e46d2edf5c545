from __future__ import annotations

import math

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure
from multitask_rl_rewards.pairwise_rm import PairwiseRewardModel
from multitask_rl_rewards.rm_hf import RewardModel
from reward_builders import rollout, train_classifier


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairwise")
    train_classifier(path, [("hello good", 2.0), ("hello bad", -2.0), ("hello it", 0.0)], num_labels=1)
    return str(path)


def build(directory: str, **changes) -> PairwiseRewardModel:
    return PairwiseRewardModel(PairwiseRewardModel.Config(model_name=directory, device="cpu", **changes))


def test_value_is_the_win_probability_over_the_opponent(directory):
    rollouts = [
        rollout(r, prompt="hello", chosen=c) for r, c in (("good", "bad"), ("bad", "good"), ("it", "it"))
    ]
    better, worse, equal = (result.value for result in build(directory).score(rollouts))
    assert better > 0.9
    assert better + worse == pytest.approx(1.0, abs=1e-5)
    assert equal == pytest.approx(0.5, abs=1e-5)
    raw = RewardModel(RewardModel.Config(model_name=directory, device="cpu"))
    own, rival = (r.value for r in raw.score([rollouts[0], rollouts[1]]))
    assert better == pytest.approx(1 / (1 + math.exp(rival - own)), abs=1e-5)


def test_missing_opponent_is_a_data_failure_and_spares_the_others(directory):
    results = build(directory).score(
        [rollout("good", prompt="hello"), rollout("good", prompt="hello", chosen="bad")]
    )
    assert isinstance(results[0], Failure)
    assert results[0].kind == "data"
    assert results[1].value > 0.5


def test_configuration_is_checked(directory):
    with pytest.raises(ConfigError, match="temperature must be > 0"):
        build(directory, temperature=0.0)
    with pytest.raises(ConfigError, match="cannot be read"):
        build("/nowhere")
    soft, sharp = (
        build(directory, temperature=t).score([rollout("good", prompt="hello", chosen="bad")])[0]
        for t in (4.0, 1.0)
    )
    assert 0.5 < soft.value < sharp.value
