"""Ranks of DeepSpeed learn what one process learns; what they cannot do is refused before a model loads."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch

from learner_benches import Bench, RanksBench, assert_same_numbers, assert_same_weights, moments
from learner_benches import relative_difference as gap
from model_builders import adapted_actor, build_actor, build_model, sample_scored
from multitask_rl.config.run import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    TrainingConfig,
)
from multitask_rl.errors import CheckpointError, ConfigError, MissingExtraError, TrainingError
from multitask_rl.models.actor import read_weights
from multitask_rl.run import estimate
from multitask_rl.testing import assert_contract
from multitask_rl.trainer import Trainer
from multitask_rl.training.backends.deepspeed import DeepSpeedBackend
from run_builders import build_tokenizer, run_config, write_run

TWO = {"actor": "cpu:0-1"}
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed; docs/ranks.md says how to run these",
)
pytestmark = pytest.mark.filterwarnings("ignore")


def zero(stage):
    return TrainingConfig(backend="deepspeed", backend_config={"stage": stage})


def bench(stage, **settings):
    return RanksBench(num_ranks=2, group=DeepSpeedBackend.group, training=zero(stage), **settings)


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_the_contract(stage):
    given = {"device_map": TWO, "training": {"backend_config": {"stage": stage}}}
    assert_contract("backend", "deepspeed", given)


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_with_checkpointed_layers_and_the_kl_over_the_whole_vocabulary(stage, monkeypatch):
    monkeypatch.setattr("multitask_rl.training.forward.SLICE_CELLS", 500)  # the head is computed in slices
    scored = sample_scored(build_actor(), top_p=0.9)
    settings = {"second": "reward_conditioned", "layout": "bucketed", "tokens": 150}
    alone = Bench(actor=adapted_actor(), **settings)
    group = bench(stage, actor=adapted_actor(), checkpointing=True, **settings)
    try:
        for _ in range(2):
            expected, found = alone.update(scored), group.update(scored)
            assert gap(moments(group), moments(alone)) < 1e-5
            assert_same_numbers(found, expected)
        assert_same_weights(group, alone)
    finally:
        group.backend.close()
    assert_same_weights(group, alone)


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_autocast_is_that_of_the_default_backend(stage, monkeypatch):
    from deepspeed.runtime import engine

    @contextmanager
    def off(_engine):
        with torch.autocast("cpu", enabled=False):
            yield

    monkeypatch.setattr(engine, "autocast_if_enabled", off)  # what it does on a GPU
    scored = sample_scored(build_actor(), top_p=0.9)

    def moments_of(make, **settings):
        group = make(**settings)
        try:
            for _ in range(3):
                group.update(scored)
            return moments(group)
        finally:
            group.backend.close()

    usual = moments_of(partial(RanksBench, num_ranks=2, sharded=True), autocast=True)
    found, in_float32 = moments_of(partial(bench, stage), autocast=True), moments_of(partial(bench, stage))
    # stage 3 computes logits at once: bfloat16 rounds elsewhere
    assert gap(found, usual) < (1e-6 if stage == 2 else 0.6 * gap(in_float32, usual))
    assert gap(in_float32, usual) > 2e-3


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_doctor_counts_what_a_rank_keeps(stage, tmp_path):
    write_run(tmp_path)
    config = run_config(tmp_path, "run", 1, device_map=TWO, training=zero(stage))
    with Trainer.from_config(config) as trainer:
        shape = estimate.read_shape(config.model)
        work = estimate.step_workload(trainer.plan, build_tokenizer())
        memory = estimate.estimate_memory(trainer.plan, shape, work)
        trainer.train()
        assert memory["optimizer"] == pytest.approx(trainer.parts.learner.backend.optimizer_bytes, rel=0.02)
    assert memory["weights"] == 4 * shape.parameters / (stage - 1)
    assert memory["gradients"] == 2 * shape.parameters
    assert memory["sum of gradients"] == 4 * shape.parameters


@needs_deepspeed
def test_no_samples_move_nothing_and_a_weight_without_gradient_is_refused():
    scored = sample_scored(build_actor())
    actor = build_actor()
    group = bench(2, actor=actor)
    try:
        group.update(scored)
        before = {name: value.clone() for name, value in group.actor.state_dict().items()}
        assert group.backend.step([], 1.0).norms == {}
        assert all(torch.equal(before[n], value) for n, value in group.actor.state_dict().items())
        named = dict(group.actor.model.named_parameters())
        counts = {f"{n}|step": torch.tensor(float(i % 2)) for i, n in enumerate(named)}
        with pytest.raises(CheckpointError, match="counts those of all together"):
            group.backend.load_optimizer(counts, named)
    finally:
        group.backend.close()
    odd = build_actor()
    odd.model.unused = torch.nn.Parameter(torch.ones(3))
    group = bench(3, actor=odd)
    try:
        with pytest.raises(TrainingError, match=r"1 weight got no gradient .* 'unused'"):
            group.update(scored)
    finally:
        group.backend.close()


@needs_deepspeed
def test_a_run_goes_from_one_process_to_deepspeed_and_back(tmp_path):
    write_run(tmp_path)

    def steps(number, **settings):
        config = run_config(tmp_path, "run", number, **settings)
        config = replace(config, checkpoint=CheckpointConfig(every=0))
        with Trainer.from_config(config) as trainer:
            trainer.train()
            assert trainer.step == number
        return read_weights(tmp_path / "run" / "checkpoints" / f"step_{number:08d}" / "actor")

    found = [steps(1)]
    found.append(steps(2, device_map=TWO, training=zero(3)))
    found.append(steps(3, device_map=TWO, training=zero(2)))
    found.append(steps(4))
    for earlier, later in pairwise(found):
        assert earlier.keys() == later.keys()
        assert all(value.isfinite().all() for value in later.values())
        assert any(not torch.equal(value, later[name]) for name, value in earlier.items())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"device_map": {"actor": "cpu"}}, "name several devices"),
        ({"device_map": {"actor": "cpu:0-1 sharded"}}, "name several devices without sharded"),
        ({"executor": "ray"}, "does not work with executor"),
        ({"rollout": RolloutConfig(engine="vllm")}, "does not work with rollout.engine=vllm"),
        ({"model": ModelConfig(dtype="bfloat16")}, "model.dtype=bfloat16: only float32"),
        ({"optimizer": OptimizerConfig(moments="int8")}, "does not work with optimizer.moments"),
        ({"model": ModelConfig(reference_decay=0.9)}, "does not work with model.reference_decay"),
        ({"training": TrainingConfig(backend_config={"stage": 1})}, r"backend_config.*stage.* 2, 3"),
    ],
)
def test_what_it_cannot_do_is_refused(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        DeepSpeedBackend.check(RunConfig(**{"device_map": TWO, **settings}))


def test_a_missing_deepspeed_is_named(monkeypatch):
    monkeypatch.setattr("multitask_rl.training.backends.deepspeed.is_installed", lambda name: False)
    with pytest.raises(MissingExtraError, match=r"pip install 'multitask-rl\[deepspeed\]'"):
        DeepSpeedBackend.check(RunConfig(device_map=TWO))


@needs_deepspeed
def test_weights_below_float32_are_refused():
    actor = build_actor()
    actor.model = build_model().bfloat16()
    with pytest.raises(ConfigError, match="float32 weights alone"):
        bench(2, actor=actor)
