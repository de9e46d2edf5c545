"""Runs with several learner ranks: the same learning, resumable, and a report of who waited for whom."""

import json
import os
import shutil
import signal

import pytest
import torch

from forked import ForkedRank
from multitask_rl.boundary.interrupts import Terminated, stopping_on_signals
from multitask_rl.cli import main
from multitask_rl.config.devices import plan_ranks
from multitask_rl.config.run import BatchConfig, CheckpointConfig, ModelConfig, RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.curriculum.scheduler import SchedulerConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import read_weights
from multitask_rl.run.plan import plan_run
from multitask_rl.trainer import Trainer
from multitask_rl.training.backends.build import LocalRank, TorchBackend
from multitask_rl.training.runner import ModelRunner
from run_builders import TASKS, run_config, train, undocumented, weights_hash, write_run

TWO = {"device_map": {"actor": "cpu:0-1"}}


@pytest.fixture(scope="module", autouse=True)
def _forked():
    """Start ranks as forks of one process: one test takes that away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "launch", ForkedRank)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """With a run of two ranks that stopped after its first step: ``parts``, and its copy ``changing``.

    One task learns nothing of responses cut at the limit.
    """
    place = tmp_path_factory.mktemp("ranks")
    weight = "    weight: 2\n"
    masked = TASKS.replace(weight, f"{weight}    algorithm_config: {{mask_truncated: true}}\n")
    assert masked != TASKS
    write_run(place, masked)
    train(run_config(place, "parts", 1, **TWO))
    shutil.copytree(place / "parts", place / "changing")
    return place


@pytest.fixture(scope="module")
def expected(place):
    return dict(train(run_config(place, "one", 3)).actor.model.named_parameters())


def test_two_ranks_learn_what_one_process_learns_and_resume_as_it_does(place, expected, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "launch", LocalRank)
        two = train(run_config(place, "two", 3, **TWO))
    for name, found in two.actor.model.named_parameters():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=1e-5)

    responses = [json.loads(line) for line in (place / "two" / "rollouts.jsonl").read_text().splitlines()]
    assert {r["finish_reason"] for r in responses if r["task"] == "copy"} >= {"length", "stop"}, (
        "masked or not"
    )

    resumed = train(run_config(place, "parts", 3, **TWO))
    assert weights_hash(resumed) == weights_hash(two)

    steps = [json.loads(line) for line in (place / "two" / "metrics.jsonl").read_text().splitlines()]
    numbers = {key: value for step in steps for key, value in step.items()}
    assert numbers["train/ranks/1/busy_s"] > 0.0
    assert numbers["train/ranks/communication_s"] > 0.0
    assert numbers["train/ranks/sent_mb"] > 0.0
    assert undocumented(place / "two") == set()
    assert numbers["train/ranks/0/waits_s"] == 0.0 or numbers["train/ranks/1/waits_s"] == 0.0
    assert 0.0 < numbers["utilisation/rank1"] <= numbers["utilisation/update"]
    assert main(["report", str(place / "two")]) == 0
    said = capsys.readouterr().out
    assert "rank1" in said
    assert "gradient_sum" in said


def test_ranks_with_parts_of_the_weights_learn_the_same_and_go_on_where_copies_ended(place, expected):
    sharded = {"device_map": {"actor": "cpu:0-1 sharded"}}
    rows = [{"id": number, "prompt": f"{letter}>", "answer": "abc"} for number, letter in enumerate("abc")]
    (place / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    anchor = {"type": "anchor", "dataset": str(place / "texts.jsonl"), "answer": "{answer}"}
    train(run_config(place, "changing", 2, tasks={"keep": anchor}, **sharded))
    records = [
        json.loads(line) for line in (place / "changing" / "evaluations.jsonl").read_text().splitlines()
    ]
    kept = [r["metrics"]["kl"]["mean"] for r in records if r["task"] == "keep"]
    assert all(kl > 0.0 for kl in kept)
    assert len(kept) == 2, "at the resume and at its end"
    in_layers = {"device_map": {"actor": "cpu:0-1 tensor=2"}}
    changing = train(run_config(place, "changing", 3, **in_layers))
    for name, found in changing.actor.model.named_parameters():
        torch.testing.assert_close(found, expected[name], rtol=1e-4, atol=2e-5)
    # what parts wrote is what one process reads, bit for bit
    one = train(run_config(place, "changing", 4))
    saved = read_weights(place / "changing" / "checkpoints" / "step_00000003" / "actor")
    assert weights_hash(changing) != weights_hash(one)
    assert all(torch.equal(saved[name], p) for name, p in changing.actor.model.named_parameters())


def test_a_signal_in_a_call_of_ranks_with_parts_of_the_weights_loses_no_step(place, monkeypatch):
    (place / "texts.jsonl").write_text('{"id": 0, "prompt": "a>", "answer": "abc"}\n')
    anchor = {"type": "anchor", "dataset": str(place / "texts.jsonl"), "answer": "{answer}"}
    score, calls, trainer = ModelRunner.score_texts, [], os.getpid()

    def scored(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 2 and os.getpid() == trainer:  # the first call was before the first step
            os.kill(trainer, signal.SIGTERM)
        return score(self, *arguments, **options)

    monkeypatch.setattr(ModelRunner, "score_texts", scored)
    config = run_config(
        place,
        "stopped",
        4,
        tasks={"keep": anchor},
        device_map={"actor": "cpu:0-1 sharded"},
        checkpoint=CheckpointConfig(every=50),
    )
    with pytest.raises(Terminated), stopping_on_signals():
        train(config)
    assert (place / "stopped" / "checkpoints" / "step_00000002").is_dir()


def test_parts_of_gradients_are_not_compared(place):
    every_step = SchedulerConfig(policy_config={"gradients_every": 1})
    for devices in ("cpu:0-1 sharded", "cpu:0-1 tensor=2"):
        config = run_config(place, "no", 1, device_map={"actor": devices}, scheduler=every_step)
        with pytest.raises(ConfigError, match="parts are not compared"):
            Trainer.from_config(config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": {"compile": True}}, r"model\.compile"),
        ({"batch": {"context_ranks": 2}}, r"batch\.context_ranks"),
        ({"critic": {"trunk": "separate"}}, r"critic\.trunk"),
    ],
)
def test_what_parts_of_weights_cannot_is_refused_before_a_model_loads(tmp_path, settings, problem):
    write_run(tmp_path)
    path = str(tmp_path)
    plain = {"tasks_file": f"{path}/tasks.yaml", "output_dir": f"{path}/out", **settings}
    config = build_dataclass(RunConfig, {**plain, "device_map": {"actor": "cpu:0-1 sharded"}}, Where())
    with pytest.raises(ConfigError, match=f"part of the weights, with which {problem}"):
        plan_run(config)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"device_map": {"actor": "cpu:0-2"}, "batch": BatchConfig(context_ranks=2)},
            "must divide the number of learner ranks, 3",
        ),
        ({"batch": BatchConfig(context_ranks=2)}, "must divide the number of learner ranks, 1"),
        (
            {**TWO, "batch": BatchConfig(context_ranks=2, layout="packed")},
            "batch.layout=packed: batch.context_ranks=2 needs samples in rows of their own",
        ),
        (
            {
                **TWO,
                "batch": BatchConfig(context_ranks=2),
                "model": ModelConfig(rope_scaling={"type": "dynamic", "factor": 2.0}),
            },
            "take yarn or ntk",
        ),
        (
            {"device_map": {"actor": "cpu:0-1", "critic": "cuda:1"}, "executor": "ray"},
            "lives on the actor's devices",
        ),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_anything_starts(tmp_path, settings, problem):
    with pytest.raises(ConfigError, match=problem):
        plan_ranks(run_config(tmp_path, "never", 1, **settings))


def test_every_device_of_the_actor_is_a_rank(tmp_path):
    def planned(**settings):
        return plan_ranks(run_config(tmp_path, "never", 1, **settings))

    four = {"actor": "cuda:0-3"}
    assert planned(device_map=four) == [(f"cuda:{i}", f"cuda:{i}") for i in range(4)]
    assert [critic for _, critic in planned(device_map={**four, "critic": "cuda:4-5"})] == [
        "cuda:4",
        "cuda:5",
        "cuda:4",
        "cuda:5",
    ]
    assert planned(**TWO) == [("cpu", "cpu")] * 2
    assert planned() == [("", "")]
