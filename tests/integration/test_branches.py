"""Forks, and branches that a run has left: each has its own checkpoints, records and settings."""

import json
import shutil
import sqlite3
from dataclasses import replace

import pytest
import torch

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TrackingConfig,
    recorded_config,
)
from multitask_rl.errors import CheckpointError, TrainingError
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardAction, GuardDecision
from multitask_rl.models.actor import read_weights
from multitask_rl.run.store import RunStore
from multitask_rl.run.supervisor import Supervisor
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.tracking.jsonl import RECORDS, JsonlTracker
from multitask_rl.tracking.reading import read_run
from multitask_rl.trainer import Trainer
from run_builders import JudgesAllGood, build_actor, lines, run_config, train, write_run

COPY = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right], kl: {coefficient: 0.001}}
"""
SMALL = {
    "batch": BatchConfig(prompts_per_step=4, group_size=2),
    "eval": EvalConfig(every=2, num_prompts=6),
    "checkpoint": CheckpointConfig(every=2, keep=9),
}


def config_of(place, name, steps, resume="auto", **changed):
    settings = {**SMALL, "checkpoint": CheckpointConfig(every=2, keep=9, resume=str(resume)), **changed}
    return run_config(place, name, steps, **settings)


def changes(run):
    events = [json.loads(line) for line in lines(run, "events.jsonl")]
    return [event["reason"].partition(": ")[2] for event in events if event["kind"] == "changed"]


@pytest.fixture
def place(tmp_path):
    write_run(tmp_path, COPY, num_rows=40)
    return tmp_path


def test_a_branch_that_was_left_is_gone_on_with_as_a_fork(place):
    """Its records were cut when it was left: those of the other branch are not its own."""
    run = place / "out"
    train(config_of(place, "out", 4))
    train(config_of(place, "out", 8, run / "checkpoints" / "step_00000002"))
    train(config_of(place, "out", 6, run / "checkpoints" / "abandoned_1_step_00000004"))
    for name in RECORDS:
        if (run / name).exists():
            assert all(isinstance(json.loads(line), dict) for line in lines(run, name))
    assert [line["step"] for line in map(json.loads, lines(run, "evaluations.jsonl"))] == [4, 6]
    assert [point.step for point in read_run(run).evaluations["copy"]] == [4, 6]
    there = {path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step_")}
    assert there == {"step_00000004", "step_00000006"}


class Back(Guard):
    """Judges what it sees good, and rolls back once, at ``at``."""

    def __init__(self, at):
        self.at = at

    def observe(self, step, evaluations, confirm=None):
        if step == self.at:
            self.at = -1
            return GuardDecision(action=GuardAction.rollback, task="copy", reason="fell")
        return GuardDecision(judged_good=True)


def test_a_fork_into_the_directory_of_a_run_rolls_back_to_its_own_checkpoints(place):
    train(config_of(place, "parent", 6))
    with Trainer.from_config(config_of(place, "out", 4, seed=7)) as other:
        other.add_guard(Back(-1))
        other.train()
    begun = place / "parent" / "checkpoints" / "step_00000006"
    (place / "out" / "reference").mkdir(exist_ok=True)
    (place / "out" / "reference" / "of another run").touch()
    with Trainer.from_config(config_of(place, "out", 8, begun)) as fork:
        fork.add_guard(Back(8))
        fork.train()
    told = [json.loads(line) for line in lines(place / "out", "events.jsonl")]
    assert [event["data"]["to"] for event in told if event["kind"] == "rolled_back"] == [6]
    there = {path.name for path in (place / "out" / "checkpoints").iterdir()}
    assert {"abandoned_1_step_00000002", "abandoned_1_step_00000004"} < there
    assert not (place / "out" / "reference" / "of another run").exists(), "the KL is not measured to it"


def test_a_rollback_to_the_beginning_repeats_no_warning_of_the_settings(tmp_path):
    tasks = "tasks:\n  copy: {dataset: copy.jsonl, system: be brief, rewards: [rewards.py:starts_right]}\n"
    write_run(tmp_path, tasks, num_rows=40)
    with Trainer.from_config(run_config(tmp_path, "out", 4)) as trainer:
        trainer.add_guard(Back(2))
        trainer.train()
        assert [e.data["to"] for e in trainer.events if e.kind == "rolled_back"] == [0]
        told = [e.step for e in trainer.events if "its system message is not used" in e.reason]
    assert told == [0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # MLflow's
def test_a_copied_directory_is_a_run_of_its_own_in_trackers_and_a_moved_one_the_same(place, caplog):
    pytest.importorskip("mlflow")

    def steps_in_mlflow():
        with sqlite3.connect(place / "m.db") as store:
            rows = "SELECT run_uuid, step FROM metrics WHERE key = 'train/loss' ORDER BY step"
            found = {}
            for run, step in store.execute(rows):
                found.setdefault(run, []).append(step)
        return sorted(found.values())

    tracking = TrackingConfig(trackers=["jsonl", "mlflow"], uri=f"sqlite:///{place}/m.db")
    train(config_of(place, "run", 2, tracking=tracking))
    shutil.copytree(place / "run", place / "copy")
    with Trainer.from_config(config_of(place, "copy", 4, tracking=tracking)) as killed:
        killed._open()  # and ended before it saves
    train(config_of(place, "copy", 4, tracking=tracking))
    assert steps_in_mlflow() == [[1, 2], [1, 2, 3, 4]], "with one entry each"
    assert caplog.text.count(f"a copy of {place / 'run'}, which still exists") == 2
    (place / "run").rename(place / "moved")
    train(config_of(place, "moved", 4, tracking=tracking))
    train(config_of(place, "copy", 6, tracking=tracking))
    assert steps_in_mlflow() == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert caplog.text.count("a copy of") == 2


def test_a_fork_from_a_checkpoint_alone_reads_nothing_of_the_run_that_output_dir_held(place):
    train(config_of(place, "parent", 2))
    alone = shutil.copytree(place / "parent" / "checkpoints" / "step_00000002", place / "kept" / "one")
    build_actor(seed=5).save(place / "other" / "actor")
    other = ModelConfig(name_or_path=str(place / "other" / "actor"))
    train(config_of(place, "out", 2, model=other))
    train(config_of(place, "out", 4, alone))
    found, expected = (read_weights(place / name) for name in ("out/reference", "parent/reference"))
    assert not [name for name in expected if not torch.equal(found[name], expected[name])], "KL to another"
    assert not (place / "out" / "events.jsonl").exists(), "no setting differs from those of its own run"
    store = RunStore(place / "fork", CheckpointConfig(resume=str(alone)))
    shutil.rmtree(alone)  # as its run does, which goes on
    with pytest.raises(CheckpointError, match="one was removed while it was read"):
        store.restore_control_tokens(build_actor())
    store.close()


def test_a_fork_that_is_killed_in_its_first_evaluation_begins_from_its_parent_again(place, monkeypatch):
    train(config_of(place, "parent", 4))

    def killed(self, step, **keywords):
        raise SystemExit(9)

    config = config_of(place, "fork", 8, place / "parent" / "checkpoints" / "step_00000004")
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "evaluate", killed)
        patch.setattr(Supervisor, "save", lambda self: None)  # as a process that is killed
        with pytest.raises(TrainingError):
            train(config)
    assert not any((place / "fork" / "checkpoints").glob("step_*"))
    train(recorded_config(place / "fork"))
    assert [line["step"] for line in map(json.loads, lines(place / "fork", "evaluations.jsonl"))] == [4, 6, 8]
    again = recorded_config(place / "fork")
    assert again.checkpoint.resume == "auto", "it has checkpoints of its own now"
    train(replace(again, max_steps=10))
    assert [line["step"] for line in map(json.loads, lines(place / "fork", "evaluations.jsonl"))][-1] == 10


def test_a_fork_that_is_stopped_in_its_first_evaluation_judges_no_weights_twice(place):
    def trainer(config):
        found = Trainer.from_config(config)
        found.add_guard(JudgesAllGood())
        return found

    def stop(step, **keywords):
        raise KeyboardInterrupt

    trainer(config_of(place, "parent", 2)).train()
    fork = trainer(config_of(place, "fork", 4, place / "parent" / "checkpoints" / "step_00000002"))
    fork._open().evaluator.evaluate = stop
    with pytest.raises(KeyboardInterrupt):
        fork.train()
    assert not any((place / "fork" / "checkpoints").glob("step_*"))
    resumed = trainer(recorded_config(place / "fork"))
    resumed.train()
    assert resumed.guard.judged == [0, 2, 4]
    assert resumed.parts.store.checkpoints.entries[2].judged_good is True


def test_keys_that_a_user_chooses_are_told_when_they_come_and_when_they_go(place):
    quark = "  quark: {type: reward_conditioned, dataset: copy.jsonl, rewards: [rewards.py:is_short]%s}\n"
    (place / "tasks.yaml").write_text(COPY + quark % "")
    train(config_of(place, "out", 2))
    (place / "tasks.yaml").write_text(COPY + quark % ", algorithm_config: {quantiles: 3}")
    chosen = {
        "scheduler": SchedulerConfig(policy_config={"prior_prompts": 1}),
        "guard": GuardConfig(guard_config={"warmup": 9}),
    }
    train(config_of(place, "out", 3, **chosen))
    (place / "tasks.yaml").write_text(COPY + quark % "")
    train(config_of(place, "out", 4))
    assert [sorted(told.split(", ")) for told in changes(place / "out")] == [
        [
            "guard.guard_config.warmup: None -> 9",
            "scheduler.policy_config.prior_prompts: None -> 1",
            "tasks.quark.algorithm_config.quantiles: None -> 3",
        ],
        [
            "guard.guard_config.warmup: 9 -> None",
            "scheduler.policy_config.prior_prompts: 1 -> None",
            "tasks.quark.algorithm_config.quantiles: 3 -> None",
        ],
    ]


def test_changed_settings_are_told_by_the_run_that_trains_with_them(place, monkeypatch):
    """One that was stopped while a tracker opened has told nothing."""
    train(config_of(place, "out", 2))
    faster = {"optimizer": OptimizerConfig(learning_rate=1e-2)}

    def stopped(self, *arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(JsonlTracker, "start", stopped)
        with pytest.raises(KeyboardInterrupt):
            train(config_of(place, "out", 4, **faster))
    train(config_of(place, "out", 4, **faster))
    assert changes(place / "out") == ["optimizer.learning_rate: 0.001 -> 0.01"]


ALIASES = """
from multitask_rl.tracking.base import Tracker


class Aliases(Tracker):
    def __init__(self, output_dir, config, run_id):
        self.run_id, self.file = run_id, output_dir / "best"

    def log_checkpoint(self, actor, step, *, is_best, judged_good):
        if is_best:
            self.file.write_text(str(actor))
"""


def test_after_a_rollback_trackers_know_the_best_checkpoint_that_is_left(place):
    scores = {0: 0.1, 2: 0.5, 4: 0.3, 6: 0.9, 8: 0.2}
    (place / "aliases.py").write_text(ALIASES)
    tracking = TrackingConfig(trackers=["jsonl", f"{place / 'aliases.py'}:Aliases"])

    class Before6(Back):
        def observe(self, step, evaluations, confirm=None):
            decision = super().observe(step, evaluations)
            return replace(decision, judged_good=step < 6)

    with Trainer.from_config(config_of(place, "out", 8, tracking=tracking)) as trainer:
        trainer.add_guard(Before6(8))
        evaluator = trainer._open().evaluator
        evaluate = evaluator.evaluate

        def scored(step, **keywords):
            found = evaluate(step, **keywords)
            mean = scores.pop(step, 0.0)
            for evaluation in found.values():
                evaluation.primary = replace(evaluation.primary, mean=mean)
            return found

        evaluator.evaluate = scored
        trainer.train()
    best = place / "out" / "checkpoints" / "step_00000002" / "actor"
    assert (place / "out" / "best").read_text() == str(best)
    assert best.is_dir()
