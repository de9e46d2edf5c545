"""Weights below float32 learn at the rates that are usual for language models."""

import pytest
import torch

from learner_benches import Bench, RanksBench, parameters_of, relative_difference, weights_of
from model_builders import build_actor, sample_scored

RATE = 1e-6
"""An update is far below what rounds to another bfloat16."""


def half_actor():
    actor = build_actor()
    actor.model.bfloat16()
    return actor


def rounded_actor():
    """The same weights, kept in float32."""
    actor = build_actor()
    actor.model.bfloat16().float()
    return actor


def state_of(bench):
    return bench.backend.optimizer_tensors({id(p): n for n, p in parameters_of(bench).items()})


def masters_of(bench):
    return {name: value for name, value in state_of(bench).items() if name.endswith("|master")}


def moved_by(bench, before):
    return {name: value - before[name] for name, value in masters_of(bench).items()}


def test_what_is_lost_on_a_weight_is_kept_by_its_master():
    scored = sample_scored(build_actor(), groups=2)
    whole, half = Bench(actor=rounded_actor(), rate=RATE), Bench(actor=half_actor(), rate=RATE, tokens=400)
    start = {f"{n}|master": p.detach().clone() for n, p in whole.actor.model.named_parameters()}
    for _ in range(4):
        whole.update(scored)
        half.update(scored)
    wanted = {
        f"{n}|master": p.detach() - start[f"{n}|master"] for n, p in whole.actor.model.named_parameters()
    }
    # small steps add up as in float32; where bfloat16 gradients have another sign, Adam's go another way
    assert relative_difference(moved_by(half, start), wanted) < 0.2
    assert all(gradient.dtype == torch.float32 for gradient in half.gradient.values())
    masters = masters_of(half)
    for name, parameter in half.actor.model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, masters[f"{name}|master"].bfloat16())
    assert half.backend.optimizer_bytes > 1.4 * whole.backend.optimizer_bytes


def test_a_resumed_run_goes_on_from_the_masters_and_weights_set_from_outside_are_taken_over():
    scored = sample_scored(build_actor(), groups=2)
    bench, other = Bench(actor=half_actor(), rate=RATE), Bench(actor=half_actor(), rate=RATE)
    bench.update(scored)
    kept = {name: value.clone() for name, value in state_of(bench).items()}
    with torch.no_grad():
        for name, parameter in parameters_of(other).items():
            parameter.copy_(parameters_of(bench)[name])
    other.backend.load_optimizer(kept, parameters_of(other))
    for one in (bench, other):
        one.update(scored)
    assert all(torch.equal(value, state_of(bench)[name]) for name, value in state_of(other).items())
    before, norm = masters_of(bench), bench.actor.model.model.norm.weight
    with torch.no_grad():
        norm[:3] = 7.0
    after = masters_of(bench)["model.norm.weight|master"]
    assert after[:3].tolist() == [7.0, 7.0, 7.0]
    assert torch.equal(after[3:], before["model.norm.weight|master"][3:])
    # a checkpoint of before there were masters: moments in bfloat16, no digits to restore
    old = {
        name: value.bfloat16() if value.dim() else value
        for name, value in kept.items()
        if not name.endswith("|master")
    }
    other.backend.load_optimizer(old, parameters_of(other))
    other.update(scored)
    assert all(value.dtype == torch.float32 for value in state_of(other).values())


def test_each_rank_has_the_masters_of_what_it_moves():
    scored = sample_scored(build_actor(), groups=2)
    alone = Bench(actor=half_actor(), rate=RATE)
    group = RanksBench(actor=half_actor(), rate=RATE, num_ranks=2, sharded=True, tensor=2)
    start = {f"{n}|master": p.detach().float() for n, p in half_actor().model.named_parameters()}
    try:
        for _ in range(2):
            alone.update(scored)
            group.update(scored)
        assert relative_difference(moved_by(group, start), moved_by(alone, start)) < 0.2
        assert 0.4 < group.backend.optimizer_bytes / alone.backend.optimizer_bytes < 0.7
        masters = masters_of(group)
        whole = group.actor.changing_weights()  # no process has them; they come bucket by bucket
        for name, _ in group.actor.model.named_parameters():
            assert torch.equal(whole[name], masters[f"{name}|master"].bfloat16())
    finally:
        group.backend.close()


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (build_actor, {}),
        (half_actor, {}),
        (build_actor, {"num_ranks": 2}),
        (half_actor, {"num_ranks": 2, "sharded": True}),
    ],
)
def test_an_optimizer_in_host_memory_moves_weights_as_one_on_the_device_does(kind, ranks):
    scored = sample_scored(build_actor(), groups=2)
    make = RanksBench if ranks else Bench
    usual, host = [make(actor=kind(), moments=moments, **ranks) for moments in ("float32", "host")]
    try:
        for bench in (usual, host):
            bench.update(scored)
        kept = {name: value.clone() for name, value in state_of(host).items()}
        # a checkpoint has masters of weights below float32 alone: a run may change the setting
        assert kept.keys() == state_of(usual).keys()
        usual.backend.load_optimizer(kept, parameters_of(usual))
        host.backend.load_optimizer(kept, parameters_of(host))
        for bench in (usual, host):
            bench.update(scored)
        wanted = weights_of(usual)
        assert all(torch.equal(value, wanted[name]) for name, value in weights_of(host).items())
        assert all(torch.equal(value, state_of(usual)[name]) for name, value in state_of(host).items())
    finally:
        for bench in (usual, host):
            bench.backend.close()
