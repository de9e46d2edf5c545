"""Runs whose tasks are held to a grammar: from the tasks file to an actor that has learnt."""

import json
import re
from statistics import fmean

import jsonschema
import pytest

from model_builders import build_byte_actor
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
)
from multitask_rl.errors import ConfigError
from multitask_rl.trainer import Trainer
from run_builders import lines, run_config, train, undocumented, weights_hash, write_run

TASKS = """
tasks:
  word:
    type: grpo
    dataset: copy.jsonl
    rewards: [rewards.py:starts_right]
    kl: {coefficient: 0.001}
    constraints:
      - {mode: grammar, config: {choices: [apple, bread, coffee]}}
  number:
    type: ppo
    dataset: digit.jsonl
    rewards: [rewards.py:starts_right]
    sampling: {temperature: 0.9, top_p: 0.95}
    constraints:
      - {mode: grammar, config: {regex: "[0-9]{1,3}"}}
      - {plugin: rewards.py:is_long, mode: penalty, weight: 0.1}
    algorithm_config: {entropy_coefficient: 0.001}
  quark:
    type: reward_conditioned
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    kl: {coefficient: 0.01}
    constraints:
      - {mode: grammar, config: {regex: "[a-c]{1,5}"}}
    algorithm_config: {quantiles: 3}
  free:
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
"""


HERE = """

def is_long(response):
    return float(len(response) > 2)


from multitask_rl.scoring.shapes import with_traits

for _plugin in (starts_right, is_short, is_long):
    with_traits(isolate=False)(_plugin)
"""


def write(directory, tasks=TASKS):
    """Write a run whose rewards have no worker processes."""
    file = write_run(directory, tasks)
    with (directory / "rewards.py").open("a") as stream:
        stream.write(HERE)
    return file


def settings(directory, output, max_steps, **changes):
    return run_config(
        directory, output, max_steps, **({"rollout": RolloutConfig(max_new_tokens=8)} | changes)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("grammar")
    write(directory)
    return directory, train(settings(directory, "whole", 4))


PATTERNS = {"word": "apple|bread|coffee", "number": "[0-9]{1,3}", "quark": "[a-c]{1,5}"}


def test_no_response_of_the_run_leaves_its_grammar(finished):
    directory, _ = finished
    rows = [json.loads(line) for line in (directory / "whole" / "rollouts.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {*PATTERNS, "free"}
    for row in rows:
        if row["task"] in PATTERNS:
            assert re.fullmatch(PATTERNS[row["task"]], row["response"]), row["response"]
            assert json.loads(row["sampling"]["grammar"])
    assert any(len(row["response"]) > 5 for row in rows if row["task"] == "free")


def test_metrics_tell_what_was_accepted_and_forced_and_engine_and_trainer_agree(finished):
    directory, trainer = finished
    steps = [json.loads(line) for line in (directory / "whole" / "metrics.jsonl").read_text().splitlines()]
    last = {k: v for step in steps for k, v in step.items() if isinstance(v, float)}
    for task in PATTERNS:
        assert last[f"task/{task}/grammar/accepted_rate"] == 1.0
        if task != "quark":
            assert last[f"task/{task}/mismatch_max"] < 1e-5
    # apple, bread and coffee are told apart by their first letter
    assert last["task/word/grammar/forced_share"] > 0.7
    assert undocumented(directory / "whole") == set()
    assert 0.0 < last["task/number/grammar/forced_share"] < 0.6
    assert not any("grammar" in name for name in last if name.startswith("task/free/"))
    assert trainer.history[-1][1]["word"].metrics["grammar/accepted_rate"].mean == 1.0


def test_a_run_stopped_and_resumed_equals_the_uninterrupted_one(finished):
    directory, whole = finished
    train(settings(directory, "parts", 2))
    resumed = train(settings(directory, "parts", 4))
    assert weights_hash(resumed) == weights_hash(whole)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert lines(directory / "parts", name) == lines(directory / "whole", name)


def test_a_task_learns_which_choice_is_right(tmp_path):
    only = TASKS.partition("  number:")[0]
    write(tmp_path, only)
    config = settings(
        tmp_path,
        "out",
        24,
        batch=BatchConfig(prompts_per_step=12, group_size=6),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        eval=EvalConfig(every=24, num_prompts=12),
        checkpoint=CheckpointConfig(every=24),
    )
    trainer = train(config)
    before, after = (fmean(t["word"].values) for _, t in (trainer.history[0], trainer.history[-1]))
    assert before < 0.6
    assert after > 0.8  # chance: a third


def test_json_responses_are_trained_on(tmp_path):
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 9}, "sure": {"type": "boolean"}},
        "required": ["sum", "sure"],
        "additionalProperties": False,
    }
    constraint = json.dumps({"mode": "grammar", "config": {"json_schema": schema}})
    tasks = "tasks:\n  m:\n    dataset: copy.jsonl\n    rewards: [rewards.py:is_sure]\n    constraints:\n"
    tasks += f"      - {constraint}\n"
    build_byte_actor().save(tmp_path / "actor")
    write(tmp_path, tasks)
    with (tmp_path / "rewards.py").open("a") as stream:
        stream.write("\n\ndef is_sure(response):\n    return float('true' in response)\n")
    changes = {
        "model": ModelConfig(name_or_path=str(tmp_path / "actor")),
        "rollout": RolloutConfig(max_new_tokens=40),
        "eval": EvalConfig(every=8, num_prompts=12),
        "checkpoint": CheckpointConfig(every=8),
    }
    trainer = train(settings(tmp_path, "out", 8, **changes))
    rows = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    for row in rows:
        jsonschema.validate(json.loads(row["response"]), schema)
    shares = [t["m"].metrics["reward_mean"].mean for _, t in trainer.history]
    assert shares[-1] > shares[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": RolloutConfig(max_new_tokens=6)}, r"tasks\.word.*'coffee' takes 7 tokens"),
        ({"rollout": RolloutConfig(max_new_tokens=8, stop=[";"])}, r"tasks\.word.*sampling\.stop=\[\]"),
    ],
)
def test_what_the_grammar_cannot_live_with_is_refused_before_training(tmp_path, changes, message):
    write(tmp_path)
    with pytest.raises(ConfigError, match=message):
        Trainer.from_config(settings(tmp_path, "out", 2, **changes))
