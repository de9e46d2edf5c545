"""Every file in configs/ works, and the configuration page says what the dataclasses say."""

import ast
import dataclasses
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

import multitask_rl
from multitask_rl.cli.train import compose_and_run
from multitask_rl.config.editor_schemas import meanings
from multitask_rl.config.run import RunConfig
from multitask_rl.config.tasks_file import load_tasks

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in CONFIGS.glob("experiment/*.yaml"))
TASKS_FILES = sorted(
    path
    for path in CONFIGS.rglob("*.yaml")
    if "tasks" in (yaml.safe_load(path.read_text()) or {}) and path.parent == CONFIGS
)


@pytest.mark.parametrize("path", TASKS_FILES, ids=lambda path: path.name)
def test_tasks_file_loads(path: Path) -> None:
    assert load_tasks(path)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[RunConfig] = []
    compose_and_run(
        ["--config-dir", str(CONFIGS), f"+experiment={name}", f"hydra.run.dir={tmp_path}"],
        "train",
        seen.append,
    )
    assert type(seen[0]) is RunConfig
    assert seen[0] != RunConfig()


def configuration_page() -> Any:
    spec = importlib.util.spec_from_file_location(
        "write_configuration", ROOT / "docs" / "write_configuration.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_and_schemas_are_up_to_date() -> None:
    for path, text in configuration_page().files().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `make docs`"


def test_every_key_has_a_meaning() -> None:
    pending: list[Any] = [RunConfig]
    while pending:
        cls = pending.pop()
        texts = meanings(cls)
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(field.default_factory):
                pending.append(field.default_factory)
            else:
                assert texts.get(field.name), f"{cls.__name__}.{field.name}"


def fenced(language: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.split(f"```{language}\n", 1)[1].split("```", 1)[0]


def test_tasks_file_of_the_readme_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for name in ("math", "chats"):
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"prompt": "?"}\n')
    (tmp_path / "tasks.yaml").write_text(fenced("yaml"))
    assert list(load_tasks("tasks.yaml")) == ["math", "code", "manners"]


def test_script_of_the_readme_uses_names_and_keywords_that_exist() -> None:
    script = ast.parse(fenced("python"))
    imported = next(node for node in script.body if isinstance(node, ast.ImportFrom))
    known = {alias.name: getattr(multitask_rl, alias.name) for alias in imported.names}
    calls = [c for c in ast.walk(script) if isinstance(c, ast.Call)]
    checked = set()
    for call in calls:
        if isinstance(call.func, ast.Name):
            inspect.signature(known[call.func.id]).bind(**{str(k.arg): None for k in call.keywords})
            checked.add(call.func.id)
        elif isinstance(call.func, ast.Attribute):
            assert callable(getattr(multitask_rl.Trainer, call.func.attr))
    assert checked == set(known)
