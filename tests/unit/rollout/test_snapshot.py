"""Sampling from a copy of the actor, in float32 or with linear layers in bfloat16."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from model_builders import build_actor
from multitask_rl.config.run import RolloutConfig
from multitask_rl.errors import ConfigError
from multitask_rl.records import Event, SamplingParams
from multitask_rl.rollout.base import GenerationRequest, push_weights
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.rollout.snapshot import PackedLinear, SnapshotEngine, build_engine, can_pack
from multitask_rl.testing import FakeEngine

HALF = RolloutConfig(engine_config={"weights": "bfloat16"})
REQUESTS = [
    GenerationRequest(
        prompt_ids=[3 + i, 7, 9],
        sampling=SamplingParams(max_new_tokens=16),
        seeds=[10 * i + j for j in range(4)],
    )
    for i in range(3)
]


def engine(actor, config, **how):
    return build_engine(HFEngine, actor, config, seed=0, output_dir=Path("unused"), **how)


def sampled(own):
    return [(g.response_ids, g.rollout_logprobs) for group in own.generate(REQUESTS) for g in group]


def autocast_sample(actor):
    """Sample the actor's own weights as a run with ``model.autocast`` does."""
    keys = {"eos_token_ids": actor.eos_token_ids, "pad_token_id": actor.pad_token_id}
    return sampled(HFEngine(actor.model, autocast=True, **keys))


@pytest.mark.parametrize("adapters", [False, True])
def test_a_copy_in_bfloat16_samples_as_autocast_does_and_changes_with_its_update_only(adapters):
    actor = build_actor()
    if adapters:
        lora = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        actor.model = get_peft_model(actor.model, lora).eval()
    whole = sampled(engine(actor, RolloutConfig()))
    first = autocast_sample(actor)
    own = engine(actor, HALF)
    assert sampled(own) == first != whole
    assert {p.dtype for p in actor.model.parameters()} == {torch.float32}
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.mul_(1.2)
    assert sampled(own) == first
    own.update_weights({}, 5)
    assert own.policy_version == 5
    assert sampled(own) == autocast_sample(actor) != first


@pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="this CPU has no instructions for bfloat16")
def test_new_weights_reach_a_thread_that_keeps_its_casts():
    actor = build_actor()
    actor.config = replace(actor.config, autocast=True)
    own = engine(actor, RolloutConfig(), copies=True)
    with ThreadPoolExecutor(
        1, initializer=torch.autocast_increment_nesting
    ) as thread:  # as a run that overlaps
        first = thread.submit(sampled, own).result()
        with torch.no_grad():
            for parameter in actor.model.parameters():
                parameter.mul_(1.2)
        push_weights(own, actor)
        assert thread.submit(sampled, own).result() == autocast_sample(actor) != first


@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_gives_the_bits_of_a_linear_layer_under_autocast(bias):
    linear = torch.nn.Linear(72, 200, bias=bias)
    packed = PackedLinear(linear)
    for rows in (1, 5, 64):
        states = torch.randn(rows, 3, 72)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(packed(states), linear(states))
    assert torch.equal(packed.weight, linear.weight.to(torch.bfloat16))
    packed.pack(2 * linear.weight)
    assert torch.equal(packed.weight, (2 * linear.weight).to(torch.bfloat16))


def test_an_overlapped_run_samples_from_a_copy_of_either_kind():
    actor = build_actor()
    expected = {"actor": sampled(engine(actor, RolloutConfig())), "bfloat16": autocast_sample(actor)}
    for kind, before in expected.items():
        config = RolloutConfig(engine_config={"weights": kind})
        own = engine(actor, config, copies=True)
        saved = {name: value.clone() for name, value in actor.model.state_dict().items()}
        with torch.no_grad():
            actor.model.lm_head.weight.mul_(0.5)
        assert sampled(own) == before
        actor.model.load_state_dict(saved)


class Able(FakeEngine):
    """An engine with abilities that it does not share with ``HFEngine``."""

    shares_weights = can_admit = can_constrain = True

    def __init__(self):
        super().__init__()
        self.admitted, self.num_sleeps = [], 0

    @classmethod
    def build(cls, actor, config, *, seed, output_dir):
        return cls()

    def admit(self, requests):
        self.admitted += requests

    def sleep(self):
        self.num_sleeps += 1

    def health_events(self, step):
        return [Event(step=step, source="engine", kind="late", reason=f"{self.num_sleeps} sleeps")]


def test_an_engine_over_a_copy_keeps_its_abilities():
    own = build_engine(Able, build_actor(), RolloutConfig(), seed=0, output_dir=Path("unused"), copies=True)
    assert isinstance(own, SnapshotEngine)
    assert own.can_admit
    assert own.can_constrain
    assert not own.can_watch
    own.admit(REQUESTS)
    own.sleep()
    assert [event.reason for event in own.health_events(3)] == ["1 sleeps"]


def test_weights_of_another_type_are_refused_with_what_is_allowed():
    with pytest.raises(ConfigError, match=r"rollout\.engine_config\.weights must be one of actor, bfloat16"):
        engine(build_actor(), RolloutConfig(engine_config={"weights": "int4"}))
