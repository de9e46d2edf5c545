import itertools
import random

import pytest
import torch
from model_builders import build_model

from multitask_rl.records import SamplingParams
from multitask_rl.training.forward import forward_tokens
from multitask_rl.training.microbatch import build_microbatches, padding_share
from multitask_rl.training.shared_prompt import cut_by_length, supports_shared_prompts


def cost(lengths, sizes, forward_cells):
    ends = list(itertools.accumulate(sizes))
    return sum(s * lengths[e - 1] + forward_cells for s, e in zip(sizes, ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_cheaper(seed):
    rng = random.Random(seed)
    lengths = sorted(rng.randint(1, 40) for _ in range(rng.randint(1, 9)))
    forward_cells = rng.choice([0, 5, 24, 100])
    found = cut_by_length(lengths, forward_cells=forward_cells)
    assert sum(found) == len(lengths)
    every = (
        [b - a for a, b in itertools.pairwise([0, *cuts, len(lengths)])]
        for number in range(len(lengths))
        for cuts in itertools.combinations(range(1, len(lengths)), number)
    )
    assert cost(lengths, found, forward_cells) == min(cost(lengths, s, forward_cells) for s in every)


def test_a_shared_prompt_is_counted_once_and_the_budget_holds():
    rng = random.Random(0)
    prompts, responses = [], []
    for length in (1, 8, 16, 48, 160, 160):
        prompt = [rng.randrange(5, 40) for _ in range(length)]
        for _ in range(8):
            prompts.append(prompt)
            responses.append([7] * rng.randint(1, 128))
    whole = build_microbatches(prompts, responses, max_tokens=10**6, layout="shared", pad_token_id=0)
    prefixes = sum(length - 1 for length in (1, 8, 16, 48, 160, 160))
    assert sum(b.num_tokens for b in whole) == prefixes + sum(map(len, responses))
    assert padding_share(whole) < 0.1
    small = build_microbatches(prompts, responses, max_tokens=600, layout="shared", pad_token_id=0)
    assert all(b.num_cells <= 600 for b in small)
    assert sorted(i for b in small for i in b.indices) == list(range(len(prompts)))


def test_fewer_forwards_where_shapes_are_compiled_say_the_same():
    rng = random.Random(0)
    prompts = [[5 + i % 4, 9, 7 + i % 4] for i in range(32)]
    responses = [[rng.randrange(5, 40) for _ in range(rng.randint(1, 90))] for _ in prompts]
    model = build_model()
    found, forwards = [], []
    for compiles_shapes in (False, True):
        (batch,) = build_microbatches(
            prompts,
            responses,
            max_tokens=10**6,
            layout="shared",
            pad_token_id=0,
            compiles_shapes=compiles_shapes,
        )
        forwards.append(sum(len(part.chunks) for part in batch.shared))
        with torch.no_grad():
            logprobs = forward_tokens(model, batch, [SamplingParams()] * len(prompts)).logprobs
        by_sample = torch.split(logprobs, torch.bincount(batch.sequence).tolist())
        found.append(torch.cat([by_sample[batch.indices.index(i)] for i in range(len(prompts))]))
    assert forwards[1] < forwards[0]
    torch.testing.assert_close(found[1], found[0])


def test_a_model_of_keys_and_values_shares_prompts_and_one_with_windows_does_not():
    model = build_model()
    assert supports_shared_prompts(model)
    assert not model.training
    model.config.sliding_window, model.config.use_sliding_window = 8, True
    assert not supports_shared_prompts(model)


def test_gradient_checkpointing_switches_sharing_off():
    model = build_model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert not supports_shared_prompts(model)
    assert torch.is_grad_enabled()
