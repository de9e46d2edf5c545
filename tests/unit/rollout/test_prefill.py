"""Chunked prefill: the same keys, values and logits as one forward, in bounded pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM, Qwen2Config, Qwen2ForCausalLM

from multitask_rl.records import SamplingParams
from multitask_rl.rollout import decoder as module
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.decoder import cache_argument, prefill
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.testing.engine import sampled_logprobs
from rollout_models import build

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(params=["qwen2", "gpt_neox"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    if request.param == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=1, initializer_range=0.3)).eval()
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, initializer_range=0.3)).eval()


def _prompts(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    width = max(lengths)
    ids = torch.randint(1, 40, (len(lengths), width), generator=torch.Generator().manual_seed(1))
    mask = torch.stack([(torch.arange(width) >= width - n).long() for n in lengths])
    ids = ids * mask
    return ids, None if min(lengths) == width else mask, (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[97], [17, 80, 41]])
@pytest.mark.parametrize("chunk_tokens", [1, 30, 10_000])
def test_chunks_give_the_keys_values_and_logits_of_one_forward(
    model: Any, lengths: list[int], chunk_tokens: int
) -> None:
    ids, mask, positions = _prompts(lengths)
    whole, pieces = DynamicCache(config=model.config), DynamicCache(config=model.config)
    arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
    expected = model(input_ids=ids, **cache_argument(model, whole), **arguments).logits[:, -1]
    found = prefill(model, ids, pieces, mask=mask, positions=positions, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    seen = torch.ones_like(ids) if mask is None else mask
    for one, other in zip(whole.layers, pieces.layers, strict=True):
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            assert a.shape == b.shape
            # what stands under padding is never read
            keep = seen.bool()[:, None, :, None].expand_as(a)
            torch.testing.assert_close(b[keep], a[keep], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_no_forward_is_larger_than_the_chunk(model: Any) -> None:
    ids, mask, positions = _prompts([50, 90])
    seen: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].numel())
    )
    cache = DynamicCache(config=model.config)
    prefill(model, ids, cache, mask=mask, positions=positions, chunk_tokens=33)
    hook.remove()
    assert max(seen) == 32
    assert sum(seen) == 180


@torch.no_grad()
def test_the_mask_of_a_forward_is_bounded_and_changes_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask, positions = _prompts([50, 90])
    given = {"mask": mask, "positions": positions, "chunk_tokens": 60}
    expected = prefill(model, ids, DynamicCache(config=model.config), **given)
    columns: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: columns.append(inputs[0].shape[1])
    )
    monkeypatch.setattr(module, "MASK_CELLS", 800)
    found = prefill(model, ids, DynamicCache(config=model.config), **given)
    hook.remove()
    assert columns[0] == 30, "the first forward needs no mask of its own"
    ends = [sum(columns[: i + 1]) for i in range(len(columns))]
    assert ends[-1] == 90
    assert all(2 * width * end <= 800 for width, end in zip(columns[1:], ends[1:], strict=True))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_the_engine_samples_the_same_however_its_prompts_are_cut(model: Any) -> None:
    engine, cutting, without_cache = (
        HFEngine(model, eos_token_ids=[1], pad_token_id=0, **further)
        for further in ({}, {"prefill_tokens": 16}, {"use_cache": False})
    )
    requests = [
        GenerationRequest(
            prompt_ids=[2 + (i * k) % 38 for i in range(length)],
            sampling=SamplingParams(max_new_tokens=12),
            seeds=[10 * k, 10 * k + 1],
        )
        for k, length in ((3, 70), (5, 64), (7, 9))
    ]
    whole = engine.generate(requests)
    for other in (cutting, without_cache):
        found = other.generate(requests)
        for a, b in zip((g for r in whole for g in r), (g for r in found for g in r), strict=True):
            assert a.response_ids == b.response_ids
            assert b.rollout_logprobs == pytest.approx(a.rollout_logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["lfm2.Lfm2", "granitemoehybrid.GraniteMoeHybrid"])
def test_a_recurrent_model_computes_each_token_once(name: str) -> None:
    model = build(name)
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0, prefill_tokens=16)
    sampling = SamplingParams(max_new_tokens=8)
    requests = [
        GenerationRequest(prompt_ids=[3 + i * k % 50 for i in range(length)], sampling=sampling, seeds=[k, 9])
        for k, length in ((3, 21), (5, 21), (7, 9))
    ]
    engine.generate(requests)
    computed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: computed.append(inputs[0].numel())
    )
    found = engine.generate(requests)
    hook.remove()
    responses = [g for group in found for g in group]
    assert sum(computed) == 21 + 21 + 9 + sum(len(g.response_ids) - 1 for g in responses)
    for request, group in zip(requests, found, strict=True):
        for one in group:
            expected = sampled_logprobs(model, request.prompt_ids, one.response_ids, sampling)
            assert one.rollout_logprobs == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("others", [False, True], ids=["one beginning", "one of each kind"])
def test_what_many_prompts_begin_with_is_computed_once(model: Any, others: bool) -> None:
    system = [2 + (3 * i) % 38 for i in range(60)]
    second = system[::-1] if others else system
    short = [[*system, *(2 + (1 + i) * k % 37 for i in range(2 + k))] for k in range(1, 8)]
    long = [[*second, *(2 + (1 + i) * k % 35 for i in range(90 + k))] for k in range(1, 8)]
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7)

    def requests(prompts: list[list[int]]) -> list[GenerationRequest]:
        return [
            GenerationRequest(prompt_ids=prompt, sampling=sampling, seeds=[len(prompt), prompt[0]])
            for prompt in prompts
        ]

    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    alone = [group for one in requests([*short, *long]) for group in engine.generate([one])]
    computed: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: computed.append(inputs[0].numel() if inputs[0].shape[1] > 1 else 0)
    )
    together = engine.generate(requests([*short, *long]))
    hook.remove()
    begun = 120 if others else 60
    assert sum(computed) == begun + 7 * 9 + 7 * 97, "of each kind as many columns as its longest has"
    assert engine.num_prompt_tokens - engine.num_cached_tokens == begun + sum(
        min(len(prompt), width) for prompts, width in ((short, 9), (long, 97)) for prompt in prompts
    )
    strange = [[*prompt[:30], 4, *prompt[31:]] for prompt in short[:2]]
    beside = engine.generate(requests([*strange, *short, *long]))[2:]
    for groups in zip(alone, together, beside, strict=True):
        for a, *others in zip(*groups, strict=True):
            for b in others:
                assert a.response_ids == b.response_ids
                assert b.rollout_logprobs == pytest.approx(a.rollout_logprobs, abs=1e-4)


def test_a_conversation_goes_on_beside_prompts_with_a_common_beginning(model: Any) -> None:
    system = [2 + (3 * i) % 38 for i in range(60)]
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0)
    sampling = SamplingParams(max_new_tokens=6)
    first = GenerationRequest(prompt_ids=[*system, 4, 5], sampling=sampling, seeds=[1], conversations=[1])
    ((answer,),) = engine.generate([first])
    said = [*first.prompt_ids, *answer.response_ids, 9]
    turn = GenerationRequest(prompt_ids=said, sampling=sampling, seeds=[2], conversations=[1])
    others = [
        GenerationRequest(prompt_ids=[*system, 6 + k, 5], sampling=sampling, seeds=[3 + k]) for k in range(7)
    ]
    (own,), *rest = engine.generate([turn, *others])
    assert engine.num_cached_tokens == len(turn.prompt_ids) - 2 + 6 * 60
    for request, group in zip([turn, *others], [[own], *rest], strict=True):
        (alone,) = HFEngine(model, eos_token_ids=[1], pad_token_id=0, use_cache=False).generate([request])
        assert alone[0].response_ids == group[0].response_ids
        assert group[0].rollout_logprobs == pytest.approx(alone[0].rollout_logprobs, abs=1e-4)


class OfToday:
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    def get_decoder(self) -> Any:
        return self


class Before(OfToday):
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...  # type: ignore[override]


def test_the_cache_goes_by_the_name_that_the_model_has() -> None:
    assert cache_argument(OfToday(), "kept") == {"cache": "kept"}
    assert cache_argument(Before(), "kept") == {"past_key_values": "kept"}
