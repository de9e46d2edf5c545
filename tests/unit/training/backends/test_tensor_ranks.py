"""Learner ranks that compute every layer together make the gradient that one process makes."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from learner_benches import (
    Bench,
    RanksBench,
    assert_a_gradient_that_is_not_finite_moves_nothing,
    assert_same_numbers,
    assert_same_weights,
    begin_alike,
    moments,
    relative_difference,
)
from model_builders import VOCABULARY, build_actor, build_model, sample_scored
from multitask_rl.config.run import LoraConfig, ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import add_adapters
from multitask_rl.seeding import derive_seed
from multitask_rl.training.backends.ranks import Ranks, host_store, join_store
from multitask_rl.training.backends.tensor import check_layers, cut_layers

SIZES = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def build(kind, **config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **config))


def adapted(settings=None):
    model = add_adapters(build_model(), settings or LoraConfig(rank=4))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


@pytest.fixture
def pair():
    """Two ranks in threads of this process."""
    store, port = host_store("127.0.0.1")
    cpu = torch.device("cpu")

    def meet(rank):
        own = store if rank == 0 else join_store("127.0.0.1", port)
        return Ranks(rank, 2, tensor=2, address="127.0.0.1", store=own, device=cpu)

    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(meet, range(2)))
        yield lambda act: list(threads.map(act, ranks))
        for one in ranks:
            one.close()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: build("qwen3", head_dim=8), id="norms of heads"),
        pytest.param(lambda: build("olmo2"), id="norms over all heads"),
        pytest.param(lambda: build("phi"), id="biases of sums"),
        pytest.param(adapted, id="adapters"),
    ],
)
def test_layers_in_parts_give_the_logits_and_gradients_of_whole_ones(pair, make):
    model = make()
    ids = torch.tensor([[3, 5, 7, 9, 11, 2], [4, 4, 8, 30, 1, 0]])

    def run(own):
        logits = own(input_ids=ids).logits
        logits.square().mean().backward()
        return logits.detach()

    own = [copy.deepcopy(model) for _ in range(2)]
    expected = run(model)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def act(ranks):
        cuts = cut_layers(own[ranks.rank], ranks)
        return cuts, run(own[ranks.rank])

    (cuts, found), (_, other) = pair(act)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, other)
    parts = [dict(one.named_parameters()) for one in own]
    assert gradients.keys() == {name for name, p in parts[0].items() if p.grad is not None}
    for name, gradient in gradients.items():
        one, other = (part[name].grad for part in parts)
        if name in cuts.dims:
            assert one.numel() == gradient.numel() // 2
            one = torch.cat([one, other], cuts.dims[name])
        elif name in cuts.partial:
            one = one + other
        else:
            assert torch.equal(one, other)
        torch.testing.assert_close(one, gradient, rtol=1e-4, atol=1e-6)
    assert sum(".layers." in name for name in cuts.dims) >= 7


def test_layers_in_parts_learn_what_whole_ones_learn():
    scored = sample_scored(build_actor(), groups=2, top_p=0.9)
    # two pairs of ranks; a loss that takes the logits and a pass of the reference, too
    settings = {"layout": "auto", "num_minibatches": 2, "tokens": 100, "second": "reward_conditioned"}
    alone = Bench(**settings)
    group = RanksBench(num_ranks=4, sharded=True, tensor=2, checkpointing=True, **settings)
    try:
        for _ in range(2):
            expected, found = alone.update(scored), group.update(scored)
            assert relative_difference(moments(group), moments(alone)) < 1e-5
            assert_same_numbers(found, expected)
            assert_same_weights(group, alone)
        begin_alike(alone, group)
        expected, found = alone.update(scored), group.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
        assert_same_numbers(found, expected)
        assert_same_weights(group, alone)
        assert_a_gradient_that_is_not_finite_moves_nothing(group)
    finally:
        group.backend.close()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_peers_drop_the_same_of_what_goes_into_the_adapters():
    scored = sample_scored(build_actor(), groups=2)
    # cut by outputs: every peer's adapter reads all of the input
    settings = LoraConfig(rank=4, dropout=0.5, target_modules="q_proj,v_proj")

    def make():
        return Actor(adapted(settings), build_actor().tokenizer, ModelConfig(lora=settings))

    alone = Bench(actor=make(), layout="bucketed")
    group = RanksBench(actor=make(), num_ranks=2, sharded=True, tensor=2, layout="bucketed")
    try:
        before = torch.get_rng_state()
        group.update(scored)
        assert torch.equal(torch.get_rng_state(), before), "the trainer's own stream stays as it is"
        torch.manual_seed(derive_seed(group.config.seed, "learner rank", 0, 0, 0))
        alone.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
    finally:
        group.backend.close()


def test_layers_that_cannot_be_cut_are_refused_by_name():
    check_layers(build_model(), 2)
    check_layers(adapted(), 2)
    with pytest.raises(ConfigError, match=r"num_key_value_heads of Qwen2ForCausalLM is 2, which 4 does not"):
        check_layers(build_model(), 4)
    small = AutoConfig.for_model("gpt2", vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel: transformers has no plan"):
        check_layers(AutoModelForCausalLM.from_config(small), 2)
    experts = build("mixtral", num_local_experts=2)
    with pytest.raises(ConfigError, match=r"mlp\.experts is cut as 'moe_tp_experts'; leave tensor out"):
        check_layers(experts, 2)
    other = build_model()
    other.model.layers[0].mlp.up_proj = torch.nn.Bilinear(32, 1, 64)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.up_proj is a Bilinear"):
        check_layers(other, 2)
