"""Runs with tasks of many turns beside tasks of one."""

import json
import os
import signal
import threading
import time
from collections import Counter

import psutil
import pytest
import torch

from multitask_rl.boundary.interrupts import stopping_on_signals
from multitask_rl.cli import main
from multitask_rl.config.run import BatchConfig, CheckpointConfig, EvalConfig, GuardConfig, RolloutConfig
from multitask_rl.tracking.jsonl import rollout_from_dict
from run_builders import (
    ECHO,
    ECHO_WORLD,
    TASKS,
    lines,
    run_config,
    train,
    undocumented,
    weights_hash,
    write_run,
)

WORLD = (
    ECHO_WORLD
    + """

NUMBERS = itertools.count()


class Waits:
    '''Notes what becomes of it. Some rows have no world; one world in five dies, wherever it is.'''

    def __init__(self, log, wait=0.0, dying=0.0):
        self.log, self.wait, self.name = log, wait, f"{os.getpid()}/{next(NUMBERS)}"
        chance = random.Random()
        self.death = chance.choice(["exit", "raise", "hang"]) if chance.random() < dying else ""
        self.call = chance.randrange(3)
        self.dying = dying
        self.note("built")

    def reset(self, row):
        self.turn = 0
        if self.dying and row["id"] % 4 == 0:
            raise OSError("this row has no world")
        self.live()
        return []

    def step(self, message):
        self.turn += 1
        self.live()
        time.sleep(self.wait)
        reply = {"role": "user", "content": "a"}
        return StepResult(messages=[reply], done=self.turn == 2, reward=1.0)

    def live(self):
        if self.death and self.turn == self.call:
            self.note(self.death)
            if self.death == "exit":
                os._exit(9)
            if self.death == "hang":
                time.sleep(1000)
            raise OSError("dead")

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what} {self.name}\\n")

    def close(self):
        self.note("closed")


class Counter:
    '''Tools beside a text game's.'''

    def reset(self, prompt, **row):
        self.calls = 0
        return " (count)"

    def add(self, number: int) -> str:
        '''Add a number.'''
        self.calls += 1
        return str(number + 1)

    def get_reward(self):
        return {"calls": float(self.calls), "always": 0.5}
"""
)

IN_LOCKSTEP = RolloutConfig(max_new_tokens=4, lockstep=True)
MIXED = (
    """
tasks:
  digit: {type: ppo, dataset: digit.jsonl, rewards: [rewards.py:starts_right]}
"""
    + ECHO
)


def write(directory, tasks=TASKS + ECHO):
    (directory / "worlds.py").write_text(WORLD)
    return write_run(directory, tasks)


def stored(directory, task="echo"):
    rows = (json.loads(line) for line in (directory / "rollouts.jsonl").read_text().splitlines())
    return [row for row in rows if row["task"] == task]


def all_metrics(directory):
    """Return the last value of every metric of a run."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return {name: value for line in lines for name, value in json.loads(line).items()}


def test_a_run_mixes_tasks_of_many_turns_with_tasks_of_one(tmp_path):
    """The sampled log-probabilities are those of the whole context."""
    write(tmp_path)
    trainer = train(run_config(tmp_path, "out", 2))
    rows = stored(tmp_path / "out")
    assert rows
    tokenizer = trainer.actor.tokenizer
    for row in rows:
        rollout = rollout_from_dict(row)
        assert 1 <= len(rollout.turns) <= 3
        assert sum(turn.num_tokens for turn in rollout.turns) == len(rollout.response_ids)
        assert rollout.turns[0].given_ids == []
        tokens = row["tokens"]
        assert tokens["texts"] == [tokenizer.decode([token]) for token in rollout.response_ids]
        assert len(tokens["logprobs"]) == len(rollout.response_ids)
        assert all(value <= 0.0 for value in tokens["logprobs"])
        for turn in rollout.turns[1:]:
            # the vocabulary has no line break
            given = tokenizer.decode(turn.given_ids, skip_special_tokens=True)
            assert given == turn.messages[0]["content"]
        assert row["reward"] == rollout.earned or rollout.turns[-1].finish_reason == "length"
    assert any(len(row["turns"]) == 3 for row in rows)
    assert any(row["tokens"]["advantages"] for row in rows)
    metrics = all_metrics(tmp_path / "out")
    assert metrics["task/echo/turns"] > 1.0
    assert metrics["task/echo/environment/heard"] > 1.0
    assert metrics["task/echo/given_tokens"] > 0.0
    assert 0.0 < metrics["task/echo/world_s"] < 5.0
    assert undocumented(tmp_path / "out") == set()
    assert "task/copy/turns" not in metrics
    assert metrics["task/echo/eval_turns"] > 1.0
    assert metrics["task/echo/mismatch_max"] < 1e-3
    assert torch.isfinite(next(trainer.actor.model.parameters())).all()


def test_in_lockstep_a_run_with_slow_worlds_stopped_and_resumed_equals_an_undisturbed_one(tmp_path):
    write(tmp_path)
    settings = {
        "rollout": IN_LOCKSTEP,
        "batch": BatchConfig(prompts_per_step=10, group_size=3),
        "eval": EvalConfig(every=2, num_prompts=4),
    }
    whole = train(run_config(tmp_path, "whole", 3, **settings))
    slow = ECHO.replace("max_turns", "environment_config: {is_slow: true}\n    max_turns")
    (tmp_path / "tasks.yaml").write_text(TASKS + slow)
    train(run_config(tmp_path, "slow", 2, **settings))
    resumed = train(run_config(tmp_path, "slow", 3, **settings))
    assert weights_hash(resumed) == weights_hash(whole)
    assert lines(tmp_path / "slow", "rollouts.jsonl") == lines(tmp_path / "whole", "rollouts.jsonl")


def test_an_overlapped_run_samples_episodes_ahead(tmp_path):
    write(tmp_path, MIXED)
    settings = {
        "rollout": RolloutConfig(max_new_tokens=4, max_staleness=1, lockstep=True),
        "batch": BatchConfig(prompts_per_step=8, group_size=3),
        "eval": EvalConfig(every=2, num_prompts=4),
    }
    first, second = (train(run_config(tmp_path, name, 3, **settings)) for name in ("one", "two"))
    assert weights_hash(first) == weights_hash(second)


def test_a_world_that_dies_begins_again_and_changes_nothing(tmp_path):
    write(tmp_path, MIXED)
    calm = train(run_config(tmp_path, "calm", 1, eval=EvalConfig(every=0), rollout=IN_LOCKSTEP))
    died = tmp_path / "died"
    dying = ECHO.replace(
        "max_turns", f"environment_config: {{dies_at: {died}, log: {tmp_path / 'log'}}}\n    max_turns"
    )
    (tmp_path / "tasks.yaml").write_text(MIXED.replace(ECHO, dying))
    shaken = train(run_config(tmp_path, "shaken", 1, eval=EvalConfig(every=0), rollout=IN_LOCKSTEP))
    assert died.exists()
    # the passes of the model hold other turns than without a death: their rounding differs, no token does
    kept = [
        [(row["draw"], row["sample"], row["response"]) for row in stored(tmp_path / n)]
        for n in ("calm", "shaken")
    ]
    assert kept[0] == kept[1]
    for one, other in zip(calm.actor.model.parameters(), shaken.actor.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-3)
    notes = (tmp_path / "log").read_text().split()
    assert 0 < notes.count("close") <= notes.count("reset")


def test_a_wrong_environment_is_refused_before_the_run(tmp_path):
    from multitask_rl.errors import ConfigError, PluginError

    write(tmp_path, TASKS + ECHO.replace("worlds.py:Echo", "worlds.py:Ecco"))
    with pytest.raises(PluginError, match=r"tasks\.echo.*has no 'Ecco'.*did you mean 'Echo'"):
        train(run_config(tmp_path, "out", 1))
    write(tmp_path, TASKS + ECHO.replace("    environment: worlds.py:Echo\n", ""))
    with pytest.raises(ConfigError, match="'max_turns' needs 'environment' beside it"):
        train(run_config(tmp_path, "out", 1))
    write(tmp_path)
    rollout = RolloutConfig(max_new_tokens=4, max_staleness=1, lockstep=True)
    message = r"tasks\.echo\.environment: batch.quorum=0.8 .*rollout.lockstep=true makes every turn wait"
    with pytest.raises(ConfigError, match=message):
        train(run_config(tmp_path, "out", 1, batch=BatchConfig(quorum=0.8), rollout=rollout))
    write(tmp_path, "\ntasks: {a: {dataset: digit.jsonl, rewards: [environment]}}")
    with pytest.raises(ConfigError, match=r"tasks.a.rewards: .*set the task's key 'environment'"):
        train(run_config(tmp_path, "out", 1))


CHECKED = """
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Verdict


class NoDigit:
    traits = PluginTraits()

    def judge(self, rollouts):
        seen = [any(c.isdigit() for c in r.response) for r in rollouts]
        return [Verdict(cost=float(s), violated=s, reason="a digit") if s else 0.0 for s in seen]
"""
CONSTRAINTS = {
    "reject": "{plugin: checks.py:NoDigit, mode: reject, max_attempts: 3}",
    "penalty": "{plugin: checks.py:NoDigit, mode: penalty, weight: 1}",
    "lagrangian": "{plugin: checks.py:NoDigit, mode: lagrangian, limit: 0.2}",
    "streamed": "{plugin: checks.py:NoDigit, mode: penalty, weight: 1, stream_every: 1}",
    "grammar": "{mode: grammar, config: {choices: [aa, bb, cc]}}",
}
TOOL = """
  tool:
    type: grpo
    dataset: digit.jsonl
    environment: worlds.py:Counter
    max_turns: 2
"""


@pytest.fixture(scope="module")
def constrained(tmp_path_factory):
    """A run with a task of many turns for each kind of constraint, and one with tools."""
    directory = tmp_path_factory.mktemp("constrained")
    (directory / "checks.py").write_text(CHECKED)
    tasks = "tasks:" + TOOL
    for name, constraint in CONSTRAINTS.items():
        tasks += ECHO.replace("echo:", f"{name}:") + f"    constraints: [{constraint}]\n"
        # without the key, the reward is the environment's all the same
        tasks += "    rewards: [environment]\n" if name in ("streamed", "grammar") else ""
    write(directory, tasks)
    batch = BatchConfig(prompts_per_step=36, group_size=4)
    train(run_config(directory, "out", 1, eval=EvalConfig(every=0), batch=batch))
    return directory / "out"


def test_tools_are_called_and_the_reward_has_components(constrained):
    rows = stored(constrained, "tool")
    assert {row["reward"] for row in rows} == {0.5}
    assert rows[0]["breakdown"]["environment"]["components"] == {"calls": 0.0, "always": 0.5}
    assert rows[0]["prompt"].endswith(" (count)")
    events = [json.loads(line) for line in (constrained / "events.jsonl").read_text().splitlines()]
    [told] = [event["reason"] for event in events if "shows no tools" in event["reason"]]
    assert told.startswith("the prompt does not name add: the model's chat template shows no tools"), (
        "the actor cannot know them"
    )


def test_a_resumed_run_warns_of_hidden_tools_as_the_undisturbed_one_does(tmp_path):
    """The first evaluation finds it, the checkpoint of step 0 holds it, and step 1 tells it, once."""
    held = TOOL.replace("tool:", "held:") + "    evaluation_only: true\n"
    write(tmp_path, "tasks:" + TOOL + held)
    every = CheckpointConfig(every=1)
    train(run_config(tmp_path, "out", 2, checkpoint=every))
    whole = lines(tmp_path / "out", "events.jsonl")
    warned = [json.loads(line)["task"] for line in whole if "shows no tools" in line]
    assert warned == ["tool", "held"], "also of a task that is evaluated only"
    for step in (1, 0):
        back = CheckpointConfig(every=1, resume=str(tmp_path / f"out/checkpoints/step_0000000{step}"))
        train(run_config(tmp_path, "out", 2, checkpoint=back))
        told = [line for line in lines(tmp_path / "out", "events.jsonl") if '"changed"' not in line]
        assert told == whole


@pytest.mark.parametrize("mode", ["reject", "penalty", "lagrangian"])
def test_a_constraint_judges_every_answer_of_an_episode(constrained, mode):
    rows = stored(constrained, mode)
    violated = 0
    for row in rows:
        answers = [turn["response"] for turn in row["turns"]]
        has_digit = [any(c.isdigit() for c in answer) for answer in answers]
        verdict = row["verdicts"]["NoDigit"]
        assert verdict["violated"] == any(has_digit)
        if any(has_digit):
            violated += 1
            number = has_digit.index(True) + 1
            assert verdict["reason"] == (f"turn {number}: a digit" if len(answers) > 1 else "a digit")
        assert row["rejected"] == (mode == "reject" and any(has_digit))
        if not row["rejected"]:
            assert row["reward"] == row["earned"] - (mode == "penalty") * verdict["cost"]
    assert 0 < violated < len(rows)
    if mode == "reject":
        assert max(row["attempt"] for row in rows) == 2


def test_a_streaming_constraint_ends_the_answer_and_the_episode(constrained):
    flagged = [row for row in stored(constrained, "streamed") if row["finish_reason"] == "flagged"]
    assert {len(row["turns"]) for row in flagged} > {1}
    for row in flagged:
        *before, last = (turn["response"] for turn in row["turns"])
        # an answer that ends by itself is not shown again
        assert not any(c.isdigit() for answer in before for c in answer[:-1])
        assert any(c.isdigit() for c in last)
        assert row["verdicts"]["NoDigit"]["violated"]
        assert row["verdicts"]["NoDigit"]["turn"] == len(row["turns"])


def test_a_grammar_holds_in_every_turn(constrained):
    answers = {turn["response"] for row in stored(constrained, "grammar") for turn in row["turns"]}
    assert answers <= {"aa", "bb", "cc"}
    assert len(answers) > 1
    assert all_metrics(constrained)["task/grammar/mismatch_max"] < 1e-3


def waits(directory, *, turn_timeout_s=20, **config):
    """Write a run of one task whose worlds note what becomes of them."""
    settings = ", ".join(f"{k}: {v}" for k, v in (config | {"log": directory / "log"}).items())
    task = "  waits: {type: grpo, dataset: digit.jsonl, environment: worlds.py:Waits, max_turns: 3,\n"
    task += f"    turn_timeout_s: {turn_timeout_s}, environment_config: {{{settings}}}}}\n"
    (directory / "worlds.py").write_text(WORLD)
    write_run(directory, "tasks:\n" + task)


def closings(directory):
    """Return how often each world was closed; without processes that ended or held a call that hangs."""
    lines = [line.split() for line in (directory / "log").read_text().splitlines()]
    dead = {name.partition("/")[0] for what, name in lines if what in ("exit", "hang")}
    built = {name for what, name in lines if what == "built"}
    assert len(built) == sum(what == "built" for what, _ in lines)
    closed = Counter(name for what, name in lines if what == "closed")
    assert max(closed.values()) == 1
    return {name: closed[name] for name in built if name.partition("/")[0] not in dead}


@pytest.fixture(scope="module")
def shaken(tmp_path_factory):
    """A run whose worlds die at random, and the processes that it left behind."""
    directory = tmp_path_factory.mktemp("shaken")
    waits(directory, turn_timeout_s=1, dying=0.2)
    here = psutil.Process()
    before = {child.pid for child in here.children(recursive=True)}
    batch = BatchConfig(prompts_per_step=4, group_size=3)
    train(run_config(directory, "out", 1, eval=EvalConfig(every=0), batch=batch))
    return directory, [child for child in here.children(recursive=True) if child.pid not in before]


def test_worlds_that_die_at_random_lose_no_episode_and_score_none_0(shaken):
    directory, left = shaken
    rows = stored(directory / "out", "waits")
    slots = {(row["draw"], row["sample"]) for row in rows}
    assert len(slots) == len(rows)
    assert {sample for _, sample in slots} == {0, 1, 2}
    without_world = [row for row in rows if row["row"]["id"] % 4 == 0]
    failed = [row for row in rows if row["reward"] is None]
    assert 0 < len(without_world) <= len(failed) < len(rows)
    assert {row["reward"] for row in rows} == {None, 2.0}
    assert all(row["failure"]["kind"] in ("infra", "timeout") for row in failed)
    assert all(row["failure"]["source"] == "environment" for row in failed)
    metrics = all_metrics(directory / "out")
    assert metrics["task/waits/failure_rate"] == pytest.approx(len(failed) / len(rows))
    assert metrics["task/waits/reward_mean"] == 2.0
    tries = [sum(row.get("world_failures", {}).values()) for row in rows]
    assert min(tries[rows.index(row)] for row in without_world) >= 3
    counted = sum(v for name, v in metrics.items() if name.startswith("task/waits/world_failures/"))
    assert counted == pytest.approx(sum(tries) / len(rows))
    assert undocumented(directory / "out") == set()
    timeouts = sum(row.get("world_failures", {}).get("timeout", 0) for row in rows)
    if timeouts <= (directory / "log").read_text().count("hang"):  # else a busy machine made others too late
        assert set(closings(directory).values()) <= {1}
    assert left == []


@pytest.mark.parametrize(("max_staleness", "quorum"), [(0, 1.0), (2, 0.5)])
def test_worlds_are_closed_once_after_an_interrupt(tmp_path, max_staleness, quorum, new_children):
    waits(tmp_path, wait=0.2)

    def interrupt():
        while not (tmp_path / "log").exists() or (tmp_path / "log").read_text().count("built") < 20:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)  # as SIGINT, which a shell's background processes ignore

    thread = threading.Thread(target=interrupt)
    thread.start()
    settings = {
        "rollout": RolloutConfig(max_new_tokens=4, max_staleness=max_staleness),
        "batch": BatchConfig(prompts_per_step=12, group_size=4, quorum=quorum),
        "eval": EvalConfig(every=0),
    }
    with stopping_on_signals(), pytest.raises(KeyboardInterrupt):
        train(run_config(tmp_path, "out", 9, **settings))
    thread.join()
    assert set(closings(tmp_path).values()) == {1}
    assert new_children() == []


ROLLS_BACK = """
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardAction, GuardDecision


class Once(Guard):
    seen = 0

    def observe(self, step, evaluations, confirm=None):
        self.seen += 1
        if self.seen == 2:
            return GuardDecision(action=GuardAction.rollback, task="waits", reason="counted")
        return GuardDecision(judged_good=True)
"""


def test_worlds_are_closed_once_when_a_run_is_taken_back(tmp_path):
    waits(tmp_path, wait=0.05)
    (tmp_path / "guards.py").write_text(ROLLS_BACK)
    settings = {
        "rollout": RolloutConfig(max_new_tokens=4, max_staleness=2),
        "batch": BatchConfig(prompts_per_step=4, group_size=2, quorum=0.5),
        "eval": EvalConfig(every=1, num_prompts=2),
        "guard": GuardConfig(plugin=f"{tmp_path / 'guards.py'}:Once"),
    }
    trainer = train(run_config(tmp_path, "out", 3, **settings))
    assert any(event.kind == "rolled_back" for event in trainer.events)
    rows = stored(tmp_path / "out", "waits")
    assert all(row["policy_version"] < row["step"] for row in rows), "no turn is of discarded weights"
    assert set(closings(tmp_path).values()) == {1}


def test_stored_episodes_are_rescored_turn_by_turn(shaken, monkeypatch):
    directory, _ = shaken
    monkeypatch.chdir(directory)
    (directory / "count.py").write_text(
        "def answers(rollout):\n    return float(sum(len(t.response) for t in rollout.turns))\n"
    )
    assert main(["rescore", "out", "--output", "same.jsonl"]) == 0
    assert main(["rescore", "out", "--output", "new.jsonl", "--reward", "count.py:answers"]) == 0
    rows = stored(directory / "out", "waits")
    same, new = (
        [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
        for name in ("same", "new")
    )
    assert [row["reward"] for row in rows].count(None) > 0
    whole = [row for row in rows if row["reward"] is not None]
    assert [row["breakdown"]["environment"]["value"] for row in same] == [row["reward"] for row in whole]
    assert [row["turns"] for row in same] == [row["turns"] for row in whole]
    lengths = [float(sum(len(turn["response"]) for turn in row["turns"])) for row in whole]
    assert [row["breakdown"]["answers"]["value"] for row in new] == lengths
