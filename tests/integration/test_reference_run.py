"""The KL's reference: fixed, following the actor, or the actor itself; through checkpoints and rollbacks."""

import json
import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from multitask_rl.config.run import EvalConfig, LoraConfig, ModelConfig
from multitask_rl.errors import CheckpointError, ConfigError
from multitask_rl.trainer import Trainer
from multitask_rl.training.runner import AveragedReference
from run_builders import build_actor, lines, run_config, train, weights_hash, write_run

TASKS = """
tasks:
  digit:
    {type: ppo, dataset: digit.jsonl, rewards: [rewards.py:starts_right], kl: {coefficient: 0.05}}
  copy:
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    kl: {coefficient: 0.05, placement: loss}
"""


HERE = """

from multitask_rl.scoring.shapes import with_traits

for _plugin in (starts_right, is_short):
    with_traits(isolate=False)(_plugin)
"""


def write(directory):
    """Write a run whose rewards have no worker processes."""
    write_run(directory, TASKS)
    with (directory / "rewards.py").open("a") as file:
        file.write(HERE)


def config(directory, output, steps, decay=None):
    changes = {} if decay is None else {"reference_decay": decay}
    model = ModelConfig(name_or_path=str(directory / "actor"), **changes)
    few = EvalConfig(every=2, num_prompts=4)
    return run_config(directory, output, steps, model=model, eval=few)


def kls(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["task/copy/kl"] for row in rows if "task/copy/kl" in row]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("reference")
    write(directory)
    return directory


def test_decay_1_is_the_fixed_reference_bitwise(directory) -> None:
    fixed, one = train(config(directory, "fixed", 3)), train(config(directory, "one", 3, 1.0))
    assert weights_hash(fixed) == weights_hash(one)
    actor = build_actor()
    start = {n: p.clone() for n, p in actor.model.named_parameters()}
    still = AveragedReference(actor.model, 1.0)
    for seed in range(1, 4):
        still.ema_update(build_actor(seed).model)
    assert all(torch.equal(start[n], p) for n, p in actor.model.named_parameters())
    assert max(map(abs, kls(directory / "fixed")[1:])) > 1e-4, "the policy has left the fixed reference"


def test_decay_0_is_the_current_policy_so_the_kl_is_0(directory) -> None:
    trainer = train(config(directory, "zero", 3, 0.0))
    assert kls(directory / "zero") == pytest.approx([0.0] * 3, abs=1e-5)
    reference = dict(trainer.parts.learner.backend.runner.reference.named_parameters())
    assert all(torch.equal(reference[n], p) for n, p in trainer.actor.model.named_parameters())


def test_the_reference_is_part_of_checkpoints_and_rollbacks(directory) -> None:
    whole = train(config(directory, "whole", 4, 0.7))
    train(config(directory, "parts", 2, 0.7))
    resumed = train(config(directory, "parts", 4, 0.7))
    assert weights_hash(resumed) == weights_hash(whole)
    assert lines(directory / "parts", "rollouts.jsonl") == lines(directory / "whole", "rollouts.jsonl")
    now = {n: t.clone() for n, t in whole.parts.learner.backend.runner.average.tensors().items()}
    checkpoint = whole.parts.store.checkpoints.load(whole.parts.store.checkpoints.path(2))
    whole.parts.state.restore(checkpoint)
    model = dict(whole.parts.learner.backend.runner.reference.named_parameters())
    for name, value in now.items():
        assert torch.equal(model[name], checkpoint.tensors[f"reference/{name}"])
        if name.endswith("mlp.up_proj.weight"):
            assert not torch.equal(model[name], value)
    assert abs(kls(directory / "whole")[-1]) > 0, "it follows, it is not the actor"


def test_averages_move_in_float32_where_bfloat16_would_stand_still() -> None:
    reference, actor = build_actor().model.bfloat16(), build_actor().model.bfloat16()
    for parameter in actor.parameters():
        parameter.data.fill_(1.0)
    for parameter in reference.parameters():
        parameter.data.fill_(0.996)
    average = AveragedReference(reference, 0.99)
    for _ in range(500):
        average.ema_update(actor)
    values = [t.mean().item() for t in average.tensors().values()]
    assert min(values) == pytest.approx(1.0, abs=1e-4)
    assert all((p == 1.0).all() for p in reference.parameters())


def test_what_cannot_be_is_refused(directory) -> None:
    with pytest.raises(ConfigError, match=r"reference_decay must be in \[0, 1\], got 1\.5"):
        ModelConfig(reference_decay=1.5)
    with pytest.raises(ConfigError, match="base model is the reference"):
        ModelConfig(reference_decay=0.9, lora=LoraConfig(rank=4))
    average = AveragedReference(build_actor().model, 0.9)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        average.load_tensors({"lm_head.weight": torch.zeros(1)})


@contextmanager
def full_disk():
    """Files end at 50 kB: enough for every record of a run, not for weights."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_full_of_reference_or_checkpoint_ends_the_run_with_one_error_and_the_next_start_goes_on(
    tmp_path, caplog
) -> None:
    write(tmp_path)
    output = tmp_path / "out"
    no_rollouts = replace(config(tmp_path, "out", 2).tracking, store_rollouts=0)

    def fail(steps: int, message: str) -> None:
        trainer = Trainer.from_config(replace(config(tmp_path, "out", steps), tracking=no_rollouts))
        with full_disk(), pytest.raises(CheckpointError, match=message):
            trainer.train()

    fail(1, r"cannot write the reference policy .*: File too large")
    assert not (output / "reference").exists()
    train(replace(config(tmp_path, "out", 1), tracking=no_rollouts))
    fail(2, r"cannot write the checkpoint .*step_00000002: .*File too large")
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == ["step_00000000", "step_00000001"]
    caplog.set_level("INFO")
    assert train(config(tmp_path, "out", 2)).step == 2
    assert "step_00000001 at step 1" in caplog.text


def test_checkpoints_none_of_which_can_be_read_are_set_aside_for_a_new_run(tmp_path, caplog) -> None:
    write(tmp_path)
    train(config(tmp_path, "out", 1))
    for state in (tmp_path / "out/checkpoints").glob("step_*/state.json"):
        state.unlink()
    assert train(config(tmp_path, "out", 1)).step == 1
    assert sorted(p.name for p in (tmp_path / "out/checkpoints").glob("*")) == [
        "abandoned_1_step_00000000",
        "abandoned_1_step_00000001",
        "step_00000000",
        "step_00000001",
    ]
