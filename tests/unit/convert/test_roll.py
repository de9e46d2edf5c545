"""A configuration of ROLL means the same here: its numbers are computed by hand from its formulas."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.policy_loss import clipped_surrogate
from multitask_rl.algorithms.reinforce_pp import ReinforcePP
from multitask_rl.config.task import RewardSpec
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.convert.conversion import Conversion, convert
from multitask_rl.convert.roll import ROLL
from multitask_rl.data import load_rows
from multitask_rl.errors import ConfigError
from multitask_rl.scoring.adapt import resolve_reward
from multitask_rl.testing import make_rollout
from multitask_rl_rewards.code_evaluator import CodeEvaluator

WORKERS = "roll.pipeline.rlvr.rewards"
REWARDS = {
    "math_rule": {"worker_cls": f"{WORKERS}.math.MathRuleRewardWorker", "tag_included": ["gsm", "aime"]},
    "choice": {
        "worker_cls": f"{WORKERS}.cross.CrossThinkQARuleRewardWorker",
        "tag_included": ["qa"],
        "reward_type": "soft",
    },
}
ROWS = [
    *({"id": f"g{i}", "tag": "gsm", "ground_truth": str(i)} for i in range(20)),
    *({"id": f"q{i}", "tag": "qa", "ground_truth": "B"} for i in range(10)),
    *({"id": f"u{i}", "tag": "unknown", "ground_truth": "1"} for i in range(5)),
    *({"id": f"d{i}", "tag": "gsm", "domain": "choice", "ground_truth": "A"} for i in range(5)),
]


def roll(folder: Path, *, data: dict[str, Any] | None = None, **options: Any) -> Conversion:
    rows = folder / "rows.jsonl"
    said = json.dumps([{"role": "user", "content": "say"}])
    rows.write_text("".join(json.dumps({**row, "messages": said}) + "\n" for row in ROWS))
    shares = {"math_rule": 0.6, "choice": 0.4}
    own = {
        "file_name": [str(rows)],
        "messages": "messages",
        "domain_interleave_probs": shares,
        **(data or {}),
    }
    train = {"data_args": own, **options.pop("actor_train", {})}
    base = {"response_length": 100, "rewards": REWARDS, "actor_train": train}
    (folder / "rlvr.yaml").write_text(yaml.safe_dump({**base, **options}, sort_keys=False))
    return convert(ROLL, folder / "rlvr.yaml")


def differs(c: Conversion, option: str) -> str:
    return next(told for options, _, told in c.taken if option in options.split(", ") and told)


def test_each_domain_becomes_a_task_with_the_rows_that_roll_gives_it(tmp_path: Path) -> None:
    c = roll(tmp_path)
    c.write(tmp_path / "out")
    tasks = load_tasks(tmp_path / "out" / "tasks.yaml")
    assert {name: task.weight for name, task in tasks.items()} == {"math_rule": 0.6, "choice": 0.4}
    assert c.run["scheduler.policy"] == "static"
    # the row's own domain; else the domain of its tag; a tag of no reward is mathematics
    for name, letters in (("math_rule", {"g": 20, "u": 5}), ("choice", {"q": 10, "d": 5})):
        rows = [row for split in ("train", "eval") for row in load_rows(tasks[name], split)]
        ids = {row["id"] for row in rows}
        assert ids == {f"{letter}{i}" for letter, number in letters.items() for i in range(number)}
        assert all(row["messages"] == [{"role": "user", "content": "say"}] for row in rows)
        assert all(row["reference"] == row["ground_truth"] for row in rows)


def test_rows_that_are_not_here_are_told_with_the_files(tmp_path: Path) -> None:
    c = roll(tmp_path, data={"file_name": ["away/rows.jsonl"]})
    assert "not here" in c.left["rows of away/rows.jsonl"]
    (tmp_path / "bad.jsonl").write_text("{")
    held_out = {"data_args": {"file_name": "gone.jsonl"}}
    files = [str(tmp_path / name) for name in ("rows.jsonl", "bad.jsonl")]
    c = roll(tmp_path, data={"file_name": files}, validation=held_out)
    assert c.files["data/choice.jsonl"], "other files are read"
    assert "bad.jsonl" in c.left[f"rows of {files[1]}"]
    assert "not here" in c.left["rows of gone.jsonl"]
    (tmp_path / "other.yaml").write_text("a: 1")
    with pytest.raises(ConfigError, match="no section actor_train or rewards"):
        convert(ROLL, tmp_path / "other.yaml")
    for section, told in (("train_env_manager", "agentic.*environment"), ("student_train", "type distill")):
        with pytest.raises(ConfigError, match=told):
            roll(tmp_path, **{section: {"a": 1}})


def test_messages_are_read_in_the_column_that_roll_names(tmp_path: Path) -> None:
    rows = tmp_path / "own.jsonl"
    said = [{"role": "user", "content": "1+1="}]
    texts = [json.dumps(said), "12"]
    rows.write_text("".join(json.dumps({"tag": "gsm", "chat": text}) + "\n" for text in texts))
    c = roll(tmp_path, data={"file_name": [str(rows)], "messages": "chat"})
    assert c.task["prompt"] == "{chat}"
    written = [json.loads(line) for line in c.files["data/math_rule.jsonl"].splitlines()]
    assert [row["chat"] for row in written] == [said, "12"]
    assert "1 row with a text" in c.left["messages of math_rule"]
    c = roll(tmp_path, data={"messages": None, "prompt": "question"})
    assert (c.task["prompt"], c.task["chat"]) == ("{question}", False), "ROLL applies no chat template"


def batch(rewards: list[float], lengths: list[int]) -> CreditBatch:
    return CreditBatch(
        rewards=torch.tensor(rewards),
        groups=torch.arange(len(rewards)) // 4,
        lengths=torch.tensor(lengths),
    )


def test_advantages_are_those_of_roll(tmp_path: Path) -> None:
    rewards, lengths = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0], [3, 1, 2, 2, 4, 1, 1, 2]
    given = {"num_return_sequences_in_group": 4}
    # grpo: (r - mean of the group) / (its deviation with n - 1, plus 1e-6)
    c = roll(tmp_path, adv_estimator="grpo", **given)
    assert c.task["type"] == "grpo"
    groups = torch.tensor(rewards).view(2, 4)
    theirs = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).flatten()
    ours = GRPO(GRPOConfig(normalisation=c.task["algorithm_config.normalisation"]))
    advantages = ours.credit(batch(rewards, lengths)).advantages
    assert torch.allclose(advantages, theirs.repeat_interleave(torch.tensor(lengths)), atol=1e-5)
    # reinforce with whitened advantages: over the domain's tokens, with n - 1
    c = roll(tmp_path, adv_estimator="reinforce", whiten_advantages=True, **given)
    assert c.task["type"] == "reinforce_pp"
    tokens = torch.tensor(rewards).repeat_interleave(torch.tensor(lengths))
    theirs = (tokens - tokens.mean()) / tokens.std()
    chosen = ReinforcePP.Config(group_baseline=c.task["algorithm_config.group_baseline"])
    advantages = ReinforcePP(chosen).credit(batch(rewards, lengths)).advantages
    number = len(tokens)
    assert torch.allclose(advantages, theirs * (number / (number - 1)) ** 0.5, atol=1e-5), "ours divides by n"
    c = roll(tmp_path, adv_estimator="reinforce", norm_mean_type="group", **given)
    assert (c.task["type"], c.task["algorithm_config.normalisation"]) == ("grpo", "none")
    assert "whitened" in differs(roll(tmp_path, adv_estimator="reinforce"), "adv_estimator")
    assert roll(tmp_path).task["type"] == "ppo", "ROLL's default is gae"
    assert "no counterpart" in roll(tmp_path, adv_estimator="gigpo").left["adv_estimator"]
    assert roll(tmp_path, adv_estimator="grpo", importance_sampling="seq", **given).task["type"] == "gspo"


def test_bounds_of_the_ratio_are_those_of_roll(tmp_path: Path) -> None:
    c = roll(tmp_path, pg_clip=0.3, pg_clip_low=0.1, pg_clip_high=0.5, dual_clip_loss=True)
    low, high, dual = (c.task[f"algorithm_config.{name}"] for name in ("clip_low", "clip_high", "dual_clip"))
    assert (low, high) == (0.3, 0.3), "the range counts with use_pg_clip_range only"
    for ratio, advantage in ((0.5, 1.0), (2.0, 1.0), (0.5, -1.0), (2.5, -1.0)):
        plain = -min(ratio * advantage, min(max(ratio, 1 - 0.3), 1 + 0.3) * advantage)
        theirs = -max(-plain, (1 + 2 * 0.3) * advantage) if advantage < 0 else plain
        bounds = {"clip_low": low, "clip_high": high, "dual_clip": dual}
        ours = clipped_surrogate(torch.tensor([ratio]), torch.tensor([advantage]), **bounds).loss
        assert float(ours) == pytest.approx(theirs)
    c = roll(tmp_path, use_pg_clip_range=True, pg_clip_low=0.1, pg_clip_high=0.5)
    assert [c.task[f"algorithm_config.clip_{side}"] for side in ("low", "high")] == [0.1, 0.5]
    assert c.task["algorithm_config.dual_clip"] == 0.0


def test_updates_of_a_step_are_counted_over_devices(tmp_path: Path) -> None:
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "warmup_steps": 20}
    train: dict[str, Any] = {"training_args": args, "device_mapping": "list(range(8, 16))"}
    train["strategy_args"] = {"strategy_config": {"tensor_model_parallel_size": 2}}
    c = roll(tmp_path, actor_train=train, rollout_batch_size=64, num_return_sequences_in_group=4)
    assert c.run["batch.num_minibatches"] == 64 * 4 / (2 * 4 * (8 / 2))
    assert c.run["optimizer.warmup_steps"] == 3, "20 updates of 8 a step"
    assert "counts updates" in differs(c, "actor_train.training_args.warmup_steps")


@pytest.mark.parametrize(
    ("mapping", "number"),
    [("list(range(0,4)) + list(range(8,12))", 8), ("list(range(0, 8, 2))", 4), ("[0, 1, 2]", 3), ([5, 6], 2)],
)
def test_devices_are_counted(mapping: Any, number: int, tmp_path: Path) -> None:
    args = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    train = {"training_args": args, "device_mapping": mapping}
    c = roll(tmp_path, actor_train=train, rollout_batch_size=48, num_return_sequences_in_group=1)
    assert c.run["batch.num_minibatches"] == 48 / number


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rollout_batch_size": "lots"}, "rollout_batch_size: expected a number, got 'lots'"),
        ({"ppo_epochs": 0}, "ppo_epochs: expected at least 1, got 0"),
        ({"use_kl_loss": "maybe"}, "use_kl_loss: expected true or false"),
        ({"response_length": "${eval:1}"}, "response_length: expected a number"),
        ({"data": {"file_name": 3}}, "file_name: expected a text or a list of texts"),
        (
            {"data": {"domain_interleave_probs": {"x": "0.7x"}}},
            r"domain_interleave_probs.x: expected a number",
        ),
        ({"exp_name": "${a}", "a": "${exp_name}"}, "stands for itself"),
        ({"rewards": {"j": {"worker_cls": "LLMJudgeRewardWorker"}}}, r"rlvr.yaml: no model of the judge"),
    ],
)
def test_values_of_another_kind_are_refused_by_name(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    if "rewards" in options:
        options = {**options, "data": {"domain_interleave_probs": {"j": 1.0}}}
    with pytest.raises(ConfigError, match=told):
        roll(tmp_path, **options)


def test_texts_are_read_as_what_they_say_and_the_last_domain_has_the_rest(tmp_path: Path) -> None:
    shares = {"math_rule": "0.5", "choice": 0.2}
    generating = {"temperature": 0.5, "top_k": "100.0"}
    c = roll(
        tmp_path,
        data={"domain_interleave_probs": shares},
        num_return_sequences_in_group="8",
        use_kl_loss="false",
        shared=generating,
        actor_infer={"generating_args": "${shared}"},
        exp_name="${first}/x",
        first="${second}",
        second="s",
    )
    assert {name: task["weight"] for name, task in c.tasks.items()} == {"math_rule": 0.5, "choice": 0.5}
    assert (c.run["batch.group_size"], c.run["rollout.temperature"], c.run["rollout.top_k"]) == (8, 0.5, 100)
    assert "kl.coefficient" not in c.task
    assert c.run["tracking.run_name"] == "s/x"


def test_interpolations_masks_lengths_and_kl_are_taken_over(tmp_path: Path) -> None:
    c = roll(
        tmp_path,
        name="x",
        exp_name="run_${name}",
        max_len_mask=True,
        response_length=None,
        sequence_length="${most}",
        most=900,
        prompt_length=200,
        use_kl_loss=True,
        kl_loss_coef=0.01,
        async_generation_ratio=1.5,
    )
    assert c.run["tracking.run_name"] == "run_x"
    assert c.run["rollout.max_new_tokens"] == 700
    assert c.task["algorithm_config.mask_truncated"] is True
    assert "counts masked" in differs(c, "loss_agg_mode")
    assert (c.task["kl.coefficient"], c.task["kl.placement"], c.task["kl.estimator"]) == (0.01, "loss", "k3")
    assert c.run["rollout.max_staleness"] == 2
    with pytest.raises(ConfigError, match="response_length or sequence_length"):
        roll(tmp_path, response_length=None)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (r"so \boxed{B}", 1.0),
        ("the ANSWER IS b, I mean B", -1.0),  # the first capital letter is I
        ("THE ANSWER IS (B), not A", 0.5),
        (r"\boxed{A} or \boxed{C}", -0.5),
        ("Cannot say", -1.0),
    ],
)
def test_the_function_for_choices_gives_the_soft_rewards_of_roll(
    said: str, value: float, tmp_path: Path
) -> None:
    roll(tmp_path).write(tmp_path / "out")
    found = importlib.util.spec_from_file_location("written", tmp_path / "out" / "rewards.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.reward_choice(said, "B") == value


def test_programs_have_tests_that_the_sandbox_runs_and_others_are_told(tmp_path: Path) -> None:
    pair = {"stdin": "1", "expected_stdout": "2"}
    cases = [
        {"case_type": "input", "test_cases": json.dumps([pair])},
        {"case_type": "assert", "test_cases": [{"assert_code": "assert f(1) == 2"}]},
        {"case_type": "pytest", "test_cases": json.dumps([{"assert_code": "def test_f():\n  assert f(1)"}])},
        {"case_type": "input", "test_cases": [pair], "test_case_function": "f"},
        {"case_type": "input", "test_cases": "no JSON"},
    ]
    rows = tmp_path / "code.jsonl"
    rows.write_text("".join(json.dumps({"tag": "code", "prompt": "p", **case}) + "\n" for case in cases))
    rewards = {
        "code": {"worker_cls": f"{WORKERS}.code.CodeSandboxRewardWorker", "tag_included": ["code"]},
        "own": {"worker_cls": "mine.Own", "tag_included": ["own"]},
    }
    shares = {"code": 0.5, "own": 0.5}
    c = roll(
        tmp_path,
        data={"file_name": str(rows), "messages": None, "domain_interleave_probs": shares},
        rewards=rewards,
    )
    written = [json.loads(line) for line in c.files["data/code.jsonl"].splitlines()]
    assert [row["tests"] for row in written] == [[{"stdin": "1", "stdout": "2"}], ["assert f(1) == 2"]]
    assert "3 of 5 rows" in c.left["rows of code"]
    (entry,) = c.tasks["code"]["rewards"]
    assert CodeEvaluator.Config(**entry["config"]).all_or_nothing
    assert "Own has no counterpart" in c.left["rewards.own.worker_cls"]
    assert "def reward_own(response, **row)" in c.files["rewards.py"]


def test_the_function_to_write_for_a_worker_gets_the_row(tmp_path: Path) -> None:
    worker = "roll.rewards.GeneralRuleRewardWorker"
    c = roll(tmp_path, rewards={**REWARDS, "choice": {**REWARDS["choice"], "worker_cls": worker}})
    text = c.files["rewards.py"].replace("raise", "return float(row['id'] == 'q1')\n    raise")
    (tmp_path / "rewards.py").write_text(text)
    reward = resolve_reward(RewardSpec(plugin=f"{tmp_path}/rewards.py:reward_choice"), "choice")
    assert reward.score([make_rollout("4", row={"id": "q1", "messages": []})]) == [1.0]
