"""``model.attn_implementation``: used where transformers knows it; refused before loading where not."""

from __future__ import annotations

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from learner_benches import Bench, relative_difference
from model_builders import build_actor, build_model, build_tokenizer, sample_scored
from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import load_actor, make_actor
from multitask_rl.rollout.decoder import can_share_prompts
from multitask_rl.run.plan import plan_run
from multitask_rl.training.runner import ModelRunner
from run_builders import run_config, write_run


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("actor")
    build_actor().save(path)
    return str(path)


@pytest.mark.parametrize("name", ["auto", "sdpa", "eager"])
def test_the_named_attention_computes_the_same(directory, name):
    actor = load_actor(ModelConfig(name_or_path=directory, attn_implementation=name), "cpu")
    assert actor.model.config._attn_implementation == name.replace("auto", "sdpa")
    ids = torch.tensor([[5, 7, 9, 4, 11]])
    with torch.no_grad():
        torch.testing.assert_close(actor.model(ids).logits, build_model()(ids).logits, atol=1e-5, rtol=1e-4)
    model = make_actor(build_model(), build_tokenizer(), ModelConfig(attn_implementation=name)).model
    assert model.config._attn_implementation == name.replace("auto", "sdpa")


def test_layout_auto_goes_round_what_the_attention_cannot():
    scored = sample_scored(build_actor(), groups=2)
    other = build_actor()
    other.model.set_attn_implementation("eager")
    benches = Bench(layout="auto"), Bench(layout="auto", actor=other)
    for bench in benches:
        bench.update(scored)
    assert relative_difference(benches[1].gradient, benches[0].gradient) < 1e-4
    flex = build_actor()
    flex.model.set_attn_implementation("flex_attention")
    runner = Bench(layout="auto", actor=flex).main.runner
    assert isinstance(runner, ModelRunner)
    assert runner._layout() == "bucketed"
    assert not can_share_prompts(flex.model)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("flash_attention_2", r"needs a CUDA device, and the actor is on cpu; .*sdpa"),
        ("flash_attention_3", r"needs a CUDA device, and the actor is on cpu; .*sdpa"),
        ("flex_attention", r"no backward pass on a CPU; .*sdpa"),
        ("kernels-community/flash-attn2", r"is a kernel of the Hugging Face hub.*pip install kernels"),
        ("sdap", r"must be auto, sdpa, .* got 'sdap'; did you mean 'sdpa'"),
    ],
)
def test_what_cannot_work_is_refused_at_plan_time(tmp_path, name, text):
    write_run(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), attn_implementation=name)
    with pytest.raises(ConfigError, match="model.attn_implementation.*" + text):
        plan_run(run_config(tmp_path, "out", 1, model=model))


def test_a_missing_package_and_a_dtype_are_named(monkeypatch):
    from multitask_rl.models.actor import check_attention

    with pytest.raises(ConfigError, match=r"flash_attention_2.*not installed; pip install flash-attn"):
        check_attention(ModelConfig(attn_implementation="flash_attention_2"), "cuda:0")
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: True)
    check_attention(ModelConfig(attn_implementation="flash_attention_2"), "cuda:0")
    with pytest.raises(ConfigError, match=r"16 bits.*model.dtype=float32"):
        check_attention(ModelConfig(attn_implementation="flash_attention_2", dtype="float32"), "cuda:0")


def test_a_model_without_the_attention_is_named(tmp_path):
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"attn_implementation=sdpa: BloomForCausalLM.*auto"):
        load_actor(ModelConfig(name_or_path=str(tmp_path), attn_implementation="sdpa"), "cpu")
    assert (
        load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu").model.config._attn_implementation
        == "eager"
    )
