import pytest
import torch
from transformers import DynamicCache

from multitask_rl.attention import products
from multitask_rl.attention.interface import use_attention
from multitask_rl.attention.shared import SHARED_PROMPT, shared_prompt_attention
from multitask_rl.rollout.decoder import (
    PlainDecoder,
    SharedDecoder,
    cache_argument,
    can_decode_cached,
    can_share_prompts,
)
from rollout_models import build

PROMPTS = [[5, 6, 7]] * 3 + [[8]] * 2 + [list(range(3, 43))] * 4 + [list(range(9, 54))]
"""Groups of four sizes; the two longest prompts share a bucket, padded."""


@pytest.fixture(autouse=True, params=[False, True], ids=["kernel", "products"])
def _attention(request, monkeypatch):
    """Run every test as where MKL multiplies, and as where oneDNN does."""
    monkeypatch.setattr(products, "with_onednn", request.param)


@pytest.mark.parametrize("name", ["qwen2.Qwen2", "llama.Llama", "gpt_neox.GPTNeoX", "opt.OPT"])
@torch.no_grad()
def test_rows_see_their_prompt_and_their_own_tokens_while_others_leave(name):
    model = build(name)
    torch.manual_seed(0)
    texts = [list(prompt) for prompt in PROMPTS]
    leaving = {3: [0], 5: [1, 4], 6: [0, 2], 8: [0, 1], 12: [0]}
    with use_attention([model], SHARED_PROMPT):
        decoder = SharedDecoder(model, PROMPTS, 0)
        for step in range(14):
            expected = [model(torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts]
            assert torch.allclose(decoder.logits, torch.stack(expected), atol=1e-5)
            tokens = torch.randint(3, 60, (len(texts),))
            if step in leaving:
                kept = [i for i in range(len(texts)) if i not in leaving[step]]
                order = decoder.keep(torch.tensor(kept)).tolist()
                assert sorted(order) == kept
                texts, tokens = [texts[i] for i in order], tokens[order]
            texts = [[*text, token] for text, token in zip(texts, tokens.tolist(), strict=True)]
            decoder.advance(tokens)


@torch.no_grad()
def test_the_largest_score_may_be_that_of_any_token_of_a_prompt():
    model = build("llama.Llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 3e4  # less than the maximum subtracted: the powers are infinite
    with use_attention([model], SHARED_PROMPT):
        decoder = SharedDecoder(model, PROMPTS, 0)
        tokens = torch.arange(3, 3 + len(PROMPTS))
        decoder.advance(tokens)
        plain = [
            model(torch.tensor([[*p, t]])).logits[0, -1]
            for p, t in zip(PROMPTS, tokens.tolist(), strict=True)
        ]
    assert torch.allclose(decoder.logits, torch.stack(plain), atol=1e-4)


@torch.no_grad()
def test_a_prompt_is_kept_once_and_leaves_with_its_last_row():
    model = build("qwen2.Qwen2")
    with use_attention([model], SHARED_PROMPT):
        decoder = SharedDecoder(model, PROMPTS, 0)
        layer = decoder._cache.layers[0]
        assert sum(keys.shape[0] for keys, _ in layer.prompts) == len({tuple(p) for p in PROMPTS})
        decoder.keep(torch.tensor([3, 9]))
        assert sum(keys.shape[0] for keys, _ in layer.prompts) == 2
        assert sum(bucket.slots for bucket in decoder._cache.grid.buckets) == 2


@torch.no_grad()
def test_the_plain_decoder_says_the_same():
    model = build("llama.Llama")
    with use_attention([model], SHARED_PROMPT):
        shared = SharedDecoder(model, PROMPTS, 0).logits
    for cached in (True, False):
        rows = [i for i, p in enumerate(PROMPTS) if cached or len(p) == 40]
        plain = PlainDecoder(model, [PROMPTS[i] for i in rows], 0, cached=cached).logits
        assert torch.allclose(plain, shared[rows], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2.Qwen2", True),
        ("opt.OPT", True),
        ("mistral.Mistral", False),  # attention windows
        ("bloom.Bloom", False),  # attention of its own, with position biases
        ("mamba.Mamba", False),  # another state
    ],
)
def test_models_that_cannot_share_are_found_out(name, expected):
    model = build(name)
    before = model.config._attn_implementation
    assert can_share_prompts(model) is expected
    assert model.config._attn_implementation == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [("mistral.Mistral", True), ("bloom.Bloom", True), ("mamba.Mamba", False), ("lfm2.Lfm2", True)],
)
def test_a_cache_is_used_where_it_gives_the_logits_of_a_plain_forward(name, expected):
    model = build(name)
    # Mamba has another name for its cache before transformers 5.24
    assert can_decode_cached(model) is (expected or "cache" in cache_argument(model, None))


@torch.no_grad()
def test_other_forwards_are_untouched_while_it_is_on():
    model = build("qwen2.Qwen2")
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    expected = model(ids, attention_mask=mask).logits
    with use_attention([model], SHARED_PROMPT):
        found = model(ids, attention_mask=mask, **cache_argument(model, DynamicCache())).logits
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6)


def test_attention_that_wants_more_is_refused():
    key = torch.zeros(1, 1, 1, 4)
    key.shared_prompt_layer = object()
    with pytest.raises(NotImplementedError, match="softcap"):
        shared_prompt_attention(None, torch.zeros(1, 1, 1, 4), key, key, None, softcap=30.0)
