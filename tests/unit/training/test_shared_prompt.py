import contextlib
import gc
import itertools
import random

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from model_builders import build_actor, build_model, build_tokenizer
from multitask_rl.attention import block as block_attention
from multitask_rl.attention import products
from multitask_rl.attention.block import BLOCKS, Block, Blocks, mask_of
from multitask_rl.attention.interface import use_attention
from multitask_rl.config.run import BatchConfig, LoraConfig, ModelConfig, RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor, checkpoint_layers
from multitask_rl.models.lora import add_adapters
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.critic import Critic
from multitask_rl.training.forward import forward_tokens, split_head
from multitask_rl.training.microbatch import build_microbatches
from multitask_rl.training.runner import ActivationOffload, ModelRunner
from multitask_rl.training.shared_prompt import cut_by_length, supports_shared_prompts


@pytest.fixture(autouse=True, params=[False, True], ids=["kernel", "products"])
def _attention(request, monkeypatch):
    """Run every test with torch's kernel of attention, and with plain products."""
    monkeypatch.setattr(products, "with_onednn", request.param)


def cost(lengths, sizes, own_cells):
    ends = list(itertools.accumulate(sizes))
    return sum(s * lengths[e - 1] + own_cells for s, e in zip(sizes, ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_cheaper(seed):
    rng = random.Random(seed)
    lengths = sorted(rng.randint(1, 40) for _ in range(rng.randint(1, 9)))
    own_cells = rng.choice([0, 5, 24, 100])
    found = [len(lengths[cut]) for cut in cut_by_length(lengths, own_cells=own_cells)]
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
    assert sum(b.num_tokens for b in whole) > 0.97 * sum(b.num_cells for b in whole)
    small = build_microbatches(prompts, responses, max_tokens=600, layout="shared", pad_token_id=0)
    assert all(b.num_cells <= 600 for b in small)
    assert sorted(i for b in small for i in b.indices) == list(range(len(prompts)))


def learn(model, prompts, responses, layout):
    (batch,) = build_microbatches(prompts, responses, max_tokens=10**6, layout=layout, pad_token_id=0)
    model.zero_grad()
    with use_attention([model], BLOCKS):
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
        checkpoint_layers(model)
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.training = True
    shared, own = learn(model, prompts, responses, "shared")
    torch.testing.assert_close(shared, whole, atol=1e-5, rtol=1e-5)
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"


TWO_PARTS = [[5, 6, 7 + i // 2] for i in range(4)] + [[8 + i // 4] * 80 + [3] for i in range(8)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [
        (EVEN, range(4, 12)),
        (TWO_PARTS, [4] * 12),
        (TWO_PARTS, [47] * 4 + [4] * 8),  # as many cells in the one part as in the other
    ],
)
def test_a_mask_that_hooks_stored_elsewhere_is_known_again(prompts, lengths, offload):
    config = GPT2Config(
        vocab_size=60, n_positions=128, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    )
    torch.manual_seed(0)
    actor = Actor(GPT2LMHeadModel(config), build_tokenizer(), ModelConfig())
    responses = [[7 + (3 * i + j) % 20 for j in range(length)] for i, length in enumerate(lengths)]
    _, gradients = learn(actor.model, prompts, responses, "shared")
    checkpoint_layers(actor.model)
    hooks = ActivationOffload(actor.model) if offload else contextlib.nullcontext()
    with actor.learning(), hooks:  # GPT-2 gives the mask to its layers by position
        _, own = learn(actor.model, prompts, responses, "shared")
    for one, other in zip(own, gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_blocks_are_gone_with_the_graph_that_needs_them():
    model = build_model()
    (batch,) = build_microbatches(
        [[5, 6]] * 4, [[7, 8, 9]] * 4, max_tokens=100, layout="shared", pad_token_id=0
    )
    split_head(model)
    gc.collect()
    before = len(block_attention._living)
    out = forward_tokens(model, batch, [SamplingParams()] * 4)
    assert len(block_attention._living) == before + 1
    out.logprobs.sum().backward()
    del out
    assert len(block_attention._living) == before


def test_the_first_look_at_a_model_that_learns_leaves_its_modes_alone():
    actor = build_actor()
    checkpoint_layers(actor.model)
    runner = ModelRunner(actor, Critic(), RunConfig())
    with actor.learning():
        before = [module.training for module in actor.model.modules()]
        assert any(before)
        runner.cut([])
        split_head(actor.model)
        assert [module.training for module in actor.model.modules()] == before


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_given_in_training_mode_learns_what_it_sampled(adapted):
    config = GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1)
    model = GPT2LMHeadModel(config).train()
    settings = ModelConfig(lora=LoraConfig(rank=4, dropout=0.5) if adapted else LoraConfig())
    if adapted:  # peft hands over models in training mode, the base model's dropout with them
        model = add_adapters(model, settings.lora).train()
        torch.nn.init.normal_(model.base_model.model.transformer.h[0].attn.c_attn.lora_B["default"].weight)
    actor = Actor(model, build_tokenizer(), settings)
    engine = HFEngine(actor.model, eos_token_ids=[1], pad_token_id=0)
    request = GenerationRequest(prompt_ids=[5, 6], sampling=SamplingParams(max_new_tokens=8), seeds=[1, 2, 3])
    (found,) = engine.generate([request])
    (batch,) = build_microbatches(
        [[5, 6]] * 3, [g.response_ids for g in found], max_tokens=10**6, layout="shared", pad_token_id=0
    )
    out = forward_tokens(actor.model, batch, [SamplingParams()] * 3)
    sampled = torch.tensor([x for i in batch.indices for x in found[i].rollout_logprobs])
    torch.testing.assert_close(out.logprobs, sampled, atol=1e-5, rtol=1e-5)


def test_dropout_by_functions_is_off_while_layers_are_computed_again():
    config = OPTConfig(
        vocab_size=60,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.5,
    )
    actor = Actor(OPTForCausalLM(config), build_tokenizer(), ModelConfig())
    responses = [[7 + i, 8, 9] for i in range(8)]
    whole, _ = learn(actor.model, EVEN, responses, "shared")
    checkpoint_layers(actor.model)
    with actor.learning():
        again, _ = learn(actor.model, EVEN, responses, "shared")
    torch.testing.assert_close(again, whole, atol=1e-5, rtol=1e-5)
    assert actor.model.model.decoder.layers[0].dropout == 0.5


def test_a_head_that_cannot_be_split_off_computes_logits_of_responses_only():
    config = GraniteConfig(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, logits_scaling=8.0, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GraniteForCausalLM(config).eval()
    assert split_head(model) is None
    assert supports_shared_prompts(model)
    prompts = [[5 + i % 9 for i in range(200)]] * 4 + [[9] * 100]
    responses = [[7, 8, 9][: 1 + i % 3] for i in range(5)]
    rows = []
    model.lm_head.register_forward_hook(lambda _module, given, _out: rows.append(given[0].shape[1]))
    whole, _ = learn(model, prompts, responses, "bucketed")
    rows.clear()
    shared, _ = learn(model, prompts, responses, "shared")
    assert sum(rows) == sum(map(len, responses))
    torch.testing.assert_close(shared, whole, atol=1e-5, rtol=1e-5)
    hidden = []  # value heads read them
    for layout in ("bucketed", "shared"):
        (batch,) = build_microbatches(prompts, responses, max_tokens=10**6, layout=layout, pad_token_id=0)
        out = forward_tokens(model, batch, [SamplingParams()] * 5, want_hidden=True).hidden
        by_sample = torch.split(out, torch.bincount(batch.sequence).tolist())
        hidden.append(torch.cat([by_sample[batch.indices.index(i)] for i in range(5)]))
    torch.testing.assert_close(hidden[1], hidden[0], atol=1e-5, rtol=1e-5)


def test_copies_of_a_prompts_keys_count_in_the_budget():
    prompts, responses = [[5] * 320] * 64, [[7] * 4] * 64
    (whole,) = build_microbatches(prompts, responses, max_tokens=2000, layout="shared", pad_token_id=0)
    assert whole.num_cells == 319 + 64 * 4
    cut = build_microbatches(prompts, responses, max_tokens=1000, layout="shared", pad_token_id=0)
    assert len(cut) > 1


def test_biases_that_are_kept_have_a_bound(monkeypatch):
    monkeypatch.setattr(block_attention, "MASK_CELLS", 500)
    prompts, responses = [[5] * 20] * 9, [[7] * (2 * i + 1) for i in range(9)]
    model, kept = build_model(), []
    known = block_attention.Blocks.bias

    def watched(self, *given):
        bias = known(self, *given)
        kept.append(sum(one.numel() for one in self._biases.values()))
        assert bias.numel() <= 500
        return bias

    monkeypatch.setattr(block_attention.Blocks, "bias", watched)
    learn(model, prompts, responses, "shared")
    assert 0 < max(kept) <= 500


def test_layers_computed_again_without_blocks_fail_loudly():
    model = build_model()
    checkpoint_layers(model)
    model.model.training = True
    for layer in model.model.layers:
        layer.training = True
    (batch,) = build_microbatches(
        [[5, 6]] * 4, [[7, 8, 9]] * 4, max_tokens=100, layout="shared", pad_token_id=0
    )
    out = forward_tokens(model, batch, [SamplingParams()] * 4)
    with pytest.raises(RuntimeError):
        out.logprobs.sum().backward()
    with pytest.raises(RuntimeError, match="the blocks of another sequence"), use_attention([model], BLOCKS):
        model(input_ids=torch.tensor([[5, 6]]), attention_mask=torch.empty(1, 1, 1, 0))


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
    mask = mask_of(blocks, model)
    with pytest.raises(NotImplementedError, match="softcap in blocks"):
        block_attention.block_attention(layer, states, states, states, mask, softcap=30.0)
    with pytest.raises(NotImplementedError, match="dropout in blocks"):
        block_attention.block_attention(layer, states, states, states, mask, dropout=0.1)


@pytest.mark.parametrize("lengths", [[3, 5], [4, 4]])
def test_rows_of_a_bias_begin_where_the_kernels_of_gpus_read_them(lengths):
    """At multiples of 8 numbers: torch would copy another bias, in every layer."""
    prefixes = [Block(rows=1, width=length) for length in lengths]
    rows = Block(rows=2, width=6, prompt=torch.tensor([0, 1]))
    bias = Blocks(prefixes, torch.tensor(lengths), [rows]).bias(0, range(6), torch.float32)
    assert bias.shape[2:] == (6, max(lengths) + 6)
    assert [stride % 8 for stride in bias.stride()[:-1]] == [0, 0, 0]


def test_attention_chosen_by_hand_is_left_alone():
    model = build_model()
    model.set_attn_implementation("flex_attention")
    assert not supports_shared_prompts(model)


def test_asking_for_what_the_model_cannot_is_told():
    actor = build_actor()
    actor.model.config.sliding_window, actor.model.config.use_sliding_window = 8, True
    config = RunConfig(batch=BatchConfig(layout="shared"))
    with pytest.raises(ConfigError, match=r"layout=shared: Qwen2ForCausalLM cannot .* batch\.layout=auto"):
        ModelRunner(actor, Critic(), config)
