import itertools
import random

import pytest
import torch
from model_builders import build_actor, build_model

from multitask_rl.config.run import BatchConfig, RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.records import SamplingParams
from multitask_rl.training import block_attention
from multitask_rl.training.block_attention import Block, Blocks, attention_in_blocks, mask_of
from multitask_rl.training.critic import Critic
from multitask_rl.training.forward import forward_tokens, split_head
from multitask_rl.training.microbatch import build_microbatches, padding_share
from multitask_rl.training.runner import ModelRunner
from multitask_rl.training.shared_prompt import cut_by_length, supports_shared_prompts


def cost(lengths, sizes, own_cells):
    ends = list(itertools.accumulate(sizes))
    return sum(s * lengths[e - 1] + own_cells for s, e in zip(sizes, ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_cheaper(seed):
    rng = random.Random(seed)
    lengths = sorted(rng.randint(1, 40) for _ in range(rng.randint(1, 9)))
    own_cells = rng.choice([0, 5, 24, 100])
    found = cut_by_length(lengths, own_cells=own_cells)
    assert sum(found) == len(lengths)
    every = (
        [b - a for a, b in itertools.pairwise([0, *cuts, len(lengths)])]
        for number in range(len(lengths))
        for cuts in itertools.combinations(range(1, len(lengths)), number)
    )
    assert cost(lengths, found, own_cells) == min(cost(lengths, s, own_cells) for s in every)


def test_a_shared_prompt_is_counted_once_and_the_budget_holds():
    rng = random.Random(0)
    prompts, responses = [], []
    for length in (1, 8, 16, 48, 160, 160):
        prompt = [rng.randrange(5, 40) for _ in range(length)]
        for _ in range(8):
            prompts.append(prompt)
            responses.append([7] * rng.randint(1, 128))
    prompts.append([9] * 77)
    responses.append([7] * 31)  # its prompt is no other's
    whole = build_microbatches(prompts, responses, max_tokens=10**6, layout="shared", pad_token_id=0)
    prefixes = sum(length - 1 for length in (1, 8, 16, 48, 160, 160, 77))
    assert sum(b.num_tokens for b in whole) == prefixes + sum(map(len, responses))
    assert padding_share(whole) < 0.03
    small = build_microbatches(prompts, responses, max_tokens=600, layout="shared", pad_token_id=0)
    assert all(b.num_cells <= 600 for b in small)
    assert sorted(i for b in small for i in b.indices) == list(range(len(prompts)))


def learn(model, prompts, responses, layout):
    (batch,) = build_microbatches(prompts, responses, max_tokens=10**6, layout=layout, pad_token_id=0)
    model.zero_grad()
    with attention_in_blocks(model):
        out = forward_tokens(model, batch, [SamplingParams()] * len(batch.indices))
        weights = torch.linspace(-1, 2, len(out.logprobs))
        by_sample = torch.split(out.logprobs, torch.bincount(batch.sequence).tolist())
        ordered = torch.cat([by_sample[batch.indices.index(i)] for i in range(len(prompts))])
        (ordered @ weights).backward()
    return ordered.detach(), [p.grad.clone() for p in model.parameters()]


EVEN = [[5, 6, 7, 8]] * 5 + [[9, 8, 7, 6]] * 3
RAGGED = [[5, 6, 7, 8, 9, 10, 11]] * 4 + [[9]] * 3 + [[12, 4]]
CASES = {
    "even": EVEN,
    "ragged": RAGGED,
    "one token": [[5]] * 8,
    "alone": [[5 + i] * (1 + i) for i in range(8)],
}


@pytest.mark.parametrize("prompts", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("mask_cells", [2**25, 96])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_shared_prompt_changes_nothing(prompts, mask_cells, checkpointing, monkeypatch):
    monkeypatch.setattr(block_attention, "MASK_CELLS", mask_cells)
    rng = random.Random(0)
    responses = [[rng.randrange(5, 40) for _ in range(rng.randint(1, 30))] for _ in prompts]
    model = build_model()
    whole, gradients = learn(model, prompts, responses, "bucketed")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.training = True
    shared, own = learn(model, prompts, responses, "shared")
    torch.testing.assert_close(shared, whole, atol=1e-5, rtol=1e-5)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"


def test_layers_computed_again_without_blocks_fail_loudly():
    model = build_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.model.training = True
    for layer in model.model.layers:
        layer.training = True
    (batch,) = build_microbatches(
        [[5, 6]] * 4, [[7, 8, 9]] * 4, max_tokens=100, layout="shared", pad_token_id=0
    )
    out = forward_tokens(model, batch, [SamplingParams()] * 4)
    with pytest.raises(RuntimeError):
        out.logprobs.sum().backward()


def test_prompts_that_fill_a_budget_are_read_in_one_forward():
    prompts = [[5 + i % 4, 9, 7 + i % 4] for i in range(32)]
    responses = [[7] * (1 + i) for i in range(32)]
    model, forwards = build_model(), []
    model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    (batch,) = build_microbatches(prompts, responses, max_tokens=10**6, layout="shared", pad_token_id=0)
    with torch.no_grad():
        supports = split_head(model)
        forwards.clear()
        forward_tokens(model, batch, [SamplingParams()] * 32)
    assert supports is not None
    assert len(forwards) == 1
    assert len(batch.shared[0].responses) > 1


def test_a_device_with_costly_launches_gets_fewer_blocks():
    prompts, responses = [[5, 6]] * 24, [[7] * (4 * i + 1) for i in range(24)]
    given = {"max_tokens": 10**6, "layout": "shared", "pad_token_id": 0}
    found = {}
    for device_type in ("cpu", "cuda"):
        (batch,) = build_microbatches(prompts, responses, device_type=device_type, **given)
        found[device_type] = len(batch.shared[0].responses)
    assert found["cuda"] < found["cpu"]


def test_a_model_of_keys_and_values_shares_prompts_and_one_with_windows_does_not():
    model = build_model()
    assert supports_shared_prompts(model)
    assert not model.training
    model.config.sliding_window, model.config.use_sliding_window = 8, True
    assert not supports_shared_prompts(model)


def test_attention_that_wants_more_is_refused():
    model = build_model()
    layer = model.model.layers[0].self_attn
    states = torch.zeros(1, 4, 6, 8)
    blocks = Blocks([], torch.tensor([0, 0]), [Block(rows=2, width=3, prompt=torch.tensor([0, 1]))])
    mask = mask_of(blocks, torch.device("cpu"))
    with pytest.raises(NotImplementedError, match="softcap in blocks"):
        block_attention.block_attention(layer, states, states, states, mask, softcap=30.0)
    with pytest.raises(NotImplementedError, match="dropout in blocks"):
        block_attention.block_attention(layer, states, states, states, mask, dropout=0.1)


def test_attention_chosen_by_hand_is_left_alone():
    model = build_model()
    model.set_attn_implementation("flex_attention")
    assert not supports_shared_prompts(model)


def test_asking_for_what_the_model_cannot_is_told():
    actor = build_actor()
    actor.model.config.sliding_window, actor.model.config.use_sliding_window = 8, True
    runner = ModelRunner(actor, Critic(), RunConfig(batch=BatchConfig(layout="shared")))
    with pytest.raises(ConfigError, match=r"layout=shared: Qwen2ForCausalLM cannot .* batch\.layout=auto"):
        runner.cut([])
