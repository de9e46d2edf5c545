"""A model scaled in memory trains beyond its first length and keeps its positions."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2ForCausalLM

from model_builders import build_model, build_tokenizer
from multitask_rl import HfModelAdapter, PPOConfig, RLTrainer
from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models import scale_rope
from multitask_rl.models.actor import load_actor

LINEAR = {"type": "linear", "factor": 4.0}


def scaled_model(scaling):
    config = build_model().config
    config.max_position_embeddings = 16
    scale_rope(config, scaling)
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_an_engine_and_a_checkpoint_have_the_positions_of_the_model(tmp_path, kind):
    model = scaled_model({"type": kind, "factor": 4.0})
    actor = HfModelAdapter(model, build_tokenizer())
    assert actor.max_length == 64
    actor.save_for_engine(tmp_path)
    again = load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu")
    assert again.max_length == 64
    ids = torch.arange(2, 42).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(again.model(ids).logits, model(ids).logits)


def test_it_trains_on_prompts_longer_than_its_first_length(tmp_path):
    trainer = RLTrainer(
        scaled_model(LINEAR),
        build_tokenizer(),
        algorithm="grpo",
        config=PPOConfig(
            output_dir=str(tmp_path), max_steps=1, batch_size=4, group_size=2, rollout={"response_length": 4}
        ),
        reward_fn=lambda response: float(len(response)),
    )
    trainer.train([f"{'abcd' * 6}{letter}" for letter in "abcdefgh"])
    saved = max(tmp_path.glob("**/checkpoints/step_*/actor"))
    config = AutoConfig.from_pretrained(saved)
    assert config.rope_parameters["rope_type"] == "linear"
    kept = AutoModelForCausalLM.from_pretrained(saved)
    ids = torch.arange(2, 42).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(kept(ids).logits, trainer.actor.model(ids).logits)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "dynamic"])
def test_a_configuration_scaled_after_its_model_was_built_is_refused(kind):
    model = build_model()
    scale_rope(model.config, {"type": kind, "factor": 4.0})
    with pytest.raises(ConfigError, match=r"was built before its configuration was scaled.*config=config"):
        HfModelAdapter(model, build_tokenizer())
    HfModelAdapter(build_model().bfloat16(), build_tokenizer())


def test_the_assignment_of_older_versions_is_explained():
    config = build_model().config
    config.rope_scaling = dict(LINEAR)
    # transformers 5.23 takes the assignment
    told = r"config.rope_scaling = .* replaces.*scale_rope\(config|already scales its positions \(linear"
    with pytest.raises(ConfigError, match=told):
        scale_rope(config, LINEAR)


def test_an_assignment_as_in_the_reference_ends_in_transformers_before_this_package_is_asked(tmp_path):
    """``003_3_rope.py`` cannot run: transformers 5 looks up ``rope_type`` in what was assigned.

    From 5.23 on it lacks the base of the positions, ``rope_theta``, instead.
    """
    build_model().save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_scaling = dict(LINEAR)
    with pytest.raises((KeyError, TypeError), match=r"rope_type|'NoneType' and 'Tensor'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    config = AutoConfig.from_pretrained(tmp_path)
    scale_rope(config, LINEAR)
    AutoModelForCausalLM.from_pretrained(tmp_path, config=config).save_pretrained(tmp_path / "scaled")
    build_tokenizer().save_pretrained(tmp_path / "scaled")
    assert load_actor(ModelConfig(name_or_path=str(tmp_path / "scaled")), "cpu").max_length == (
        4 * build_model().config.max_position_embeddings
    )
