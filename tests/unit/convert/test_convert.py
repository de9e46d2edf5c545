"""Converted configurations mean the same: each trap computes the source's number and ours by hand."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from multitask_rl.algorithms.base import CreditBatch, TokenBatch
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.policy_loss import clipped_surrogate, policy_loss
from multitask_rl.cli import main
from multitask_rl.config.run import OptimizerConfig
from multitask_rl.config.task import RewardSpec
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.convert.conversion import Conversion, convert
from multitask_rl.convert.openrlhf import OPENRLHF
from multitask_rl.convert.trl import TRL
from multitask_rl.convert.verl import VERL
from multitask_rl.data import load_rows
from multitask_rl.errors import ConfigError
from multitask_rl.scoring.adapt import resolve_reward
from multitask_rl.testing import make_prompt, make_rollout
from multitask_rl.training.optimizer import schedule_factor


def trl(tmp_path: Path, num_rows: int | None = None, processes: int = 1, **options: Any) -> Conversion:
    file = tmp_path / "grpo.yaml"
    file.write_text(json.dumps(options))
    return convert(
        TRL, file, dataset="hub/rows", reward="exact_match", num_rows=num_rows, processes=processes
    )


def verl(tmp_path: Path, *overrides: str, num_rows: int | None = None) -> Conversion:
    file = tmp_path / "run.sh"
    file.write_text("python3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(overrides))
    return convert(VERL, file, dataset="hub/rows", reward="exact_match", num_rows=num_rows)


def openrlhf(tmp_path: Path, *options: str, num_rows: int | None = None) -> Conversion:
    file = tmp_path / "run.sh"
    file.write_text("python3 -m openrlhf.cli.train_ppo_ray \\\n  " + " \\\n  ".join(options))
    return convert(OPENRLHF, file, dataset="hub/rows", reward="exact_match", num_rows=num_rows)


def mean_loss(c: Conversion, losses: list[list[float]]) -> float:
    """Return the loss of one minibatch from the losses of its tokens, as docs/configuration.md defines it."""
    longest = c.run["rollout.max_new_tokens"]
    mean = {
        "token": sum(map(sum, losses)) / sum(map(len, losses)),
        "sequence": sum(sum(own) / len(own) for own in losses) / len(losses),
        "constant": sum(map(sum, losses)) / (len(losses) * longest),
    }[c.task["algorithm_config.aggregation"]]
    return mean * c.task.get("loss_weight", 1.0)


LOSSES = [[1.0, 2.0], [3.0, 4.0, 5.0, 6.0]]
"""Of the tokens of two responses: 21 over 6 tokens."""


# batches, updates and steps


def test_trl_counts_responses_per_device_and_updates(tmp_path: Path) -> None:
    c = trl(
        tmp_path,
        processes=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        steps_per_generation=8,
        num_generations=8,
        num_iterations=2,
        max_steps=100,
        warmup_steps=10,
        save_steps=30,
    )
    responses = 4 * 2 * 8  # per device, devices, micro-batches of a generation
    updates = 8 // 4 * 2  # accumulated micro-batches, iterations
    assert c.run["batch.prompts_per_step"] * c.run["batch.group_size"] == responses
    assert c.run["batch.num_minibatches"] * c.run["batch.num_epochs"] == updates
    assert responses // c.run["batch.num_minibatches"] == 4 * 2 * 4  # responses of an update
    assert c.run["max_steps"] * updates == 100
    assert c.run["optimizer.warmup_steps"] == math.ceil(10 / updates)
    assert c.run["checkpoint.every"] == math.ceil(30 / updates)


def test_one_update_of_trl_over_several_generations_is_one_step(tmp_path: Path) -> None:
    c = trl(tmp_path, gradient_accumulation_steps=4, steps_per_generation=2, max_steps=10)
    assert c.run["batch.prompts_per_step"] * 8 == 8 * 4
    assert (c.run["batch.num_minibatches"], c.run["max_steps"]) == (1, 10)


def test_generations_that_num_generations_does_not_divide_ask_for_the_number_of_devices(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="--processes N"):
        trl(tmp_path, per_device_train_batch_size=4)


def test_epochs_become_steps_where_rows_are_known(tmp_path: Path) -> None:
    assert (
        trl(tmp_path, num_rows=83, num_train_epochs=2, per_device_train_batch_size=16).run["max_steps"] == 82
    )
    assert "--rows N" in trl(tmp_path, num_train_epochs=2).left["num_train_epochs"]
    c = verl(tmp_path, "trainer.total_epochs=3", "data.train_batch_size=32", num_rows=100)
    assert c.run["max_steps"] == 3 * (100 // 32)
    options = ("--train.num_episodes 2", "--rollout.batch_size 16", "--train.max_epochs 4")
    c = openrlhf(tmp_path, *options, num_rows=100)
    assert c.run["max_steps"] == 2 * (100 // 16)  # epochs of training reuse a batch, they do not sample
    assert c.run["batch.num_epochs"] == 4


def test_verl_counts_mini_batches_in_prompts(tmp_path: Path) -> None:
    names = ("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    c = verl(tmp_path, *names, "actor_rollout_ref.rollout.n=5")
    responses_of_an_update = 64 * 5 // c.run["batch.num_minibatches"]
    assert responses_of_an_update == 16 * 5


def test_openrlhf_counts_the_training_batch_in_responses(tmp_path: Path) -> None:
    names = ("--rollout.batch_size 16", "--rollout.n_samples_per_prompt 8", "--train.batch_size 32")
    c = openrlhf(tmp_path, *names)
    assert c.run["batch.prompts_per_step"] * c.run["batch.group_size"] // c.run["batch.num_minibatches"] == 32


# learning rate


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_rates_are_those_of_transformers_and_one_update_ahead_while_they_rise(
    tmp_path: Path, kind: str
) -> None:
    c = trl(tmp_path, lr_scheduler_type=kind, warmup_steps=4, max_steps=20)
    config = OptimizerConfig(
        schedule=c.run["optimizer.schedule"], warmup_steps=c.run["optimizer.warmup_steps"]
    )
    ours = [schedule_factor(config, step, c.run["max_steps"]) for step in range(20)]
    done = [(step - 4) / 16 for step in range(4, 20)]
    after = {
        "linear": [1 - part for part in done],
        "cosine": [0.5 * (1 + math.cos(math.pi * part)) for part in done],
        "constant_with_warmup": [1.0] * 16,
    }
    theirs = [0.0, 0.25, 0.5, 0.75, *after[kind]]
    assert ours[4:] == pytest.approx(theirs[4:])
    assert ours[:4] == pytest.approx([*theirs[1:4], 1.0])
    assert any("rate 0" in differs for _, _, differs in c.taken)


def test_schedules_and_warm_ups_have_the_source_s_defaults(tmp_path: Path) -> None:
    assert trl(tmp_path).run["optimizer.schedule"] == "linear"
    assert "optimizer.warmup_steps" not in trl(tmp_path, lr_scheduler_type="constant", warmup_steps=5).run
    assert verl(tmp_path, "data.shuffle=true").run["optimizer.schedule"] == "constant"
    c = openrlhf(tmp_path, "--rollout.batch_size 10", "--train.batch_size 10", num_rows=1000)
    assert (c.run["optimizer.schedule"], c.run["optimizer.warmup_steps"]) == ("cosine", 3)
    assert any("0.1 of the rate" in differs for _, _, differs in c.taken)
    betas = [f.run["optimizer.betas"] for f in (trl(tmp_path), verl(tmp_path, "data.shuffle=1"), c)]
    assert betas == [[0.9, 0.999], [0.9, 0.999], [0.9, 0.95]]
    assert verl(tmp_path, "data.shuffle=1").run["optimizer.weight_decay"] == 0.01


# KL


def kl_gradient(c: Conversion, now: float, ref: float) -> float:
    """Return the derivative of our loss by the log-probability, without an advantage, at ratio 1."""
    logprobs = torch.tensor([now], requires_grad=True)
    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.zeros(1),
        sequence=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        ref_logprobs=torch.tensor([ref]),
        kl_coefficient=c.task["kl.coefficient"],
        kl_estimator=c.task["kl.estimator"],
    )
    policy_loss(batch, GRPOConfig()).loss.sum().backward()
    assert logprobs.grad is not None
    return float(logprobs.grad)


def test_trl_s_kl_has_the_gradient_of_ours(tmp_path: Path) -> None:
    now, ref, beta = -1.0, -1.5, 0.04
    ratio = math.exp(ref - now)
    value, slope = ratio - (ref - now) - 1, 1 - ratio  # k3 and its derivative
    corrected = trl(tmp_path, beta=beta)
    assert corrected.task["kl.placement"] == "loss"
    assert kl_gradient(corrected, now, ref) == pytest.approx(beta * (value + slope), rel=1e-5)
    plain = trl(tmp_path, beta=beta, use_bias_correction_kl=False)
    assert kl_gradient(plain, now, ref) == pytest.approx(beta * slope, rel=1e-5)


def test_a_plus_behind_verl_s_estimate_has_the_gradient_of_k2(tmp_path: Path) -> None:
    names = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1")
    c = verl(tmp_path, *names, "actor_rollout_ref.actor.kl_loss_type=k3+")
    assert kl_gradient(c, -1.0, -1.5) == pytest.approx(0.1 * (-1.0 + 1.5))


def test_verl_s_kl_in_the_reward_is_the_same_only_without_scaling(tmp_path: Path) -> None:
    names = (
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.5",
    )
    c = verl(tmp_path, *names, "algorithm.norm_adv_by_std_in_grpo=False")
    rewards, kl = [1.0, 0.0, 0.0, 1.0], [0.4, 0.0, 0.8, 0.0]
    total = [r - 0.5 * k for r, k in zip(rewards, kl, strict=True)]
    theirs = [t - sum(total) / 4 for t in total]
    batch = CreditBatch(
        rewards=torch.tensor(rewards),
        groups=torch.zeros(4, dtype=torch.int64),
        lengths=torch.ones(4, dtype=torch.int64),
        old_logprobs=torch.tensor(kl),
        ref_logprobs=torch.zeros(4),
        kl_coefficient=c.task["kl.coefficient"],
    )
    ours = GRPO(GRPOConfig(normalisation=c.task["algorithm_config.normalisation"])).credit(batch).advantages
    assert ours.tolist() == pytest.approx(theirs)
    assert c.task["kl.placement"] == "reward"
    assert not any("kl.coefficient" in key and differs for _, key, differs in c.taken)
    scaled = verl(tmp_path, *names, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.1")
    assert any("kl.coefficient" in key and "scaled" in differs for _, key, differs in scaled.taken)
    assert "per token" in scaled.left["algorithm.kl_ctrl.target_kl"]


def test_openrlhf_has_a_kl_in_the_reward_by_default(tmp_path: Path) -> None:
    c = openrlhf(tmp_path, "--algo.advantage.estimator rloo")
    assert (c.task["kl.coefficient"], c.task["kl.placement"]) == (0.01, "reward")
    c = openrlhf(tmp_path, "--algo.kl.use_loss", "--algo.kl.estimator k3", "--algo.kl.unbiased_gradient")
    assert (c.task["kl.placement"], c.task["kl.estimator"]) == ("loss", "k2")


# clip ranges


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_trl_s_delta_is_the_dual_clip(tmp_path: Path, advantage: float) -> None:
    c = trl(tmp_path, epsilon=0.1, epsilon_high=0.3, delta=2.0)
    ratios = torch.tensor([0.5, 0.95, 1.2, 1.5, 4.0])
    settings = {name: c.task[f"algorithm_config.{name}"] for name in ("clip_low", "clip_high", "dual_clip")}
    ours = clipped_surrogate(ratios, torch.full((5,), advantage), **settings).loss.tolist()
    theirs = [
        -min(min(r, 2.0) * advantage, min(max(r, 0.9), 1.3) * advantage) for r in [0.5, 0.95, 1.2, 1.5, 4.0]
    ]
    assert ours == pytest.approx(theirs)
    assert trl(tmp_path).task["algorithm_config.dual_clip"] == 0.0  # ours would be 3


def test_trl_bounds_the_weight_of_cispo_itself(tmp_path: Path) -> None:
    c = trl(tmp_path, loss_type="cispo", epsilon_high=5.0)
    assert c.task["type"] == "cispo"
    assert 1 + c.task["algorithm_config.clip_high"] == 5.0
    assert 1 - c.task["algorithm_config.clip_low"] == 0.0
    with pytest.raises(ConfigError, match="bounds the weight itself"):
        trl(tmp_path, loss_type="cispo")


def test_verl_s_clip_ratio_alone_changes_nothing(tmp_path: Path) -> None:
    c = verl(tmp_path, "actor_rollout_ref.actor.clip_ratio=0.4", "algorithm.adv_estimator=grpo")
    keys = ("clip_low", "clip_high", "dual_clip")
    assert [c.task[f"algorithm_config.{key}"] for key in keys] == [0.2, 0.2, 3.0]
    assert "alone it changes nothing" in c.left["actor_rollout_ref.actor.clip_ratio"]


# sums and means of the loss


def test_losses_of_trl_are_summed_up_alike(tmp_path: Path) -> None:
    assert mean_loss(trl(tmp_path), LOSSES) == pytest.approx(21 / 6)  # dapo: all tokens
    assert mean_loss(trl(tmp_path, loss_type="grpo"), LOSSES) == pytest.approx((1.5 + 4.5) / 2)
    c = trl(tmp_path, loss_type="dr_grpo", max_completion_length=10)
    assert mean_loss(c, LOSSES) == pytest.approx(21 / (2 * 10))
    c = trl(tmp_path, loss_type="bnpo", per_device_train_batch_size=1, gradient_accumulation_steps=8)
    assert c.task["algorithm_config.aggregation"] == "sequence"  # a micro-batch is one response
    assert "no counterpart" in trl(tmp_path, loss_type="sapo").left["loss_type"]


@pytest.mark.parametrize(
    ("mode", "theirs"),
    [
        ("token-mean", 21 / 6),
        ("seq-mean-token-mean", (1.5 + 4.5) / 2),
        ("seq-mean-token-sum", 21 / 2),
        ("seq-mean-token-sum-norm", 21 / 2 / 10),
    ],
)
def test_losses_of_verl_are_summed_up_alike(tmp_path: Path, mode: str, theirs: float) -> None:
    names = (f"actor_rollout_ref.actor.loss_agg_mode={mode}", "data.max_response_length=10")
    assert mean_loss(verl(tmp_path, *names), LOSSES) == pytest.approx(theirs)


def test_a_scale_factor_of_verl_becomes_a_weight_of_the_loss(tmp_path: Path) -> None:
    names = ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=10")
    c = verl(tmp_path, *names, "actor_rollout_ref.actor.loss_scale_factor=40")
    assert mean_loss(c, LOSSES) == pytest.approx(21 / 2 / 40)


def test_dr_grpo_of_openrlhf_keeps_the_mean_over_tokens(tmp_path: Path) -> None:
    c = openrlhf(tmp_path, "--algo.advantage.estimator dr_grpo")
    assert (c.task["type"], c.task["algorithm_config.normalisation"]) == ("grpo", "none")
    assert mean_loss(c, LOSSES) == pytest.approx(21 / 6)


# rewards and responses


@pytest.mark.parametrize(("scale", "std"), [("group", math.sqrt(1 / 3)), (False, 1.0)])
def test_rewards_are_scaled_alike(tmp_path: Path, scale: str | bool, std: float) -> None:
    c = trl(tmp_path, scale_rewards=scale)
    batch = CreditBatch(
        rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        groups=torch.zeros(4, dtype=torch.int64),
        lengths=torch.ones(4, dtype=torch.int64),
    )
    ours = GRPO(GRPOConfig(normalisation=c.task["algorithm_config.normalisation"])).credit(batch).advantages
    epsilon = 1e-4 if scale else 0.0  # TRL's; ours is 1e-6
    theirs = [(r - 0.5) / (std + epsilon) for r in (1.0, 0.0, 0.0, 1.0)]
    assert ours.tolist() == pytest.approx(theirs, rel=2e-4)
    batch_wide = trl(tmp_path, scale_rewards="batch")
    assert any("whole batch" in differs for _, _, differs in batch_wide.taken)


@pytest.mark.parametrize("is_masked", [False, True])
def test_the_mask_of_truncated_responses_is_taken_over(is_masked: bool, tmp_path: Path) -> None:
    c = trl(tmp_path, mask_truncated_completions=is_masked)
    assert GRPOConfig(mask_truncated=c.task["algorithm_config.mask_truncated"]).mask_truncated == is_masked


def test_temperatures_of_training_and_evaluation(tmp_path: Path) -> None:
    c = trl(tmp_path, temperature=0.7)
    assert (c.run["rollout.temperature"], c.run["eval.temperature"]) == (0.7, 0.7)
    c = verl(tmp_path, "actor_rollout_ref.rollout.temperature=0.7")
    assert (c.run["rollout.temperature"], c.run["eval.temperature"]) == (0.7, 0.0)  # greedy validation
    assert openrlhf(tmp_path, "--rollout.temperature 0.7").run["eval.temperature"] == 0.6


def test_an_optimizer_in_host_memory_stays_there(tmp_path: Path) -> None:
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
    assert verl(tmp_path, f"{offload}=True").run["optimizer.moments"] == "host"
    assert "optimizer.moments" not in verl(tmp_path, f"{offload}=False").run
    for option in ("--ds.adam_offload", "--adam_offload"):
        c = openrlhf(tmp_path, option, "--rollout.n_samples_per_prompt 8")
        assert (c.run["optimizer.moments"], c.run["batch.group_size"]) == ("host", 8)


def test_nothing_is_sampled_again_and_nothing_rolled_back_unless_the_source_does(tmp_path: Path) -> None:
    plain = [trl(tmp_path), verl(tmp_path, "data.shuffle=1"), openrlhf(tmp_path, "--train.seed 1")]
    assert [(c.run["batch.refill_rounds"], c.run["guard.enabled"]) for c in plain] == [(0, False)] * 3
    filtered = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=4")
    assert verl(tmp_path, *filtered).run["batch.refill_rounds"] == 3  # three further rounds


def test_the_reference_of_trl_keeps_what_ours_forgets(tmp_path: Path) -> None:
    c = trl(tmp_path, sync_ref_model=True, ref_model_mixup_alpha=0.25, ref_model_sync_steps=1, beta=0.1)
    old, new = 2.0, 6.0
    decay = c.run["model.reference_decay"]
    assert decay * old + (1 - decay) * new == 0.25 * new + 0.75 * old
    assert "sync_ref_model" in trl(tmp_path, sync_ref_model=True).left  # every 512 updates


def test_engine_mismatch_is_corrected_only_where_the_source_does(tmp_path: Path) -> None:
    key = "algorithm_config.truncated_is"
    assert trl(tmp_path).task[key] == 0.0
    vllm = {"use_vllm": True, "vllm_importance_sampling_clip_max": 2.5}
    c = trl(tmp_path, **vllm, vllm_importance_sampling_mode="token_truncate")
    assert c.task[key] == 2.5
    assert not any(key in written and differs for _, written, differs in c.taken)
    assert any(key in written and differs for _, written, differs in trl(tmp_path, **vllm).taken)
    assert verl(tmp_path, "data.shuffle=1").task[key] == 0.0


# whole files

SCRIPT = dedent(
    '''
    import os
    import re

    from datasets import load_dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer
    from trl.rewards import accuracy_reward

    raise RuntimeError("a conversion runs nothing")
    ANSWER = re.compile(r"(\\d+)$")


    def last_number(text):
        found = ANSWER.search(text)
        return found[1] if found else None


    def correct(completions, solution, **kwargs):
        """Whether the last number is the solution."""
        return [float(last_number(c) == s) for c, s in zip(completions, solution)]


    rows = load_dataset("json", data_files="rows.jsonl", split="train")
    config = GRPOConfig(
        output_dir="runs/grpo",
        num_generations=4,
        learning_rate=float(os.environ["LR"]),
        reward_weights=[2.0, 1.0],
        unheard_of=1,
    )
    trainer = GRPOTrainer(
        model="some/model",
        args=config,
        train_dataset=rows,
        reward_funcs=[correct, accuracy_reward],
        peft_config=LoraConfig(r=4, lora_alpha=8),
    )
    trainer.train()
    '''
)


def write_rows(folder: Path, **columns: str) -> None:
    rows = [{"prompt": f"{i}+1=", **columns} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_script_of_trl_becomes_files_that_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, solution="7")
    (tmp_path / "grpo.py").write_text(
        SCRIPT.replace("accuracy_reward]", "lambda completions, **_: [0.0] * len(completions)]")
    )
    assert main(["convert", "--from", "trl", "grpo.py"]) == 0
    told = capsys.readouterr().out
    assert "learning_rate: the script computes it (float(os.environ['LR']))" in told
    assert "unheard_of: not known here" in told
    assert main(["tasks", "validate", "converted/tasks.yaml"]) == 0
    assert main(["train", "--config-dir", "converted", "+experiment=converted", "--cfg", "job"]) == 0
    text = (tmp_path / "converted" / "rewards.py").read_text()
    assert "ANSWER = re.compile" in text
    assert "load_dataset" not in text
    assert main(["convert", "--from", "trl", "grpo.py"]) == 2
    assert "--out DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "rank"),
    [("peft_config=None", None), ("", None), ("peft_config=lora", 4), ("peft_config=LoraConfig(r=2)", 2)],
)
def test_adapters_that_the_trainer_does_not_get_are_not_trained(
    tmp_path: Path, given: str, rank: int | None
) -> None:
    script = SCRIPT.replace("peft_config=LoraConfig(r=4, lora_alpha=8),", given)
    file = tmp_path / "grpo.py"
    file.write_text(script.replace("trainer = GRPO", "lora = LoraConfig(r=4, lora_alpha=8)\ntrainer = GRPO"))
    assert convert(TRL, file).run.get("model.lora.rank") == rank


def test_a_script_s_callbacks_and_resume_are_answered_by_what_takes_their_place(tmp_path: Path) -> None:
    file = tmp_path / "grpo.py"
    script = SCRIPT.replace("trainer.train()", "trainer.train(resume_from_checkpoint=True)")
    file.write_text(script.replace("args=config,", "args=config, callbacks=[Log()], tools=[find],"))
    left = convert(TRL, file).left
    assert "tracker" in left["GRPOTrainer.callbacks"]
    assert "environment" in left["GRPOTrainer.tools"]
    assert "checkpoint.resume" in left["train.resume_from_checkpoint"]


def script_of_trl(tmp_path: Path, text: str, **arguments: Any) -> Conversion:
    file = tmp_path / "train.py"
    head = "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, TrlParser\n"
    file.write_text(f"{head}{dedent(text)}")
    return convert(TRL, file, **arguments)


def test_rows_that_a_script_binds_again_and_again_are_followed_to_their_file(tmp_path: Path) -> None:
    c = script_of_trl(
        tmp_path,
        """
        def main():
            rows = load_dataset("openai/gsm8k", "main", revision="abc", split="train[:5%]")
            rows = rows.map(
                lambda row: rows.info,
            )
            rows = rows.shuffle(seed=1)
            trainer = GRPOTrainer(model="M", args=GRPOConfig(), reward_funcs="R", train_dataset=rows)
        """,
        num_rows=64,
    )
    (task,) = c.tasks.values()
    assert task["dataset"] == "openai/gsm8k"
    assert task["dataset_config"] == {"name": "main", "revision": "abc"}
    assert "split train[:5%], map, shuffle" in c.left["train_dataset"]


def test_arguments_by_position_and_attributes_set_later_are_options(tmp_path: Path) -> None:
    c = script_of_trl(
        tmp_path,
        """
        config = GRPOConfig("runs/a", max_steps=7)
        config.max_steps = 9
        config.beta = choose()
        rows = load_dataset("org/rows", split="train")
        GRPOTrainer("M", "R", config, rows, callbacks=[])
        """,
    )
    assert (c.run["model.name_or_path"], c.run["output_dir"], c.run["max_steps"]) == ("M", "runs/a", 9)
    assert list(c.tasks) == ["rows"]
    assert "choose()" in c.left["beta"]


def test_options_that_come_from_a_command_line_are_told(tmp_path: Path) -> None:
    c = script_of_trl(
        tmp_path,
        """
        script, config, model = TrlParser((A, GRPOConfig, B)).parse_args_and_config()
        config.beta = 0.5
        rows = load_dataset("org/rows", split="train").train_test_split(0.2)
        GRPOTrainer(model=model.model_name_or_path, args=config, reward_funcs="R",
            train_dataset=rows["train"], eval_dataset=rows["test"])
        """,
    )
    assert c.tasks["rows"].keys() == {"dataset", "rewards"}
    assert "train_test_split" in c.left["train_dataset"]
    assert c.task["kl.coefficient"] == 0.5
    assert "command line" in c.left["GRPOTrainer.args"]
    assert "model.model_name_or_path" in c.left["GRPOTrainer.model"]


def test_rewards_that_a_script_adds_to_their_list_are_told(tmp_path: Path) -> None:
    c = script_of_trl(
        tmp_path,
        """
        rewards = [good]
        rewards.append(better)
        rewards += [best]
        rows = load_dataset("org/rows", split="train")
        GRPOTrainer(model="M", reward_funcs=rewards, args=GRPOConfig(), train_dataset=rows)
        """,
    )
    told = c.left["GRPOTrainer.reward_funcs"]
    assert "rewards.append(better)" in told
    assert "rewards += [best]" in told


def test_rows_of_trl_that_carry_names_of_tasks_stay_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}", "solution": "1", "task": ("math", "chat")[i % 2]} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "grpo.yaml").write_text("dataset_name: rows.jsonl\n")
    c = convert(TRL, tmp_path / "grpo.yaml", reward="exact_match")
    c.write(tmp_path / "out")
    (task,) = load_tasks(tmp_path / "out" / "tasks.yaml").values()
    assert sum(len(load_rows(task, split)) for split in ("train", "eval")) == 20
    assert any(option == "column task" and "a task for each" in differs for option, _, differs in c.taken)


def test_a_launch_script_of_trl_is_answered_by_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text("accelerate launch grpo.py --beta 0.1\n")
    with pytest.raises(ConfigError, match=r"command line .*YAML.*Python script"):
        convert(TRL, file)
    (tmp_path / "grpo.yaml").write_text("datasets: [{name: org/a}]\n")
    with pytest.raises(ConfigError, match=r"no data set .*datasets is .*org/a"):
        convert(TRL, tmp_path / "grpo.yaml")


def test_a_mixture_of_trl_is_a_task_per_data_set_drawn_by_rows(tmp_path: Path) -> None:
    for name, number in (("long", 20), ("short", 5)):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "a"}\n' * number)
    parts = [
        {"path": "json", "data_files": str(tmp_path / "long.jsonl")},
        {
            "path": "json",
            "data_files": str(tmp_path / "short.jsonl"),
            "split": "train",
            "columns": ["prompt"],
        },
    ]
    file = tmp_path / "grpo.yaml"
    given = {"datasets": parts, "dataset_name": "org/ignored", "num_train_epochs": 2, "num_generations": 8}
    file.write_text(json.dumps({**given, "test_split_size": 0.1}))
    c = convert(TRL, file, reward="exact_match")
    assert {name: task["weight"] for name, task in c.tasks.items()} == {"long": 20.0, "short": 5.0}
    assert (c.run["scheduler.policy"], c.run["max_steps"]) == ("static", 2 * 25)
    assert any(option == "test_split_size" and "a tenth" in differs for option, _, differs in c.taken)
    parts = [{"path": "org/a", "name": "main", "split": "test"}, {"path": "org/b"}]
    file.write_text(json.dumps({"datasets": parts, "test_split_size": 0.3}))
    c = convert(TRL, file, reward="exact_match")
    assert c.tasks["a"] == {
        **{"dataset": "org/a", "dataset_config": {"name": "main"}, "split": "test", "weight": 1.0},
        "rewards": [{"plugin": "exact_match"}],
    }
    assert any(option == "datasets" and "weights by rows" in differs for option, _, differs in c.taken)
    assert "a tenth" in c.left["test_split_size"]


@pytest.mark.parametrize(
    ("mixed", "weights"),
    [
        ("concatenate_datasets([a, b])", [1.0, 1.0]),
        ("interleave_datasets([a, b], seed=1)", [1.0, 1.0]),
        ("interleave_datasets([a, b], probabilities=[0.3, 0.7]).shuffle(seed=2)", [0.3, 0.7]),
    ],
)
def test_data_sets_that_a_script_of_trl_mixes_become_tasks(
    mixed: str, weights: list[float], tmp_path: Path
) -> None:
    c = script_of_trl(
        tmp_path,
        f"""
        a = load_dataset("org/a", split="train")
        b = load_dataset("org/b", "main", split="train")
        rows = {mixed}
        GRPOTrainer(model="M", reward_funcs="R", args=GRPOConfig(), train_dataset=rows)
        """,
    )
    assert [task["weight"] for task in c.tasks.values()] == weights
    assert c.tasks["b"]["dataset_config"] == {"name": "main"}
    assert "train_dataset" not in c.left
    assert "--rows N" in c.left["num_train_epochs"]


@pytest.mark.parametrize(
    ("size", "trained", "is_same"),
    [
        ("0.1", "train", True),
        ("test_size=0.1, seed=4", "train", True),
        ("0.1", "test", False),
        ("0.2", "train", False),
        ("0.1, stratify_by_column='kind'", "train", False),
    ],
)
def test_a_tenth_that_a_script_of_trl_holds_out_is_held_out_here(
    size: str, trained: str, is_same: bool, tmp_path: Path
) -> None:
    c = script_of_trl(
        tmp_path,
        f"""
        rows = load_dataset("org/rows", split="train").train_test_split({size})
        GRPOTrainer(model="M", reward_funcs="R", args=GRPOConfig(), train_dataset=rows["{trained}"],
            eval_dataset=rows["test"])
        """,
    )
    assert c.tasks["rows"].keys() == {"dataset", "rewards"}
    assert ("train_dataset" not in c.left) == is_same
    assert any(option == "train_test_split" for option, _, _ in c.taken) == is_same


def test_adapters_of_megatron_in_verl_are_adapters(tmp_path: Path) -> None:
    lora = "actor_rollout_ref.model.lora"
    c = verl(
        tmp_path, f"{lora}.rank=8", f"{lora}.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
    )
    keys = ("rank", "alpha", "dropout", "target_modules")
    assert [c.run[f"model.lora.{key}"] for key in keys] == [8, 32.0, 0.0, "all-linear"]
    c = verl(tmp_path, f"{lora}.rank=8", f"{lora}.target_modules=[linear_qkv]")
    assert "Megatron" in c.left[f"{lora}.target_modules"]
    assert "model.lora.rank" not in verl(tmp_path, f"{lora}.rank=0").run


def test_a_data_set_that_no_file_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data set .*interleave_datasets\(\[math, code\]\).*--dataset"):
        script_of_trl(
            tmp_path,
            """
            rows = interleave_datasets([math, code])
            GRPOTrainer(model="M", reward_funcs="R", args=GRPOConfig(), train_dataset=rows)
            """,
        )


def test_keywords_of_a_model_that_are_not_taken_over_are_told(tmp_path: Path) -> None:
    c = script_of_trl(
        tmp_path,
        """
        import torch
        model = AutoModelForCausalLM.from_pretrained("M", dtype=torch.bfloat16, revision="abc")
        rows = load_dataset("org/rows", split="train")
        config = GRPOConfig(model_init_kwargs={"attn_implementation": "eager", "max_memory": 3})
        GRPOTrainer(model=model, reward_funcs="R", args=config, train_dataset=rows, **more)
        """,
    )
    assert (c.run["model.dtype"], c.run["model.attn_implementation"]) == ("bfloat16", "eager")
    assert "revision" in c.left["model_init_kwargs"]
    assert "max_memory" in c.left["model_init_kwargs"]
    assert "more" in c.left["GRPOTrainer.**more"]


def test_each_source_in_a_file_of_verl_becomes_a_task_with_its_rows(tmp_path: Path) -> None:
    train, held_out, file = (tmp_path / name for name in ("train.jsonl", "val.jsonl", "run.sh"))
    file.write_text(f"main_ppo data.train_files={train} data.val_files={held_out}")

    def converted(*sources: str | None) -> Conversion:
        for path, some in ((train, sources), (held_out, sources[:2])):
            rows = [{"id": i, "prompt": f"{s}{i}", "data_source": s} for i, s in enumerate(some)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return convert(VERL, file, reward="exact_match")

    c = converted("openai/gsm8k", "math", "math", "code", "code", "code")
    assert {name: task["weight"] for name, task in c.tasks.items()} == {"code": 3, "gsm8k": 1, "math": 2}
    assert "no row of it" in c.left["data.val_files for code"]
    c.write(tmp_path / "out")
    for task in load_tasks(tmp_path / "out" / "tasks.yaml").values():
        rows = [row for split in ("train", "eval") for row in load_rows(task, split)]
        expected = {"code": {"code"}, "gsm8k": {"openai/gsm8k"}, "math": {"math"}}[task.name]
        assert {row["data_source"] for row in rows} == expected
        assert len({row["id"] for row in rows}) == c.tasks[task.name]["weight"]
    assert len(converted("math", "math").tasks) == len(converted("math", None).tasks) == 1
    many = converted(*map(str, range(40)))
    assert len(many.tasks) == 1
    assert "40 sources" in many.left["column data_source"]


@pytest.mark.parametrize(
    ("source", "given", "told"),
    [
        (trl, {"use_vllm": "maybe"}, "use_vllm: expected true or false, got 'maybe'"),
        (trl, {"delta": "lots"}, "delta: expected a number, got 'lots'"),
        (trl, {"model_init_kwargs": 3}, "model_init_kwargs: expected a mapping, got 3"),
        (trl, {"reward_weights": 2.0}, "reward_weights: expected a list, got 2.0"),
        (trl, {"loss_type": ["dapo"]}, "loss_type: expected a text, got ['dapo']"),
        (trl, {"max_steps": "inf"}, "max_steps: expected a number, got 'inf'"),
        (trl, {"num_train_epochs": "nan"}, "num_train_epochs: expected a number, got 'nan'"),
        (trl, {"steps_per_generation": 0}, "steps_per_generation: expected at least 1, got 0"),
        (trl, {"generation_batch_size": 4}, "steps_per_generation (0)"),
        (verl, ["data.train_batch_size=lots"], "data.train_batch_size: expected a number, got 'lots'"),
        (
            verl,
            ["actor_rollout_ref.actor.ppo_mini_batch_size=0"],
            "mini_batch_size: expected at least 1, got 0",
        ),
        (verl, ["data.val_files=3"], "data.val_files: expected a text or a list of texts, got 3"),
        (verl, ["trainer.total_training_steps=all"], "total_training_steps: expected a number, got 'all'"),
        (openrlhf, ["--ds.param_dtype fp8"], "ds.param_dtype: 'fp8' is no value that is known here"),
        (verl, ["trainer.resume_mode=[auto]"], "trainer.resume_mode: expected a text, got ['auto']"),
        (
            openrlhf,
            ["--algo.advantage.is_correction_threshold low high"],
            "is_correction_threshold: expected two numbers, got ['low', 'high']",
        ),
        (openrlhf, ["--train.batch_size 0"], "train.batch_size: expected at least 1, got 0"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_name(
    tmp_path: Path, source: Any, given: Any, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        source(tmp_path, **given) if source is trl else source(tmp_path, *given)


def test_a_number_may_be_a_text(tmp_path: Path) -> None:
    assert trl(tmp_path, num_generations="4").run["batch.group_size"] == 4


def test_names_of_runs_are_taken_over(tmp_path: Path) -> None:
    assert trl(tmp_path, run_name="first").run["tracking.run_name"] == "first"
    c = verl(tmp_path, "trainer.project_name=grpo", "trainer.experiment_name=first")
    named = ("--logger.wandb.project grpo", "--logger.wandb.run_name first")
    before = ("--wandb_project grpo", "--wandb_run_name first")
    for one in (c, openrlhf(tmp_path, *named), openrlhf(tmp_path, *before)):
        assert (one.run["tracking.experiment"], one.run["tracking.run_name"]) == ("grpo", "first")


def test_a_rounded_number_of_steps_is_told(tmp_path: Path) -> None:
    """Four updates a step here."""
    c = trl(tmp_path, num_iterations=4, max_steps=40, eval_strategy="steps", eval_steps=2, save_steps=8)
    told = {key: differs for _, key, differs in c.taken}
    assert told["eval.every = 1"] == "2 updates there, 4 here"
    assert not told["checkpoint.every = 2"]


def test_a_pass_of_verl_counts_each_row_once_though_its_sources_are_tasks(tmp_path: Path) -> None:
    train, file = tmp_path / "train.jsonl", tmp_path / "run.sh"
    rows = [{"prompt": "a", "data_source": source} for source in "abc" * 4]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file.write_text(f"main_ppo data.train_files={train} data.train_batch_size=4 trainer.total_epochs=2\n")
    c = convert(VERL, file, reward="exact_match")
    assert len(c.tasks) == 3
    assert c.run["max_steps"] == 2 * 12 // 4


def test_managers_and_defaults_of_verl_are_told_by_what_they_mean(tmp_path: Path) -> None:
    c = verl(
        tmp_path,
        "--config-name=ppo_trainer",
        "reward.reward_manager.name=batch",
        "trainer.val_before_train=False",
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
    )
    assert "one response" in c.left["reward.reward_manager.name"]
    assert "start" in c.left["trainer.val_before_train"]
    assert "rollout.top_p" in c.left["actor_rollout_ref.rollout.val_kwargs.top_p"]
    assert not any(name.startswith("--config-name") for name in c.left)
    assert "reward.reward_manager.name" not in verl(tmp_path, "reward.reward_manager.name=dapo").left


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adamw_bnb_8bit"])
def test_moments_of_eight_bits_stay_so(tmp_path: Path, name: str) -> None:
    assert trl(tmp_path, optim=name).run["optimizer.moments"] == "int8"
    assert "optimizer.moments" not in trl(tmp_path, optim="adamw_torch").run


def test_shares_of_verl_s_files_stay_as_they_are(tmp_path: Path) -> None:
    """verl draws every row equally often during the whole run. An edit of one task changes no other task."""
    for name, number in (("a", 6), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1"}\n' * number)
    file = tmp_path / "run.sh"
    file.write_text(f"main_ppo data.train_files=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]")
    c = convert(VERL, file, reward="exact_match")
    assert c.run["scheduler.policy"] == "static"
    c.write(tmp_path / "converted")
    assert "&id" not in (tmp_path / "converted" / "tasks.yaml").read_text()


def test_rewards_imported_by_a_script_are_named_where_they_live(tmp_path: Path) -> None:
    (tmp_path / "grpo.py").write_text(SCRIPT)
    c = convert(TRL, tmp_path / "grpo.py")
    assert c.tasks["rows"]["rewards"] == [
        {"plugin": "trl:rewards.py:correct", "weight": 2.0},
        {"plugin": "trl:trl.rewards:accuracy_reward"},
    ]
    assert c.run["model.lora.rank"] == 4
    assert c.run["model.name_or_path"] == "some/model"


def test_a_script_of_verl_becomes_files_that_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, answer="7")
    parameters = "data_source, solution_str, ground_truth, extra_info=None, strict=False"
    (tmp_path / "reward.py").write_text(f"def compute_score({parameters}):\n    return 0.0\n")
    (tmp_path / "run.sh").write_text(
        dedent(
            """
            length=$((1024 * 2))
            ARGS=(
              data.max_response_length=${length}
              # data.train_batch_size=1
            )
            python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=rows.jsonl \\
              data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
              custom_reward_function.path=reward.py +custom_reward_function.reward_kwargs.strict=true \\
              trainer.experiment_name=$NAME "${ARGS[@]}" $@
            """
        )
    )
    assert main(["convert", "--from", "verl", "run.sh"]) == 0
    told = capsys.readouterr().out
    assert "rollout.max_new_tokens = 2048" in told
    written = (tmp_path / "converted" / "experiment" / "converted.yaml").read_text()
    assert "max_steps: 150\n" in written  # 30 passes over 40 rows, 8 a step
    assert "trainer.experiment_name: the script computes it" in told
    assert main(["tasks", "validate", "converted/tasks.yaml"]) == 0
    assert main(["train", "--config-dir", "converted", "+experiment=converted", "--cfg", "job"]) == 0


def overrides_of_verl(tmp_path: Path, script: str) -> Conversion:
    file = tmp_path / "run.sh"
    file.write_text(dedent(script))
    return convert(VERL, file, reward="exact_match", num_rows=64)


def test_the_default_of_a_variable_may_hold_other_variables(tmp_path: Path) -> None:
    c = overrides_of_verl(
        tmp_path,
        """
        ROOT=${ROOT:-/data}
        TRAIN=${TRAIN:-$ROOT/gsm8k/train.parquet}
        TEST=${TEST:-${ROOT:-${HOME}/data}/gsm8k/test.parquet}
        DATA=(
            data.train_files="['$TRAIN']"
            data.val_files=$TEST
        )
        python3 -m verl.trainer.main_ppo "${DATA[@]}" trainer.project_name=${NAME:-$UNKNOWN}
        """,
    )
    task = c.tasks["gsm8k"]
    assert (task["dataset"], task["eval_dataset"]) == (
        "/data/gsm8k/train.parquet",
        "/data/gsm8k/test.parquet",
    )
    assert "$UNKNOWN" in c.left["trainer.project_name"]


def test_words_that_a_script_prints_set_nothing_and_branches_are_told(tmp_path: Path) -> None:
    c = overrides_of_verl(
        tmp_path,
        """
        ENGINE=vllm
        SHARE=0.6
        if [ "$ENGINE" = trtllm ]; then
            echo "ENGINE=trtllm needs a GPU" >&2
            SHARE=0.9
        fi
        EXTRA=(data.train_batch_size=32)
        EXTRA+=(data.train_batch_size=16)
        python3 -m verl.trainer.main_ppo data.train_files=hub/rows "${EXTRA[@]}" \\
            actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.rollout.gpu_memory_utilization=$SHARE
        """,
    )
    assert c.run["rollout.engine"] == "vllm"
    assert c.run["batch.prompts_per_step"] == 16
    assert "0.6, 0.9" in c.left["variable SHARE"]
    assert "variable ENGINE" not in c.left
    assert "32, 16" in c.left["data.train_batch_size"]


def test_a_value_that_is_no_yaml_is_a_text(tmp_path: Path) -> None:
    c = overrides_of_verl(
        tmp_path,
        """
        python3 -m verl.trainer.main_ppo data.train_files=hub/rows trainer.experiment_name='*a: b' \\
            actor_rollout_ref.actor.fsdp_config.wrap='{*\\.mlp}'
        """,
    )
    assert c.run["tracking.run_name"] == "*a: b"


def test_a_configuration_that_a_script_of_verl_names_is_told(tmp_path: Path) -> None:
    script = "python3 -m verl.trainer.main_ppo --config-path=config --config-name='multi'"
    assert (
        "not read"
        in overrides_of_verl(tmp_path, f"{script} data.train_files=hub/rows").left["--config-name multi"]
    )


def test_what_a_script_computes_is_named_where_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data set .*data\.train_files is computed: \$FILES.*--dataset"):
        overrides_of_verl(tmp_path, "main_ppo data.train_files=$FILES data.train_batch_size=8")


def test_a_yaml_of_verl_is_read_like_its_overrides(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {train_batch_size: 32, prompt_key: question}\nalgorithm: {adv_estimator: rloo}\n"
        "actor_rollout_ref: {rollout: {n: 4, prompt_length: '${data.max_prompt_length}'}}\n"
    )
    c = convert(VERL, tmp_path / "run.yaml", dataset="hub/rows", reward="exact_match")
    assert (c.task["type"], c.task["prompt"], c.run["batch.group_size"]) == ("rloo", "{question}", 4)


def test_a_script_of_openrlhf_becomes_files_that_validate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, answer="7")
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels, **_):\n"
        "    return {'rewards': [float(q.endswith(a)) for q, a in zip(queries, labels)]}\n"
    )
    (tmp_path / "run.sh").write_text(
        dedent(
            """
            ARGS=(
               --reward.remote_url reward.py
               --data.prompt_dataset rows.jsonl,rows.jsonl
               --data.prompt_probs 0.25,0.75
               --data.input_key prompt
               --data.input_template $'Q: {}\\nA:'
               --data.label_key answer
               # --algo.kl.use_loss
               --algo.advantage.estimator group_norm
               --rollout.n_samples_per_prompt 4
               --logger.wandb.key $KEY
               --train.batch_size 64
            )
            ray job submit --address="http://localhost:8265" -- \\
               python3 -m openrlhf.cli.train_ppo_ray --actor.adam.lr 5e-7 "${ARGS[@]}"
            """
        )
    )
    assert main(["convert", "--from", "openrlhf", "run.sh"]) == 0
    assert "address" not in capsys.readouterr().out
    assert main(["tasks", "validate", "converted/tasks.yaml"]) == 0
    shown = (tmp_path / "converted" / "tasks.yaml").read_text()
    assert "weight: 0.25" in shown
    written = (tmp_path / "converted" / "experiment" / "converted.yaml").read_text()
    assert "num_minibatches: 64\n" in written  # 1024 prompts, 4 responses each, 64 an update
    assert "learning_rate: 5.0e-07\n" in written
    assert "Q: {prompt}" in shown


def test_options_of_openrlhf_before_0_11_are_read_under_their_present_names(tmp_path: Path) -> None:
    c = openrlhf(
        tmp_path, "--advantage_estimator rloo", "--rollout_batch_size 8", "--actor_learning_rate 5e-7"
    )
    assert (c.task["type"], c.run["batch.prompts_per_step"]) == ("rloo", 8)
    assert c.run["optimizer.learning_rate"] == 5e-7


def test_names_of_openrlhf_s_options_of_old_say_what_they_said(tmp_path: Path) -> None:
    options = ("--prompt_max_len 300", "--generate_max_len 700", "--enable_vllm_is_correction", "--bf16")
    c = openrlhf(tmp_path, *options, "--vllm_is_truncated_threshold 2", "--pretrain_data mix", "--un_heard 1")
    assert (c.run["rollout.max_prompt_tokens"], c.run["rollout.max_new_tokens"]) == (300, 700)
    assert c.task["algorithm_config.truncated_is"] == 2.0
    assert "sft" in c.left["pretrain_data"]
    assert "not known here" in c.left["un_heard"]


@pytest.mark.parametrize(("kind", "is_same"), [("tis", False), ("icepop", False), ("", False)])
def test_openrlhf_s_correction_is_on_where_0_11_0_has_enabled_it(
    tmp_path: Path, kind: str, is_same: bool
) -> None:
    options = ["--algo.advantage.is_correction_enable", "--algo.advantage.is_correction_threshold 0.5 3"]
    c = openrlhf(tmp_path, *options, *([f"--algo.advantage.is_correction_type {kind}"] if kind else []))
    assert c.task["algorithm_config.truncated_is"] == 3.0
    assert any("is_correction" in o and bool(differs) != is_same for o, _, differs in c.taken)


def test_a_command_of_openrlhf_in_quotes_is_read(tmp_path: Path) -> None:
    file = tmp_path / "slurm.sh"
    file.write_text(
        dedent(
            """
            MORE="--rollout.n_samples_per_prompt 4"
            MORE+=" --train.seed 7"
            srun -w "$node" bash -c \\
            "pip install ray && ray job submit --runtime-env-json='{\\"pip\\": \\"x\\"}' \\
                -- python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset org/rows \\
                --data.input_template 'Q: {} A:' --rollout.batch_size 16 $MORE" &>> log
            """
        )
    )
    c = convert(OPENRLHF, file, reward="exact_match", num_rows=64)
    assert (c.run["batch.prompts_per_step"], c.run["batch.group_size"], c.run["seed"]) == (16, 4, 7)
    assert c.task["prompt"] == "Q: {input} A:"


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_reward_of_openrlhf_gets_the_prompt_as_the_model_saw_it(tmp_path: Path, column: str) -> None:
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    assert queries[0].startswith(prompts[0]) and prompts[0].startswith('<user>')\n"
        "    return {'rewards': [float(labels[0] in queries[0][len(prompts[0]) :])]}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --reward.remote_url reward.py --data.prompt_dataset org/rows "
        f"--data.input_key {column} --data.label_key answer --data.apply_chat_template\n"
    )
    c = convert(OPENRLHF, script, num_rows=8)
    c.write(tmp_path)
    (reference,) = c.tasks["rows"]["rewards"]
    spec = RewardSpec(
        **{**reference, "plugin": reference["plugin"].replace("rewards.py", f"{tmp_path}/rewards.py")}
    )
    row = {column: [{"role": "user", "content": "7 or 8?"}], "answer": "7"}
    reward = resolve_reward(spec, "rows")
    rollouts = [
        make_rollout(said, prompt=make_prompt("<user>7 or 8?<assistant>", row=row)) for said in ("8", "7.")
    ]
    assert reward.score(rollouts) == [0.0, 1.0]


def test_a_server_or_an_agent_of_openrlhf_is_named_where_a_reward_is_missing(tmp_path: Path) -> None:
    for option in ("--reward.remote_url http://host/score", "--train.agent_func_path agent.py"):
        file = tmp_path / "run.sh"
        file.write_text(f"python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset org/rows {option}\n")
        with pytest.raises(ConfigError, match=f"no reward .*{option.split()[1]}.*--reward"):
            convert(OPENRLHF, file)


def test_every_option_is_taken_over_or_listed_with_a_reason(tmp_path: Path) -> None:
    found = [
        trl(
            tmp_path, use_vllm=False, bf16=True, top_k=5, eval_strategy="no", min_p=0.1, logging_steps=1, x=2
        ),
        verl(tmp_path, "trainer.nnodes=2", "data.truncation=error", "algorithm.lam=0.9", "made.up=1"),
        openrlhf(tmp_path, "--ds.zero_stage 3", "--actor.dual_clip 3", "--reward.clip_range -5 5"),
    ]
    for c in found:
        taken = {option for options, _, _ in c.taken for option in options.split(", ")}
        assert set(c.given) <= taken | set(c.left)
        assert all(c.left.values())


@pytest.mark.parametrize("what", ["data set", "reward"])
def test_what_is_missing_is_asked_for(tmp_path: Path, what: str) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "dataset_name: hub/rows\n" if what == "reward" else "learning_rate: 1.0\n"
    )
    with pytest.raises(ConfigError, match=f"no {what} was found .* --"):
        convert(TRL, tmp_path / "grpo.yaml")


def test_variables_of_the_chat_template_are_taken_over(tmp_path: Path) -> None:
    variables = {"enable_thinking": False}
    assert trl(tmp_path, chat_template_kwargs=variables).task["chat_template_kwargs"] == variables
    option, key = "data.apply_chat_template_kwargs", "chat_template_kwargs.enable_thinking"
    assert verl(tmp_path, f"+{option}.enable_thinking=False").task[key] is False
    assert verl(tmp_path, f"'+{option}={{enable_thinking:False}}'").task[key] is False


def test_words_that_yaml_reads_as_false_are_the_words(tmp_path: Path) -> None:
    off = openrlhf(tmp_path, "--algo.advantage.is_correction_level off")
    assert off.task["algorithm_config.truncated_is"] == 0.0
    file = tmp_path / "config.yaml"
    file.write_text("eval_strategy: no\ndataset_name: rows.jsonl\nmodel_name_or_path: MODEL\n")
    c = convert(TRL, file, dataset="rows.jsonl", reward="digits.py:digits")
    assert c.run["eval.every"] == 0


def test_data_sets_are_weighed_by_rows_only_where_all_are_counted(tmp_path: Path) -> None:
    for name, number in (("long", 20), ("short", 5)):
        (tmp_path / f"{name}.jsonl").write_text('{"input": "a"}\n' * number)
    for second, weights in (
        (tmp_path / "short.jsonl", [20.0, 5.0]),
        ("org/hub", [1.0, 1.0]),
    ):
        sets = f"--data.prompt_dataset {tmp_path / 'long.jsonl'},{second}"
        file = tmp_path / "run.sh"
        file.write_text(f"python -m openrlhf.cli.train_ppo_ray {sets} --rollout.n_samples_per_prompt 8\n")
        c = convert(OPENRLHF, file, reward="digits.py:digits", num_rows=25)
        assert [task["weight"] for task in c.tasks.values()] == weights
