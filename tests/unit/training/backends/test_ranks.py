"""Several learner ranks make the gradient that one makes."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from forked import ForkedRank
from learner_benches import (
    Bench,
    RanksBench,
    assert_a_call_beside_unfetched_samples_is_refused,
    assert_a_gradient_that_is_not_finite_moves_nothing,
    assert_an_interrupt_while_sampling_leaves_the_ranks_usable,
    assert_ranks_sample_as_one_does,
    assert_same_bits,
    assert_same_numbers,
    moments,
    parameters_of,
    relative_difference,
)
from model_builders import build_actor, build_model, sample_scored
from multitask_rl.boundary.channel import Channel
from multitask_rl.boundary.interrupts import Terminated
from multitask_rl.errors import ConfigError, TrainingError
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.training.backends.build import rank_0_address
from multitask_rl.training.backends.context import cut_sequences
from multitask_rl.training.backends.rank_connections import RankConnections
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.replica import Setup
from multitask_rl.training.backends.sharded import Shards
from multitask_rl.training.backends.skeleton import freeze, thaw
from multitask_rl.training.balance import deal
from multitask_rl.training.microbatch import make_microbatch
from multitask_rl.training.runner import AveragedReference


def small_gpt2(positions):
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=positions, n_embd=16, n_layer=1, n_head=2)
    ).eval()


def test_ranks_with_samples_and_sequences_shared_out_learn_what_one_process_learns():
    scored = sample_scored(build_actor(), groups=3, top_p=0.9)
    settings = {"layout": "auto", "num_minibatches": 2, "num_epochs": 2, "tokens": 150}
    alone, group = Bench(**settings), RanksBench(num_ranks=4, context=2, weights="bfloat16", **settings)
    try:
        assert_ranks_sample_as_one_does(group)  # and again below, after updates: each rank has a copy
        for _ in range(2):
            expected, found = alone.update(scored), group.update(scored)
            assert relative_difference(moments(group), moments(alone)) < 1e-5
            assert_same_numbers(found, expected)
        assert {f"ranks/{r}/busy_s" for r in range(4)} < found.metrics.keys()
        assert found.metrics["ranks/sent_mb"] > 0.0
        assert {"rank0", "rank3", "gradient_sum"} < {stage for stage, _ in found.spans}
        # what changes here outside of an update reaches the others: weights, a head, the optimizer's state
        for bench in (alone, group):
            with torch.no_grad():
                for parameter in bench.actor.model.parameters():
                    parameter.mul_(0.9)
            bench.critic.rescale("a", 2.0, 0.5)
            parameters = parameters_of(bench)
            names = {id(p): n for n, p in parameters.items()}
            state = {n: 0.5 * t for n, t in bench.backend.optimizer_tensors(names).items()}
            bench.backend.load_optimizer(state, parameters)
            assert_same_bits(bench.backend.optimizer_tensors(names), state)
        own, all_states = (b.main.optimizer.state_bytes for b in (group, alone))
        assert 0 < own < all_states  # each rank has been given its own
        for _ in range(2):
            alone.update(scored)
            group.update(scored)
            assert relative_difference(moments(group), moments(alone)) < 1e-4
        assert 0.2 < group.main.optimizer.state_bytes / all_states < 0.3
        assert_a_gradient_that_is_not_finite_moves_nothing(group)
        assert_ranks_sample_as_one_does(group)
        assert_a_call_beside_unfetched_samples_is_refused(group)
        assert_an_interrupt_while_sampling_leaves_the_ranks_usable(group)
        # what a rank raises is raised here: the cheaper sample goes to the other ranks
        broken = [c.sample for c in group.credited[:2]]
        broken[1].prompt_ids = []
        with pytest.raises(TrainingError, match="has an empty prompt"):
            group.backend.step_start_outputs("b", broken, want_values=False, want_ref=False)
    finally:
        group.backend.close()
    assert all(helper.ended() for helper in group.helpers)
    with pytest.raises(TrainingError, match="their parts of the optimizer's state with them"):
        moments(group)
    with pytest.raises(TrainingError, match="start again from the last checkpoint"):
        group.backend.step([], 1.0)


def test_sequences_in_parts_with_checkpointed_layers_and_the_whole_vocabularys_kl():
    scored = sample_scored(build_actor(), groups=3, top_p=0.9)
    alone = Bench(second="reward_conditioned")
    group = RanksBench(num_ranks=2, context=2, checkpointing=True, second="reward_conditioned")
    try:
        expected, found = alone.update(scored), group.update(scored)
        assert relative_difference(moments(group), moments(alone)) < 1e-5
        assert_same_numbers(found, expected)
        assert group.actor.model.config._attn_implementation == "sdpa"
        own = HFEngine.build(group.actor, group.config.rollout, seed=0, output_dir=Path("unused"))
        sampling = SamplingParams(max_new_tokens=40)
        requests = [GenerationRequest(prompt_ids=[2 + i], sampling=sampling, seeds=[i]) for i in range(8)]
        samples = group.backend.spread(own).generate_stream(requests)
        os.kill(group.helpers[0].pid, signal.SIGKILL)
        with pytest.raises(
            TrainingError, match=r"rank 1 was killed by SIGKILL during \w+; the last checkpoint"
        ):
            list(samples)
        with pytest.raises(TrainingError, match="rank 1 was killed by SIGKILL"):  # no call waits for it again
            group.update(scored)
    finally:
        group.backend.close()


NOTING = """
from pathlib import Path

from multitask_rl.rollout.hf import HFEngine


class Noting(HFEngine):
    def generate_stream(self, requests):
        self.note("samples", [c for request in requests for c in request.conversations])
        return super().generate_stream(requests)

    def retain(self, conversations):
        self.note("retains", conversations)
        super().retain(conversations)

    def note(self, what, conversations):
        with (Path(__file__).parent / "notes").open("a") as file:
            print(what, sorted(conversations), file=file)
"""


def test_a_rank_samples_all_turns_of_a_conversation_and_then_drops_its_keys_and_values(tmp_path):
    (tmp_path / "noting.py").write_text(NOTING)
    group = RanksBench(num_ranks=2, engine=f"{tmp_path / 'noting.py'}:Noting")
    sampling = SamplingParams(max_new_tokens=4)

    def turn(conversations, length):
        return [
            GenerationRequest(prompt_ids=[2 + i] * length, sampling=sampling, seeds=[i], conversations=[i])
            for i in conversations
        ]

    try:
        own = HFEngine.build(group.actor, group.config.rollout, seed=0, output_dir=Path("unused"))
        engine = group.backend.spread(own)
        engine.retain([])  # nothing is kept yet: no rank is asked
        engine.generate(turn(range(4), 1))
        # dealt anew, the longest of the two would change places
        engine.generate([*turn([0, 1], 9), *turn([2, 3], 3)])
        engine.retain([3])
        engine.retain([])
        first, second, *after = (tmp_path / "notes").read_text().splitlines()
        assert first == second
        assert first.startswith("samples [")
        assert after == ["retains [3]", "retains []"]
    finally:
        group.backend.close()


def test_a_rank_that_does_not_start_is_named():
    class Broken:
        def __init__(self, where):
            self.is_dead = False

        def ended(self):
            return "ended with code 7"

        def kill(self):
            self.is_dead = True

    started = []

    def launch(where):
        started.append(Broken(where))
        return started[-1]

    bench = Bench()
    with pytest.raises(TrainingError, match="learner rank 1 did not start: it ended with code 7"):
        RankGroup(bench.main, bench.config, launch, devices=[("cpu", "cpu")] * 3)
    assert [helper.is_dead for helper in started] == [True, True]
    assert bench.main.step([], 1.0).norms == {}, "this process can go on alone"


def test_a_rank_that_dies_while_all_meet_is_named_at_once():
    class Dying:
        """A rank that takes its models and hangs up where it should join the others."""

        def __init__(self, where):
            self._thread = threading.Thread(target=self._live, args=(where,))
            self._thread.start()

        def _live(self, where):
            with socket.create_connection((where["host"], where["port"])) as sock:
                sock.sendall(f"{where['token']} {where['rank']:08d}".encode())
                channel = Channel(sock)
                channel.receive()
                channel.send(("thawed", None))

        def ended(self):
            return "was killed by SIGKILL" if not self._thread.is_alive() else ""

        def kill(self):
            self._thread.join()

    bench = Bench()
    began = time.monotonic()
    with pytest.raises(TrainingError, match="learner rank 1 was killed by SIGKILL during the start"):
        RankGroup(bench.main, bench.config, Dying, devices=[("cpu", "cpu")] * 2)
    assert time.monotonic() - began < 60  # the library's own limit is three minutes


@pytest.mark.timeout(100)  # the library's own limit is three minutes
def test_any_error_of_this_process_while_all_meet_is_raised():
    def fails():
        raise OSError("no such address")

    with pytest.raises(OSError, match="no such address"):
        RankConnections(ForkedRank, 1, "127.0.0.1").meet(fails, "the start")


def test_a_signal_while_a_lost_rank_is_looked_for_does_not_make_the_next_call_wait():
    class HungUp:
        """A rank that hangs up; ``torchrun`` then sends SIGTERM to the trainer."""

        def __init__(self, where):
            self.sock = socket.create_connection((where["host"], where["port"]))
            self.sock.sendall(f"{where['token']} {where['rank']:08d}".encode())

        def ended(self):
            if self.sock.fileno() == -1:
                raise Terminated(signal.SIGTERM)
            return ""

        def kill(self):
            self.sock.close()

    ranks = []
    connections = RankConnections(lambda where: ranks.append(HungUp(where)) or ranks[0], 2, "127.0.0.1")
    ranks[0].kill()
    with pytest.raises(Terminated):
        connections.receive("sampling", [1])
    with pytest.raises(TrainingError, match="learner rank 1 hung up during sampling"):
        connections.receive("sampling", [1], until=time.monotonic() + 1.0)
    assert connections.has_lost
    connections.close()


def test_a_rank_whose_trainer_dies_while_all_meet_ends_at_once():
    bench = Bench()
    runner = bench.main.runner
    frozen, _ = freeze((runner, bench.main.tasks, bench.config))
    devices = [("cpu", "cpu")] * 2
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as store:
        ports = [s.getsockname()[1] for s in (server, store)]
        rank = ForkedRank({"host": "127.0.0.1", "port": ports[0], "token": "t", "rank": 1})
        trainer = Channel(server.accept()[0])
        trainer._sock.recv(10)
        store.close()
        setup = Setup(
            sizes=(2, 1, 1, 0),
            host="127.0.0.1",
            port=ports[1],
            devices=devices,
            num_threads=1,
            frozen=frozen,
            shards=Shards,
        )
        trainer.send(setup)
        assert trainer.receive() == ("thawed", None)
        trainer.hang_up()
    until = time.monotonic() + 60  # the library's own limit is three minutes
    while not rank.ended() and time.monotonic() < until:
        time.sleep(0.05)
    ended = rank.ended()
    if not ended:
        rank.kill()
    assert ended


def test_shares_are_about_equal_and_keep_the_samples_of_a_prompt_together():
    prompts = [[g] * (3 + g) for g in range(12) for _ in range(4)]
    responses = [[1] * (1 + (7 * i) % 23) for i in range(48)]
    shares = deal(prompts, responses, 3, hidden_size=64)
    assert sorted(i for share in shares for i in share) == list(range(48))
    groups = [{tuple(prompts[i]) for i in share} for share in shares]
    assert sum(map(len, groups)) == 12
    sizes = [
        sum(len(responses[i]) for i in share) + sum(map(len, g))
        for share, g in zip(shares, groups, strict=True)
    ]
    assert max(sizes) < 1.15 * min(sizes)


def test_one_large_group_is_halved_rather_than_left_to_one_rank():
    shares = deal([[5, 6]] * 8, [[1] * 10] * 8, 2, hidden_size=64)
    assert [len(share) for share in shares] == [4, 4]
    assert deal([[5, 6]], [[1]], 3, hidden_size=64) == [[0], [], []]


def test_parts_of_sequences_hold_every_token_once():
    prompts = [[2, 3, 4], list(range(2, 25)), [7]]
    responses = [[5] * 6, [6] * 3, [8] * 14]
    batch = make_microbatch([0, 1, 2], prompts, responses, layout="bucketed", pad_token_id=0)
    for number in (2, 3):
        parts = [cut_sequences(batch, i, number) for i in range(number)]
        assert torch.cat([p.tokens for p in parts]).sort().values.tolist() == list(range(23))
        gathered = torch.full((number * parts[0].most,), -1)
        for index, part in enumerate(parts):
            own = part.batch
            predicting = own.input_ids[own.row, own.column]
            assert torch.equal(predicting, batch.input_ids[batch.row, batch.column][part.tokens])
            assert torch.equal(own.position_ids[own.row, own.column], batch.column[part.tokens])
            start = index * part.most
            gathered[start : start + len(part.tokens)] = part.tokens
        assert all(torch.equal(gathered[p.place], torch.arange(23)) for p in parts)


def test_padding_of_parts_stays_within_learnt_positions():
    batch = make_microbatch([0], [[3] * 20], [[4] * 15], layout="bucketed", pad_token_id=0)
    model = small_gpt2(35)
    for index in range(2):
        own = cut_sequences(batch, index, 2).batch
        assert model(input_ids=own.input_ids, position_ids=own.position_ids).logits.isfinite().all()


def test_a_moving_reference_in_bfloat16_travels_with_its_averages():
    model = build_model().bfloat16()
    average = AveragedReference(model, 0.5)
    average.ema_update(build_model(seed=1).bfloat16())
    frozen, tensors = freeze((model, average))
    (found, moved), empty = thaw(frozen, {"cpu": "cpu"})
    for there, here in zip(empty, tensors, strict=True):
        there.copy_(here.detach())
    versions = [t._version for t in tensors]
    for one in (average, moved):
        one.ema_update(build_model(seed=2).bfloat16())
    changed = sum(now._version > before for now, before in zip(tensors, versions, strict=True))
    assert changed == 2 * len(list(model.parameters()))  # weights and averages; not the rotary tables
    expected = dict(model.named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in found.named_parameters())


def test_a_skeleton_keeps_tied_weights_tied_and_carries_no_contents():
    model = build_model(tied=True)
    frozen, tensors = freeze({"model": model, "again": model.lm_head.weight})
    number = sum(p.numel() for p in model.parameters())
    assert len(frozen) < number  # bytes; the weights alone have four each
    found, empty = thaw(frozen, {"cpu": "cpu"})
    assert found["again"] is found["model"].get_input_embeddings().weight
    assert [t.shape for t in empty] == [t.shape for t in tensors]
    for there, here in zip(empty, tensors, strict=True):
        assert not there.any()
        there.copy_(here.detach())
    ids = torch.arange(2, 12).unsqueeze(0)
    assert torch.equal(found["model"](input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_skeleton_has_no_memory_for_weights_that_come_in_parts():
    model = build_model(tied=True)
    frozen, tensors = freeze(model)
    weights = {p.data_ptr() for p in model.parameters()}
    absent = [number for number, t in enumerate(tensors) if t.data_ptr() in weights]
    found, _ = thaw(frozen, {"cpu": "cpu"}, absent)
    assert all(p.is_meta for p in found.parameters())
    assert found.lm_head.weight is found.get_input_embeddings().weight
    assert [b.device.type for b in found.buffers()] == ["cpu"] * len(list(model.buffers())) != []


def test_a_model_with_windows_is_refused_in_parts():
    config = MistralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4,
    )  # fmt: skip
    actor = build_actor()
    actor.model = MistralForCausalLM(config)
    with pytest.raises(ConfigError, match=r"MistralForCausalLM cannot be computed in parts: .* windows"):
        RanksBench(actor=actor, num_ranks=2, context=2)


def test_an_address_that_the_ranks_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.5")
    assert rank_0_address() == "127.0.0.5"
    monkeypatch.setenv("MASTER_ADDR", "::1")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='::1': .* IPv4 .*--master-addr"):
        rank_0_address()
