"""Reward models with weights of few bits: about the same scores from a fraction of the memory."""

from __future__ import annotations

import sys

import pytest

from multitask_rl.errors import ConfigError, MissingExtraError
from multitask_rl_rewards.rm_hf import RewardModel
from reward_builders import rollout, train_classifier

EXAMPLES = [("hello good", 1.0), ("hello bad", -1.0), ("what good good", 1.0), ("what bad it", -1.0)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("rm")
    train_classifier(path, EXAMPLES, num_labels=1)
    return path


def build(directory, dtype) -> RewardModel:
    return RewardModel(RewardModel.Config(model_name=str(directory), device="cpu", dtype=dtype))


def test_int8_scores_as_the_whole_model(directory):
    pytest.importorskip("torchao")
    answers = [rollout(text, prompt="hello") for text in ("good", "bad", "it is what it is", "good good")]
    whole = [score.value for score in build(directory, "float32").score(answers)]
    model = build(directory, "int8")
    assert [score.value for score in model.score(answers)] == pytest.approx(whole, abs=0.05)
    layers = [p for p in model._classifier._loaded.model.parameters() if "Int8" in type(p.data).__name__]
    assert layers
    assert all(p.element_size() == 1 or p.qdata.element_size() == 1 for p in layers)


def test_what_is_missing_is_named(directory, monkeypatch):
    with pytest.raises(ConfigError, match=r"int4 runs on CUDA only.* dtype: int8"):
        build(directory, "int4")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'multitask-rl\[quantized\]'"):
        build(directory, "int8")
