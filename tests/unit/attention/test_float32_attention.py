"""Attention under autocast on a CPU: float32 where that pays, one distribution for engine and trainer."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from multitask_rl.attention import float32, products
from multitask_rl.attention.float32 import FLOAT32, LONGEST, attend_float32, use_float32_attention
from multitask_rl.attention.interface import use_attention
from multitask_rl.attention.shared import SHARED_PROMPT
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.decoder import SharedDecoder, can_share_prompts, round_rows
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.forward import forward_tokens
from multitask_rl.training.microbatch import build_microbatches
from rollout_models import build

AUTOCAST = {"device_type": "cpu", "dtype": torch.bfloat16}


class _Layer(torch.nn.Module):
    num_key_value_groups = 2
    is_causal = True


def states(length: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    heads = (4, 2, 2)
    return [torch.randn(3, h, length, 8, dtype=torch.bfloat16, requires_grad=True) for h in heads]


@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_values_and_gradients_are_those_of_float32(kind):
    query, key, value = states(6)
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    mask = {"causal": None, "bool": seen.expand(3, 1, 6, 6)}.get(
        kind, torch.zeros(3, 1, 6, 6, dtype=torch.bfloat16).masked_fill(~seen, float("-inf"))
    )
    with torch.autocast(**AUTOCAST):
        found, _ = attend_float32(_Layer(), query, key, value, mask)
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    many = [wide[0], *(x.repeat_interleave(2, 1) for x in wide[1:])]
    expected = scaled_dot_product_attention(*many, attn_mask=seen).transpose(1, 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    expected.square().sum().backward()
    for given, reference in zip((query, key, value), wide, strict=True):
        torch.testing.assert_close(given.grad.float(), reference.grad, rtol=2e-2, atol=2e-2)


@pytest.fixture(params=[2**21, 100], ids=["one slice", "slices"])
def multiplies(request, monkeypatch):
    """Take plain products, as where oneDNN multiplies."""
    monkeypatch.setattr(products, "with_onednn", True)
    monkeypatch.setattr(float32, "SCORE_CELLS", request.param)


@pytest.mark.parametrize("kind", ["causal", "bool", "float", "shared"])
def test_plain_products_give_values_and_gradients_of_the_kernel(kind, multiplies):
    given = [x.detach().float().requires_grad_() for x in states(6)]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    bias = torch.zeros(6, 6).masked_fill(~seen, float("-inf"))
    masks = {"bool": seen.expand(3, 1, 6, 6), "float": bias.expand(3, 1, 6, 6), "shared": bias[None, None]}
    found, _ = attend_float32(_Layer(), *given, masks.get(kind), scaling=0.2)
    wide = [x.detach().clone().requires_grad_() for x in given]
    many = [wide[0], *(x.repeat_interleave(2, 1) for x in wide[1:])]
    expected = scaled_dot_product_attention(*many, attn_mask=seen, scale=0.2).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    expected.square().sum().backward()
    for own, reference in zip(given, wide, strict=True):
        torch.testing.assert_close(own.grad, reference.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"is_causal": False}, {"dropout": 0.5}])
def test_plain_products_leave_other_attention_to_the_kernel(options, multiplies, monkeypatch):
    asked = []
    monkeypatch.setattr(float32, "_sdpa", lambda *args, **kwargs: asked.append(kwargs) or (args[1], None))
    attend_float32(_Layer(), *(x.float() for x in states(6)), None, **options)
    assert asked == [options]


def test_padding_before_a_prompt_makes_no_output_nan(multiplies):
    query, key, value = (x.detach().float() for x in states(6))
    seen = torch.ones(6, 6, dtype=torch.bool).tril().repeat(3, 1, 1, 1)
    seen[1, :, :, :2] = False
    found, _ = attend_float32(_Layer(), query, key, value, seen)
    alone, _ = attend_float32(_Layer(), *(x[1:2, :, 2:] for x in (query, key, value)), None)
    assert found.isfinite().all()
    torch.testing.assert_close(found[1:2, 2:], alone)


def test_long_sequences_and_models_without_autocast_are_left_alone():
    query, key, value = states(LONGEST + 1)
    with torch.autocast(**AUTOCAST):
        assert attend_float32(_Layer(), query, key, value, None)[0].dtype == torch.bfloat16
    assert attend_float32(_Layer(), *states(6), None)[0].dtype == torch.bfloat16


def test_a_model_takes_it_in_place_of_sdpa_only_and_its_files_do_not_name_it(tmp_path):
    model = build("qwen2.Qwen2")
    model.set_attn_implementation("eager")
    assert not use_float32_attention(model)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert use_float32_attention(model)
    assert can_share_prompts(model)
    model.save_pretrained(tmp_path)
    assert FLOAT32 not in (tmp_path / "config.json").read_text()


def test_a_batch_is_filled_up_to_one_of_few_sizes():
    assert [round_rows(n) for n in (1, 2, 3, 9, 16, 17, 33, 256, 257, 600)] == [
        *(1, 2, 4, 16, 16, 24, 40, 256, 272, 608),
    ]
    assert len({round_rows(n) for n in range(1, 513)}) == 4 + (256 // 8 - 1) + 256 // 16
    assert all(n <= round_rows(n) for n in range(1, 5000))


def test_rows_that_fill_a_batch_change_nothing_and_are_not_seen():
    model = build("qwen2.Qwen2")
    sizes = []
    model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    prompts = [[5, 3, 9, 4]] * 18 + [[7, 8]] * 3
    answers = torch.randint(3, 60, (3, len(prompts)), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(len(prompts))
    with torch.no_grad(), torch.autocast(**AUTOCAST), use_attention([model], SHARED_PROMPT):
        decoder = SharedDecoder(model, prompts, 0)
        sizes.clear()
        for step, tokens in enumerate(answers):
            decoder.advance(tokens[rows])
            assert len(decoder.logits) == len(rows)
            if step == 0:
                rows = rows[decoder.keep(torch.arange(2, len(rows)))]
    assert sizes == [24, 24, 24]
    whole = torch.cat([torch.tensor(prompts[-1]), answers[:, -1]]).unsqueeze(0)
    with torch.no_grad():
        expected = model(whole).logits[0, -1]
    at = int((rows == len(prompts) - 1).nonzero())
    torch.testing.assert_close(decoder.logits[at].float(), expected, rtol=0.03, atol=0.03)


def test_without_bfloat16_no_row_is_added():
    model = build("qwen2.Qwen2")
    sizes = []
    model.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    with torch.no_grad(), use_attention([model], SHARED_PROMPT):
        decoder = SharedDecoder(model, [[5, 3]] * 21, 0)
        decoder.advance(torch.arange(21))
    assert sizes[-1] == 21


def gap(model) -> float:
    """Return the mean distance of engine's and trainer's log-probabilities under autocast."""
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0, autocast=True)
    sampling = SamplingParams(max_new_tokens=24)
    requests = [
        GenerationRequest(
            prompt_ids=[3 + i, 5, 9, 4 + i], sampling=sampling, seeds=[8 * i + j for j in range(8)]
        )
        for i in range(4)
    ]
    found = [
        (r.prompt_ids, g) for r, own in zip(requests, engine.generate(requests), strict=True) for g in own
    ]
    (batch,) = build_microbatches(
        [p for p, _ in found],
        [g.response_ids for _, g in found],
        max_tokens=10**6,
        layout="shared",
        pad_token_id=0,
    )
    with torch.no_grad(), torch.autocast(**AUTOCAST):
        out = forward_tokens(model, batch, [sampling] * len(found))
    sampled = torch.cat([torch.tensor(found[i][1].rollout_logprobs) for i in batch.indices])
    return float((out.logprobs - sampled).abs().mean())


def test_engine_and_trainer_are_closer_than_with_attention_in_bfloat16_on_one_side():
    model = build("qwen2.Qwen2")
    apart = gap(model)
    assert use_float32_attention(model)
    together = gap(model)
    assert together < 0.005
    assert together <= apart


@pytest.mark.parametrize("autocast", [False, True])
def test_rows_that_end_are_handed_on_every_few_tokens_under_autocast_and_all_come(autocast):
    model = build("qwen2.Qwen2")
    engine = HFEngine(model, eos_token_ids=range(3, 12), pad_token_id=0, autocast=autocast)
    sampling = SamplingParams(max_new_tokens=40)
    requests = [GenerationRequest(prompt_ids=[20, 21], sampling=sampling, seeds=list(range(32)))]
    handed = list(engine.generate_stream(requests))
    lengths = [{len(generation.response_ids) for _, _, generation in part} for part in handed]
    assert sorted(sample for part in handed for _, sample, _ in part) == list(range(32))
    if autocast:
        whole = [range(8 * n + 1, 8 * n + 9) for n in range(5)]
        assert all(any(own <= set(span) for span in whole) for own in lengths)
        assert len(lengths) < len(set().union(*lengths))
    else:
        assert all(len(own) == 1 for own in lengths)


def test_weights_that_changed_between_two_generations_are_the_ones_sampled_from():
    model = build("qwen2.Qwen2")
    engine = HFEngine(model, eos_token_ids=[1], pad_token_id=0, autocast=True)
    greedy = SamplingParams(max_new_tokens=6, temperature=0.0)
    requests = [GenerationRequest(prompt_ids=[3, 4, 5], sampling=greedy, seeds=[0])]
    engine.generate(requests)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    ((found,),) = engine.generate(requests)
    fresh = build("qwen2.Qwen2")
    fresh.load_state_dict(model.state_dict())
    ((expected,),) = HFEngine(fresh, eos_token_ids=[1], pad_token_id=0, autocast=True).generate(requests)
    assert found == expected
