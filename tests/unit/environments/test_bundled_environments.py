"""Every bundled environment has an entry point, one of the two shapes and a section of the page."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from hostile_texts import hostile_texts  # noqa: E402

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
PAGE = (ROOT / "docs" / "environments.md").read_text()
NAMES = sorted(DECLARED["multitask_rl.environments"])
ROW = {
    "prompt": "Write add.",
    "seed": 1,
    "level": 4,
    "entry_point": "add",
    "tests": ["assert add(1, 2) == 3", "assert add(2, 3) == 5"],
}


def load(name: str) -> type:
    module, _, label = DECLARED["multitask_rl.environments"][name].partition(":")
    found: type = getattr(importlib.import_module(module), label)
    return found


def build(name: str):
    config = {
        "search": {"documents": str(ROOT / "examples" / "search" / "documents.jsonl")},
        "user": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "role": "judge", "retries": 0},
        "python_tool": {"timeout": 0.2},
        "code_repair": {"timeout": 0.2},
    }.get(name, {})
    if name == "search":
        pytest.importorskip("bm25s")
    cls = load(name)
    return cls(cls.Config(**config))


def test_every_file_of_the_folder_is_an_environment():
    files = {path.stem for path in (ROOT / "tasks" / "multitask_rl_tasks" / "environments").glob("*.py")}
    assert (
        files - {"__init__"} == set(NAMES) == {"code_repair", "number_game", "python_tool", "search", "user"}
    )


@pytest.mark.parametrize("name", NAMES)
def test_its_methods_have_one_of_the_two_shapes(name):
    cls = load(name)
    public = {k: v for k, v in vars(cls).items() if inspect.isfunction(v) and not k.startswith("_")}
    assert "reset" in public
    tools = {k: v for k, v in public.items() if k not in ("reset", "step", "get_reward", "close")}
    assert bool(tools) != ("step" in public)
    for tool in tools.values():
        hints = inspect.signature(tool).parameters
        assert all(p.annotation != inspect.Parameter.empty for n, p in hints.items() if n != "self")
        assert all(f"    {argument}: " in tool.__doc__ for argument in hints if argument != "self")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_its_section_with_an_example_and_every_key(name):
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None
    assert "```yaml" in section[1]
    documented = re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| ([^|]+) \|", section[1], re.MULTILINE)))
    keys = {field.name for field in dataclasses.fields(load(name).Config)}
    assert sorted(set(documented) - {"environment_config"}) == sorted(keys)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "user"])
def test_hostile_text_of_the_actor_raises_nothing_and_takes_little_time(name):
    world, slow = build(name), []
    texts = [(label, text) for label, text in hostile_texts(4000) if "huge power" not in label]
    for label, text in texts[:: 6 if name in ("python_tool", "code_repair") else 1]:
        began = time.process_time()
        if hasattr(world, "step"):
            world.reset(ROW)
            world.step({"role": "assistant", "content": text})
        else:
            world.reset(**ROW)
            tool = world.python if name == "python_tool" else world.search
            assert isinstance(tool(text), str)
        if time.process_time() - began > 0.5:
            slow.append(label)
    assert slow == []
