import contextlib
import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from multitask_rl.boundary import allowance
from multitask_rl.config.run import (
    CheckpointConfig,
    CriticConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    RolloutConfig,
    TrackingConfig,
)
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import CheckpointError, ConfigError, DataError, TrainingError
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.models.actor import control_ids
from multitask_rl.plugins import TRACKERS, load_plugin
from multitask_rl.records import Scored
from multitask_rl.run.checkpoint import CheckpointStore
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.step.flow import Stage
from multitask_rl.trainer import Trainer
from run_builders import build_actor, lines, run_config, train, undocumented, weights_hash, write_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 5 steps without interruption, and what nodes of one's own saw in it."""
    directory = tmp_path_factory.mktemp("run")
    write_run(directory)
    trainer = Trainer.from_config(run_config(directory, "whole", 5))
    seen: list[Scored] = []
    losses: list[float] = []

    def watch(scored: Scored) -> Scored:
        seen.append(scored)
        return scored

    trainer.insert_stage(Stage("watch", watch, consumes=Scored, produces=Scored), after="rewards")
    trainer.insert_stage(Stage("loss", lambda report: losses.append(report.metrics["loss"])), after="update")
    trainer.train()
    trainer.seen_by_nodes = seen, losses
    return directory, trainer


def test_every_task_is_trained_and_every_number_is_per_task(finished):
    directory, _ = finished
    last = json.loads((directory / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    steps = [json.loads(line) for line in (directory / "whole" / "metrics.jsonl").read_text().splitlines()]
    numbers = {k: v for row in steps for k, v in row.items()}
    for task in ("copy", "digit", "quark", "clean"):
        assert math.isfinite(numbers[f"task/{task}/reward_mean"])
        assert math.isfinite(numbers[f"task/{task}/loss"])
        assert math.isfinite(numbers[f"task/{task}/eval"])
        for share in ("requested", "sampled", "trained"):
            assert 0.0 <= numbers[f"task/{task}/share_{share}"] <= 1.0
    assert {"macro/reward_mean", "worst/reward_mean", "macro/eval", "worst/eval"} <= numbers.keys()
    assert 0.0 < numbers["task/clean/rejection_rate"] < 1.0
    assert numbers["task/copy/mismatch_max"] < 1e-4
    assert numbers["task/digit/value_loss"] >= 0.0
    assert last["step"] == 5
    assert undocumented(directory / "whole") == set()


RECORDS = ("rollouts.jsonl", "events.jsonl", "evaluations.jsonl", "metrics.jsonl")


def records_of(directory, last=5):
    """Return every record up to the step ``last`` without what depends on the clock."""
    found = {name: lines(directory, name) for name in RECORDS}
    return {name: [row for row in rows if json.loads(row)["step"] <= last] for name, rows in found.items()}


def test_the_same_seed_gives_the_same_run_twice_and_another_seed_another(finished):
    """A run of 2 steps is as the first 2 of 5; resumed, it equals the uninterrupted one."""
    directory, whole = finished
    for seed in (random.seed, np.random.seed):
        seed()  # as another process begins
    second = train(run_config(directory, "parts", 2))
    assert records_of(directory / "parts") == records_of(directory / "whole", last=2)
    state = whole.parts.store.checkpoints.load(directory / "whole/checkpoints/step_00000002")
    same = second.parts.store.checkpoints.load(directory / "parts/checkpoints/step_00000002")
    assert same.state["random"] == state.state["random"]
    assert same.tensors.keys() == state.tensors.keys()
    assert [n for n, tensor in state.tensors.items() if not torch.equal(same.tensors[n], tensor)] == []
    assert weights_hash(train(run_config(directory, "other", 2, seed=1))) != weights_hash(second)
    resumed = train(run_config(directory, "parts", 5))
    assert weights_hash(resumed) == weights_hash(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert lines(directory / "parts", name) == lines(directory / "whole", name)


def test_a_complete_run_makes_no_step_more_and_is_left_as_it_is(finished, caplog):
    directory, trainer = finished
    shutil.copytree(directory / "whole", directory / "complete")
    record = directory / "complete/config.yaml"  # as of a run that began anew in its directory, or as a fork
    record.write_text(record.read_text().replace("resume: auto", "resume: never"))
    before = {p: p.read_bytes() for p in (directory / "complete").rglob("*.*") if p.is_file()}
    caplog.set_level("INFO")
    again = Trainer.from_config(run_config(directory, "complete", 5))
    evaluations = again.train()
    assert {n: e.values for n, e in evaluations.items()} == {
        n: e.values for n, e in trainer.history[-1][1].items()
    }
    assert "already made its 5 steps; raise max_steps" in caplog.text
    assert {p: p.read_bytes() for p in before} == before


@pytest.mark.parametrize(("is_given", "wanted", "expected"), [(False, 0, 1), (True, 0, 1), (True, 3, 3)])
def test_a_run_takes_as_many_threads_as_its_container_has_cores_or_as_it_is_told(
    is_given, wanted, expected, tmp_path, monkeypatch
):
    write_run(tmp_path)
    monkeypatch.setattr(allowance, "usable_cores", lambda: 1)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        config = run_config(tmp_path, "out", 1, num_threads=wanted)
        with Trainer(build_actor() if is_given else None, config=config):
            assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (torch.inference_mode, r"inference_mode\(\) is on, in which nothing is learnt"),
        (lambda: default_dtype(torch.bfloat16), r"dtype is torch.bfloat16; call .*\(torch.float32\)"),
        (lambda: torch.device("meta"), r"device is meta; call torch.set_default_device\(None\)"),
        (lambda: torch.autocast("cpu"), r"autocast is on; .*model\.autocast=true"),
    ],
    ids=["inference", "dtype", "device", "autocast"],
)
@pytest.mark.parametrize("is_made", [False, True])
def test_settings_of_torch_that_break_training_are_refused(setting, message, is_made, finished, tmp_path):
    config = run_config(finished[0], str(tmp_path / "out"), 1)
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(Trainer(config=config)) if is_made else None
        with setting(), pytest.raises(ConfigError, match=message):
            made.train_step() if is_made else Trainer(config=config)


def test_a_run_learns_where_gradients_are_off(tmp_path):
    write_run(tmp_path)
    with torch.no_grad():
        off = train(run_config(tmp_path, "off", 1))
    assert weights_hash(off) == weights_hash(train(run_config(tmp_path, "on", 1)))


def test_a_run_that_is_resumed_at_its_last_step_counts_to_that_step(finished, capsys):
    directory, _ = finished
    shown = {"tracking": TrackingConfig(trackers=["console"])}
    with Trainer.from_config(run_config(directory, "fewer", 60, **shown)) as stopped:
        stopped.train_step()
        stopped.parts.supervisor.save()
    train(run_config(directory, "fewer", 1, **shown))
    assert "step 1/1  held out: " in capsys.readouterr().out
    assert load_yaml(directory / "fewer/config.yaml")[0]["max_steps"] == 1


@pytest.mark.parametrize("step", [0, 4])
def test_a_run_killed_after_a_checkpoint_or_whose_newest_is_broken_has_every_record_once(
    finished, caplog, step
):
    """Behind step 0 no checkpoint is there, behind step 4 one that is cut off."""
    directory, whole = finished
    killed = directory / f"killed_{step}"
    shutil.copytree(directory / "whole", killed)
    for later in (2, 4, 5) if step == 0 else ():
        shutil.rmtree(killed / f"checkpoints/step_0000000{later}")
    if step == 4:
        weights = next((killed / "checkpoints/step_00000005/actor").glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:1000])
    with (killed / "metrics.jsonl").open("a") as torn:
        torn.write('{"step": 1, "x')
    resumed = train(run_config(directory, killed.name, 5))
    assert ("cut off or altered" in caplog.text) == (step == 4)
    assert resumed.parts.store.resumed_at == step
    assert weights_hash(resumed) == weights_hash(whole)
    assert records_of(killed) == records_of(directory / "whole")
    assert not list(killed.glob("previous-*"))


def test_a_checkpoint_without_its_state_is_not_gone_on_from(finished):
    directory, _ = finished
    shutil.copytree(directory / "whole/checkpoints/step_00000004", directory / "stateless/step_00000004")
    (directory / "stateless/step_00000004/state.json").unlink()
    resume = CheckpointConfig(resume=str(directory / "stateless/step_00000004"))
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        train(run_config(directory, "out2", 5, checkpoint=resume))


def test_a_run_killed_before_its_first_checkpoint_leaves_nothing_behind(finished):
    directory, _ = finished
    (directory / "early").mkdir()
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        first = (directory / "whole" / name).read_text().partition("\n")[0]
        (directory / "early" / name).write_text(first + "\n")
    train(run_config(directory, "early", 1))
    assert not list((directory / "early").glob("previous-*"))
    train(run_config(directory, "early", 1, checkpoint=CheckpointConfig(every=2, resume="never")))
    assert (directory / "early/previous-1/rollouts.jsonl").exists()


def test_an_output_dir_deleted_while_the_run_trains_ends_it_with_the_weights_saved(finished):
    directory, _ = finished

    def delete(scored: Scored) -> Scored:
        if trainer.step == 1:
            shutil.rmtree(directory / "deleted", ignore_errors=True)
        return scored

    trainer = Trainer.from_config(run_config(directory, "deleted", 5))
    trainer.insert_stage(Stage("delete", delete, consumes=Scored, produces=Scored), after="rewards")
    with pytest.raises(CheckpointError, match="deleted' was deleted or replaced while the run writes it"):
        trainer.train()
    assert CheckpointStore(directory / "deleted/checkpoints", keep=4).newest().state["counters"]["step"] == 2
    assert train(run_config(directory, "deleted", 3)).step == 3


def test_a_checkpoint_is_an_ordinary_model_directory(finished):
    from transformers import AutoModelForCausalLM

    directory, trainer = finished
    model = AutoModelForCausalLM.from_pretrained(
        directory / "whole" / "checkpoints" / "step_00000005" / "actor"
    )
    for name, value in trainer.actor.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_tasks_may_be_added_dropped_and_renamed_between_runs(tmp_path, caplog):
    write_run(tmp_path)
    first = train(run_config(tmp_path, "out", 1))
    tasks = (tmp_path / "tasks.yaml").read_text()
    changed = tasks.replace("  copy:\n", "  echo:\n    renamed_from: copy\n").replace("  clean:", "  fresh:")
    write_run(tmp_path, changed)
    second = Trainer.from_config(run_config(tmp_path, "out", 2))
    with caplog.at_level("INFO", "multitask_rl"):
        second._open()
    (told,) = [r.getMessage() for r in caplog.records if "is new since" in r.getMessage()]
    assert told.startswith("task 'fresh' is new")
    assert "if it is clean under a new name, stop the run and set renamed_from" in told
    assert second.step == 1
    assert second.tasks["echo"].stream.draw == first.tasks["copy"].stream.draw > 0
    assert second.tasks["fresh"].stream.draw == 0
    budgets = second.scorer.state_dict()
    assert budgets["echo"] == first.scorer.state_dict()["copy"]
    assert [name for name in ("echo", "fresh") if budgets[name]["scored"]["recent"]] == ["echo"]
    second.train()
    assert second.step == 2
    kept = changed.replace("from: copy", "from: fresh")
    write_run(tmp_path, kept[: kept.index("  fresh:")])
    with Trainer.from_config(run_config(tmp_path, "out", 3)) as third:
        third._open()
        saved = second.scheduler.state_dict()["policy_state"]["traces"]
        assert (
            third.scheduler.state_dict()["policy_state"]["traces"]["echo"] == saved["echo"] != saved["fresh"]
        )


QUARK = """
  quark:
    type: reward_conditioned
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    algorithm_config: {quantiles: %d}
"""


@pytest.mark.parametrize(("before", "after"), [(3, 0), (0, 3), (2, 4)])
def test_control_tokens_may_come_and_go_between_runs(tmp_path, before, after):
    """The engine has a copy of the weights, the critic a trunk, the KL a reference: all follow."""
    task = "tasks:\n  digit: {type: ppo, dataset: digit.jsonl, rewards: [rewards.py:starts_right], KL}\n"
    task = task.replace("KL", "kl: {coefficient: 0.05}")

    def build(quantiles, steps):
        write_run(tmp_path, task + (QUARK % quantiles if quantiles else ""), num_rows=24)
        config = run_config(
            tmp_path,
            "out",
            steps,
            model=ModelConfig(name_or_path=str(tmp_path / "actor"), reference_decay=0.9),
            rollout=RolloutConfig(max_new_tokens=4, max_staleness=1),
            critic=CriticConfig(trunk="separate"),
            guard=GuardConfig(enabled=False),
            eval=EvalConfig(every=0, num_prompts=4),
            checkpoint=CheckpointConfig(every=1),
        )
        return Trainer.from_config(config)

    first = build(before, 1)
    first.train()
    second = build(after, 2)
    second._open()
    checkpoint = second.parts.store.checkpoints.load(second.parts.store.checkpoints.path(1))
    old, new = first.actor.model.get_input_embeddings(), second.actor.model.get_input_embeddings()
    num_before = old.weight.shape[0]
    ids = [control_ids(trainer.actor.tokenizer) for trainer in (first, second)]
    assert len(ids[1]) == max(before, after)
    assert ids[0].items() <= ids[1].items()
    never = {run.sampling.suppressed_ids for run in second.tasks.values()}
    assert never == {tuple(sorted(ids[1].values()))}, "also where no task uses them any more"
    assert new.weight.shape[0] == len(second.actor.tokenizer)

    def check(number):
        """The first ``number`` rows are the checkpoint's."""
        state = second.parts.learner.backend.optimizer._adamw.state[new.weight]
        saved = checkpoint.tensors["optimizer/actor.model.embed_tokens.weight|exp_avg"]
        critic = second.critic.trunk.get_input_embeddings().weight
        reference = second.parts.learner.backend.runner.reference.get_input_embeddings().weight
        assert torch.equal(new.weight[:number], old.weight)
        assert torch.equal(state["exp_avg"][:number], saved)
        assert torch.equal(critic[:number], first.critic.trunk.get_input_embeddings().weight)
        assert torch.equal(reference[:number], checkpoint.tensors["reference/model.embed_tokens.weight"])
        for row in new.weight[number:]:
            torch.testing.assert_close(row, old.weight.mean(dim=0))
        assert not state["exp_avg"][number:].any()

    check(num_before)
    second.train_step()
    assert not torch.equal(new.weight[:num_before], old.weight)
    second.parts.state.restore(checkpoint)  # a rollback takes the same road
    check(num_before)
    second.close()


def test_a_node_of_ones_own_is_inserted_without_touching_the_others(finished):
    """Nor what the run learns: those that are compared with it have no such node."""
    _, trainer = finished
    seen, losses = trainer.seen_by_nodes
    assert len(losses) == 5
    assert {s.rollout.task for s in seen} == {"copy", "digit", "quark", "clean"}
    assert [s.name for s in trainer.flow.stages] == [
        "rollout",
        "constraints",
        "rewards",
        "watch",
        "advantages",
        "update",
        "loss",
    ]


ONE_TASK = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
"""


def test_interrupts_while_sampling_evaluating_and_judging_lose_no_step_and_no_verdict(finished, monkeypatch):
    """One run, interrupted three times: each time the next start goes on from the step that was made."""
    directory, whole = finished
    config = run_config(directory, "interrupted", 5, checkpoint=CheckpointConfig(every=10))
    expected = whole.parts.store.checkpoints.entries

    def opened(resumed_at):
        trainer = Trainer.from_config(config)
        trainer._open()
        assert trainer.step == resumed_at
        return trainer

    def keeps_the_verdict(trainer, step):
        entry = trainer.parts.store.checkpoints.entries[step]
        assert (entry.judged_good, entry.score) == (True, expected[step].score)

    trainer = Trainer.from_config(config)

    def interrupted(scored: Scored) -> Scored:
        if trainer.step == 2:
            raise IndexError("of a stage")
        return scored

    trainer.insert_stage(Stage("interrupted", interrupted, consumes=Scored, produces=Scored), after="rewards")
    with pytest.raises(IndexError):
        trainer.train()

    evaluate, observe = Evaluator.evaluate, SafetyGuard.observe

    def interrupted_evaluation(self, step, **kind):
        if step == 4:
            raise KeyboardInterrupt
        return evaluate(self, step, **kind)

    def interrupted_judging(self, step, *rest):
        decision = observe(self, step, *rest)
        if step == 4:
            raise KeyboardInterrupt
        return decision

    resumed_at = 2
    for owner, name, broken in (
        (Evaluator, "evaluate", interrupted_evaluation),
        (SafetyGuard, "observe", interrupted_judging),
    ):
        trainer = opened(resumed_at)
        keeps_the_verdict(trainer, 2)
        monkeypatch.setattr(owner, name, broken)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        monkeypatch.undo()
        resumed_at = 4
    trainer = opened(4)
    trainer.train()
    assert weights_hash(trainer) == weights_hash(whole)
    keeps_the_verdict(trainer, 4)
    assert records_of(directory / "interrupted") == records_of(directory / "whole")


@pytest.mark.parametrize(("problem", "is_foreseen"), [(IndexError("9"), False), (TrainingError("9"), True)])
def test_a_save_that_fails_does_not_hide_what_ended_the_run(
    tmp_path, monkeypatch, caplog, problem, is_foreseen
):
    write_run(tmp_path, ONE_TASK)
    trainer = Trainer.from_config(run_config(tmp_path, "out", 2))

    def fails(directory):
        raise problem

    def broken(scored: Scored) -> Scored:
        if trainer.step == 1:
            monkeypatch.setattr(trainer.actor, "save", fails)
            raise KeyError("of a stage")
        return scored

    trainer.insert_stage(Stage("broken", broken, consumes=Scored, produces=Scored), after="rewards")
    with pytest.raises(KeyError, match="of a stage"):
        trainer.train()
    assert "its last checkpoint cannot be written: 9" in caplog.text
    assert ("Traceback" in caplog.text) is not is_foreseen


def test_the_best_checkpoint_is_the_lowest_where_lower_is_better(tmp_path):
    tasks = ONE_TASK.replace("{type", "{higher_is_better: false, type").replace("starts_right", "is_short")
    write_run(tmp_path, tasks)
    trainer = train(run_config(tmp_path, "out", 2))
    for step, evaluations in trainer.history:
        values = evaluations["copy"].values
        expected = pytest.approx(-sum(values) / len(values))
        assert trainer.parts.store.checkpoints.entries[step].score == expected


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tasks_file": "nowhere.yaml"}, ConfigError, "nowhere.yaml"),
        (
            {"model": ModelConfig(name_or_path="no/such/dir")},
            ConfigError,
            "no directory on this machine",
        ),
        ({"output_dir": "/proc/version/out"}, ConfigError, "goes through a file"),
        ({"device_map": {"actor": "cuda:7"}}, ConfigError, "cuda:7"),
        ({"checkpoint": CheckpointConfig(resume="no/such/checkpoint")}, ConfigError, "is not there"),
    ],
)
def test_bad_settings_are_one_clear_error_before_training(finished, changes, error, message):
    directory, _ = finished
    with pytest.raises(error, match=message):
        train(run_config(directory, "bad", 2, **changes))


def test_chat_messages_and_system_without_a_chat_template_are_told_once(tmp_path):
    write_run(tmp_path, ONE_TASK.replace("{type", "{system: Be kind., type"))
    chats = [{"prompt": [{"role": "user", "content": f"{i % 10}"}], "reference": "a"} for i in range(60)]
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chats))
    train(run_config(tmp_path, "out", 2))
    messages, system = [e for e in lines(tmp_path / "out", "events.jsonl") if "chat template" in e]
    assert "chat: false" in messages
    assert "its system message is not used" in system


def test_a_prompt_longer_than_the_context_is_left_out_and_counted(tmp_path):
    write_run(tmp_path, ONE_TASK)
    rows = [{"id": i, "prompt": "a" * (5 if i % 2 else 300), "reference": "a"} for i in range(60)]
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    trainer = train(run_config(tmp_path, "out", 1))
    assert trainer.tasks["copy"].num_overlong > 0
    (told,) = [e for e in lines(tmp_path / "out", "events.jsonl") if "longer than" in e]
    assert "task/copy/overlong_prompts" in told
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps(r | {"prompt": "a" * 300}) + "\n" for r in rows))
    with pytest.raises(DataError, match="longer than"):
        train(run_config(tmp_path, "out2", 1))


def only_threads(before):
    """Whether none but ``before`` are left; transformers does not wait for those that it loaded with."""
    until = time.monotonic() + 60
    while not set(threading.enumerate()) <= before and time.monotonic() < until:
        time.sleep(0.05)
    return set(threading.enumerate()) <= before


def test_a_run_made_of_single_steps_is_closed_by_its_user(tmp_path):
    write_run(tmp_path, ONE_TASK)
    before = set(threading.enumerate())
    with Trainer.from_config(run_config(tmp_path, "out", 5)) as trainer:
        trainer.train_step()
        for late in (
            lambda: trainer.insert_stage(Stage("late", lambda record: record), after="rewards"),
            lambda: trainer.add_guard(SafetyGuard()),
            lambda: trainer.set_task_scheduler(trainer.scheduler),
            trainer.enable_3d_hybrid_engine,
        ):
            with pytest.raises(TrainingError, match="before the run begins"):
                late()
        trainer.train_step()
    trainer.close()
    assert only_threads(before), "workers and engine are gone"
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2]
    never_opened = Trainer.from_config(run_config(tmp_path, "other", 5))
    never_opened.close()
    never_opened.close()
    assert only_threads(before)
    with pytest.raises(TrainingError, match="run has ended"):  # its reward pool would answer nothing
        never_opened.train()


def test_state_that_was_edited_is_refused_with_its_place_or_taken_whole(finished):
    """As if every hash were right: whatever a controller cannot read is one error that says where."""
    directory, _ = finished
    rng = random.Random(0)
    with Trainer.from_config(run_config(directory, "edited", 5)) as trainer:
        trainer._open()
        whole = trainer.parts.store.checkpoints.load(directory / "whole/checkpoints/step_00000005")
        refused = 0
        for _ in range(300):
            state = copy.deepcopy(whole.state)
            node, key = state, rng.choice(sorted(state))
            while isinstance(node[key], dict | list) and node[key] and rng.random() < 0.8:
                node = node[key]
                key = rng.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
            wrong = rng.choice([None, "x", -7, [], {}, [1], {"a": 1}, 1e308, math.nan, "gone"])
            if wrong == "gone":
                del node[key]
            else:
                node[key] = wrong
            try:
                trainer.parts.state.restore(replace(whole, state=state))
            except CheckpointError as error:
                refused += 1
                assert re.search("does not hold what this version|is unreadable", str(error))  # noqa: PT017
    assert refused > 78, "a third of 1,500 edits was refused; 78 of 300 are three standard errors less"


TOLD = """
from multitask_rl.tracking.base import Tracker


class Told(Tracker):
    calls = []

    def __init__(self, output_dir, config, run_id):
        pass

    def start(self, parameters, resume_step=None):
        self.calls.append("start")

    def finish(self, status):
        self.calls.append(status)


class Refuses(Tracker):
    error = KeyboardInterrupt

    def __init__(self, output_dir, config, run_id):
        pass

    def start(self, parameters, resume_step=None):
        raise self.error
"""


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "stopped"), (CheckpointError("no space"), "failed")]
)
def test_trackers_that_have_started_are_ended_when_a_run_is_not_opened(tmp_path, error, status):
    write_run(tmp_path)
    (tmp_path / "told.py").write_text(TOLD)
    names = [f"{tmp_path / 'told.py'}:{name}" for name in ("Told", "Refuses")]
    told, refuses = (load_plugin(TRACKERS, name, expects="log_metrics") for name in names)
    refuses.error = error
    config = run_config(tmp_path, "out", 3, tracking=TrackingConfig(trackers=names))
    with pytest.raises(error if isinstance(error, type) else type(error)):
        Trainer.from_config(config).train()
    assert told.calls == ["start", status]


def test_an_interrupt_of_steps_made_by_hand_stops_the_run_as_one_of_train_does(tmp_path):
    write_run(tmp_path)
    (tmp_path / "told.py").write_text(TOLD)
    name = f"{tmp_path / 'told.py'}:Told"
    told = load_plugin(TRACKERS, name, expects="log_metrics")
    config = run_config(tmp_path, "out", 3, tracking=TrackingConfig(trackers=[name]))

    def make_a_step_and_interrupt() -> None:
        with Trainer.from_config(config) as trainer:
            trainer.train_step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_a_step_and_interrupt()
    assert told.calls == ["start", "stopped"]


def test_a_later_trainer_of_the_process_takes_the_directory_over(tmp_path):
    write_run(tmp_path)
    config = run_config(tmp_path, "out", 3)
    earlier, later = Trainer.from_config(config), Trainer.from_config(config)
    earlier.train_step()
    later.train_step()
    with pytest.raises(CheckpointError, match="a later run of this process trains into it"):
        earlier.train_step()
    earlier.close()
    lock = (
        "import sys; from pathlib import Path; from multitask_rl.run.directory_lock import DirectoryLock; "
        f"DirectoryLock(Path({str(tmp_path / 'out')!r}))"
    )
    other = subprocess.run([sys.executable, "-c", lock], capture_output=True, text=True)
    assert f"process {os.getpid()} on" in other.stderr
    later.train()
    rows = [json.loads(row) for row in lines(tmp_path / "out", "metrics.jsonl")]
    assert [row["step"] for row in rows if "train/learning_rate" in row] == [1, 2, 3]
    assert max((tmp_path / "out/checkpoints").glob("step_*")).name == "step_00000003"


LEAVES = """
import os

from multitask_rl.tracking.base import Tracker


class Leaves(Tracker):
    def __init__(self, output_dir, config, run_id):
        self.elsewhere = output_dir.parent / "elsewhere"

    def log_metrics(self, metrics, step):
        os.chdir(self.elsewhere)
"""


def test_a_run_with_relative_paths_survives_a_change_of_the_working_directory(tmp_path, monkeypatch):
    write_run(tmp_path)
    (tmp_path / "leaves.py").write_text(LEAVES)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tracking = TrackingConfig(trackers=["leaves.py:Leaves", "jsonl"])
    paths = {"tasks_file": "tasks.yaml", "output_dir": "out", "model": ModelConfig(name_or_path="actor")}
    Trainer.from_config(run_config(tmp_path, "out", 4, tracking=tracking, **paths)).train()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "out" / "checkpoints" / "step_00000004").is_dir()
    steps = [line for line in lines(tmp_path / "out", "metrics.jsonl") if "train/loss" in line]
    assert len(steps) == 4


def test_an_output_directory_that_is_a_link_to_nothing_is_told(tmp_path):
    write_run(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="gone' is a link to a path that does not exist"):
        Trainer.from_config(run_config(tmp_path, "gone", 1))
