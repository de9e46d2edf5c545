"""Every bundled environment has an entry point, one of the two shapes and a section of the page."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from multitask_rl.config.tasks_file import parse_tasks
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import Opening, StepResult
from multitask_rl.environments.pool import WorldPool
from multitask_rl.environments.worker import Ended

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


CONFIG = {
    "search": {"documents": str(ROOT / "examples" / "search" / "documents.jsonl")},
    "user": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "retries": 0},
    "python_tool": {"timeout": 0.2},
    "code_repair": {"timeout": 0.2},
    "number_game": {},
}


def build(name: str):
    if name == "search":
        pytest.importorskip("bm25s")
    cls = load(name)
    return cls(cls.Config(**CONFIG[name]))


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


def test_the_examples_of_the_page_are_tasks():
    text = "".join(re.findall(r"```yaml\ntasks:\n(.*?)```", PAGE, re.DOTALL))
    for name, place in DECLARED["multitask_rl.environments"].items():
        text = text.replace(f"environment: {name}\n", f"environment: {place}\n")
    text = text.replace("plugin:number_game", f"plugin:{DECLARED['multitask_rl.tasks']['number_game']}")
    specs = parse_tasks(yaml.safe_load(f"tasks:\n{text}"))
    assert len(specs) == len(NAMES) + 1
    for spec in specs.values():
        cls = load(next(name for name in NAMES if name in spec.environment))
        assert cls.Config(**spec.environment_config)
        assert spec.rewards
    longest = specs["service"].environment_config
    assert specs["service"].turn_timeout_s > 2 * (longest["retries"] + 1) * longest["timeout"]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ANSWERS = {
    "python_tool": [call("python", code="x = 20"), call("python", code="x + 1"), "It is 21."],
    "search": [call("search", query="Which town is known for its glass?"), "Widgra"],
    "code_repair": [f"```python\ndef add(a, b):\n    return {v}\n```" for v in ("a - b", "a + b")],
    "number_game": ["8", "12", "14", "15"],
    "user": ["How can I help?"],
}
HEARD = {
    "python_tool": ["(no output)", "21"],
    "search": ["[1] Widgra"],
    "code_repair": ["1 of 1 public tests failed."],
    "number_game": [],
    "user": ["EndpointError: no answer from http://127.0.0.1:9/v1"],
}


def test_each_lives_in_a_worker_from_its_beginning_to_its_end():
    names = [name for name in NAMES if name != "search" or importlib.util.find_spec("bm25s")]
    specs = {
        name: WorldSpec(
            reference=DECLARED["multitask_rl.environments"][name], config=CONFIG[name], where=name
        )
        for name in names
    }
    pool = WorldPool(specs, num_workers=1)
    try:
        for name in names:
            pool.check(name)
        tickets = {pool.open(name, ROW): name for name in names}
        answers = {name: iter(ANSWERS[name]) for name in names}
        heard: dict[str, list[str]] = {name: [] for name in names}
        rewards: dict[str, list] = {name: [] for name in names}
        under_way = set(tickets)
        while under_way:
            for ticket, answer in pool.poll(20):
                name = tickets[ticket]
                match answer:
                    case Opening(tools=tools):
                        assert bool(tools) == (name in ("python_tool", "search"))
                    case StepResult(messages=messages, reward=reward):
                        heard[name] += [message["content"] for message in messages]
                        rewards[name].append(reward)
                    case Ended(earned=earned):
                        assert earned is None
                        under_way.discard(ticket)
                        continue
                    case failure:
                        heard[name].append(failure.message)
                        under_way.discard(ticket)
                        continue
                if isinstance(answer, StepResult) and answer.done:
                    pool.finish(ticket)
                else:
                    pool.step(ticket, {"role": "assistant", "content": next(answers[name])})
    finally:
        pool.close()
    for name in names:
        begins = zip(heard[name], HEARD[name], strict=name != "number_game")
        assert all(text.startswith(begin) for text, begin in begins), (name, heard[name])
    assert sum(rewards["code_repair"]) == 1.0
    assert sum(rewards["number_game"]) in (0.0, 1.0)
    assert set(rewards["python_tool"]) == {None}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "user"])
def test_hostile_text_of_the_actor_raises_nothing_and_takes_little_time(name):
    world, slow = build(name), []
    texts = [(label, text) for label, text in hostile_texts(4000) if "huge power" not in label]
    for label, text in texts[:: 6 if name in ("python_tool", "code_repair") else 1]:
        began = time.thread_time()
        if hasattr(world, "step"):
            world.reset(ROW)
            world.step({"role": "assistant", "content": text})
        else:
            world.reset(**ROW)
            tool = world.python if name == "python_tool" else world.search
            assert isinstance(tool(text), str)
        if time.thread_time() - began > 0.5:
            slow.append(label)
    assert slow == []
