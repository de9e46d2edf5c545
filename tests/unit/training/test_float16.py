"""A float16 actor learns: its loss is scaled so that gradients neither vanish nor overflow."""

from __future__ import annotations

import json

import pytest
import torch

from learner_benches import Bench, RanksBench, parameters_of, relative_difference
from model_builders import build_actor, build_tokenizer, sample_scored
from multitask_rl.config.run import ModelConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import load_actor
from multitask_rl.training.optimizer import FIRST_SCALE
from run_builders import run_config, train, write_run

TINY = {"a": 1e-5, "b": 1e-5}
"""Shares that make gradients inside the model smaller than float16 can hold."""
HUGE = {"a": 100.0, "b": 100.0}


def half_actor():
    actor = build_actor()
    actor.model.half()
    return actor


def rounded_actor():
    """The same weights, kept in float32."""
    actor = build_actor()
    actor.model.half().float()
    return actor


def moved_by(bench):
    state = bench.backend.optimizer_tensors({id(p): n for n, p in parameters_of(bench).items()})
    return {name: value.clone() for name, value in state.items() if name.endswith("|exp_avg")}


@pytest.mark.parametrize("shares", [TINY, HUGE])
def test_gradients_that_float16_cannot_hold_are_those_of_float32(shares):
    scored = sample_scored(build_actor(), groups=2)
    whole, half = Bench(actor=rounded_actor()), Bench(actor=half_actor())
    whole.update(scored, shares)
    report = half.update(scored, shares)
    assert report.metrics["skipped_updates"] == 0.0
    assert relative_difference(moved_by(half), moved_by(whole)) < 0.02
    assert {p.dtype for p in half.actor.model.parameters()} == {torch.float16}


def test_a_step_and_a_rank_without_a_gradient_move_nothing():
    scored = sample_scored(build_actor(), groups=2)
    bench = Bench(actor=half_actor())
    before = {name: p.detach().clone() for name, p in parameters_of(bench).items()}
    assert bench.main.optimizer.step(1.0) == {}
    assert all(torch.equal(p, before[name]) for name, p in parameters_of(bench).items())
    one = [sample for sample in scored if sample.rollout.task == "a"][:1]
    group = RanksBench(actor=half_actor(), num_ranks=2)
    try:
        assert group.update(one).metrics["skipped_updates"] == 0.0
        bench.update(one)
        assert relative_difference(moved_by(group), moved_by(bench)) < 0.02
    finally:
        group.backend.close()


def test_an_overflow_lowers_the_scale_which_then_rises(monkeypatch):
    scored = sample_scored(build_actor(), groups=2)
    bench = Bench(actor=half_actor())
    optimizer = bench.main.optimizer
    first = optimizer.loss_scale
    bench.update(scored, HUGE)
    low = optimizer.loss_scale
    assert 0 < low < first
    monkeypatch.setattr("multitask_rl.training.optimizer.GROWTH", 2.0)
    bench.update(scored, TINY)
    assert optimizer.loss_scale > low
    assert Bench(actor=rounded_actor()).main.optimizer.loss_scale == 1.0


def test_a_gradient_that_no_scale_makes_finite_is_skipped():
    bench = Bench(actor=half_actor())
    scored = sample_scored(build_actor(), groups=2)
    assert bench.update(scored, {"a": float("inf"), "b": 1.0}).metrics["skipped_updates"] == 1.0


def state_of(bench):
    """Return the optimizer's state and the loss scales in it."""
    state = bench.backend.optimizer_tensors({id(p): n for n, p in parameters_of(bench).items()})
    return state, {float(value) for name, value in state.items() if name.endswith("|loss_scale")}


@pytest.mark.parametrize("shares", [HUGE, {"a": float("inf"), "b": 1.0}], ids=["moved", "none_moved_yet"])
@pytest.mark.parametrize("sharded", [None, False, True])
def test_the_scale_is_part_of_the_saved_state(shares, sharded):
    scored = sample_scored(build_actor(), groups=2)
    ranks = {} if sharded is None else {"num_ranks": 2, "sharded": sharded}
    benches = [(RanksBench if ranks else Bench)(actor=half_actor(), **ranks) for _ in range(2)]
    try:
        benches[0].update(scored, shares)
        saved, scales = state_of(benches[0])
        assert len(scales) == 1
        assert max(scales) < FIRST_SCALE
        for other in (benches[1], Bench(actor=half_actor())):
            other.backend.load_optimizer(saved, parameters_of(other))
            assert state_of(other)[1] == scales
            assert other.update(scored, TINY).metrics["skipped_updates"] == 0.0
    finally:
        for bench in benches:
            bench.backend.close()


def test_a_state_from_before_the_first_update_begins_with_the_first_scale():
    """A rollback to it goes on as a resume from it does."""
    bench = Bench(actor=half_actor())
    first = bench.main.optimizer.loss_scale
    bench.update(sample_scored(build_actor(), groups=2), HUGE)
    assert bench.main.optimizer.loss_scale < first
    bench.backend.load_optimizer({}, parameters_of(bench))
    assert bench.main.optimizer.loss_scale == first


def test_ranks_scale_alike():
    scored = sample_scored(build_actor(), groups=2)
    alone = Bench(actor=half_actor())
    ranks = RanksBench(actor=half_actor(), num_ranks=2, sharded=True)
    try:
        for bench in (alone, ranks):
            bench.update(scored, HUGE)
        assert relative_difference(moved_by(ranks), moved_by(alone)) < 0.02
    finally:
        ranks.backend.close()


def test_a_model_is_loaded_in_float16_and_autocast_is_refused(tmp_path):
    build_actor().model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    actor = load_actor(ModelConfig(name_or_path=str(tmp_path), dtype="float16"), "cpu")
    assert actor.model.dtype == torch.float16
    with pytest.raises(ConfigError, match=r"model.autocast computes in bfloat16.*model.dtype"):
        ModelConfig(dtype="float16", autocast=True)


def test_four_tasks_train_in_float16_and_sample_from_the_same_weights(tmp_path):
    write_run(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), dtype="float16")
    actor = train(run_config(tmp_path, "out", 2, model=model)).actor
    assert {p.dtype for p in actor.model.parameters()} == {torch.float16}
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    gaps = [v for row in rows for key, v in row.items() if key.endswith("/mismatch_max")]
    assert gaps
    assert max(gaps) < 0.02
    assert not any(row.get("train/skipped_updates") for row in rows)
