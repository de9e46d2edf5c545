"""Models whose attention is biased by distance (ALiBi) are loaded, sampled and trained like any other."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from learner_benches import Bench
from model_builders import VOCABULARY, build_tokenizer, sample_scored
from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor, load_actor
from multitask_rl.models.rope import scale_rope
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine

IDS = {"vocab_size": len(VOCABULARY), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True, **IDS}
MODELS = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, **IDS)),
    "mpt": lambda: MptForCausalLM(MptConfig(d_model=32, n_layers=2, n_heads=4, max_seq_len=64, **IDS)),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**FALCON)),
    "falcon, new decoder": lambda: FalconForCausalLM(FalconConfig(new_decoder_architecture=True, **FALCON)),
}


def logits_alone(model, prompt, response):
    ids = torch.tensor([[*prompt, *response]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def chosen_logprobs(model, prompt, response, temperature=1.0):
    logprobs = (logits_alone(model, prompt, response).float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)


@pytest.fixture(params=MODELS)
def actor(request, tmp_path):
    torch.manual_seed(0)
    model = MODELS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    Actor(model, build_tokenizer(), ModelConfig()).save(tmp_path)
    return load_actor(ModelConfig(name_or_path=str(tmp_path)), "cpu")


@torch.no_grad()
def test_samples_are_those_of_a_plain_forward(actor):
    prompts = [[5, 9, 4, 3, 8, 2, 6, 7], [5, 9], [11, 4, 30, 2]]
    engine = HFEngine(actor.model, eos_token_ids=[1], pad_token_id=0)
    greedy = SamplingParams(max_new_tokens=12, temperature=0.0)
    requests = [GenerationRequest(prompt_ids=p, seeds=[0, 1], sampling=greedy) for p in prompts]
    for prompt, group in zip(prompts, engine.generate(requests), strict=True):
        for found in group:
            best = logits_alone(actor.model, prompt, found.response_ids).argmax(-1)
            assert found.response_ids == best.tolist()
    for scored in sample_scored(actor, groups=2):
        rollout = scored.rollout
        given = (rollout.prompt.prompt_ids, rollout.response_ids, rollout.sampling.temperature)
        alone = chosen_logprobs(actor.model, *given)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), alone, atol=1e-5, rtol=0)


def test_gradients_are_those_of_a_plain_forward(actor):
    bench = Bench(actor=actor, layout="auto", tokens=64)
    bench.update(sample_scored(actor, groups=2))
    runner = bench.main.runner
    samples = [c.sample for c in bench.credited]
    factors = [1.0 + 0.3 * i for i in range(len(samples))]
    names = [name for name, _ in actor.model.named_parameters()]
    plain = []
    for sample, factor in zip(samples, factors, strict=True):
        temperature = sample.scored.rollout.sampling.temperature
        given = (sample.prompt_ids, sample.response_ids, temperature)
        plain.append(factor * chosen_logprobs(actor.model, *given).sum())
    wanted = torch.autograd.grad(sum(plain), list(actor.model.parameters()))
    actor.model.zero_grad()
    with actor.learning(), runner.together():
        for batch in runner.cut(samples):
            weight = torch.tensor([factors[i] for i in batch.indices])[batch.sequence]
            (runner.forward(batch, samples).logprobs * weight).sum().backward()
    for name, parameter, own in zip(names, actor.model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, own, atol=1e-3, rtol=1e-3, msg=name)


def test_mpt_has_a_length_and_rows_of_a_batch_keep_to_it():
    model = MODELS["mpt"]().eval()
    assert Actor(model, build_tokenizer(), ModelConfig()).max_length == 64
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    requests = [
        GenerationRequest(
            prompt_ids=[2 + i % 40 for i in range(length)],
            seeds=[0],
            sampling=SamplingParams(max_new_tokens=64 - length),
        )
        for length in (24, 44)
    ]
    assert [len(group) for group in engine.generate(requests)] == [1, 1]


@pytest.mark.parametrize("config", [FalconConfig(**FALCON), MptConfig(), BloomConfig()])
def test_their_positions_cannot_be_scaled(config):
    with pytest.raises(ConfigError, match="no rotary positions"):
        scale_rope(config, {"type": "linear", "factor": 2.0})
