"""Tasks of type ``sft`` and ``distill`` in runs: two actors of one task each become one actor of both."""

import json
import shutil
from dataclasses import replace

import pytest

from model_builders import build_byte_actor
from multitask_rl.config.run import BatchConfig, CheckpointConfig, EvalConfig, GuardConfig, OptimizerConfig
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.curriculum.scheduler import SchedulerConfig
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.step.task_state import draw_prompts
from multitask_rl.trainer import Trainer
from run_builders import build_actor, run_config, undocumented, weights_hash, write_run

SFT, DISTILL = "multitask_rl.algorithms.sft:SFT", "multitask_rl.algorithms.distill:Distill"
ONE = f"""
tasks:
  TASK: {{type: "{SFT}", dataset: TASK.jsonl, answer: "{{reference}}", rewards: [rewards.py:starts_right]}}
"""
BOTH = f"""
tasks:
  copy: {{type: "{DISTILL}", teacher: copy_run, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}}
  digit: {{type: "{DISTILL}", teacher: digit_run, dataset: digit.jsonl, rewards: [rewards.py:starts_right]}}
"""
MIXED = f"""
tasks:
  short: {{type: grpo, dataset: copy.jsonl, rewards: [rewards.py:is_short]}}
  warm: {{type: "{SFT}", dataset: digit.jsonl, answer: "{{reference}}"}}
  taught: {{type: "{DISTILL}", teacher: digit_run, dataset: digit.jsonl}}
"""
ECHO = """
from multitask_rl.environments.base import StepResult


class Echo:
    def reset(self, row):
        return []

    def step(self, message):
        text = message["content"]
        return StepResult(messages=[{"role": "user", "content": text}], reward=float(len(text) > 1))
"""


def settings(directory, output, steps, **changes):
    return run_config(
        directory,
        output,
        steps,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
        eval=EvalConfig(every=0, num_prompts=12, temperature=0.0),
        checkpoint=CheckpointConfig(every=0),
        guard=GuardConfig(enabled=False),
        **changes,
    )


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """A folder with an actor of each task, fitted to the answers of its rows."""
    directory = tmp_path_factory.mktemp("teachers")
    solved = {}
    for task in ("copy", "digit"):
        write_run(directory, ONE.replace("TASK", task))
        trainer = Trainer.from_config(settings(directory, f"{task}_run", 25))
        solved[task] = trainer.train()[task].primary.mean
    return directory, solved


def test_two_actors_of_one_task_each_are_distilled_into_one(teachers):
    directory, solved = teachers
    assert min(solved.values()) > 0.9
    write_run(directory, BOTH)
    config = settings(directory, "both", 45)
    config = replace(
        config,
        batch=BatchConfig(prompts_per_step=64, group_size=1),
        rollout=replace(config.rollout, max_new_tokens=2),
        optimizer=replace(config.optimizer, learning_rate=0.015),
    )
    trainer = Trainer.from_config(config)
    trainer.train()
    first, last = trainer.history[0][1], trainer.history[-1][1]
    for task in ("copy", "digit"):
        assert first[task].primary.mean < 0.3
        assert last[task].primary.mean > 0.8
    steps = [json.loads(line) for line in (directory / "both" / "metrics.jsonl").read_text().splitlines()]
    kls = [row["task/copy/teacher_kl"] for row in steps if "task/copy/teacher_kl" in row]
    assert kls[-1] < 0.3 * kls[0]


@pytest.fixture(scope="module")
def mixed(teachers):
    """A run of four steps of a task with rewards, one with answers and one with a teacher, sampled ahead."""
    directory, _ = teachers
    (directory / "mixed").mkdir()
    for name in ("copy_run", "digit_run"):
        (directory / "mixed" / name).symlink_to(directory / name)
    write_run(directory / "mixed", MIXED)
    return directory / "mixed", run_mixed(directory / "mixed", "whole", 4)


def run_mixed(directory, output, steps, **changes):
    config = settings(directory, output, steps)
    changed = {
        "rollout": replace(config.rollout, max_staleness=1),
        "eval": replace(config.eval, every=2),
        "checkpoint": replace(config.checkpoint, every=2),
        "guard": GuardConfig(monitor_metrics=["short", "warm", "taught"]),
        "scheduler": SchedulerConfig(policy_config={"gradients_every": 2}),
    }
    trainer = Trainer.from_config(replace(config, **(changed | changes)))
    trainer.train()
    return trainer


def test_tasks_without_rewards_are_measured_and_keep_their_share(mixed):
    directory, trainer = mixed
    first, last = trainer.history[0][1], trainer.history[-1][1]
    assert (last["warm"].metric, last["taught"].metric) == ("loss", "kl")
    for task in ("warm", "taught"):
        assert first[task].prompts == last[task].prompts
        assert trainer.scheduler.weights()[task] == pytest.approx(1 / 3, abs=0.02)
    assert last["warm"].primary.mean < first["warm"].primary.mean
    steps = [json.loads(line) for line in (directory / "whole" / "metrics.jsonl").read_text().splitlines()]
    numbers = {name: value for row in steps for name, value in row.items()}
    assert [row["step"] for row in steps if "task/warm/cosine/taught" in row] == [1, 3]
    assert 0.0 < abs(numbers["task/taught/cosine/warm"]) < 1.0
    assert numbers["task/warm/nll"] < 4
    assert numbers["task/taught/teacher_kl"] > 0
    assert "guard/warm/value" in numbers
    assert undocumented(directory / "whole") == set()


def test_a_run_with_answers_and_a_teacher_resumes_as_if_it_had_not_stopped(mixed):
    directory, trainer = mixed
    run_mixed(directory, "cut", 2)
    assert weights_hash(run_mixed(directory, "cut", 4)) == weights_hash(trainer)


def test_a_resumed_run_keeps_its_teacher_though_the_run_of_the_teacher_has_gone_on(teachers, tmp_path):
    directory, _ = teachers
    shutil.copytree(directory / "digit_run", tmp_path / "teacher")
    write_run(
        tmp_path,
        f"""
tasks:
  taught: {{type: "{DISTILL}", teacher: {tmp_path / "teacher"}, dataset: digit.jsonl}}
""",
    )
    (tmp_path / "rewards.py").write_text((directory / "rewards.py").read_text())

    def run(output, steps):
        config = settings(tmp_path, output, steps)
        trainer = Trainer.from_config(replace(config, checkpoint=replace(config.checkpoint, every=2)))
        trainer.train()
        return trainer

    whole = weights_hash(run("whole", 4))
    run("cut", 2)
    (tmp_path / "later").mkdir()
    write_run(tmp_path / "later", ONE.replace("TASK", "digit"))
    shutil.copytree(tmp_path / "teacher", tmp_path / "later" / "teacher")
    Trainer.from_config(settings(tmp_path / "later", "teacher", 30)).train()
    shutil.copytree(tmp_path / "later" / "teacher", tmp_path / "teacher", dirs_exist_ok=True)
    resumed = run("cut", 4)
    assert weights_hash(resumed) == whole
    assert not [event for event in resumed.events if event.kind == "changed"]
    assert weights_hash(run("new", 4)) != whole
    tasks = (tmp_path / "tasks.yaml").read_text()
    (tmp_path / "tasks.yaml").write_text(tasks.replace("taught: {", "learned: {renamed_from: taught, "))
    assert run("cut", 5).tasks["learned"].spec.teacher == resumed.tasks["taught"].spec.teacher


def test_the_held_out_kl_is_within_what_may_be_sampled(tmp_path):
    """Equal weights, beside a task that adds tokens; one response only, whatever the weights."""
    write_run(
        tmp_path,
        f"""
tasks:
  same: {{type: "{DISTILL}", teacher: actor, dataset: copy.jsonl}}
  forced: {{type: "{DISTILL}", teacher: other, dataset: copy.jsonl, constraints: [
    {{mode: grammar, config: {{regex: "7{{3}}"}}}}]}}
  free: {{type: "{DISTILL}", teacher: other, dataset: copy.jsonl}}
  quark: {{type: reward_conditioned, dataset: copy.jsonl, rewards: [rewards.py:is_short]}}
""",
    )
    other = build_actor(seed=5)
    other.save(tmp_path / "other")
    with Trainer.from_config(settings(tmp_path, "run", 1)) as trainer:
        found = {name: own.primary.mean for name, own in trainer.evaluate().items()}
    assert found["same"] == pytest.approx(0.0, abs=1e-6)
    assert found["forced"] == pytest.approx(0.0, abs=1e-6)
    assert found["free"] > 1e-3


def test_answers_are_trained_on_with_their_end_and_are_not_scored(mixed):
    directory, _ = mixed
    rows = [json.loads(line) for line in (directory / "whole" / "rollouts.jsonl").read_text().splitlines()]
    own = [row for row in rows if row["task"] == "warm"]
    assert own
    assert all(row["reward"] is None and len(row["response"]) == 1 for row in own)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"type": DISTILL}, "type distill needs a teacher"),
        ({"type": "grpo", "teacher": "x", "rewards": ["math_answer"]}, "no other type has one"),
        ({"type": DISTILL, "teacher": "x", "kl": {"coefficient": 0.1}}, "no KL term to the initial actor"),
        ({"type": "anchor", "kl": {"coefficient": 0.1}}, "no KL term to the initial actor; leave kl out"),
        ({"type": SFT, "environment": "number_game"}, "has one turn"),
        ({"type": SFT, "group_size": 4}, "one answer per row"),
        *[
            ({**keys, "curriculum": {"by": by}}, "rewards of training responses decide which pools are drawn")
            for keys in ({"type": SFT}, {"type": DISTILL, "teacher": "x"})
            for by in ("pass_rate", "level")
        ],
        ({"type": SFT, "constraints": ["over_refusal"]}, "which no constraint changes"),
        (
            {"type": DISTILL, "teacher": "x", "constraints": [{"plugin": "over_refusal", "mode": "penalty"}]},
            "act on rewards, which type distill does not",
        ),
    ],
)
def test_what_cannot_hold_is_refused(keys, told):
    with pytest.raises(ConfigError, match=told):
        parse_tasks({"tasks": {"a": keys}})


def test_teachers_that_cannot_be_compared_are_refused(mixed):
    directory, _ = mixed
    build_byte_actor().save(directory / "stranger")
    for teacher, told in (("stranger", "has another vocabulary"), ("absent/run/x", "tasks.taught.teacher")):
        with pytest.raises(ConfigError, match=told):
            run_mixed(directory, "no", 1, tasks={"taught": {"teacher": teacher}})
    devices = {"actor": "cpu:0-1 sharded"}
    with pytest.raises(ConfigError, match="computed whole"):
        run_mixed(directory, "no", 1, device_map=devices)


def test_an_answer_that_is_too_long_is_left_out(mixed):
    directory, trainer = mixed
    rollout = replace(trainer.config.rollout, max_new_tokens=1)
    with pytest.raises(DataError, match="given answers of more than 1"):
        run_mixed(directory, "long", 1, rollout=rollout)


def test_episodes_have_a_teacher_and_several_responses_a_prompt(mixed):
    directory, _ = mixed
    (directory / "worlds.py").write_text(ECHO)
    world = {
        "type": DISTILL,
        "teacher": str(directory / "digit_run"),
        "dataset": str(directory / "digit.jsonl"),
        "environment": f"{directory}/worlds.py:Echo",
        "max_turns": 2,
        "eval_samples": 2,
    }
    sampled = EvalConfig(every=0, num_prompts=4)
    trainer = run_mixed(directory, "turns", 1, tasks={"echo": world}, eval=sampled)
    found = trainer.history[-1][1]["echo"]
    assert found.primary.n == 2 * len(found.values)
    assert found.metrics["turns"].mean == 2.0
    assert '"task/echo/teacher_kl"' in (directory / "turns" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("chat", [True, False])
def test_a_given_answer_ends_as_the_chat_template_ends_one(tmp_path, chat):
    """The first end token of Llama 3 and Gemma ends a text, the chat template's another one a turn."""
    actor = build_actor()
    end_of_text, end_of_turn = actor.tokenizer.convert_tokens_to_ids(["<eos>", "!"])
    actor.model.generation_config.eos_token_id = [end_of_text, end_of_turn]
    actor.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} !{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    actor.save(tmp_path / "actor")
    task = (
        f'warm: {{type: "{SFT}", dataset: digit.jsonl, answer: "{{reference}}", chat: {str(chat).lower()}}}'
    )
    write_run(tmp_path, f"tasks:\n  {task}\n")
    with Trainer.from_config(settings(tmp_path, "run", 1)) as trainer:
        prompts = draw_prompts(trainer.tasks, {"warm": 3}, trainer.actor)
        assert {prompt.given_ids[-1] for prompt in prompts} == {end_of_turn if chat else end_of_text}
