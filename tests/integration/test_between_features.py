"""Features that are right alone, together: what a reader of the whole found."""

import json
import shutil
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest

from multitask_rl.algorithms.distill import Distill
from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.algorithms.reward_conditioned import RewardConditioned
from multitask_rl.cli import main
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    GuardConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SchedulerConfig,
    ScoringConfig,
    TrainingConfig,
    recorded_config,
)
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.data import get_dataloader
from multitask_rl.errors import ConfigError, DataError, RewardError
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardAction, GuardDecision
from multitask_rl.records import Prompt, Rollout, Scored
from multitask_rl.report.differences import config_difference
from multitask_rl.report.summary import summarise_run
from multitask_rl.run.checkpoint import CheckpointEntry, CheckpointStore
from multitask_rl.run.plan import plan_run
from multitask_rl.statistics.definitions import definitions, measured
from multitask_rl.step.flow import Stage
from multitask_rl.step.metrics import has_spread
from multitask_rl.step.task_state import draw_prompts
from multitask_rl.tracking.reading import read_run
from multitask_rl.trainer import Trainer
from run_builders import ECHO, ECHO_WORLD, JudgesAllGood, lines, run_config, train, write_run

COPY = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
"""
DIGIT = "  digit: {type: grpo, dataset: digit.jsonl, rewards: [rewards.py:starts_right]}\n"
SCALED = COPY.replace("[rewards.py:starts_right]", "[{plugin: rewards.py:starts_right, weight: 0.2}]")
SMALL = {
    "batch": BatchConfig(prompts_per_step=4, group_size=2),
    "eval": EvalConfig(every=2, num_prompts=6),
    "checkpoint": CheckpointConfig(every=2),
}


class Freezes(Guard):
    """Judges all weights good, and freezes ``digit``."""

    def observe(self, step, evaluations, confirm=None):
        return GuardDecision(judged_good=True)

    def weight_factors(self):
        return {"digit": 0.0}


class Forgets(Guard):
    """Remembers which tasks it was told to forget."""

    def observe(self, step, evaluations, confirm=None):
        return GuardDecision(judged_good=True)

    def forget_tasks(self, tasks):
        self.forgotten = tasks


def test_a_guard_is_told_the_tasks_that_a_resume_trains_no_more(tmp_path):
    """By the names that they have now."""
    more = DIGIT.replace("digit: {", "more: {")
    last = DIGIT.replace("digit: {", "last: {")
    write_run(tmp_path, COPY + DIGIT + more + last, num_rows=40)
    with Trainer.from_config(run_config(tmp_path, "out", 2, **SMALL)) as trainer:
        trainer.add_guard(Forgets())
        trainer.train()
    kept = last.replace("last: {", "kept: {renamed_from: last, evaluation_only: true, ")
    (tmp_path / "tasks.yaml").write_text(
        COPY.replace("copy: {", "other: {renamed_from: copy, ") + more + kept
    )
    with Trainer.from_config(run_config(tmp_path, "out", 4, **SMALL)) as trainer:
        trainer.add_guard(guard := Forgets())
        trainer.train()
    assert guard.forgotten == ["digit", "kept"]


@pytest.mark.parametrize("guard", [GuardConfig(enabled=False), GuardConfig()], ids=["off", "another"])
def test_a_task_that_the_guard_froze_is_trained_again_once_that_guard_is_gone(tmp_path, guard):
    write_run(tmp_path, COPY + DIGIT, num_rows=40)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 4, **SMALL))
    trainer.add_guard(Freezes())
    trainer.train()
    assert trainer.scheduler.weights()["digit"] == 0.0
    with Trainer.from_config(run_config(tmp_path, "out", 6, guard=guard, **SMALL)) as resumed:
        resumed.train_step()
        assert resumed.scheduler.weights()["digit"] > 0.0


def settings_of_a_fork(directory):
    """Train two steps into ``out``; return settings with which a run begins from there."""
    write_run(directory, COPY, num_rows=40)
    trainer = Trainer.from_config(run_config(directory, "out", 2, **SMALL))
    trainer.add_guard(JudgesAllGood())
    trainer.train()
    found = str(directory / "out/checkpoints/step_00000002")
    return {**SMALL, "checkpoint": CheckpointConfig(every=2, resume=found)}


def test_a_fork_begins_with_an_evaluation_and_a_checkpoint_that_its_guard_may_restore(tmp_path):
    sizes = settings_of_a_fork(tmp_path)
    for guard, judged, verdict in ((JudgesAllGood(), [0, 2, 3], True), (None, None, None)):
        none = GuardConfig(enabled=False)
        fork = Trainer.from_config(run_config(tmp_path, f"fork_{judged}", 3, guard=none, **sizes))
        if guard is not None:
            fork.add_guard(guard)
        fork.train()
        records = (tmp_path / f"fork_{judged}/evaluations.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in records] == [2, 3]
        entries = CheckpointStore(tmp_path / f"fork_{judged}/checkpoints", 4).entries
        assert entries[2].judged_good is verdict
        assert entries[2].score is not None
        if guard is not None:
            assert guard.judged == judged


def test_a_fork_with_other_rewards_or_tasks_is_judged_anew_and_says_what_differs(tmp_path):
    sizes = settings_of_a_fork(tmp_path)
    for name, text in (
        ("scaled", SCALED),
        ("more", COPY + DIGIT),
        ("fewer", COPY.replace("copy:", "other:")),
    ):
        (tmp_path / "tasks.yaml").write_text(text)
        fork = Trainer.from_config(run_config(tmp_path, name, 3, **sizes))
        fork.add_guard(JudgesAllGood())
        fork.train()
        assert fork.guard.judged == [0, 2, 2, 3], "step 2 by the checkpoint's guard, and anew"
        (event,) = [json.loads(e) for e in lines(tmp_path / name, "events.jsonl") if '"changed"' in e]
        assert event["reason"].startswith("forked with other settings: tasks")
    config = run_config(tmp_path, "other_model", 3, **sizes)
    other = tmp_path / "another"
    shutil.copytree(config.model.name_or_path, other)
    with pytest.raises(
        ConfigError, match=r"was made with model\.name_or_path=.* would go on with the former"
    ):
        train(replace(config, model=replace(config.model, name_or_path=str(other))))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ("one", "two", r"critic\.name_or_path='.*one', and now it is '.*two'"),
        ("one", "", r"critic\.name_or_path='.*one', and now it is ''"),
        ("", "one", r"critic\.name_or_path='', and now it is '.*one'"),
        ("one", None, r"critic\.trunk='separate', and now it is 'actor'"),
        (None, "", r"critic\.trunk='actor', and now it is 'separate'"),
    ],
)
def test_a_resume_with_another_critic_is_refused_as_one_with_another_actor_is(tmp_path, before, now, said):
    write_run(tmp_path, COPY.replace("grpo", "ppo"))
    for name in ("one", "two"):
        shutil.copytree(tmp_path / "actor", tmp_path / name)

    def critic(name):
        if name is None:
            return CriticConfig()
        return CriticConfig(trunk="separate", name_or_path=str(tmp_path / name) if name else "")

    train(run_config(tmp_path, "run", 1, critic=critic(before), **SMALL))
    checkpoint = CheckpointConfig(resume=str(tmp_path / "run/checkpoints/step_00000001"))
    for change in ({"output": "run"}, {"output": "fork", "checkpoint": checkpoint}):
        with pytest.raises(ConfigError, match=f"was made with {said}: .* would go on with the former"):
            train(run_config(tmp_path, max_steps=2, critic=critic(now), **{**SMALL, **change}))


def test_a_run_that_had_no_critic_may_get_one_of_any_kind_at_a_resume(tmp_path):
    write_run(tmp_path, COPY)
    train(run_config(tmp_path, "run", 1, **SMALL))
    write_run(tmp_path, COPY + DIGIT.replace("grpo", "ppo"))
    resumed = train(run_config(tmp_path, "run", 2, critic=CriticConfig(trunk="separate"), **SMALL))
    assert resumed.critic.trunk is not None
    assert any("critic.trunk: 'actor' -> 'separate'" in event.reason for event in resumed.events)


CHANGED = """
  quark: {type: TYPE, dataset: digit.jsonl, rewards: [rewards.py:is_short]}
  held: {dataset: digit.jsonl, rewards: [rewards.py:is_short]CONSTRAINT}
  valued: {type: VALUED, dataset: digit.jsonl, rewards: [rewards.py:is_short], kl: {KL, target: 0.1}}
"""


@pytest.mark.parametrize("trunk", ["actor", "separate"])
def test_a_rollback_past_a_resume_keeps_nothing_of_the_steps_that_it_undoes(tmp_path, trunk):
    """The resume changed types, added a critic and a constraint and set another KL coefficient."""
    before = {"TYPE": "grpo", "VALUED": "grpo", "KL,": "coefficient: 0.01,", "CONSTRAINT": ""}
    after = {"TYPE": "reward_conditioned", "VALUED": "ppo", "KL,": "coefficient: 0.5,"}
    after["CONSTRAINT"] = ", constraints: [{plugin: rewards.py:starts_right, mode: lagrangian, limit: 0}]"

    def opened(changes, steps):
        text = CHANGED
        for key, value in changes.items():
            text = text.replace(key, value)
        write_run(tmp_path, COPY + text, num_rows=60)
        config = run_config(tmp_path, "out", steps, batch=BatchConfig(prompts_per_step=8, group_size=4))
        saving, critic = CheckpointConfig(every=2, keep=9), CriticConfig(trunk=trunk)
        return Trainer.from_config(replace(config, checkpoint=saving, critic=critic))

    def state(trainer):
        tasks = {name: task.state_dict() for name, task in trainer.tasks.items()}
        return tasks, {name: value.tolist() for name, value in trainer.critic.tensors().items()}

    with opened(before, 2) as first:
        first.train()
    with opened(after, 6) as trainer:
        trainer.train_step()
        restore, load = trainer.parts.state.restore, trainer.parts.store.checkpoints.load
        checkpoint, own = load(tmp_path / "out/checkpoints/step_00000002"), ["scorer", "guard"]
        restore(checkpoint, without=own)
        fresh, critic = state(trainer)
        assert fresh["quark"]["algorithm"]["buffer"] == []
        assert [m["value"] for m in fresh["held"]["multipliers"].values()] == [0.0]
        assert fresh["valued"]["kl"]["coefficient"] == 0.5
        heads = [tensor for name, tensor in critic.items() if name.startswith("heads.")]
        assert not any(value for tensor in heads for value in np.ravel(tensor))
        for _ in range(3):
            trainer.train_step()
        assert state(trainer)[0]["quark"]["algorithm"]["buffer"]
        restore(checkpoint, without=own)
        assert state(trainer) == (fresh, critic)


def test_a_task_whose_world_always_fails_ends_the_run_as_failing_rewards_do(tmp_path):
    echo = "  echo: {type: grpo, dataset: digit.jsonl, environment: 'worlds.py:Gone', max_turns: 2}\n"
    write_run(tmp_path, COPY + echo, num_rows=40)
    (tmp_path / "worlds.py").write_text(
        "class Gone:\n"
        "    def reset(self, row):\n        raise RuntimeError('server gone')\n\n"
        "    def step(self, message):\n        raise AssertionError\n\n"
        "    def close(self):\n        pass\n"
    )
    with pytest.raises(RewardError, match=r"'echo'.*server gone"):
        train(run_config(tmp_path, "out", 2, **SMALL))


def test_a_world_that_gives_stop_strings_beside_a_grammar_is_told_as_a_failure(tmp_path):
    """As ``sampling.stop`` beside a grammar, which is refused at the start."""
    game = """
  game:
    dataset: digit.jsonl
    environment: worlds.py:Stops
    constraints: [{mode: grammar, config: {regex: "[abc]{2}"}}]
"""
    write_run(tmp_path, COPY + game, num_rows=40)
    (tmp_path / "worlds.py").write_text(
        "from multitask_rl.environments.base import StepResult\n\n\n"
        "class Stops:\n"
        "    def reset(self, row):\n        self.turn = 0\n        return []\n\n"
        "    def step(self, message):\n"
        "        self.turn += 1\n"
        "        again = [{'role': 'user', 'content': 'on'}]\n"
        "        return StepResult(messages=again, done=self.turn > 1, reward=1.0, stop=['b'])\n"
    )
    with pytest.raises(RewardError, match=r"'game'.*stop strings 'b'.*grammar"):
        train(run_config(tmp_path, "out", 2, **SMALL))


def test_scores_of_other_tasks_are_not_compared_for_the_best_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, 4)
    for step, score, of in ((2, 0.2, ["a"]), (4, 0.1, ["a", "b"]), (6, 0.15, ["a", "b"]), (8, None, [])):
        store.entries[step] = CheckpointEntry(step=step, score=score, score_of=of)
    assert store.best() == 6


def test_an_evaluation_without_one_of_its_tasks_is_not_the_best(tmp_path):
    write_run(tmp_path, COPY + DIGIT, num_rows=40)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 4, **SMALL))
    evaluate = trainer._open().evaluator.evaluate

    def fails_at_2(step, **options):
        found = evaluate(step, **options)
        if step == 2:
            values = [float("nan")] * len(found["digit"].primary.values)
            primary = found["digit"].primary
            lost = type(primary)(
                mean=float("nan"), error=float("nan"), n=0, values=values, direction=primary.direction
            )
            found["digit"].primary = lost
        return found

    trainer.parts.evaluator.evaluate = fails_at_2
    trainer.train()
    entries = trainer.parts.store.checkpoints.entries
    assert [entries[step].score is None for step in (2, 4)] == [True, False]


def test_a_task_that_is_only_evaluated_keeps_its_own_temperature(tmp_path):
    held = DIGIT.replace("}\n", ", evaluation_only: true, sampling: {temperature: 0}}\n")
    write_run(tmp_path, COPY + held, num_rows=40)
    with Trainer.from_config(run_config(tmp_path, "out", 1, **SMALL)) as trainer:
        evaluator = trainer._open().evaluator
        first, again = (evaluator.evaluate(0, purpose=purpose) for purpose in ("one", "two"))
    assert first["digit"].primary.n == 6
    assert first["digit"].values == again["digit"].values, "greedy: other seeds change nothing"
    write_run(tmp_path, COPY + held.replace("{type", "{eval_samples: 2, type"), num_rows=40)
    with pytest.raises(ConfigError, match=r"eval_samples=2 with sampling.temperature=0"):
        Trainer.from_config(run_config(tmp_path, "other", 1))


def test_a_renamed_task_keeps_its_held_out_rows(tmp_path):
    found = []
    for name, own in (
        ("digit", DIGIT),
        ("number", DIGIT.replace("digit: {", "number: {renamed_from: digit, ")),
    ):
        write_run(tmp_path, COPY + own, num_rows=400)
        trainer = Trainer.from_config(run_config(tmp_path, "out", 1, **SMALL))
        found.append([row["id"] for row in trainer.tasks[name].eval_rows])
        trainer.close()
    assert found[0] == found[1]


def test_a_rollback_past_the_beginning_of_a_task_begins_it_anew(tmp_path):
    write_run(tmp_path, COPY, num_rows=40)
    train(run_config(tmp_path, "out", 2, **SMALL))
    held = "constraints: [{plugin: rewards.py:has_no_digit, mode: lagrangian, limit: 0.01}]"
    write_run(tmp_path, COPY + DIGIT.replace("}\n", f", {held}}}\n"), num_rows=40)
    with Trainer.from_config(run_config(tmp_path, "out", 20, **SMALL)) as trainer:
        parts = trainer._open()
        task = trainer.tasks["digit"]
        before = json.dumps(task.state_dict())
        for _ in range(2):
            trainer.train_step()
        assert json.dumps(task.state_dict()) != before
        store = parts.store.checkpoints
        parts.experience.clear()
        parts.state.restore(store.load(store.path(2)), without=["scorer", "guard"])
        assert json.dumps(task.state_dict()) == before


def test_settings_that_would_fail_late_are_refused_before_a_model_loads(tmp_path):
    write_run(tmp_path, COPY.replace("type: grpo", "type: grpo, target: 50"))
    with pytest.raises(ConfigError, match=r"target must be in \[0, 1\], got 50"):
        Trainer.from_config(run_config(tmp_path, "out", 1))
    late = "type: dapo, algorithm_config: {overlong_buffer: 100}"
    write_run(tmp_path, COPY.replace("type: grpo", late))
    with pytest.raises(ConfigError, match=r"tasks\.copy\.algorithm_config\.overlong_buffer is 100"):
        Trainer.from_config(run_config(tmp_path, "out", 1))
    write_run(tmp_path, COPY.replace("type: grpo", "type: reward_conditioned"))
    adapted = ModelConfig(lora=LoraConfig(rank=2))
    with pytest.raises(ConfigError, match=r"tasks\.copy\.type: reward_conditioned has control tokens"):
        plan_run(run_config(tmp_path, "out", 1, model=adapted))
    misspelt = RolloutConfig(engine_config={"weigths": "bfloat16"})
    with pytest.raises(ConfigError, match=r"rollout\.engine_config.* 'weigths'"):
        plan_run(run_config(tmp_path, "out", 1, rollout=misspelt))


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_a_grammar_is_refused_where_the_engine_of_a_user_does_not_follow_it(tmp_path, executor):
    constrained = "type: grpo, constraints: [{mode: grammar, config: {choices: [a, b]}}]"
    write_run(tmp_path, COPY.replace("type: grpo", constrained))
    (tmp_path / "engines.py").write_text("from multitask_rl.testing import FakeEngine\n")
    own = RolloutConfig(engine=f"{tmp_path}/engines.py:FakeEngine")
    with pytest.raises(ConfigError, match=r"tasks\.copy\.constraints: mode grammar .* not '.*:FakeEngine'"):
        plan_run(run_config(tmp_path, "out", 1, rollout=own, executor=executor))
    plan_run(run_config(tmp_path, "out", 1, executor=executor))


def test_a_grammar_needs_no_device_and_leaves_that_of_a_judge_alone(tmp_path, monkeypatch):
    """A constraint of mode grammar has no plugin."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    masked = "constraints: [{mode: grammar, config: {choices: ['1', '2']}}]"
    write_run(tmp_path, COPY.replace("[rewards.py:starts_right]", f"[rewards.py:starts_right], {masked}"))
    with pytest.raises(ConfigError, match=r"device_map\.reward\.copy: no reward of task 'copy' runs a model"):
        plan_run(run_config(tmp_path, "out", 1, device_map={"reward.copy": "cuda:0"}))


def test_a_teacher_beside_a_backend_that_cuts_models_is_refused_by_what_to_set(tmp_path):
    backend = "from multitask_rl.training.backends.in_process import InProcess\n\n\n"
    backend += "class Halves(InProcess):\n    has_parts = classmethod(lambda cls, config: True)\n"
    (tmp_path / "halves.py").write_text(backend)
    write_run(tmp_path, COPY.replace("type: grpo", "type: distill, teacher: elsewhere"))
    halves = TrainingConfig(backend=f"{tmp_path}/halves.py:Halves")
    with pytest.raises(ConfigError, match=r"teacher: .* set training\.backend=torch"):
        plan_run(run_config(tmp_path, "out", 1, training=halves))


def test_a_constraint_that_only_rejects_is_said_to_teach_little(tmp_path, caplog):
    rejects = "constraints: [{plugin: rewards.py:has_no_digit, mode: reject}]"
    rewarded = "rewards: [rewards.py:starts_right]"
    write_run(tmp_path, COPY.replace(rewarded, rejects))
    Trainer.from_config(run_config(tmp_path, "out", 1)).close()
    assert "take type constrained_decoding" in caplog.text
    caplog.clear()
    write_run(tmp_path, COPY + DIGIT.replace(rewarded, f"evaluation_only: true, {rejects}"))
    Trainer.from_config(run_config(tmp_path, "other", 1)).close()
    assert "constrained_decoding" not in caplog.text, "nothing is to be learnt"


def test_a_teacher_s_groups_count_as_learnable_whatever_their_rewards_are():
    prompt = Prompt(task="d", prompt_id="x", draw=0, row={}, text="", prompt_ids=[1])
    failed = [
        Scored(rollout=Rollout(prompt=prompt, sample=i, response_ids=[1]), reward=0.0) for i in range(4)
    ]
    learns = {}
    for kind in (Distill, GRPO):
        task = SimpleNamespace(algorithm=kind(kind.Config()), multipliers={})
        learns[kind] = has_spread(task, failed)
    assert learns == {Distill: True, GRPO: False}


def test_the_scheduler_sees_a_teacher_s_task_as_one_that_learns(tmp_path):
    failing = "{type: distill, teacher: actor, dataset: digit.jsonl, rewards: [rewards.py:fails]}"
    write_run(tmp_path, f"{COPY}  taught: {failing}\n", num_rows=40)
    with (tmp_path / "rewards.py").open("a") as file:
        file.write("\n\ndef fails(response):\n    return 0.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        train(run_config(tmp_path, "out", 1, **SMALL))
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    (step,) = [row for row in map(json.loads, lines) if "train/loss" in row]
    assert step["task/taught/informative_rate"] == 1.0
    assert "task/copy/headroom" in step
    assert "task/taught/headroom" not in step, "what equal rewards say would hold it back"


def test_a_renamed_task_goes_on_from_its_buffer():
    def scored(task, draw):
        prompt = Prompt(task=task, prompt_id=f"{task}/{draw}", draw=draw, row={}, text="", prompt_ids=[1])
        return Scored(rollout=Rollout(prompt=prompt, sample=0, response_ids=[2]), reward=float(draw % 2))

    first, renamed = (RewardConditioned(RewardConditioned.Config()) for _ in "ab")
    for algorithm in (first, renamed):
        algorithm.bind([40, 41, 42, 43, 44])
    first.select([scored("old", draw) for draw in range(8)])
    renamed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    drawn = [sample.task for _ in range(3) for sample in renamed.select([scored("new", 8), scored("new", 9)])]
    assert drawn == ["new"] * len(drawn)


def test_a_run_that_fails_says_why_in_its_records_until_it_goes_on(tmp_path):
    write_run(tmp_path, COPY.replace("starts_right", "breaks"), num_rows=40)
    good = "\n\ndef breaks(response):\n    return 1.0\n"
    with (tmp_path / "rewards.py").open("a") as file:
        file.write(good.replace("return 1.0", "raise OSError('the server is gone: http://me:pa55@host/')"))
    for steps in (2, 2):
        with pytest.raises(RewardError, match="the server is gone"):
            train(run_config(tmp_path, "out", steps, **SMALL))
        events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
        (failed,) = [e for e in events if (e["source"], e["kind"]) == ("run", "failed")]
        assert "the server is gone" in failed["reason"]
        assert "pa55" not in failed["reason"]


def test_a_key_of_a_reward_that_an_older_version_did_not_record_is_no_change(tmp_path):
    write_run(tmp_path, COPY, num_rows=40)
    train(run_config(tmp_path, "out", 2, **SMALL))
    record = tmp_path / "out/config.yaml"
    text = record.read_text()
    assert text.count("      range: null\n") == 1
    record.write_text(text.replace("      range: null\n", ""))
    for steps in (2, 3):
        train(run_config(tmp_path, "out", steps, **SMALL))
    (tmp_path / "tasks.yaml").write_text(SCALED)
    trainer = train(run_config(tmp_path, "out", 4, **SMALL))
    assert [(e.step, e.kind) for e in trainer.events if e.kind == "changed"] == [(3, "changed")]
    told = [line for line in lines(tmp_path / "out", "events.jsonl") if '"changed"' in line]
    assert len(told) == 1, "the change to another weight alone"


def test_a_warning_of_a_setting_that_a_resume_has_changed_is_told_once(tmp_path):
    def told(steps):
        trainer = train(run_config(tmp_path, "out", steps, **SMALL))
        return [event.step for event in trainer.events if "its system message is not used" in event.reason]

    write_run(tmp_path, COPY, num_rows=40)
    assert told(2) == []
    (tmp_path / "tasks.yaml").write_text(COPY.replace("]}", "], system: be brief}"))
    assert told(4) == [2]
    assert told(6) == []


def test_tasks_that_come_and_go_at_a_resume_are_told(tmp_path):
    write_run(tmp_path, COPY + DIGIT, num_rows=40)
    train(run_config(tmp_path, "out", 2, **SMALL))
    write_run(tmp_path, COPY + DIGIT.replace("digit:", "number:"), num_rows=40)
    with Trainer.from_config(run_config(tmp_path, "out", 3, **SMALL)) as resumed:
        resumed.train_step()
        (changed,) = [event for event in resumed.events if event.kind == "changed"]
    assert "tasks: ['copy', 'digit'] -> ['copy', 'number']" in changed.reason


def test_a_resume_tells_of_keys_that_the_user_has_added_to_a_mapping(tmp_path):
    write_run(tmp_path, COPY, num_rows=40)
    rows = [json.loads(line) | {"kind": "x"} for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = run_config(tmp_path, "out", 3, **SMALL)
    template = "{% for m in messages %}{{ m.content }}{{ end }}{% endfor %}"
    (tmp_path / "actor/chat_template.jinja").write_text(template)
    train(replace(config, max_steps=2))
    keys = "], select: {kind: x}, chat_template_kwargs: {end: '.'}}"
    (tmp_path / "tasks.yaml").write_text(COPY.replace("]}", keys))
    with Trainer.from_config(config) as resumed:
        resumed.train_step()
        (changed,) = [event.reason for event in resumed.events if event.kind == "changed"]
    for told in ("tasks.copy.select.kind: None -> 'x'", "tasks.copy.chat_template_kwargs.end: None -> '.'"):
        assert told in changed


def test_edited_plugin_files_are_told_while_the_run_goes_on_and_at_a_resume(tmp_path):
    write_run(tmp_path, COPY + DIGIT, num_rows=40)

    def told(steps, edits_at=None):
        trainer = Trainer.from_config(run_config(tmp_path, "out", steps, **SMALL))

        def edit(scored):
            if trainer.step == edits_at:
                with (tmp_path / "rewards.py").open("a") as file:
                    file.write("# edited\n")
            return scored

        trainer.insert_stage(Stage("edit", edit, consumes=Scored, produces=Scored), after="rewards")
        trainer.train()
        return [event.reason for event in trainer.events if event.kind == "changed"]

    (reason,) = told(2, edits_at=1)
    assert reason.startswith("edited while the run goes on: tasks.copy.rewards.starts_right (rewards.py), ")
    assert told(3) == []
    with (tmp_path / "rewards.py").open("a") as file:
        file.write("# edited again\n")
    assert told(3) == [], "a finished run makes no step with it"
    (reason,) = told(4)
    assert reason.startswith("resumed with other settings: code of tasks.copy.rewards.starts_right: ")


def test_an_edit_of_an_algorithm_policy_or_guard_is_told_at_a_resume(tmp_path):
    write_run(tmp_path, COPY.replace("grpo", "own.py:Own"), num_rows=40)
    (tmp_path / "own.py").write_text("from multitask_rl.algorithms.grpo import GRPO as Own\n")
    (tmp_path / "policy.py").write_text("from multitask_rl.curriculum.uniform import Uniform\n")
    (tmp_path / "calm.py").write_text("from run_builders import JudgesAllGood\n")

    def told(steps):
        scheduler = SchedulerConfig(policy=f"{tmp_path / 'policy.py'}:Uniform")
        guard = GuardConfig(plugin=f"{tmp_path / 'calm.py'}:JudgesAllGood")
        parts = {**SMALL, "scheduler": scheduler, "guard": guard}
        trainer = train(run_config(tmp_path, "out", steps, **parts))
        return [event.reason for event in trainer.events if event.kind == "changed"]

    assert told(2) == []
    for name in ("own", "policy", "calm"):
        with (tmp_path / f"{name}.py").open("a") as file:
            file.write("# edited\n")
    (reason,) = told(4)
    for place in ("tasks.copy.type", "scheduler.policy", "guard.plugin"):
        assert f"code of {place}: " in reason
    assert told(6) == []


def test_a_task_renamed_long_ago_keeps_the_prompts_that_it_is_judged_by(tmp_path):
    """``renamed_from`` may be left out once a checkpoint has the new name."""
    anchor = "  old: {type: anchor, dataset: digit.jsonl, rewards: [rewards.py:starts_right]}\n"
    write_run(tmp_path, COPY + anchor, num_rows=60)
    asked, solved = [], []
    for step, task in enumerate((anchor, anchor.replace("old: {", "new: {renamed_from: old, "), anchor), 1):
        name = "old" if step == 1 else "new"
        write_run(tmp_path, COPY + task.replace("old:", f"{name}:"), num_rows=60)
        trainer = train(run_config(tmp_path, "out", 2 * step, **SMALL))
        asked.append([row["id"] for row in trainer.tasks[name].eval_rows])
        solved.append((trainer.tasks[name].anchor.measured, trainer.tasks[name].anchor.solved))
    assert asked[0] == asked[1] == asked[2]
    assert solved[0] == solved[1] == solved[2], "what was solved at first"
    assert len(asked[0]) == 6


@pytest.mark.parametrize(
    "names", [("digit", "number, from digit", "number"), ("digit", "one, from digit", "two, from one")]
)
def test_a_rollback_past_a_renaming_keeps_the_state_of_the_task(tmp_path, names):
    """``renamed_from`` is left out once a checkpoint has the new name, or names the name in between."""
    sizes = {**SMALL, "checkpoint": CheckpointConfig(every=2, keep=9)}
    for steps, text in zip((2, 4, 6), names, strict=True):
        name, _, former = text.partition(", from ")
        renamed = f"{name}: {{renamed_from: '{former}', "
        write_run(tmp_path, COPY + DIGIT.replace("digit: {", renamed), num_rows=60)
        with Trainer.from_config(run_config(tmp_path, "out", steps, **sizes)) as trainer:
            trainer.train()
            task, state = trainer.tasks[name], trainer.parts.state
            checkpoint = trainer.parts.store.checkpoints.load(tmp_path / "out/checkpoints/step_00000002")
            rows = task.eval_rows
            before = checkpoint.state["scheduler"]["policy_state"]["traces"]["digit"]
            state.restore(checkpoint, without=["scorer", "guard"])
            assert task.stream.state_dict() == checkpoint.state["tasks"]["digit"]["stream"]
            assert task.eval_rows == rows
            assert state.state_dict()["scheduler"]["policy_state"]["traces"][name] == before
            assert state.unmeasured == []


def test_a_new_task_does_not_take_the_name_under_which_the_records_know_another(tmp_path):
    write_run(tmp_path, COPY + DIGIT, num_rows=60)
    renamed = DIGIT.replace("digit: {", "number: {renamed_from: digit, ")
    for steps, tasks in ((2, COPY + DIGIT), (4, COPY + renamed)):
        (tmp_path / "tasks.yaml").write_text(tasks)
        train(run_config(tmp_path, "out", steps, **SMALL))
    both = COPY + DIGIT.replace("digit:", "number:") + DIGIT.replace("digit.jsonl", "copy.jsonl")
    (tmp_path / "tasks.yaml").write_text(both)
    with pytest.raises(ConfigError, match=r"tasks\.digit: .* task 'number'; .* another name"):
        train(run_config(tmp_path, "out", 6, **SMALL))
    (tmp_path / "tasks.yaml").write_text(COPY + DIGIT.replace("digit: {", "digit: {renamed_from: number, "))
    train(run_config(tmp_path, "out", 6, **SMALL))
    assert list(read_run(tmp_path / "out").evaluations) == ["copy", "digit"], "its own former name"


def test_a_renamed_from_that_is_left_out_is_no_changed_setting(tmp_path):
    write_run(tmp_path, COPY + DIGIT, num_rows=60)
    for steps, name in ((2, "digit: {"), (4, "number: {renamed_from: digit, "), (4, "number: {")):
        (tmp_path / "tasks.yaml").write_text(COPY + DIGIT.replace("digit: {", name))
        trainer = train(run_config(tmp_path, "out", steps, **SMALL))
    assert trainer.events == []


def test_another_definition_of_a_reward_begins_anew_wherever_its_values_are_read(tmp_path, capsys):
    """A resume scales the reward: no fall for the guard, nothing for ``report`` or ``compare``."""
    anchor = "  kept: {type: anchor, dataset: digit.jsonl, rewards: [rewards.py:is_short], solved_at: 0.1}\n"
    write_run(tmp_path, COPY + anchor, num_rows=60)
    watched = GuardConfig(threshold_delta=-0.02, guard_config={"warmup": 1, "confirm": False})
    train(run_config(tmp_path, "out", 6, guard=watched, **SMALL))
    (tmp_path / "tasks.yaml").write_text(SCALED + anchor.replace("is_short]", "starts_right]"))
    twice = [run_config(tmp_path, "out", steps, guard=watched, **SMALL) for steps in (7, 12)]
    with Trainer.from_config(twice[0]) as stopped:  # killed, as it were, before the next checkpoint
        stopped.train_step()
    trainer = train(twice[1])
    assert trainer.step == 12
    assert dict(trainer.history)[8]["kept"].metrics["turnover"].mean == 0.0, "solved by another reward before"
    events = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    assert [(e["step"], e["kind"]) for e in events if e["kind"] in ("changed", "redefined")] == [
        (6, "changed"),
        (8, "redefined"),
        (8, "redefined"),
    ]
    assert not [e for e in events if e["source"] == "guard" and e["kind"] in ("rollback", "stop", "warn")]
    capsys.readouterr()
    assert main(["report", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "copy: not compared with the evaluations at steps 0, 2, 4," in shown
    assert "of the same definition" in shown
    train(run_config(tmp_path, "new", 2, **SMALL))
    (tmp_path / "tasks.yaml").write_text(COPY)
    train(run_config(tmp_path, "old", 2, **SMALL))
    assert main(["compare", *(str(tmp_path / name) for name in ("old", "new"))]) == 2
    assert "has not one definition of 'reward' in" in capsys.readouterr().err


def test_the_rates_of_two_rules_are_not_compared(tmp_path, capsys, caplog):
    """A resume gives a constraint another rule; the reward stays the same."""
    judged = COPY.replace("]}", "], constraints: [{plugin: rewards.py:RULE, name: rule, limit: 0.5, %s}]}")
    judged %= "mode: lagrangian"
    write_run(tmp_path, judged.replace("RULE", "has_no_digit"), num_rows=60)
    rows = []
    for rule, steps in (("has_no_digit", 2), ("is_short", 4), ("is_short", 6)):
        (tmp_path / "tasks.yaml").write_text(judged.replace("RULE", rule))
        train(run_config(tmp_path, "out", steps, **SMALL))
        capsys.readouterr()
        assert main(["report", str(tmp_path / "out"), "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["result"]
        rows += shown["constraints"]
        told = caplog.text.count("the constraint 'rule' is of another rule than before")
        assert told == (steps > 2), "its multiplier starts fresh once"
    history = [json.loads(line) for line in lines(tmp_path / "out", "evaluations.jsonl")]
    rates = {e["step"]: e["metrics"]["constraint/rule/violation_rate"]["mean"] for e in history}
    assert [row["violation_rate"] for row in rows] == [rates[2], rates[4], rates[6]]
    assert [row["before"] for row in rows] == [rates[0], None, rates[4]]
    assert shown["tasks"]["copy"]["steps"] == [0, 6], "the reward is the same"


FOREIGN = (("trl:", "a/r.py:f"), ("trl:", "b/r.py:f"), ("trl:", "a/r.py:g"), ("", "a/r.py:f"))


def test_of_a_path_in_a_definition_only_the_name_counts_and_of_a_named_metric_only_its_reward(tmp_path):
    def found(
        plugin="rm_hf",
        primary="reward",
        weight=1.0,
        more=(),
        order=1,
        constraints=(),
        task=MappingProxyType({}),
        **config,
    ):
        rewards = [
            {"plugin": plugin, "name": "rm_hf", "weight": weight, "config": {"model": "/a b/rm", **config}},
            {"plugin": "length", "weight": 0.1},
            *more,
        ]
        spec = {"rewards": rewards[::order], "primary_metric": primary, "constraints": list(constraints)}
        return definitions(parse_tasks({"tasks": {"t": {**spec, **task}}})["t"])[""]

    assert found() == found(model="/else, where/rm")
    assert found() != found(model="/a b/other")
    assert found(model="a/judge") != found(model="b/judge"), "ids of a hub"
    assert found(model="http://a/v1") != found(model="http://b/v1")
    assert found() != found(weight=0.5)
    assert found() == found(order=-1)
    measured = {"plugin": "over_refusal", "mode": "penalty", "weight": 0.0}
    assert found() == found(constraints=[measured]) != found(constraints=[{**measured, "weight": 0.1}])
    assert found() == found(constraints=[{**measured, "mode": "reject"}]), "it changes no reward"
    assert found() == found(more=[{"plugin": "format", "weight": 0, "config": {"pattern": "a"}}]), (
        "a metric only"
    )
    assert found(primary="rm_hf") == found(primary="rm_hf", weight=0.5)
    assert found(primary="rm_hf") != found(primary="rm_hf", batch_size=3)
    taught = {"type": "distill", "teacher": "/runs/a/checkpoints/step_1/actor"}
    assert found(task=taught) == found(task={**taught, "teacher": "/runs/b/checkpoints/step_1/actor"})

    rows = tmp_path / "rows.jsonl"
    rows.touch()

    def unscored(**keys):
        return definitions(parse_tasks({"tasks": {"t": {"dataset": str(rows), **keys}}})["t"])[""]

    def taught_by(teacher):
        return unscored(type="distill", teacher=teacher)

    assert taught_by("/runs/a/checkpoints/step_1/actor") != taught_by("/runs/b/checkpoints/step_1/actor")
    assert taught_by("/here/teacher") == taught_by("/moved/to/there/teacher")
    assert found(threshold=1) == found(threshold=1.0)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text("def f(completions, **_): ...\n\n\ng = f\n")
    foreign = [found(f"{kind}{tmp_path}/{file}") for kind, file in FOREIGN]
    assert foreign[0] == foreign[1]
    assert len(set(foreign)) == 3

    def solved(**keys):
        spec = {"rewards": ["length"], "dataset": str(rows), **keys}
        return definitions(parse_tasks({"tasks": {"t": spec}})["t"])["solved"]

    assert len({solved(), solved(solved_at=0.5), solved(higher_is_better=False)}) == 3
    reject = {"plugin": "over_refusal", "mode": "reject"}
    other = {**reject, "plugin": "tool_use"}
    assert unscored(constraints=[reject]) != unscored(constraints=[other]), "the reward is 1 - cost"
    assert unscored(constraints=[reject]) != unscored(constraints=[{**reject, "max_attempts": 1}])


def test_a_prompt_at_the_limit_still_fits_with_its_control_token(tmp_path):
    """``max_prompt_tokens`` is of the prompt: training conditions it once the buffer has responses."""
    write_run(tmp_path, COPY + DIGIT.replace("grpo", "reward_conditioned"))
    with Trainer.from_config(run_config(tmp_path, "plain", 3)) as trainer:
        (limit,) = {len(p.prompt_ids) for p in draw_prompts(trainer.tasks, {"copy": 12}, trainer.actor)}
    rollout = RolloutConfig(max_new_tokens=4, max_prompt_tokens=limit)
    trainer = train(run_config(tmp_path, "out", 3, rollout=rollout, **SMALL))
    assert trainer.tasks["digit"].num_overlong == 0
    (prompt,) = draw_prompts(trainer.tasks, {"digit": 1}, trainer.actor)
    assert prompt.is_conditioned
    assert len(prompt.prompt_ids) == limit + 1
    episodes = ECHO.replace("grpo", "reward_conditioned")
    (tmp_path / "worlds.py").write_text(ECHO_WORLD)
    (tmp_path / "tasks.yaml").write_text((tmp_path / "tasks.yaml").read_text() + episodes)
    train(run_config(tmp_path, "episodes", 3, rollout=rollout, **SMALL))
    drawn = [row for row in lines(tmp_path / "episodes", "rollouts.jsonl") if '"task": "echo"' in row]
    assert drawn
    assert not [row for row in drawn if json.loads(row)["failure"]]
    shorter = replace(rollout, max_prompt_tokens=limit - 1)
    with pytest.raises(DataError, match=f"longer than {limit - 1} tokens"):
        train(run_config(tmp_path, "short", 3, rollout=shorter, **SMALL))


REDEFINED = """
  plain: {dataset: digit.jsonl, rewards: [{plugin: rewards.py:starts_right, weight: WEIGHT}]}
  pools:
    dataset: digit.jsonl
    rewards: [{plugin: rewards.py:starts_right, weight: WEIGHT}]
    curriculum: {by: pass_rate, pools: 2}
  quark:
    type: reward_conditioned
    dataset: digit.jsonl
    rewards: [{plugin: rewards.py:is_short, weight: WEIGHT}]
"""


def test_values_on_the_scale_of_other_rewards_are_dropped_at_a_resume(tmp_path):
    def tasks(weight, steps):
        write_run(tmp_path, COPY + REDEFINED.replace("WEIGHT", weight), num_rows=60)
        config = run_config(tmp_path, "out", steps, batch=BatchConfig(prompts_per_step=8, group_size=4))
        return Trainer.from_config(replace(config, checkpoint=CheckpointConfig(every=2)))

    def state(trainer):
        own = {name: task.state_dict() for name, task in trainer.tasks.items()}
        levels = trainer.scheduler.state_dict()["policy_state"]["traces"]
        return {name: {**own[name], "steps": levels[name]["steps"]} for name in own}

    with tasks("100", 4) as first:
        first.train()
        before, owed = state(first), dict(first.scheduler.carry)
    assert all(own["steps"] == 4 for own in before.values())
    assert before["quark"]["algorithm"]["buffer"]
    assert before["pools"]["stream"]["curriculum"]["rates"]
    with tasks("1", 6) as resumed:
        resumed._open()
        assert resumed.scheduler.carry == owed, "prompts have no scale"
        assert any(owed.values())
        resumed.train()
        after = state(resumed)
    assert after["copy"]["refused_values"] == before["copy"]["refused_values"], "its reward is the same"
    assert after["copy"]["steps"] == 6
    for name in ("plain", "pools", "quark"):
        assert after[name]["steps"] == 2
    assert max(sample["reward"] for sample in after["quark"]["algorithm"]["buffer"]) <= 1.0
    assert max(after["pools"]["stream"]["curriculum"]["rates"].values()) <= 1.0
    for name in ("plain", "pools"):
        shown = resumed.scheduler.state_dict()["policy_state"]["traces"][name]["shown"]
        assert max(shown["highest"]) <= 1.0


def test_a_level_is_on_the_scale_of_the_range_that_a_resume_gives_the_reward(tmp_path):
    ranged = "  ranged: {dataset: digit.jsonl, rewards: [{plugin: rewards.py:is_short, range: [0, %s]}]}\n"
    levels, solved = [], set()
    for steps, high in ((2, 100), (4, 1)):
        write_run(tmp_path, COPY + ranged % high, num_rows=60)
        trainer = train(run_config(tmp_path, "out", steps, **SMALL))
        levels.append(trainer.scheduler.metrics()["task/ranged/level"])
        solved.add(definitions(trainer.plan.specs["ranged"])["solved"])
    assert levels[0] < 0.01 < 0.1 < levels[1]
    assert len(solved) == 2, "the best end of the range is what solves a prompt"


MEASURED = {
    "reward/m": "rewards: [rewards.py:starts_right, {plugin: rewards.py:PLUGIN, name: m, weight: 0}]",
    "violation_rate": "rewards: [rewards.py:starts_right], "
    "constraints: [{plugin: rewards.py:PLUGIN, mode: penalty, weight: 0}]",
}


@pytest.mark.parametrize("metric", MEASURED)
def test_the_level_of_a_metric_that_is_no_reward_starts_fresh_with_its_definition(tmp_path, metric):
    """``scheduler.metric_key`` names what has no weight; the task's reward stays the same."""
    measured = COPY.replace("rewards: [rewards.py:starts_right]", MEASURED[metric])
    assert measured != COPY
    steps = []
    for plugin, most in (("is_short", 2), ("is_short", 4), ("starts_right", 6)):
        write_run(tmp_path, measured.replace("PLUGIN", plugin), num_rows=60)
        watched = SchedulerConfig(metric_key=metric)
        trainer = train(run_config(tmp_path, "out", most, scheduler=watched, **SMALL))
        steps.append(trainer.scheduler.state_dict()["policy_state"]["traces"]["copy"]["steps"])
    assert steps == [2, 4, 2]


def test_weights_given_with_the_rows_are_of_trained_tasks_and_missing_ones_are_filled(tmp_path):
    more = DIGIT.replace("digit: {", "more: {")
    write_run(tmp_path, COPY + more + DIGIT.replace("}\n", ", evaluation_only: true}\n"))
    rows = [
        {"task": t, "prompt": "a=", "reference": "a"} for t in ("copy", "more", "digit") for _ in range(9)
    ]
    with pytest.raises(ConfigError, match="task_weights names 'digit', which is only evaluated"):
        Trainer(dataloader=get_dataloader(rows, {"digit": 1.0}), config=run_config(tmp_path, "no", 1))
    with Trainer(
        dataloader=get_dataloader(rows, {"copy": 3.0}), config=run_config(tmp_path, "out", 1)
    ) as trainer:
        assert trainer.scheduler.weights() == {"copy": 0.5, "more": 0.5}
        trainer.train()
    (event,) = [json.loads(e) for e in lines(tmp_path / "out", "events.jsonl") if '"weights"' in e][:1]
    assert event["data"]["given"] == {"copy": 3.0}
    assert event["data"]["filled"] == ["more"]


MEASURED_ALIKE = """
tasks:
  copy: {type: TYPE, dataset: copy.jsonl, eval_dataset: HELD.jsonl, rewards: [rewards.py:fills_half]PROMPT}
"""
OTHER_EVALUATIONS = {
    "a control token": {"TYPE": "reward_conditioned"},
    "shorter responses": {"rollout": RolloutConfig(max_new_tokens=1)},
    "greedy": {"eval": EvalConfig(every=1, num_prompts=40, temperature=0.0)},
    "other rows": {"HELD": "digit"},
    "other prompts": {"PROMPT": ", prompt: 'b{prompt}'"},
    "cut prompts": {"rollout": RolloutConfig(max_new_tokens=4, max_prompt_tokens=6)},
}


def measured_alike(directory, steps, *, HELD="copy", PROMPT="", TYPE="grpo", **changed):
    tasks = MEASURED_ALIKE.replace("HELD", HELD).replace("PROMPT", PROMPT).replace("TYPE", TYPE)
    write_run(directory, tasks, num_rows=60)
    short = lines(directory, "copy.jsonl")
    long = [row.replace('"prompt": "', '"prompt": "bbbb') for row in short[::2]]
    (directory / "copy.jsonl").write_text("\n".join([*long, *short[1::2]]))
    with (directory / "rewards.py").open("a") as file:
        file.write(
            "\n\n@with_traits(isolate=False, low=0.0, high=1.0)\n"
            "def fills_half(response, reference):\n    return float(len(response) >= 3)\n"
        )
    small = {
        "batch": BatchConfig(prompts_per_step=4, group_size=2),
        "eval": EvalConfig(every=1, num_prompts=40),
        "checkpoint": CheckpointConfig(every=1, keep=3),
        "optimizer": OptimizerConfig(learning_rate=1e-9),
    }
    train(run_config(directory, "out", steps, **{**small, **changed}))


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory):
    """A directory with ``out``, which holds six steps, and a copy of it."""
    directory = tmp_path_factory.mktemp("measured")
    measured_alike(directory, 6)
    shutil.copytree(directory / "out", directory / "kept")
    return directory


@pytest.mark.parametrize("change", OTHER_EVALUATIONS)
def test_evaluations_made_in_another_way_are_no_fall_of_the_weights(six_steps, change):
    shutil.rmtree(six_steps / "out")
    shutil.copytree(six_steps / "kept", six_steps / "out")
    measured_alike(six_steps, 12, **OTHER_EVALUATIONS[change])
    told = [json.loads(line) for line in lines(six_steps / "out", "events.jsonl")]
    said = [e for e in told if e["source"] == "guard" and not e["reason"].startswith("responses went from")]
    assert [(e["step"], e["kind"]) for e in said] == [(7, "redefined")]
    row = summarise_run(read_run(six_steps / "out"))["tasks"]["copy"]
    assert (row["steps"], row["left_out"]) == ([6, 12], list(range(6))), "measured anew at the resume"


def test_the_kl_to_a_teacher_does_not_depend_on_the_temperature_of_evaluations(tmp_path):
    """It is measured under the sampling of training: another temperature redefines nothing."""
    write_run(tmp_path, "\ntasks:\n  copy: {type: distill, dataset: copy.jsonl, teacher: actor}\n")
    first, second = (
        Trainer.from_config(
            run_config(tmp_path, f"out{t}", 1, eval=EvalConfig(num_prompts=6, temperature=t))
        ).evaluate()["copy"]
        for t in (1.0, 0.5)
    )
    assert list(first.values) == list(second.values)
    assert measured(first) == measured(second)


def test_two_ways_to_treat_rejected_responses_are_two_definitions(tmp_path):
    """``constrained_decoding`` credits 0 for them, ``grpo`` the bad end of the reward's range."""
    (tmp_path / "rows.jsonl").touch()

    def definition(kind, *constraints):
        spec = {"type": kind, "dataset": str(tmp_path / "rows.jsonl"), "rewards": ["length"]}
        return definitions(parse_tasks({"tasks": {"t": {**spec, "constraints": list(constraints)}}})["t"])[""]

    reject = {"plugin": "tool_use", "mode": "reject"}
    assert (
        definition("grpo", reject) == definition("rloo", reject) != definition("constrained_decoding", reject)
    )
    assert definition("grpo") == definition("constrained_decoding"), "nothing is rejected"


def test_a_renamed_anchor_answers_its_prompts_with_the_same_seeds(tmp_path):
    anchor = (
        "  %s: {type: anchor, dataset: digit.jsonl, rewards: [rewards.py:has_no_digit], solved_at: 1.0%s}\n"
    )
    still = {
        **SMALL,
        "optimizer": OptimizerConfig(learning_rate=1e-9),
        "eval": EvalConfig(every=1, num_prompts=40),
    }
    write_run(tmp_path, COPY + anchor % ("kept", ""), num_rows=400)
    first = train(run_config(tmp_path, "out", 2, **still))
    (tmp_path / "tasks.yaml").write_text(COPY + anchor % ("held", ", renamed_from: kept"))
    second = train(run_config(tmp_path, "out", 3, **still, seed=9))
    before, after = first.history[-1][1]["kept"], second.history[-1][1]["held"]
    assert list(before.values) == list(after.values)
    assert len(set(before.values)) > 1
    assert after.metrics["turnover"].mean == 0.0


def test_the_best_checkpoint_stays_the_best_when_its_task_is_renamed(tmp_path):
    scores = {0: 0.1, 2: 0.9, 4: 0.2, 6: 0.3, 8: 0.3, 10: 0.3}

    def run(steps):
        with Trainer.from_config(run_config(tmp_path, "out", steps, **SMALL)) as trainer:
            evaluate = trainer._open().evaluator.evaluate

            def scored(step, **keywords):
                found = evaluate(step, **keywords)
                for evaluation in found.values():
                    evaluation.primary = replace(evaluation.primary, mean=scores[step])
                return found

            trainer.parts.evaluator.evaluate = scored
            trainer.train()
            return trainer.parts.store.checkpoints.best()

    write_run(tmp_path, COPY, num_rows=60)
    assert run(4) == 2
    for steps, name in (
        (6, "again: {renamed_from: copy, "),
        (8, "again: {"),
        (10, "third: {renamed_from: again, "),
    ):
        (tmp_path / "tasks.yaml").write_text(COPY.replace("copy: {", name))
        assert run(steps) == 2
    found = read_run(tmp_path / "out")
    assert list(found.evaluations) == ["third"]
    assert [stage for stage in found.stages if stage.startswith("rewards/")] == ["rewards/third"]
    named = found.config["tasks"]["third"]
    assert named["former_names"] == ["again", "copy"]
    always = {"tasks": {"third": {key: named[key] for key in named if key != "former_names"}}}
    assert config_difference(found.config, found.config | always) == {}, "its names are no setting"
    assert recorded_config(tmp_path / "out").tasks.keys() == {"third"}


def test_a_task_that_was_only_evaluated_for_a_while_goes_on_in_its_data(tmp_path):
    write_run(tmp_path, COPY + DIGIT, num_rows=60)
    train(run_config(tmp_path, "out", 2, **SMALL))
    (tmp_path / "tasks.yaml").write_text(COPY + DIGIT.replace("digit: {", "digit: {evaluation_only: true, "))
    train(run_config(tmp_path, "out", 4, **SMALL))
    (tmp_path / "tasks.yaml").write_text(COPY + DIGIT)
    train(run_config(tmp_path, "out", 6, **SMALL))
    rows = [json.loads(line) for line in (tmp_path / "out/rollouts.jsonl").read_text().splitlines()]
    drawn = {(row["step"], row["draw"]) for row in rows if row["task"] == "digit"}
    assert {step for step, _ in drawn} == {1, 2, 5, 6}
    assert sorted(draw for _, draw in drawn) == list(range(len(drawn))), "no row twice"


def test_a_resume_measures_what_is_new_before_it_trains_on_it(tmp_path):
    def rows():
        found = map(json.loads, (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines())
        return [(row["task"], row["step"]) for row in found]

    def stop(_):
        raise KeyboardInterrupt

    write_run(tmp_path, COPY, num_rows=60)
    train(run_config(tmp_path, "out", 4, **SMALL))
    assert rows() == [("copy", step) for step in (0, 2, 4)]
    (tmp_path / "tasks.yaml").write_text(COPY + DIGIT)
    for _ in range(2):  # the second time what the first one has measured is cut, and measured again
        resumed = Trainer.from_config(run_config(tmp_path, "out", 6, **SMALL))
        resumed.insert_stage(Stage("stop", stop, consumes=Scored, produces=Scored), after="rewards")
        with pytest.raises(KeyboardInterrupt):
            resumed.train()
        assert rows()[3:] == [("digit", 4)]
    trainer = train(run_config(tmp_path, "out", 6, **SMALL))
    assert rows()[3:] == [("digit", 4), ("copy", 6), ("digit", 6)]
    assert [step for step, _ in trainer.history] == [6], "no controller has read it"
    (tmp_path / "tasks.yaml").write_text(COPY.replace("starts_right", "is_short") + DIGIT)
    train(run_config(tmp_path, "out", 8, **SMALL))
    assert rows()[6:] == [("copy", 6), ("copy", 8), ("digit", 8)]


@pytest.mark.parametrize("change", OTHER_EVALUATIONS)
def test_a_resume_measures_what_it_evaluates_in_another_way_before_it_trains_on_it(tmp_path, change):
    six = {"eval": EvalConfig(every=2, num_prompts=40), "checkpoint": CheckpointConfig(every=1)}
    measured_alike(tmp_path, 1, **six)
    changed = {**six, **OTHER_EVALUATIONS[change]}
    if "eval" in OTHER_EVALUATIONS[change]:
        changed["eval"] = replace(OTHER_EVALUATIONS[change]["eval"], every=2)
    measured_alike(tmp_path, 3, **changed)
    measured_alike(tmp_path, 5, **changed)  # nothing has changed
    rows = [json.loads(line) for line in lines(tmp_path / "out", "evaluations.jsonl")]
    assert [row["step"] for row in rows] == [0, 1, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_rollback_past_a_resume_measures_the_new_task_at_its_target(tmp_path, is_interrupted):
    """So does a resume after an interruption behind the rollback, whose checkpoint has the new task."""

    class Back(Guard):
        is_done = False

        def state_dict(self):
            return {"is_done": self.is_done}

        def load_state_dict(self, state, renamed=None):
            self.is_done = state["is_done"]

        def observe(self, step, evaluations, confirm=None):
            if step == 6 and not self.is_done:
                self.is_done = True
                return GuardDecision(action=GuardAction.rollback, reason="planted", task="copy")
            return GuardDecision(judged_good=step <= 2)

    write_run(tmp_path, COPY, num_rows=60)
    first = Trainer.from_config(run_config(tmp_path, "out", 4, **SMALL))
    first.add_guard(Back())
    first.train()
    (tmp_path / "tasks.yaml").write_text(COPY + DIGIT)
    second = Trainer.from_config(run_config(tmp_path, "out", 8, **SMALL))
    second.add_guard(guard := Back())

    def stop(items):
        if guard.is_done:
            raise KeyboardInterrupt
        return items

    if is_interrupted:
        second.insert_stage(Stage("stop", stop, consumes=Scored, produces=Scored), after="rewards")
        with pytest.raises(KeyboardInterrupt):
            second.train()
        second = Trainer.from_config(run_config(tmp_path, "out", 8, **SMALL))
        second.add_guard(Back())
    second.train()
    found = map(json.loads, (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines())
    steps = [row["step"] for row in found if row["task"] == "digit"]
    assert steps[:3] == [4, 6, 2], "at the resume, before the rollback, at its target"
    assert list(read_run(tmp_path / "out").evaluations["digit"][0].values)


def test_a_renamed_task_keeps_the_rows_that_carry_its_former_name(tmp_path):
    write_run(tmp_path, COPY, num_rows=60)
    rows = [
        json.dumps({**json.loads(line), "task": task})
        for task in ("copy", "digit")
        for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(rows))
    tasks = (COPY + DIGIT).replace("copy.jsonl", "all.jsonl").replace("digit.jsonl", "all.jsonl")
    (tmp_path / "tasks.yaml").write_text(tasks)
    first = train(run_config(tmp_path, "out", 2, **SMALL)).tasks["digit"]
    (tmp_path / "tasks.yaml").write_text(tasks.replace("digit: {", "number: {renamed_from: digit, "))
    second = train(run_config(tmp_path, "out", 4, **SMALL)).tasks["number"]
    assert second.eval_rows == first.eval_rows


SPEAKS_FIRST = """
import os
from multitask_rl.environments.base import StepResult


class Speaks:
    def reset(self, row):
        if row["id"] == ROW and os.path.exists("PLACE/is_down"):
            raise ConnectionError("the server is gone")
        return [{"role": "user", "content": "b"}]

    def step(self, message):
        return StepResult(done=True, reward=float(len(message["content"]) > 2))

    def close(self):
        pass
"""


def test_an_evaluation_with_a_world_that_fails_is_of_the_same_prompts(tmp_path):
    task = "  says: {type: grpo, dataset: digit.jsonl, environment: 'worlds.py:Speaks', max_turns: 2}\n"
    write_run(tmp_path, f"tasks:\n{task}", num_rows=400)
    small = {**SMALL, "scoring": ScoringConfig(num_workers=1, max_failure_rate=0.9)}
    (tmp_path / "worlds.py").write_text(SPEAKS_FIRST)
    with Trainer.from_config(run_config(tmp_path, "rows", 2, **small)) as trainer:
        row = trainer.tasks["says"].eval_rows[0]["id"]
    (tmp_path / "worlds.py").write_text(
        SPEAKS_FIRST.replace("ROW", repr(row)).replace("PLACE", str(tmp_path))
    )
    with Trainer.from_config(run_config(tmp_path, "out", 2, **small)) as trainer:
        evaluator = trainer._open().evaluator
        first = evaluator.evaluate(0)["says"]
        (tmp_path / "is_down").touch()
        second = evaluator.evaluate(0)["says"]
    assert (first.num_failed, second.num_failed) == (0, 1)
    assert first.prompts == second.prompts


def test_a_rollback_to_a_fixed_reference_undoes_what_an_averaged_one_followed(tmp_path):
    held = COPY.replace("rewards:", "kl: {coefficient: 0.01}, rewards:")
    write_run(tmp_path, held, num_rows=40)
    train(run_config(tmp_path, "out", 2, **SMALL))
    config = run_config(tmp_path, "out", 12, **SMALL, optimizer=OptimizerConfig(learning_rate=1e-2))
    with Trainer.from_config(replace(config, model=replace(config.model, reference_decay=0.5))) as trainer:
        opened = trainer._open()
        reference = trainer.parts.learner.backend.runner.reference
        first = [parameter.clone() for parameter in reference.parameters()]

        def has_moved():
            return any(not a.equal(b) for a, b in zip(first, reference.parameters(), strict=True))

        for _ in range(3):
            trainer.train_step()
        assert has_moved()
        checkpoints = opened.store.checkpoints
        opened.experience.clear()
        opened.state.restore(checkpoints.load(checkpoints.path(2)), without=["scorer", "guard"])
        assert not has_moved()


def test_groups_dropped_as_too_old_are_given_back_without_refill_too(tmp_path):
    paced = """
tasks:
  fast: {type: grpo, dataset: copy.jsonl, rewards: [slow.py:fast]}
  slow: {type: grpo, dataset: copy.jsonl, rewards: [slow.py:slow]}
"""
    write_run(tmp_path, paced, num_rows=60)
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from multitask_rl.scoring.shapes import with_traits\n"
        "GATE = Path(__file__).with_name('gate')\n\n\n"
        "@with_traits(isolate=False, low=0.0, high=1.0)\n"
        "def fast(response):\n    return (sum(map(ord, response)) % 97) / 97\n\n\n"
        "@with_traits(isolate=False, low=0.0, high=1.0, deterministic=False, timeout_s=250.0)\n"
        "def slow(response):\n"
        "    while not GATE.exists():\n        time.sleep(0.01)\n"
        "    return fast(response)\n"
    )
    batch = BatchConfig(prompts_per_step=8, group_size=2, refill_rounds=0, quorum=0.5)
    config = run_config(
        tmp_path,
        "out",
        12,
        batch=batch,
        rollout=RolloutConfig(max_new_tokens=4, max_staleness=1),
        eval=EvalConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        guard=GuardConfig(enabled=False),
        scheduler=SchedulerConfig(policy="static"),
        scoring=ScoringConfig(num_workers=1),
    )
    trainer = Trainer.from_config(config)
    requested, dropped = 0.0, 0.0
    while trainer.step < 12 and (requested <= 0.5 or dropped == 0.0):
        trainer.train_step()
        row = json.loads(lines(tmp_path / "out", "metrics.jsonl")[-1])
        requested = max(requested, row["task/slow/share_requested"])
        dropped += row["task/slow/dropped_stale"]
        if dropped:
            (tmp_path / "gate").touch()  # a step that owes groups may wait for some
    (tmp_path / "gate").touch()
    trainer.close()
    assert dropped > 0
    assert requested > 0.5


def test_the_distance_from_a_teacher_is_no_kl_to_the_reference(tmp_path):
    own = f"teacher: {tmp_path / 'actor'}, algorithm_config: {{exact: false}}"
    write_run(tmp_path, f"tasks:\n  s: {{type: distill, dataset: copy.jsonl, {own}}}\n", num_rows=60)
    config = run_config(tmp_path, "out", 1, **SMALL)
    train(replace(config, guard=GuardConfig(guard_config={"kl_budget": 0.5})))
    rows = [json.loads(line) for line in lines(tmp_path / "out", "metrics.jsonl")]
    (row,) = [row for row in rows if "task/s/teacher_kl" in row]
    assert "task/s/kl" not in row


def test_a_task_whose_responses_are_all_rejected_or_fail_is_told_to_be_starved(tmp_path):
    starving = """
tasks:
  good: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:is_short]}
  rejected:
    type: grpo
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    constraints: [{plugin: bad.py:always, mode: reject, max_attempts: 1}]
  failing: {type: grpo, dataset: copy.jsonl, rewards: [bad.py:fails]}
"""
    write_run(tmp_path, starving, num_rows=60)
    (tmp_path / "bad.py").write_text(
        "from pathlib import Path\n"
        "from multitask_rl.scoring.shapes import with_traits\n"
        "DOWN = Path(__file__).with_name('down')\n\n\n"
        "@with_traits(isolate=False, deterministic=False)\n"
        "def always(response):\n    return float(DOWN.exists())\n\n\n"
        "@with_traits(isolate=False, low=0.0, high=1.0, deterministic=False)\n"
        "def fails(response):\n"
        "    if DOWN.exists():\n        raise RuntimeError('down')\n"
        "    return float(len(response) % 2)\n"
    )
    settings = {
        "batch": BatchConfig(prompts_per_step=9, group_size=2),
        "eval": EvalConfig(every=1, num_prompts=6),
        "scoring": ScoringConfig(num_workers=1, max_failure_rate=1.0),
    }
    with Trainer.from_config(run_config(tmp_path, "out", 5, **settings)) as trainer:
        supervisor = trainer._open().supervisor
        for step in range(5):
            trainer.train_step()
            supervisor.inspect()
            if step == 1:
                (tmp_path / "down").touch()
    told = {event.task for event in trainer.events if event.kind == "starved"}
    assert told == {"rejected", "failing"}
