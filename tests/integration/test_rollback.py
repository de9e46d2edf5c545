"""The guard in whole runs: what it takes back, from which checkpoints, and what is left of it on the disk."""

import shutil

import pytest
import torch

from multitask_rl.config.run import BatchConfig, CheckpointConfig, EvalConfig, GuardConfig, OptimizerConfig
from multitask_rl.errors import GuardStop
from multitask_rl.records import Scored
from multitask_rl.step.flow import Stage
from multitask_rl.tracking.reading import read_run
from multitask_rl.trainer import Trainer
from run_builders import run_config, write_run

ONE_TASK = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
"""
LEARNT = 40
SETTINGS = {
    "batch": BatchConfig(prompts_per_step=16, group_size=8),
    "optimizer": OptimizerConfig(learning_rate=5e-3),
    "eval": EvalConfig(every=2, num_prompts=150),
    "checkpoint": CheckpointConfig(every=2),
    "guard": GuardConfig(rollback_steps=60, max_rollbacks=1, guard_config={"warmup": 3, "cooldown_steps": 4}),
}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """A run in which ``copy`` is learnt within ``LEARNT`` steps and judged by 150 held-out prompts."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, ONE_TASK, num_rows=1500)
    with Trainer.from_config(run_config(directory, "learnt", LEARNT, **SETTINGS)) as trainer:
        last = trainer.train()["copy"].values
    return directory, sum(last) / len(last)


def go_on(directory, name, max_steps, plant):
    """Return a trainer that goes on from ``LEARNT`` with ``plant(trainer)`` between rewards and update."""
    shutil.copytree(directory / "learnt", directory / name)
    trainer = Trainer.from_config(run_config(directory, name, max_steps, **SETTINGS))

    def stage(scored: Scored) -> Scored:
        plant(trainer)
        return scored

    trainer.insert_stage(Stage("plant", stage, consumes=Scored, produces=Scored), after="rewards")
    return trainer


def damage(trainer, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.actor.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def test_a_planted_regression_is_taken_back_for_good(learnt):
    directory, before = learnt
    draws, seen = [], []

    def plant(trainer):
        if trainer.step == LEARNT and not draws:
            draws.append(trainer.tasks["copy"].stream.draw)
            damage(trainer)
        elif draws and len(draws) == 1 and any(e.kind == "rolled_back" for e in trainer.events):
            draws.append(trainer.tasks["copy"].stream.draw)
            shutil.copytree(directory / "planted", directory / "killed")
            # what a reader sees until the next evaluation: that of the restored weights
            seen.append((trainer.step, read_run(directory / "killed").evaluations["copy"][-1].step))

    trainer = go_on(directory, "planted", LEARNT + 16, plant)
    values = trainer.train()["copy"].values
    assert len(draws) == 2, "the regression was planted and taken back"
    assert [at for _, at in seen] == [step for step, _ in seen]
    assert trainer.step == LEARNT + 16
    assert sum(values) / len(values) >= 0.95 * before
    assert trainer.tasks["copy"].stream.draw > draws[1] > draws[0], (
        "the data of the window are not seen again"
    )
    with Trainer.from_config(run_config(directory, "killed", LEARNT + 20, **SETTINGS)) as resumed:
        resumed._open()
        assert resumed.step < LEARNT + 2
        assert resumed.parts.store.checkpoints.entries[resumed.step].judged_good
        assert resumed.guard.metrics()["guard/rollbacks"] == 1
        assert resumed.guard.lr_factor(resumed.step) == 0.5
        assert resumed.tasks["copy"].stream.draw > draws[0]


def test_a_regression_that_comes_back_stops_the_run_with_the_good_weights_named(learnt, caplog):
    def plant(trainer):
        if trainer.step % 5 == 0:
            damage(trainer, 0.5)

    caplog.set_level("WARNING")
    with pytest.raises(GuardStop, match=r"the last good weights are in .*step_000000") as caught:
        go_on(learnt[0], "stopped", 200, plant).train()
    assert caught.value.exit_code == 3
    assert "guard rollback [copy] at step" in caplog.text
    assert "guard stop [copy] at step" in caplog.text


@pytest.mark.parametrize("how_many", ["the newest", "all"])
def test_checkpoints_that_are_gone_or_damaged_are_done_without(learnt, how_many):
    good = []

    def plant(trainer):
        if trainer.step == LEARNT and not good:
            damage(trainer)
            checkpoints = trainer.parts.store.checkpoints
            good.extend(s for s, e in sorted(checkpoints.entries.items()) if e.judged_good)
            shutil.rmtree(checkpoints.path(good[-1]))
            for step in good[-2:-1] if how_many == "the newest" else good[:-1]:
                (checkpoints.path(step) / "tensors.safetensors").write_bytes(b"cut off")

    trainer = go_on(learnt[0], how_many.replace(" ", "_"), LEARNT + 3, plant)
    trainer.train()
    assert len(good) > 2
    events = [e for e in trainer.events if e.source == "guard"]
    without = [e.reason for e in events if e.kind == "alarm"]
    assert len(without) == (2 if how_many == "the newest" else len(good))
    assert all("the guard does without this checkpoint" in reason for reason in without)
    to = [e.data["to"] for e in events if e.kind == "rolled_back"]
    assert to == ([good[-3]] if how_many == "the newest" else [])
    assert trainer.step == LEARNT + 3


def test_evaluations_that_miss_the_checkpoints_still_leave_the_guard_a_target(tmp_path):
    write_run(tmp_path, ONE_TASK, num_rows=40)
    settings = {
        **SETTINGS,
        "batch": BatchConfig(prompts_per_step=2, group_size=2),
        "optimizer": OptimizerConfig(learning_rate=1e-9),
        "eval": EvalConfig(every=2, num_prompts=4),
        "checkpoint": CheckpointConfig(every=3, keep=9),
    }
    with Trainer.from_config(run_config(tmp_path, "run", 5, **settings)) as trainer:
        trainer.train()
        good = [step for step, entry in trainer.parts.store.checkpoints.entries.items() if entry.judged_good]
    assert good == [0, 4, 5]
