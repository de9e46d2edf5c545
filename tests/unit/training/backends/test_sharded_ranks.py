"""Learner ranks that hold parts of the weights make the gradient that one process makes."""

import gc
import os
import signal
import weakref

import pytest
import torch
from transformers.utils import output_capturing

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
from model_builders import adapted_actor, build_actor, build_model, sample_scored
from multitask_rl.config.run import ModelConfig, RunConfig
from multitask_rl.errors import ConfigError, TrainingError
from multitask_rl.models.actor import read_weights
from multitask_rl.training.backends.build import LocalRank
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.ranks import Ranks, host_store
from multitask_rl.training.backends.replica import register_outputs
from multitask_rl.training.backends.sharded import Shards, check_shardable, forward_pass, shard_model
from multitask_rl.training.critic import Critic
from multitask_rl.training.masters import Masters
from multitask_rl.training.runner import ModelRunner


class StoppedAtItsEnd(RankGroup):
    """Ctrl-C comes when the ranks give the weights back."""

    def stream(self, without=()):
        raise KeyboardInterrupt


def test_ranks_end_when_their_close_is_interrupted():
    group = RanksBench(num_ranks=2, sharded=True, group=StoppedAtItsEnd)
    with pytest.raises(KeyboardInterrupt):
        group.backend.close()
    assert all(helper.ended() for helper in group.helpers)


def test_parts_of_the_weights_learn_what_whole_ones_learn(tmp_path):
    scored = sample_scored(build_actor(), groups=4, top_p=0.9)
    # parts of unequal size, tied weights, many passes of which some ranks have fewer
    settings = {"layout": "auto", "num_minibatches": 2, "tokens": 300}
    alone, group = Bench(**settings), RanksBench(num_ranks=3, sharded=True, **settings)
    try:
        for _ in range(2):
            expected, found = alone.update(scored), group.update(scored)
            assert relative_difference(moments(group), moments(alone)) < 1e-5
            assert_same_numbers(found, expected)
            assert_same_weights(group, alone)
        assert {f"ranks/{r}/busy_s" for r in range(3)} < found.metrics.keys()
        share = group.backend.optimizer_bytes / alone.backend.optimizer_bytes
        assert 0.3 < share < 0.4
        assert_this_process_has_no_whole_actor_and_saves_and_restores_one(group, alone, tmp_path)
        # what changes here outside of an update reaches the others: weights, a head, the optimizer's state
        for bench in (alone, group):
            bench.critic.rescale("a", 2.0, 0.5)
            for buffer in bench.actor.model.buffers():
                buffer.mul_(0.9)
        begin_alike(alone, group)
        expected, found = alone.update(scored), group.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
        assert_same_numbers(found, expected)
        assert_same_weights(group, alone)
        assert not group.main.optimizer.state_bytes, "the whole state was given away"
        assert_a_gradient_that_is_not_finite_moves_nothing(group)
        # fewer samples than ranks; none
        for number in (1, 0):
            for bench in (alone, group):
                weights = {"a": 0.5, "b": 0.5}
                bench.learner.update(bench.credited[:number], shares=weights, step=0)
            assert relative_difference(moments(group), moments(alone)) < 1e-4
        assert_same_weights(group, alone)
        texts = [c.sample for c in group.credited[:5]]
        scored_texts = [b.backend.score_texts(texts, with_kl=True, task="b") for b in (group, alone)]
        for found, expected in zip(*scored_texts, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        # what a rank raises is raised here: the cheaper sample goes to the other ranks
        broken = [c.sample for c in group.credited[:2]]
        broken[1].prompt_ids = []
        with pytest.raises(TrainingError, match="has an empty prompt"):
            group.backend.step_start_outputs("b", broken, want_values=False, want_ref=False)
    finally:
        group.backend.close()
    assert all(helper.ended() for helper in group.helpers)
    with pytest.raises(TrainingError, match="start again from the last checkpoint"):
        moments(group)
    with pytest.raises(TrainingError, match="learner rank"):
        dict(group.actor.state_dict())


def assert_this_process_has_no_whole_actor_and_saves_and_restores_one(group, alone, directory):
    assert all(p.isnan().all() for p in group.actor.model.parameters())
    assert all(p.untyped_storage().nbytes() == 4 for p in group.actor.model.parameters())
    before = {name: value.clone() for name, value in group.actor.state_dict().items()}
    assert before.keys() == alone.actor.state_dict().keys()
    for name, bench in (("group", group), ("alone", alone)):
        bench.actor.save(directory / name)
    written, expected = (
        {file.name: file.stat().st_size for file in (directory / name).iterdir()}
        for name in ("group", "alone")
    )
    assert written == expected
    assert all(torch.equal(before[n], value) for n, value in read_weights(directory / "group").items())
    restore = group.actor.keep_weights()
    other = build_actor(seed=9)
    other.save(directory / "other")
    group.actor.load_weights(directory / "other")
    found = dict(group.actor.state_dict())
    assert all(torch.equal(found[name], value) for name, value in other.state_dict().items())
    restore()
    assert all(torch.equal(before[name], value) for name, value in group.actor.state_dict().items())


def test_copies_of_parts_learn_what_whole_ones_learn():
    scored = sample_scored(build_actor(), groups=2, top_p=0.9)
    settings = {"layout": "auto", "num_minibatches": 2, "tokens": 200}
    alone = Bench(**settings)
    group = RanksBench(num_ranks=4, sharded=True, parts=2, **settings)
    try:
        expected, found = alone.update(scored), group.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
        assert_same_numbers(found, expected)
        assert_same_weights(group, alone)
        assert 0.4 < group.backend.optimizer_bytes / alone.backend.optimizer_bytes < 0.6
        begin_alike(alone, group)
        alone.update(scored)
        group.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
        assert_same_weights(group, alone)
    finally:
        group.backend.close()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_on_parts_of_the_base_model_which_is_the_reference_too():
    scored = sample_scored(build_actor(), groups=2, top_p=0.9)
    # checkpointed layers are gathered again; some micro-batches hold no sample whose KL takes another pass
    settings = {"second": "reward_conditioned", "layout": "bucketed", "tokens": 150}
    alone = Bench(actor=adapted_actor(), **settings)
    group = RanksBench(actor=adapted_actor(), num_ranks=2, sharded=True, checkpointing=True, **settings)
    try:
        for _ in range(2):
            expected, found = alone.update(scored), group.update(scored)
            assert relative_difference(moments(group), moments(alone)) < 1e-5
            assert_same_numbers(found, expected)
        assert_same_weights(group, alone)
        merged = alone.actor.state_dict()
        assert merged.keys() == group.actor.state_dict().keys()
        for name, value in group.actor.state_dict().items():
            torch.testing.assert_close(value, merged[name], rtol=1e-3, atol=1e-5)
        names = {name for name in moments(group) if not name.startswith("heads")}
        assert names
        assert all("lora_" in name for name in names)
    finally:
        group.backend.close()
    assert group.actor.parts is None
    assert_same_weights(group, alone)


def test_a_rank_that_dies_ends_the_call_and_is_named():
    scored = sample_scored(build_actor(), groups=1)
    group = RanksBench(num_ranks=2, sharded=True)
    try:
        group.update(scored)
        os.kill(group.helpers[0].pid, signal.SIGKILL)
        with pytest.raises(TrainingError, match=r"rank 1 was killed by SIGKILL"):
            group.update(scored)
        with pytest.raises(TrainingError, match="rank 1 was killed by SIGKILL"):
            moments(group)
    finally:
        group.backend.close()
    part = weakref.ref(group.backend._rank.own.runner.actor.model)
    del group
    gc.collect()
    assert part() is None, "torch keeps process groups and meshes, but not the models"


def test_a_rank_in_a_new_interpreter_says_how_it_ended():
    rank = LocalRank({})
    assert rank.ended() == ""
    os.kill(rank.pid, signal.SIGKILL)
    rank._process.wait()
    assert rank.ended() == "was killed by SIGKILL"


def test_a_critic_with_a_trunk_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="take critic_trunk='actor'"):
        RanksBench(num_ranks=2, sharded=True, trunk="separate")


@pytest.fixture
def one_rank():
    store, _ = host_store("127.0.0.1")
    ranks = Ranks(0, 1, 1, address="127.0.0.1", store=store, device=torch.device("cpu"))
    yield ranks
    ranks.close()


def test_parts_are_cut_as_torch_cuts_them(one_rank):
    actor = build_actor()
    whole = {name: p.detach().clone() for name, p in actor.model.named_parameters()}
    shards = shard_model(actor.model, one_rank)
    assert shards.names == list(whole)
    assert all(torch.equal(shards.gather(n), whole[name]) for n, name in enumerate(shards.names))
    shards.keep()
    shards.fill([0], [whole[shards.names[0]] + 1.0])
    assert torch.equal(shards.gather(0), whole[shards.names[0]] + 1.0)
    shards.restore()
    assert torch.equal(shards.gather(0), whole[shards.names[0]])


def test_blocks_in_blocks_are_cut_and_what_no_rank_met_gets_no_gradient(one_rank):
    ids = torch.tensor([[3, 5, 7, 9]])
    model = build_model()
    model._no_split_modules = ["Qwen2DecoderLayer", "Qwen2MLP"]
    model.unused = torch.nn.Parameter(torch.ones(3))
    expected = model(input_ids=ids).logits.sum()
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    shards = shard_model(model, one_rank)
    found = forward_pass(model, lambda: {"sum": model(input_ids=ids).logits.sum()})["sum"]
    torch.testing.assert_close(found, expected)
    found.backward()
    shards.take_gradients()
    for name, local in zip(shards.names, shards.local, strict=True):
        assert (local.grad is None) == (name not in wanted)
        if local.grad is not None:
            torch.testing.assert_close(local.grad, wanted[name])
    assert "unused" not in wanted


def test_models_that_cannot_be_cut_are_refused_by_name():
    def check(actor):
        check_shardable(ModelRunner(actor, Critic(), RunConfig()), 1, Shards.settings)

    check(build_actor())
    odd = build_actor()
    odd.model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="'scale' of Qwen2ForCausalLM is a single number"):
        check(odd)
    mixed = build_actor()
    mixed.model.model.layers[1].mlp.bfloat16()
    with pytest.raises(ConfigError, match=r"DecoderLayer trains weights of 2 types .* model.dtype=float32"):
        check(mixed)
    compiled = build_actor()
    compiled.config = ModelConfig(compile=True)
    with pytest.raises(ConfigError, match=r"model\.compile=false"):
        check(compiled)


def test_unpickled_models_record_hidden_states(monkeypatch):
    # as in a process that built no model
    empty = type(output_capturing._CAN_RECORD_REGISTRY)()
    model = build_model()
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", empty)
    ids = torch.tensor([[3, 5, 7]])
    assert model(input_ids=ids, output_hidden_states=True).hidden_states is None
    register_outputs(model)
    assert len(model(input_ids=ids, output_hidden_states=True).hidden_states) == 3


def test_gradients_of_many_micro_batches_add_up_in_float32(one_rank):
    """As those of a whole model in bfloat16, to the last bit: one rank has nothing to sum over ranks."""
    whole, model = build_model().bfloat16(), build_model().bfloat16()
    Masters(whole.parameters())  # gives them gradients in float32
    shards = shard_model(model, one_rank)
    Masters(shards.local)

    for start in range(16):
        ids = torch.arange(start, start + 6).unsqueeze(0)
        given = {"input_ids": ids, "labels": ids}
        whole(**given).loss.backward()
        forward_pass(model, lambda given=given: {"loss": model(**given).loss})["loss"].backward()
    shards.take_gradients()
    wanted = dict(whole.named_parameters())
    for name, local in zip(shards.names, shards.local, strict=True):
        gap = float((local.grad - wanted[name].grad).norm() / wanted[name].grad.norm())
        # torch adds what embedding and head, which are tied, say in one pass in bfloat16
        assert gap < 1e-3 if "embed" in name else gap == 0.0, name
