"""The schemas that editors read refuse what `tasks validate` and `train` refuse, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from multitask_rl.cli import main
from multitask_rl.config.editor_schemas import run_schema, tasks_schema
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where, parse_yaml
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]
TASKS, RUN = Draft7Validator(tasks_schema()), Draft7Validator(run_schema())


def _lagrangian(multiplier: str) -> str:
    return (
        f"constraints: [{{plugin: over_refusal, mode: lagrangian, limit: 0.1, multiplier: {{{multiplier}}}}}]"
    )


def refuses(validator: Draft7Validator, document: Any) -> bool:
    return not validator.is_valid(document)


@pytest.mark.parametrize("path", [*ROOT.glob("configs/*.yaml"), *ROOT.glob("examples/*/tasks.yaml")])
def test_shipped_tasks_files_are_valid(path: Path) -> None:
    assert [e.message for e in TASKS.iter_errors(yaml.safe_load(path.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/experiment/*.yaml")), ids=lambda path: path.stem)
def test_shipped_runs_are_valid(path: Path) -> None:
    document, _ = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    assert [e.message for e in RUN.iter_errors(document)] == []


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        ("weight: 2", False),
        ("weight: -1", True),
        ("weight: two", True),
        ("weight: true", True),
        ("wieght: 2", True),
        ("min_share: 1", False),
        ("min_share: 1.5", True),
        ("min_share: null", False),
        ("loss_weight: null", True),
        ("group_size: 0", True),
        ("group_size: null", False),
        ("kl: {coefficient: 0.1, estimator: k2}", False),
        ("kl: {estimator: k4}", True),
        ("kl: {target: 0, coefficient: 0.1}", True),
        ("kl: {horizon: 0.5}", True),
        ("kl: 0.1", True),
        ("curriculum: {by: pass_rate, pools: 2}", False),
        ("curriculum: {pools: 1}", True),
        ("curriculum: {floor: 1.01}", True),
        ("sampling: {temperature: 0.5, top_p: 1, stop: [a, b]}", False),
        ("sampling: {top_p: 0}", True),
        ("sampling: {top_k: -1}", True),
        ("sampling: {stop: a}", True),
        ("sampling: {max_new_tokens: 0}", True),
        ("sampling: {grammar: x}", True),
        ("chat: true", False),
        ("chat: 1", True),
        ("evaluation_only: 'no'", True),
        ("source: here", True),
        ("dataset_config: [a]", True),
        ("algorithm_config: {clip_low: 0.1}", False),
        ("constraints: [{plugin: over_refusal, mode: penalty, weight: 0}]", False),
        ("constraints: [{plugin: over_refusal, mode: lagrangain}]", True),
        ("constraints: [{plugin: over_refusal, limit: 2}]", True),
        ("constraints: [{plugin: over_refusal, max_attempts: 0}]", True),
        ("constraints: [{plugin: over_refusal, stream_every: -1}]", True),
        (
            _lagrangian("mode: log"),
            False,
        ),
        (_lagrangian("mode: p"), True),
        (
            _lagrangian("setpoint: 0"),
            True,
        ),
        ("constraints: over_refusal", True),
        ("constraint_model: over_refusal", False),
        ("constraint_model: [over_refusal]", True),
    ],
)
def test_a_task_is_refused_by_the_schema_where_it_is_refused_by_validate(keys: str, wrong: bool) -> None:
    for text in (
        f"tasks: {{a: {{rewards: [exact_match], {keys}}}}}",
        f"tasks: [{{name: a, rewards: [f1], {keys}}}]",
    ):
        document, _ = parse_yaml(text, "tasks.yaml")
        assert refuses(TASKS, document) is wrong
        if wrong:
            with pytest.raises(ConfigError):
                parse_tasks(document)
        else:
            assert list(parse_tasks(document)) == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        "tasks: {}",
        "tasks: []",
        "tasks: math",
        "task: {a: {rewards: [f1]}}",
        "tasks: {all: {rewards: [f1]}}",
        "tasks: {a b: {rewards: [f1]}}",
        "tasks: [{rewards: [f1]}]",
        "tasks: {a: {rewards: f1}}",
        "tasks: {a: {rewards: [{weight: 1}]}}",
        "tasks: {a: {rewards: [{plugin: f1, weigth: 1}]}}",
        "tasks: {a: {rewards: [{plugin: f1, weight: high}]}}",
        "tasks: {a: {rewards: [1]}}",
    ],
)
def test_a_file_that_is_no_list_of_tasks_is_refused_by_both(text: str) -> None:
    document, _ = parse_yaml(text, "tasks.yaml")
    assert refuses(TASKS, document)
    with pytest.raises(ConfigError):
        parse_tasks(document)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("batch: {group_size: 0}", "batch.group_size must be >= 1, got 0"),
        ("batch: {quorum: 1.5}", "batch.quorum must be in (0, 1], got 1.5"),
        ("batch: {layuot: auto}", "batch.layuot: unknown key 'layuot'; did you mean 'layout'?"),
        (
            "batch: {layout: share}",
            "batch.layout must be one of auto, shared, bucketed, packed, got 'share'",
        ),
        ("optimizer: {betas: [0.9, 1]}", "optimizer.betas[1] must be in [0, 1), got 1.0"),
        ("scheduler: {min_weight: 2}", "scheduler.min_weight must be in [0, 1], got 2.0"),
        ("guard: {rollback_steps: 0}", "guard.rollback_steps must be >= 1, got 0"),
        ("executor: slurm", "executor must be one of local, ray, got 'slurm'"),
        ("model: {lora: {alpha: 0}}", "model.lora.alpha must be > 0, got 0.0"),
        ("max_steps: many", "max_steps: expected a whole number, got 'many' (str)"),
        ("tracking: {trackers: [console], store_rollouts: -1}", ""),
        ("profile: torch", ""),
    ],
)
def test_a_run_is_refused_by_the_schema_where_it_is_refused(text: str, wrong: str) -> None:
    document, _ = parse_yaml(text, "run.yaml")
    assert refuses(RUN, document) is bool(wrong)
    if wrong:
        with pytest.raises(ConfigError) as told:
            build_dataclass(RunConfig, document, Where())
        assert str(told.value).startswith(wrong)
    else:
        build_dataclass(RunConfig, document, Where())


def test_a_value_of_a_run_may_be_a_reference_that_hydra_fills_in() -> None:
    assert not refuses(RUN, {"max_steps": "${oc.env:STEPS}", "defaults": ["_self_"], "hydra": {}})
    assert refuses(RUN, {"max_steps": "STEPS"})
    assert refuses(RUN, {"tasks": {"a": {"wieght": 1}}})


def test_the_command_prints_the_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, schema in (
        (["tasks", "schema"], TASKS.schema),
        (["tasks", "schema", "--run"], RUN.schema),
    ):
        assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out) == schema
    Draft7Validator.check_schema(TASKS.schema)
    Draft7Validator.check_schema(RUN.schema)


def test_editors_offer_the_installed_plugins_and_take_others() -> None:
    task = tasks_schema()["properties"]["tasks"]["anyOf"][0]["additionalProperties"]["properties"]
    assert {"grpo", "anchor", "sft"} <= set(task["type"]["examples"])
    name, mapping = task["rewards"]["items"]["anyOf"]
    assert "exact_match" in name["examples"] == mapping["properties"]["plugin"]["examples"]
    assert "safety_classifier" in task["constraint_model"]["examples"]
    assert not refuses(TASKS, {"tasks": {"t": {"dataset": "d.jsonl", "rewards": ["rewards.py:mine"]}}})
