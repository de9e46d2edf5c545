import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from model_builders import build_model
from multitask_rl.attention import products
from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import EngineError
from multitask_rl.models.actor import Actor
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.testing.engine import sampled_logprobs
from rollout_models import ARCHITECTURES, build

REQUESTS = [
    GenerationRequest(
        prompt_ids=list(range(3, 3 + length)),
        sampling=SamplingParams(max_new_tokens=limit, temperature=temperature, top_p=top_p),
        seeds=[1000 * length + i for i in range(4)],
    )
    for length, limit, temperature, top_p in ((3, 20, 0.8, 1.0), (12, 5, 1.0, 0.9), (7, 24, 0.8, 1.0))
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_any_causal_model_is_sampled_token_exactly(name):
    model = build(name)
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    for request, group in zip(REQUESTS, engine.generate(REQUESTS), strict=True):
        for generation in group:
            expected = sampled_logprobs(model, request.prompt_ids, generation.response_ids, request.sampling)
            assert torch.allclose(expected, torch.tensor(generation.rollout_logprobs), atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["qwen2.Qwen2", "mistral.Mistral", "mamba.Mamba"])
def test_a_sample_depends_on_its_seed_alone(name):
    engine = HFEngine(build(name), eos_token_ids=[1], pad_token_id=0)
    together = engine.generate(REQUESTS)
    for request, group in zip(REQUESTS, together, strict=True):
        alone = engine.generate(
            [
                GenerationRequest(
                    prompt_ids=request.prompt_ids, sampling=request.sampling, seeds=request.seeds[1:2]
                )
            ]
        )
        assert alone[0][0].response_ids == group[1].response_ids


def test_small_batches_give_the_same_samples_as_one_large():
    model = build("qwen2.Qwen2")
    large = HFEngine(model, eos_token_ids=[1], pad_token_id=0).generate(REQUESTS)
    small = HFEngine(model, eos_token_ids=[1], pad_token_id=0, max_batch_tokens=40).generate(REQUESTS)
    assert [[g.response_ids for g in group] for group in large] == [
        [g.response_ids for g in group] for group in small
    ]


def test_sampling_follows_the_models_distribution():
    model = build("qwen2.Qwen2")
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    number = 4000
    request = GenerationRequest(
        prompt_ids=[5, 6, 7], sampling=SamplingParams(max_new_tokens=1), seeds=range(number)
    )
    drawn = torch.tensor([g.response_ids[0] for g in engine.generate([request])[0]])
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1) * number
    counts = torch.bincount(drawn, minlength=60).float()
    # chi-square with 59 degrees of freedom: 99.9 % quantile 98.3
    assert float(((counts - expected) ** 2 / expected).sum()) < 98.3


def test_the_end_token_is_kept_and_nothing_follows_it():
    model = build("qwen2.Qwen2")
    with torch.no_grad():
        model.lm_head.weight[1] += 0.3
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    generations = [g for group in engine.generate(REQUESTS) for g in group]
    stopped = [g for g in generations if g.finish_reason == "stop"]
    assert stopped
    assert all(g.response_ids[-1] == 1 and 1 not in g.response_ids[:-1] for g in stopped)
    assert all(1 not in g.response_ids for g in generations if g.finish_reason == "length")


def test_a_stop_string_ends_the_response_where_it_appears():
    model = build("qwen2.Qwen2")
    engine = HFEngine(
        model, eos_token_ids=[1], pad_token_id=0, decode=lambda ids: "".join(chr(65 + i) for i in ids)
    )
    free = engine.generate([REQUESTS[0]])[0][0]
    stop = chr(65 + free.response_ids[3]) + chr(65 + free.response_ids[4])
    sampling = SamplingParams(max_new_tokens=20, temperature=0.8, stop=(stop,))
    request = GenerationRequest(
        prompt_ids=REQUESTS[0].prompt_ids, sampling=sampling, seeds=REQUESTS[0].seeds[:1]
    )
    cut = engine.generate([request])[0][0]
    assert cut.response_ids == free.response_ids[:5]
    assert cut.finish_reason == "stop"


def test_a_stop_string_is_found_behind_characters_of_several_tokens():
    """A decoder with byte fallback reads a row of byte tokens that begins inside a character as no text."""
    words = ["<pad>", "<eos>", *(f"<0x{value:02X}>" for value in range(256))]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    actor = Actor(build_model(vocab_size=len(words)), tokenizer, ModelConfig())
    engine = HFEngine(
        actor.model,
        eos_token_ids=[1],
        pad_token_id=0,
        decode=tokenizer.decode,
        grammars=lambda: actor.grammars,
    )
    choice = json.dumps({"choices": ["\u65e5\u672c\u8a9e\u3002\u672c\u65e5"]})
    sampling = SamplingParams(max_new_tokens=30, grammar=choice, stop=("\u3002",))
    (generation,) = engine.generate([GenerationRequest(prompt_ids=[5], sampling=sampling, seeds=[1])])[0]
    assert tokenizer.decode(generation.response_ids) == "\u65e5\u672c\u8a9e\u3002"
    assert generation.finish_reason == "stop"


def test_an_empty_prompt_is_an_error_with_its_place():
    engine = HFEngine(build("qwen2.Qwen2"), eos_token_ids=[1], pad_token_id=0)
    with pytest.raises(EngineError, match="request 0 has an empty prompt"):
        engine.generate([GenerationRequest(prompt_ids=[], sampling=SamplingParams(), seeds=[1])])


def test_the_mode_of_the_model_is_put_back():
    model = build("qwen2.Qwen2").train()
    HFEngine(model, eos_token_ids=[1], pad_token_id=0).generate(REQUESTS[:1])
    assert model.training


def test_a_call_beside_an_open_stream_is_refused_and_disturbs_nothing():
    model = build("qwen2.Qwen2").train()
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    expected = engine.generate(REQUESTS)
    parts = engine.generate_stream(REQUESTS)
    ended = next(parts)
    with pytest.raises(EngineError, match="at work on another call"):
        engine.generate(REQUESTS)
    for part in parts:
        ended += part
    assert {(i, j): g for i, j, g in ended} == {
        (i, j): g for i, group in enumerate(expected) for j, g in enumerate(group)
    }
    assert model.training

    parts = engine.generate_stream(REQUESTS)
    next(parts)
    parts.close()
    assert engine.generate(REQUESTS) == expected


def converse(engine, turns=3):
    """Return the answers of six conversations of one group, turn by turn, and how much was cached."""
    prompts = [[5, 9, 3, 7, 2 + 1] * 3] * 6
    answers, cached = [], []
    for turn in range(turns):
        # siblings share their first prompt; a new conversation begins beside each later turn
        requests = [
            GenerationRequest(
                prompt_ids=prompt,
                sampling=SamplingParams(max_new_tokens=4 + 3 * (i % 3)),
                seeds=[100 * turn + i],
                conversations=[i + 1],
            )
            for i, prompt in enumerate(prompts)
        ]
        if turn:
            requests.insert(2, replace(REQUESTS[1], conversations=[10 * turn + i for i in range(4)]))
        found = engine.generate(requests)
        cached.append(engine.num_cached_tokens / engine.num_prompt_tokens)
        answers += found
        own = [group[0].response_ids for group in found if len(group) == 1]
        prompts = [
            [*p, *ids, *range(20, 24 + 9 * (i % 2))]
            for i, (p, ids) in enumerate(zip(prompts, own, strict=True))
        ]
        prompts[3][8:] = prompts[3][9:]  # a template has rewritten what was said before
    return [generation for group in answers for generation in group], cached


@pytest.mark.parametrize("with_onednn", [False, True])
@pytest.mark.parametrize("name", ["qwen2.Qwen2", "gpt_neox.GPTNeoX", "mistral.Mistral"])
def test_turns_continue_from_kept_keys_and_values(name, with_onednn, monkeypatch):
    monkeypatch.setattr(products, "with_onednn", with_onednn)
    model = build(name)
    kept, cached = converse(HFEngine(model, eos_token_ids=[1], pad_token_id=0))
    again, without = converse(HFEngine(model, eos_token_ids=[1], pad_token_id=0, kept_tokens=0))
    assert [g.response_ids for g in kept] == [g.response_ids for g in again]
    for one, other in zip(kept, again, strict=True):
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=1e-5)
    assert without == [0.0, 0.0, 0.0]
    shares_prompts = name != "mistral.Mistral"  # a model of sliding windows computes every turn anew
    assert [share > 0.4 for share in cached] == [False, shares_prompts, shares_prompts]


def test_what_is_kept_is_bounded_and_ends_with_its_conversation_and_weights():
    def share(engine, between=lambda: None):
        prompt = list(range(3, 30))
        first = GenerationRequest(
            prompt_ids=prompt,
            sampling=SamplingParams(max_new_tokens=1),
            seeds=[1, 2],
            conversations=[1, 2],
        )
        (answers,) = engine.generate([first])
        between()
        engine.generate(
            [
                replace(first, prompt_ids=[*prompt, *a.response_ids, 7 + n], seeds=[3], conversations=[n])
                for n, a in enumerate(answers, 1)
            ]
        )
        return engine.num_cached_tokens / 27

    def engine(tokens):
        return HFEngine(build("qwen2.Qwen2"), eos_token_ids=[1], pad_token_id=0, kept_tokens=tokens)

    assert [share(engine(tokens)) for tokens in (54, 53, 26)] == [2, 1, 0]
    assert share(one := engine(54), lambda: one.retain([2, 9])) == 1
    assert share(one, lambda: one.update_weights({}, 1)) == 0
