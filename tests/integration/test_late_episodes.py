"""A quorum of episodes: steps go on without the groups of slow worlds, and later steps learn from them."""

import json
import math
import shutil
from collections import Counter

import pytest
import torch

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    OptimizerConfig,
    RolloutConfig,
)
from multitask_rl.records import Scored
from multitask_rl.step.flow import Stage
from multitask_rl.trainer import Trainer
from multitask_rl.training.backend import CreditedSample
from run_builders import run_config, train, undocumented, write_run

SLOW = """
import itertools, os, random, time
from multitask_rl.environments.base import StepResult

NUMBERS = itertools.count()


class Slow:
    '''Two turns; every other world takes its time in one of them. Some wait for worlds of the next step.'''

    def __init__(self, log):
        self.log, self.name, self.row = log, f"{os.getpid()}/{next(NUMBERS)}", -1

    def reset(self, row):
        self.turn, self.row = 0, row["id"]
        self.note("reset")
        chance = random.Random(self.row)
        self.waits = [0.0, 0.0, 0.0]
        if chance.random() < 0.5:
            self.waits[chance.choice([0, 1, 1, 1, 2])] = chance.choice([0.1, 0.2, 0.4, 0.8])
        time.sleep(self.waits[0])
        return []

    def step(self, message):
        self.turn += 1
        if self.turn == 1 and self.waits[1] >= 0.4:
            known, until, end = self.begun(), time.monotonic() + 3.0, self.log + ".end"
            while self.begun() == known and time.monotonic() < until and not os.path.exists(end):
                time.sleep(0.01)
        else:
            time.sleep(self.waits[self.turn])
        reply = {"role": "user", "content": "ab"}
        reward = float(len(message["content"]) % 2)
        return StepResult(messages=[reply], done=self.turn == 2, reward=reward)

    def begun(self):
        with open(self.log) as file:
            return {line.split()[-1] for line in file if line.startswith("reset")}

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what} {self.name} {self.row}\\n")

    def close(self):
        self.note("close")
"""
TASKS = """
tasks:
  copy: {{type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}}
  slow: {{type: grpo, dataset: digit.jsonl, environment: worlds.py:Slow, max_turns: 3, weight: 3,
    environment_config: {{log: {log}}}}}
"""
PROMPTS, SIZE, QUORUM = 8, 2, 0.6


def write(directory):
    (directory / "worlds.py").write_text(SLOW)
    write_run(directory, TASKS.format(log=directory / "log"))


def late_config(directory, steps, max_staleness=1, **changes):
    settings = {
        "rollout": RolloutConfig(max_new_tokens=4, max_staleness=max_staleness),
        "batch": BatchConfig(prompts_per_step=PROMPTS, group_size=SIZE, refill_rounds=0, quorum=QUORUM),
        "optimizer": OptimizerConfig(learning_rate=0.02),
        "eval": EvalConfig(every=0, num_prompts=1),
        "checkpoint": CheckpointConfig(every=4),
    }
    return run_config(directory, "out", steps, **(settings | changes))


def worlds(directory):
    """Return how often each world was closed, and the number of worlds by row."""
    lines = [line.split() for line in (directory / "log").read_text().splitlines()]
    closed = Counter(name for what, name, _ in lines if what == "close")
    begun = [(name, int(row)) for what, name, row in lines if what == "reset"]
    assert len({name for name, _ in begun}) == len(begun)
    return {name: closed[name] for name, _ in begun}, Counter(row for _, row in begun)


def training_rows(directory):
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train/loss" in row]


def draws(rows):
    """Return the step in which each group was drawn, by task and number, and the groups by step."""
    drawn_at, by_step, numbers = {}, [], Counter()
    for step, row in enumerate(rows):
        by_step.append([])
        for task in ("copy", "slow"):
            for _ in range(round(row[f"task/{task}/share_requested"] * PROMPTS)):
                group = task, numbers[task]
                numbers[task] += 1
                drawn_at[group] = step
                by_step[-1].append(group)
    return drawn_at, by_step


def logprobs(model, state, context, ids):
    """Return the log-probabilities of ``ids`` behind ``context`` under the weights ``state``, in nats."""
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*context, *ids]])).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(-1)[range(len(ids)), ids].tolist()


@pytest.fixture(scope="module", params=[1, 2])
def finished(request, tmp_path_factory):
    """A run, what it learnt from, its weights by version, and in ``killed`` what a kill in step 5 leaves."""
    directory, max_staleness = tmp_path_factory.mktemp("late"), request.param
    write(directory)
    trainer = Trainer.from_config(late_config(directory, 6, max_staleness))
    seen, states = [], {}

    def note(scored):
        seen.append((trainer.step, scored))
        return scored

    def keep(sample):
        state = {name: value.clone() for name, value in trainer.actor.model.state_dict().items()}
        if states.setdefault(trainer.step, state) is state and trainer.step == 5:
            shutil.copytree(directory / "out", directory / "killed")
            (directory / "log.end").touch()  # no other step follows
        return sample

    kept = Stage("keep", keep, consumes=CreditedSample, produces=CreditedSample)
    trainer.insert_stage(Stage("note", note, consumes=Scored, produces=Scored), after="rewards")
    trainer.insert_stage(kept, after="advantages")
    trainer.train()
    return directory, max_staleness, trainer.actor.model, seen, states


def test_every_group_is_learnt_once_or_dropped_when_it_is_too_old(finished):
    directory, max_staleness, model, seen, states = finished
    rows = training_rows(directory / "out")
    assert undocumented(directory / "out") == set()

    # what a list of draws and a clock say
    drawn_at, by_step = draws(rows)
    learnt_at, members, version = {}, Counter(), {}
    for step, scored in seen:
        group = scored.rollout.task, scored.rollout.prompt.draw
        assert learnt_at.setdefault(group, step) == step
        members[group] += 1
        version[group] = min(version.get(group, step), scored.rollout.policy_version)
        assert scored.rollout.failure is None
        assert scored.reward == scored.rollout.earned or group[0] == "copy"
    assert set(members.values()) == {SIZE}
    # one update of the bound is for late groups; the step after a checkpoint begins with its weights
    ahead = {step: max_staleness - 1 if step % 4 else 0 for step in range(len(rows))}
    sampled_with = {group: step - ahead[step] for group, step in drawn_at.items()}
    for step, row in enumerate(rows):
        own = [group for group in by_step[step] if learnt_at.get(group) == step]
        assert len(own) >= math.ceil(QUORUM * PROMPTS - 1e-9)
        late = Counter(g[0] for g, s in learnt_at.items() if s == step and drawn_at[g] < step)
        old = [g for g, v in sampled_with.items() if g not in learnt_at and step == v + max_staleness + 1]
        gone = Counter(group[0] for group in old)
        for task in ("copy", "slow"):
            assert (row[f"task/{task}/carried_over"], row[f"task/{task}/dropped_stale"]) == (
                late[task],
                gone[task],
            )
    assert all(learnt_at[group] - version[group] <= max_staleness for group in learnt_at)
    assert all(version[group] >= sampled_with[group] for group in learnt_at)
    assert sum(row["task/slow/carried_over"] for row in rows) > 0
    assert all(row["task/copy/carried_over"] == 0 for row in rows)

    # every turn has the log-probabilities of the weights that sampled it, the first those of its version
    several = 0
    for step, rollout in ((s, scored.rollout) for s, scored in seen):
        if drawn_at[rollout.task, rollout.prompt.draw] == step:
            continue
        context, found = list(rollout.prompt.prompt_ids), []
        for answer, turn in zip(rollout.answers(), rollout.turns, strict=True):
            context += turn.given_ids
            ids = answer.response_ids
            errors = {
                v: max(map(abs, (a - b for a, b in zip(naive, answer.rollout_logprobs, strict=True))))
                for v in range(rollout.policy_version, step + 1)
                for naive in [logprobs(model, states[v], context, ids)]
            }
            context += ids
            found.append(min(errors, key=errors.get))
            assert errors[found[-1]] < 1e-4
        assert found == sorted(found)
        assert found[0] == rollout.policy_version
        several += found[0] < found[-1]
    assert several > 0

    closed, begun = worlds(directory)
    assert set(closed.values()) == {1}
    assert set(begun.values()) == {SIZE}


@pytest.mark.parametrize("finished", [2], indirect=True)
def test_what_a_kill_leaves_is_resumed_without_late_groups_and_draws_no_group_twice(finished):
    directory, max_staleness, *_ = finished
    (directory / "log").unlink()
    trainer = train(late_config(directory, 7, max_staleness, output_dir=str(directory / "killed")))
    assert trainer.parts.store.resumed_at == 4
    drawn_at, _ = draws(training_rows(directory / "killed"))
    learnt_at = {}
    for row in map(json.loads, (directory / "killed" / "rollouts.jsonl").read_text().splitlines()):
        assert learnt_at.setdefault((row["task"], row["draw"]), row["step"] - 1) == row["step"] - 1
    assert set(learnt_at.values()) == set(range(7))
    assert all(drawn_at[group] >= 4 for group, step in learnt_at.items() if step >= 4)
    lost = Counter(step for group, step in drawn_at.items() if step < 4 and group not in learnt_at)
    assert all(number <= PROMPTS - math.ceil(QUORUM * PROMPTS) for number in lost.values())
    assert set(worlds(directory)[0].values()) == {1}
