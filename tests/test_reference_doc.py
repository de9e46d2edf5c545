"""docs/reference.md says what is there: its names can be imported, its keys are settings, its tests exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import tomllib
import typing
from pathlib import Path

import pytest

from multitask_rl.config.run import RunConfig
from multitask_rl.config.task import TaskSpec

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d+) \| (.+) \| (\w+) \| (.+) \| (.+) \|$", re.MULTILINE)
CITED = re.compile(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)")


def wrong_name(name: str) -> bool:
    """Say whether neither a module nor an attribute has this dotted name."""
    try:
        importlib.import_module(name)
    except ImportError:
        module, _, attribute = name.rpartition(".")
        return not hasattr(importlib.import_module(module), attribute)
    return False


def wrong_key(key: str) -> bool:
    """Say whether the run configuration lacks this key; keys below a mapping are the user's."""
    node: object = RunConfig
    for part in key.split("."):
        if not (isinstance(node, type) and dataclasses.is_dataclass(node)):
            return False
        hints = typing.get_type_hints(node)
        if part not in hints:
            return True
        node = hints[part]
    return False


def faults(page: str) -> list[str]:
    """Name everything that the page says and that does not hold."""
    rows = ROW.findall(page)
    found = [f"row {n}" for n in range(1, 190) if [row[0] for row in rows].count(str(n)) != 1]
    found += [f"state {state}" for _, _, state, _, _ in rows if state not in {"yes", "other", "part", "no"}]
    sections = {field.name for field in dataclasses.fields(RunConfig)}
    tasks_keys = {field.name for field in dataclasses.fields(TaskSpec)}
    for number, _, _, here, test in rows:
        spans = re.findall(r"`([^`]+)`", here)
        found += [f"{number}: {s}" for s in spans if re.fullmatch(r"multitask_rl[\w.]*", s) and wrong_name(s)]
        keys = [s for s in spans if re.fullmatch(r"[a-z_]+\.[a-z_.]+", s) and s.split(".")[0] in sections]
        found += [f"{number}: {key}" for key in keys if wrong_key(key)]
        if re.search(r"\bof a (task|reward)\b", here):
            found += [f"{number}: {s}" for s in spans if s.isidentifier() and s not in tasks_keys]
        for owner, method in re.findall(r"`(Trainer|RLTrainer|DataFlow|Stage)\.(\w+)`", here):
            if not hasattr(getattr(importlib.import_module("multitask_rl"), owner), method):
                found.append(f"{number}: {owner}.{method}")
        cited = CITED.fullmatch(test)
        if cited is None:
            found += [f"{number}: {test}"] if test != "-" else []
            continue
        file = ROOT / cited[2]
        if cited[2].startswith("tests/gpu/"):
            found.append(f"{number}: {cited[1]} is skipped by make test")
        if not file.is_file() or not re.search(rf"\bdef {cited[1]}\(", file.read_text(encoding="utf-8")):
            found.append(f"{number}: {cited[1]}")
    if len(rows) != 189:
        found.append(f"{len(rows)} rows")
    return found


def test_folders_and_libraries_of_the_project_card_are_there() -> None:
    for name in ("multitask_rl", "tasks", "rewards", "configs", "tests", "docs", "examples", "benchmarks"):
        assert (ROOT / name).is_dir(), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}

    assert names(project["dependencies"]) >= {"torch", "transformers", "datasets", "hydra-core"}
    extras = {name: names(own) for name, own in project["optional-dependencies"].items()}
    assert {"evaluate", "codebleu"} <= extras["eval"]
    assert [name in extras[name] for name in ("ray", "vllm", "mlflow", "deepspeed")] == [True] * 4
    assert not any("deepspeed" in own for name, own in extras.items() if name != "deepspeed")


def test_the_page_of_the_reference_says_what_is_there() -> None:
    assert faults(PAGE) == []


@pytest.mark.parametrize(
    ("said", "planted"),
    [
        ("`multitask_rl.PPOConfig`", "`multitask_rl.PPOKonfig`"),
        ("`optimizer.adam_eps`", "`optimizer.adam_epsilon`"),
        ("`Trainer.add_guard`", "`Trainer.add_gard`"),
        ("[test_version_is_the_packages]", "[test_version_is_another]"),
        ("| 189 |", "| 190 |"),
        ("`dataset` of a task", "`datasets` of a task"),
    ],
)
def test_a_planted_fault_is_found(said: str, planted: str) -> None:
    assert said in PAGE
    assert faults(PAGE.replace(said, planted)) != []
