"""Whole runs in every variant of model, critic, batch and constraint: they train, and resume bitwise."""

import json
import math
import shutil

import pytest
import torch

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    SchedulerConfig,
)
from multitask_rl.errors import ConfigError, EngineError, RewardError, TrainingError
from multitask_rl.trainer import Trainer
from run_builders import (
    TASKS,
    VOCABULARY,
    build_actor,
    build_tokenizer,
    run_config,
    train,
    undocumented,
    weights_hash,
    write_run,
)

BATCH = {"prompts_per_step": 12, "group_size": 4}
NO_CONTROL_TOKENS = TASKS.split("  quark:")[0] + "  clean:" + TASKS.split("  clean:")[1]
CONSTRAINTS = """
tasks:
  copy:
    type: grpo
    dataset: copy.jsonl
    rewards: [rewards.py:starts_right]
    constraints: [{plugin: rewards.py:has_no_digit, mode: penalty, weight: 0.5}]
  digit:
    type: ppo
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints:
      - {plugin: rewards.py:has_no_digit, mode: lagrangian, limit: 0.1}
      - plugin: rewards.py:is_short
        mode: lagrangian
        limit: 0.2
        multiplier: {mode: log, initial_value: 0.5, log_rate: 2}
  held:
    {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right], evaluation_only: true}
"""
ONE = "tasks:\n  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}\n"


def save_gpt2(directory):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(VOCABULARY),
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    GPT2LMHeadModel(config).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)


def save_with_chat_template(directory):
    actor = build_actor()
    actor.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}>"
    actor.save(directory)


def settings(directory, **changes):
    model = {"name_or_path": str(directory / "actor"), **changes.pop("model", {})}
    return {"eval": EvalConfig(every=2, num_prompts=4), "model": ModelConfig(**model), **changes}


def numbers(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {k: v for row in rows for k, v in row.items()}


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize(
    ("tasks", "save", "changes"),
    [
        (
            TASKS,
            None,
            {
                "critic": CriticConfig(trunk="separate"),
                "batch": BatchConfig(**BATCH, num_minibatches=2, num_epochs=2),
            },
        ),
        (TASKS, None, {"model": {"autocast": True}, "batch": BatchConfig(**BATCH, layout="packed")}),
        (
            TASKS,
            save_with_chat_template,
            {
                "rollout": RolloutConfig(max_new_tokens=6, stop=["a", "1"]),
                "model": {"gradient_checkpointing": True},
            },
        ),
        (TASKS, save_gpt2, {"batch": BatchConfig(**BATCH, layout="packed")}),
        (NO_CONTROL_TOKENS, None, {"model": {"lora": LoraConfig(rank=4)}}),
        (
            NO_CONTROL_TOKENS,
            None,
            {
                "model": {"lora": LoraConfig(rank=4), "gradient_checkpointing": True},
                "critic": CriticConfig(trunk="separate"),
            },
        ),
        (CONSTRAINTS, None, {}),
    ],
    ids=[
        "separate-critic-minibatches",
        "autocast-packed",
        "chat-stop-checkpointing",
        "gpt2",
        "lora",
        "lora-separate",
        "constraints",
    ],
)
def test_the_variant_trains_and_resumes_bitwise(tmp_path, tasks, save, changes):
    if save is not None:
        save(tmp_path / "actor")
    write_run(tmp_path, tasks)
    whole = train(run_config(tmp_path, "whole", 2, **settings(tmp_path, **changes)))
    train(run_config(tmp_path, "parts", 1, **settings(tmp_path, **changes)))
    torch.manual_seed(99)  # what was drawn before a run has no influence on it
    resumed = train(run_config(tmp_path, "parts", 2, **settings(tmp_path, **changes)))
    assert weights_hash(resumed) == weights_hash(whole)
    found = numbers(tmp_path / "whole")
    assert math.isfinite(found["train/loss"])
    assert found["train/grad_norm"] > 0
    assert undocumented(tmp_path / "whole") == set()
    tolerance = 0.05 if changes.get("model", {}).get("autocast") else 1e-4
    # not every task has an informative group in these steps
    mismatches = [value for name, value in found.items() if name.endswith("/mismatch_max")]
    assert mismatches
    assert max(mismatches) < tolerance


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_adapters_are_the_same_in_every_run_and_alone_are_trained(tmp_path):
    write_run(tmp_path, ONE)
    changes = settings(tmp_path, model={"lora": LoraConfig(rank=4)})
    first = train(run_config(tmp_path, "a", 2, **changes))
    torch.manual_seed(99)
    assert weights_hash(train(run_config(tmp_path, "b", 2, **changes))) == weights_hash(first)
    start = build_actor().model.state_dict()
    merged = first.actor.state_dict()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(merged[name], start[name])
    base = first.actor.model.get_base_model().state_dict()
    assert torch.equal(base["model.layers.0.self_attn.q_proj.base_layer.weight"], start[name])


def test_every_lagrangian_constraint_of_a_task_has_a_multiplier_of_its_own(tmp_path):
    write_run(tmp_path, CONSTRAINTS)
    trainer = train(run_config(tmp_path, "out", 3))
    multipliers = trainer.tasks["digit"].multipliers
    assert list(multipliers) == ["has_no_digit", "is_short"]
    found = numbers(tmp_path / "out")
    for name, multiplier in multipliers.items():
        assert found[f"task/digit/multiplier/{name}"] > 0
        assert 0 < found[f"task/digit/cost/{name}"] <= 1
        learner = trainer.tasks["digit"].learner
        assert learner.multipliers[name] == multiplier.value
    assert multipliers["is_short"].value > 0.5, "it started at its initial_value and its cost is too high"
    assert multipliers["is_short"].value != multipliers["has_no_digit"].value
    assert not trainer.tasks["copy"].multipliers


def test_a_tasks_scale_and_shift_of_rewards_change_no_weight(tmp_path):
    """Group normalisation, no KL, static weights: x100 + 7 gives the same updates."""
    write_run(tmp_path, TASKS)
    with (tmp_path / "rewards.py").open("a") as file:
        file.write(
            "\n\ndef scaled(response, reference):\n    return 100 * starts_right(response, reference) + 7\n"
        )
    plain = "tasks:\n  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}\n"
    plain += "  digit: {type: grpo, dataset: digit.jsonl, rewards: [rewards.py:starts_right]}\n"
    static = {"scheduler": SchedulerConfig(policy="static"), "guard": GuardConfig(enabled=False)}
    (tmp_path / "tasks.yaml").write_text(plain)
    first = train(run_config(tmp_path, "plain", 4, **static))
    (tmp_path / "tasks.yaml").write_text(plain.replace("starts_right", "scaled", 1))
    second = train(run_config(tmp_path, "scaled", 4, **static))
    start = build_actor().model.state_dict()
    moved = 0.0
    for (name, one), other in zip(
        first.actor.model.named_parameters(), second.actor.model.parameters(), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
        moved = max(moved, float((one.detach() - start[name]).abs().max()))
    assert moved > 1e-3


def test_one_task_trains_bitwise_as_alone_beside_tasks_that_get_no_prompts(tmp_path):
    write_run(tmp_path, ONE)
    config = {"scheduler": SchedulerConfig(policy="static"), "guard": GuardConfig(enabled=False)}
    alone = train(run_config(tmp_path, "alone", 3, **config))
    held = (
        "  held: {type: ppo, dataset: digit.jsonl, rewards: [rewards.py:is_short], evaluation_only: true}\n"
    )
    (tmp_path / "tasks.yaml").write_text(ONE + held)
    assert weights_hash(train(run_config(tmp_path, "held", 3, **config))) == weights_hash(alone)
    zero = "  zero: {type: grpo, dataset: digit.jsonl, rewards: [rewards.py:is_short], weight: 0}\n"
    (tmp_path / "tasks.yaml").write_text(ONE.replace("copy: {", "copy: {weight: 1, ") + zero)
    with_zero = train(run_config(tmp_path, "zero", 3, **config))
    assert with_zero.tasks["zero"].stream.draw == 0
    assert weights_hash(with_zero) == weights_hash(alone)


def test_going_back_and_changing_nothing_replays_the_same_trajectory(tmp_path):
    write_run(tmp_path)
    config = run_config(tmp_path, "out", 4, checkpoint=CheckpointConfig(every=2, keep=9))
    trainer = Trainer.from_config(config)
    trainer.train()
    expected, at_end = weights_hash(trainer), trainer.scheduler.weights()
    held_out = {name: e.metrics["reward_mean"].mean for name, e in trainer.history[-1][1].items()}
    resumed = Trainer.from_config(config)
    resumed._open()
    resumed.parts.state.restore(resumed.parts.store.checkpoints.load(resumed.parts.store.checkpoints.path(2)))
    resumed.push_weights()
    for _ in range(2):
        resumed.train_step()
    resumed._close("finished")
    assert weights_hash(resumed) == expected
    resumed.scheduler.calibrate(held_out, step=4)
    assert resumed.scheduler.weights() == at_end
    resumed.scheduler.calibrate(dict.fromkeys(held_out, 0.0), step=4)  # an evaluation counts once
    assert resumed.scheduler.weights() == at_end


def test_the_share_requested_is_the_quota_exactly(tmp_path):
    write_run(tmp_path)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 4))
    reports = [trainer.train_step() for _ in range(2)]
    trainer._close("finished")
    rows = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    for report, row in zip(reports, rows, strict=True):
        assert sum(report.quotas.values()) == 12
        for name, count in report.quotas.items():
            assert row[f"task/{name}/share_requested"] == count / 12


def test_workers_end_when_the_engine_cannot_be_built(tmp_path, monkeypatch):
    write_run(tmp_path)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 2))
    closed = []
    close = trainer.scorer.close
    monkeypatch.setattr(trainer.scorer, "close", lambda: (closed.append(True), close()))

    def build(*_, **__):
        raise EngineError("no room")

    monkeypatch.setattr(trainer.plan.engine_class, "build", build)
    with pytest.raises(EngineError, match="no room"):
        trainer.train()
    assert closed


def test_an_error_while_scoring_loses_no_step_and_the_resumed_run_is_the_uninterrupted_one(tmp_path):
    write_run(tmp_path)
    rare = {"checkpoint": CheckpointConfig(every=100)}
    whole = train(run_config(tmp_path, "whole", 4, **rare))
    trainer = Trainer.from_config(run_config(tmp_path, "out", 4, **rare))
    begin = trainer.scorer.begin_scoring

    def fail_late():
        if trainer.step == 3:
            raise RewardError("the grader is gone")
        return begin()

    trainer.scorer.begin_scoring = fail_late
    with pytest.raises(RewardError):
        trainer.train()
    assert trainer.parts.store.checkpoints.newest().state["counters"]["step"] == 3
    assert weights_hash(train(run_config(tmp_path, "out", 4, **rare))) == weights_hash(whole)


def test_evaluating_a_run_cuts_nothing_off_its_records(tmp_path):
    write_run(tmp_path, ONE)
    train(run_config(tmp_path, "out", 4))
    shutil.rmtree(tmp_path / "out/checkpoints/step_00000004")
    before = (tmp_path / "out/evaluations.jsonl").read_text()
    Trainer.from_config(run_config(tmp_path, "out", 4)).evaluate()
    assert (tmp_path / "out/evaluations.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "type: reward_conditioned, "
            "constraints: [{plugin: rewards.py:has_no_digit, mode: lagrangian, limit: 0.1}]",
            "acts on advantages",
        ),
        ("type: reward_conditioned, kl: {coefficient: 0.1, target: 1.0}", "no KL per response"),
        ("kl: {coefficient: 0.1, placement: loss, estimator: k1}", "expected gradient of 0.*estimator: k2"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(tmp_path, settings, message):
    write_run(
        tmp_path, f"tasks: {{t: {{dataset: copy.jsonl, rewards: [rewards.py:starts_right], {settings}}}}}"
    )
    with pytest.raises(ConfigError, match=message):
        train(run_config(tmp_path, "out", 1))


def test_a_trainer_whose_run_has_ended_says_so(tmp_path):
    write_run(tmp_path)
    trainer = train(run_config(tmp_path, "out", 1))
    with pytest.raises(TrainingError, match=r"run has ended.*with trainer.actor as the actor"):
        trainer.evaluate()
