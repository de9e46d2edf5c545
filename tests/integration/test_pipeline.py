"""Overlap: the same run whatever the clock does, from the scheduled versions, without losing data."""

import contextlib
import json
import math
import os
import signal
import threading
import time
from dataclasses import replace

import pytest

from multitask_rl.boundary.interrupts import Terminated, stopping_on_signals
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    ModelConfig,
    RolloutConfig,
    SchedulerConfig,
)
from multitask_rl.data import PromptStream
from multitask_rl.errors import ConfigError
from multitask_rl.records import Rollout, Scored
from multitask_rl.run.plan import load_specs, load_task_rows
from multitask_rl.step.flow import Stage
from multitask_rl.testing import FakeEngine
from multitask_rl.tracking.reading import read_run
from multitask_rl.trainer import Trainer
from multitask_rl.training.backend import CreditedSample
from run_builders import VOCABULARY, lines, run_config, train, undocumented, weights_hash, write_run

OVERLAP = {
    "rollout": RolloutConfig(max_new_tokens=4, max_staleness=1),
    "eval": EvalConfig(every=3, num_prompts=6),
    "checkpoint": CheckpointConfig(every=3),
}
SLEEPY = """
import random, time


def starts_right(response, reference):
    time.sleep(random.uniform(0, 0.01))
    return float(response[:1] == reference[:1]) if response else 0.0
"""
TWO_TASKS = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
  slow: {type: grpo, dataset: digit.jsonl, rewards: [gated.py:starts_right]}
"""
GATED = """
import pathlib, time

GATE = pathlib.Path(__file__).with_name("gate")


def starts_right(response, reference):
    while not GATE.exists():
        time.sleep(0.01)
    return float(response[:1] == reference[:1]) if response else 0.0
"""
REJECTING = """
tasks:
  copy:
    type: grpo
    dataset: copy.jsonl
    rewards: [rewards.py:starts_right]
    algorithm_config: {entropy_coefficient: 0.01}
  clean:
    type: constrained_decoding
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints: [{plugin: rewards.py:has_no_digit, mode: reject, max_attempts: 3, stream_every: 2}]
"""
ONE_TASK = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 steps with one rollout ahead; evaluated and saved after 3."""
    directory = tmp_path_factory.mktemp("overlap")
    write_run(directory)
    return directory, train(run_config(directory, "whole", 6, **OVERLAP))


def records(directory, name="rollouts.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def test_every_step_learns_from_the_version_the_schedule_names(finished):
    directory, _ = finished
    versions = {}
    for row in records(directory / "whole"):
        versions.setdefault(row["step"] - 1, set()).add(row["policy_version"])
    # drained for the evaluation before step 3, so step 3 is on-policy again
    assert versions == {0: {0}, 1: {0}, 2: {1}, 3: {3}, 4: {3}, 5: {4}}
    steps = [row for row in records(directory / "whole", "metrics.jsonl") if "train/loss" in row]
    assert [row["task/copy/staleness"] for row in steps] == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert all(math.isfinite(row["train/loss"]) for row in steps)


def test_a_run_stopped_and_resumed_equals_the_uninterrupted_one(finished):
    directory, whole = finished
    train(run_config(directory, "parts", 3, **OVERLAP))
    resumed = train(run_config(directory, "parts", 6, **OVERLAP))
    assert weights_hash(resumed) == weights_hash(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl", "metrics.jsonl"):
        assert lines(directory / "parts", name) == lines(directory / "whole", name)


def test_rewards_of_random_duration_change_nothing(finished, tmp_path):
    directory, whole = finished
    write_run(tmp_path)
    rewards = (directory / "rewards.py").read_text()
    (tmp_path / "rewards.py").write_text(rewards + SLEEPY)  # in a worker process
    assert weights_hash(train(run_config(tmp_path, "whole", 6, **OVERLAP))) == weights_hash(whole)


def test_sampling_beside_the_update_changes_no_bit_of_it_under_autocast(tmp_path):
    # rejected responses are sampled again in many short calls, and each ends an autocast of the other thread
    write_run(tmp_path, REJECTING)
    changes = OVERLAP | {
        "model": ModelConfig(name_or_path=str(tmp_path / "actor"), autocast=True),
        # some micro-batches have two parts: a forward pass uses each weight twice
        "batch": BatchConfig(prompts_per_step=8, group_size=4, tokens_per_microbatch=64),
    }
    runs = [train(run_config(tmp_path, f"run{number}", 6, **changes)) for number in range(3)]
    assert len({weights_hash(run) for run in runs}) == 1


def test_more_staleness_means_more_rollouts_ahead(tmp_path):
    write_run(tmp_path, ONE_TASK)
    config = OVERLAP | {"rollout": RolloutConfig(max_new_tokens=4, max_staleness=2)}
    train(run_config(tmp_path, "out", 3, **config))
    assert {(r["step"] - 1, r["policy_version"]) for r in records(tmp_path / "out")} == {
        (0, 0),
        (1, 0),
        (2, 0),
    }


def test_given_answers_have_no_staleness(tmp_path):
    given = "  given: {type: sft, dataset: copy.jsonl, answer: '{reference}', prompt: '{prompt}'}\n"
    write_run(tmp_path, ONE_TASK + given)
    train(run_config(tmp_path, "out", 2, **OVERLAP))
    steps = [row for row in records(tmp_path / "out", "metrics.jsonl") if "train/loss" in row]
    assert [row["task/copy/staleness"] for row in steps] == [0.0, 1.0]
    assert not any("task/given/staleness" in row for row in steps)


def test_a_failure_draws_again_what_was_in_flight(tmp_path):
    write_run(tmp_path, ONE_TASK)
    batch = BatchConfig(prompts_per_step=4, group_size=4, refill_rounds=0)
    config = run_config(tmp_path, "out", 6, **OVERLAP, batch=batch)
    trainer = Trainer.from_config(config)

    def fail(scored: Scored) -> Scored:
        if trainer.step == 2:
            raise ZeroDivisionError
        return scored

    trainer.insert_stage(Stage("fail", fail, consumes=Scored, produces=Scored), after="rewards")
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    resumed = Trainer.from_config(config)
    resumed._open()
    assert resumed.step == 2
    assert resumed.tasks["copy"].stream.draw == 2 * 4, (
        "what the third step and the next had drawn is not lost"
    )
    resumed.train()
    draws = {(r["step"], r["draw"]) for r in records(tmp_path / "out")}
    assert sorted(d for s, d in draws) == list(range(6 * 4))


@pytest.mark.timeout(60)
def test_a_run_whose_update_fails_ends_while_the_next_batch_is_sampled_and_judged(tmp_path):
    reject = "constraints: [{plugin: rewards.py:has_no_digit, mode: reject}]"
    write_run(tmp_path, f"{ONE_TASK.rstrip()[:-1]}, {reject}}}\n")
    rollout = RolloutConfig(max_new_tokens=48, max_staleness=1)
    config = run_config(tmp_path, "out", 6, **OVERLAP | {"rollout": rollout})

    def fail(_: CreditedSample) -> None:
        raise ZeroDivisionError

    trainer = Trainer.from_config(config)
    stage = Stage("fail", fail, consumes=CreditedSample, produces=CreditedSample)
    trainer.insert_stage(stage, after="advantages")
    with pytest.raises(ZeroDivisionError):
        trainer.train()


def test_a_run_begun_by_hand_is_evaluated_and_saved_without_batches_under_way(tmp_path):
    write_run(tmp_path, ONE_TASK)
    by_hand = Trainer.from_config(run_config(tmp_path, "out", 6, **OVERLAP))
    by_hand.train_step()
    by_hand.train()
    first = tmp_path / "out/checkpoints/step_00000001"
    again = CheckpointConfig(every=3, resume=str(first))
    resumed = train(run_config(tmp_path, "again", 6, **OVERLAP | {"checkpoint": again}))
    assert weights_hash(resumed) == weights_hash(by_hand)


def test_prompts_left_out_of_a_batch_that_is_drawn_again_are_told_once(tmp_path):
    write_run(tmp_path, ONE_TASK)
    rollout = RolloutConfig(max_new_tokens=4, max_staleness=1, max_prompt_tokens=8)
    config = run_config(tmp_path, "out", 3, **OVERLAP | {"rollout": rollout})
    rows, _ = load_task_rows(load_specs(config), None)["copy"]
    of_second_batch = PromptStream(rows, task="copy", seed=0).next(20)[-1][1]["id"]
    rows = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
    rows[of_second_batch]["prompt"] = "a" * 40
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    by_hand = Trainer.from_config(config)
    by_hand.train_step()
    by_hand.train()
    told = [event.reason for event in by_hand.events if "are left out and counted" in event.reason]
    assert [reason.partition(" are ")[0] for reason in told] == ["1 of 13 prompts drawn"]


class EngineAtWork(FakeEngine):
    """The second batch takes 40 s; a thread calls ``when_slow`` when it begins."""

    when_slow = hook = staticmethod(lambda: None)
    num_calls = 0
    has_sampled = False

    def call_between_steps(self, hook):
        self.hook = hook
        return True

    def generate_stream(self, requests):
        self.num_calls += 1
        if self.num_calls == 2:
            threading.Thread(target=self.when_slow).start()
            for _ in range(4000):
                time.sleep(0.01)
                self.hook()
            self.has_sampled = True
        yield from super().generate_stream(requests)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_does_not_wait_until_the_batch_under_way_is_sampled(tmp_path, fails):
    """A signal comes while a step waits for the engine, or the step itself fails."""
    write_run(tmp_path, ONE_TASK)
    config = run_config(tmp_path, "out", 6, **OVERLAP)
    engine, noted = EngineAtWork(vocab_size=len(VOCABULARY)), threading.Event()

    def note(sample: CreditedSample) -> CreditedSample:
        if fails:
            raise ZeroDivisionError
        noted.set()
        return sample

    trainer = Trainer(config=config, engine=engine)
    stage = Stage("note", note, consumes=CreditedSample, produces=CreditedSample)
    trainer.insert_stage(stage, after="advantages")

    def end() -> None:
        noted.wait(30)
        time.sleep(1.0)  # the update is made, and the step waits for the engine
        os.kill(os.getpid(), signal.SIGTERM)

    engine.when_slow = (lambda: None) if fails else end

    def make_steps() -> None:
        with stopping_on_signals(), trainer:
            while True:
                trainer.train_step()

    with pytest.raises(ZeroDivisionError if fails else Terminated):
        make_steps()
    assert not engine.has_sampled
    assert trainer.step == (0 if fails else 1)
    saved = {path.name for path in (tmp_path / "out/checkpoints").glob("step_*")}
    assert saved == (set() if fails else {"step_00000001"})


WITHOUT_HALF = {
    "rollout": RolloutConfig(max_new_tokens=4, max_staleness=1),
    "batch": BatchConfig(prompts_per_step=8, group_size=4, refill_rounds=0, quorum=0.5),
    "scheduler": SchedulerConfig(policy="uniform"),
    "eval": EvalConfig(every=0, num_prompts=1),
    "checkpoint": CheckpointConfig(every=0),
}
"""A step goes on without half of its groups."""


def gated_trainer(directory, steps, **changes):
    """Return a trainer of ``TWO_TASKS``, and the gate that its slow rewards wait for; it is open."""
    write_run(directory, TWO_TASKS)
    gate = directory / "gate"
    (directory / "gated.py").write_text(GATED)
    gate.touch()
    return Trainer.from_config(run_config(directory, "out", steps, **{**WITHOUT_HALF, **changes})), gate


def close_in_first_step(trainer, gate):
    """Close the gate after the first rollout; open it in the next step."""

    def switch(rollout: Rollout) -> Rollout:
        if trainer.step == 0:
            gate.unlink(missing_ok=True)
        else:
            gate.touch()
        return rollout

    trainer.insert_stage(Stage("switch", switch, consumes=Rollout, produces=Rollout), after="rollout")


def test_late_groups_are_carried_over_and_old_ones_dropped(tmp_path):
    trainer, gate = gated_trainer(tmp_path, 3)

    def close(rollout: Rollout) -> Rollout:
        if trainer.step == 0:
            gate.unlink(missing_ok=True)
        return rollout

    def open_again(scored: Scored) -> Scored:
        if trainer.step == 2 and not gate.exists():
            gate.touch()
            for late in trainer.parts.experience._unscored:
                late.rewards.wait()
        return scored

    trainer.insert_stage(Stage("close", close, consumes=Rollout, produces=Rollout), after="rollout")
    trainer.insert_stage(Stage("open", open_again, consumes=Scored, produces=Scored), after="rewards")
    trainer.train()
    steps = [r for r in records(tmp_path / "out", "metrics.jsonl") if "train/loss" in r]
    # the slow groups of step 0 are two updates old when they are scored, those of step 1 one
    assert [row["task/slow/carried_over"] for row in steps] == [0.0, 0.0, 4.0]
    assert [row["task/slow/dropped_stale"] for row in steps] == [0.0, 0.0, 4.0]
    assert all(row["task/copy/carried_over"] == 0.0 for row in steps)
    assert undocumented(tmp_path / "out") == set()
    slow = [r for r in records(tmp_path / "out") if r["task"] == "slow"]
    assert {r["draw"] for r in slow if r["policy_version"] == 1} == {4, 5, 6, 7}
    assert {r["step"] for r in slow} == {3}
    assert steps[2]["task/slow/staleness"] > 0.0


def test_a_task_whose_groups_are_too_old_is_told_once(tmp_path):
    batch = replace(WITHOUT_HALF["batch"], quorum=0.25)
    trainer, gate = gated_trainer(tmp_path, 4, batch=batch)
    gate.unlink()
    with trainer:
        for _ in range(4):
            trainer.train_step()
    steps = [r for r in records(tmp_path / "out", "metrics.jsonl") if "train/loss" in r]
    assert [row["task/slow/dropped_stale"] > 0 for row in steps] == [False, False, True, True]
    told = [(event.step, event.task) for event in trainer.events if "dropped_stale" in event.reason]
    assert told == [(2, "slow")]


@pytest.mark.parametrize("fails_after", [None, "rollout", "rewards"])
def test_late_groups_of_a_run_that_stops_are_given_back_to_their_task(tmp_path, fails_after):
    trainer, gate = gated_trainer(tmp_path, 3 if fails_after else 1)
    close_in_first_step(trainer, gate)

    def fail(record: Rollout | Scored) -> Rollout | Scored:
        if trainer.step == 1:
            raise ZeroDivisionError
        return record

    if fails_after:
        kind = Rollout if fails_after == "rollout" else Scored
        trainer.insert_stage(Stage("fail", fail, consumes=kind, produces=kind), after=fails_after)

    def open_gate(sample: CreditedSample) -> CreditedSample:
        gate.touch()  # the evaluation at the end is scored
        return sample

    stage = Stage("open", open_gate, consumes=CreditedSample, produces=CreditedSample)
    trainer.insert_stage(stage, after="advantages")
    with pytest.raises(ZeroDivisionError) if fails_after else contextlib.nullcontext():
        trainer.train()
    gate.touch()
    train(run_config(tmp_path, "out", 3, **WITHOUT_HALF))
    steps = [r for r in records(tmp_path / "out", "metrics.jsonl") if "train/loss" in r]
    # four late groups are owed, half of them by this task itself
    assert [row["task/slow/share_requested"] for row in steps] == [0.5, 0.75, 0.5]
    learnt = {r["draw"] for r in records(tmp_path / "out") if r["task"] == "slow"}
    assert learnt, "the gate is open"
    assert learnt.isdisjoint(range(4)), "late groups are not drawn again"


def test_late_groups_of_an_interrupted_step_are_given_back_by_the_same_trainer(tmp_path):
    trainer, gate = gated_trainer(tmp_path, 5)
    close_in_first_step(trainer, gate)
    interruptions = [KeyboardInterrupt]

    def interrupt(scored: Scored) -> Scored:
        if trainer.step == 1 and interruptions:
            raise interruptions.pop()
        return scored

    trainer.insert_stage(Stage("interrupt", interrupt, consumes=Scored, produces=Scored), after="rewards")
    with trainer:
        trainer.train_step()
        with pytest.raises(KeyboardInterrupt):
            trainer.train_step()
        gate.touch()
        for _ in range(3):
            trainer.train_step()
        trainer.parts.supervisor.save()
        checkpoint = trainer.parts.store.checkpoints.newest()
        with trainer.parts.experience.giving_back_late_groups():  # the last step may have some, too
            carry = dict(trainer.scheduler.carry)
    assert checkpoint is not None
    assert checkpoint.state["scheduler"]["carry"] == carry
    steps = [r for r in records(tmp_path / "out", "metrics.jsonl") if "train/loss" in r]
    # as a run that is resumed from the checkpoint of the interruption
    assert [row["task/slow/share_requested"] for row in steps] == [0.5, 0.75, 0.5, 0.5]


def test_a_checkpoint_with_late_groups_changes_no_quota_of_the_run_that_goes_on(tmp_path):
    trainer, gate = gated_trainer(tmp_path, 4, checkpoint=CheckpointConfig(every=1))
    close_in_first_step(trainer, gate)

    def wait(scored: Scored) -> Scored:
        if trainer.step > 0:  # a group that is late by two steps would be dropped, and given back for that
            for late in trainer.parts.experience._unscored:
                late.rewards.wait()
        return scored

    trainer.insert_stage(Stage("wait", wait, consumes=Scored, produces=Scored), after="rewards")
    trainer.train()
    steps = [r for r in records(tmp_path / "out", "metrics.jsonl") if "train/loss" in r]
    assert sum(row["task/slow/carried_over"] for row in steps) >= 4.0
    assert [row["task/slow/share_requested"] for row in steps] == [0.5] * 4


def test_the_timeline_tells_who_was_busy_and_who_waited(finished):
    directory, _ = finished
    steps = [row for row in records(directory / "whole", "metrics.jsonl") if "train/loss" in row]
    for row in steps:
        shares = {k: v for k, v in row.items() if k.startswith(("utilisation/", "waits_for/"))}
        assert {"utilisation/update", "utilisation/rollout", "waits_for/rollout"} <= shares.keys()
        assert all(0.0 <= share <= 1.0 for share in shares.values())
    spans = records(directory / "whole", "timeline.jsonl")
    assert {s["step"] for s in spans} == {1, 2, 3, 4, 5, 6}
    assert all(s["start"] <= s["end"] for s in spans)
    assert {s["task"] for s in spans if s["stage"] == "rewards"} == {"copy", "digit", "quark", "clean"}
    assert read_run(directory / "whole").stages["update"]["busy"] > 0.0


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_rollout_begins_before_the_update_before_it_if_it_may_be_stale(tmp_path, max_staleness):
    write_run(tmp_path)
    rollout = RolloutConfig(max_new_tokens=4, max_staleness=max_staleness)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 2, **OVERLAP | {"rollout": rollout}))

    def pause(credited: CreditedSample) -> CreditedSample:
        time.sleep(0.01)  # before the update; the thread that samples gets a processor
        return credited

    stage = Stage("pause", pause, consumes=CreditedSample, produces=CreditedSample)
    trainer.insert_stage(stage, after="advantages")
    trainer.train()
    spans = {(s["stage"], s["step"]): s for s in records(tmp_path / "out", "timeline.jsonl")}
    assert (spans["rollout", 2]["start"] < spans["update", 1]["start"]) == (max_staleness == 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": BatchConfig(quorum=0.5)}, "needs rollout.max_staleness >= 1"),
        ({"rollout": RolloutConfig(max_staleness=1)}, r"tasks\.copy\.algorithm_config\.truncated_is is 0"),
        (
            {"rollout": RolloutConfig(engine_config={"weights": "bfloat16"})},
            "truncated_is is 0.*less precise",
        ),
    ],
)
def test_settings_that_would_lose_or_bias_samples_are_refused(tmp_path, changes, message):
    write_run(tmp_path, ONE_TASK.replace("{type: grpo", "{type: grpo, algorithm_config: {truncated_is: 0}"))
    with pytest.raises(ConfigError, match=message):
        train(run_config(tmp_path, "out", 1, **changes))


def test_the_hybrid_engine_turns_the_overlap_on_and_says_what_it_chose(tmp_path, capsys):
    write_run(tmp_path, ONE_TASK)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 2, eval=EvalConfig(every=0, num_prompts=2)))
    choice = trainer.enable_3d_hybrid_engine()
    assert choice in capsys.readouterr().out
    assert "max_staleness=1" in choice
    assert "snapshot" in choice
    trainer.train()
    assert {(r["step"], r["policy_version"]) for r in records(tmp_path / "out")} == {(1, 0), (2, 0)}


def test_a_slow_task_is_named_as_the_one_that_is_waited_for(tmp_path):
    write_run(tmp_path, TWO_TASKS)
    (tmp_path / "gated.py").write_text(
        "import time\n\n\ndef starts_right(response):\n    time.sleep(0.05)\n    return 0.5\n"
    )
    train(run_config(tmp_path, "out", 2, eval=EvalConfig(every=0, num_prompts=1)))
    waited = read_run(tmp_path / "out").stages["rewards/slow"]["waited"]
    assert 0.0 < waited <= 1.0
