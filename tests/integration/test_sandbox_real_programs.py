"""Reference solutions of real data sets pass, and each of them fails once it is broken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from multitask_rl.sandbox import AssertsTask, Ending, Limits, Program, StdioTask, StdioTest
from multitask_rl.sandbox.pool import NamespaceSandbox
from multitask_rl_rewards.code_evaluator import sandbox_task

DATA = Path(os.environ.get("MULTITASK_RL_DATA", Path(__file__).parents[3] / "shared/data"))
LIMITS = Limits(cpu_s=10, wall_s=30)

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.exists(), reason=f"no data sets at {DATA}"),
]

# wrong in every call: another value of the same type
BREAK = """
def _broken(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float, complex)):
        return value + 1
    if isinstance(value, str):
        return value + "!"
    if isinstance(value, (list, tuple)):
        return type(value)([*value, None]) if type(value) in (list, tuple) else None
    return (value,)
_correct = {name}
def {name}(*a, **k):
    return _broken(_correct(*a, **k))
"""


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def task(row):
    built = sandbox_task(row)
    assert isinstance(built, AssertsTask), built
    return built


def source(row):
    return row["prompt"] + row["reference"] if row["id"].startswith("HumanEval") else row["reference"]


@pytest.mark.parametrize(("name", "count"), [("humaneval.jsonl", 164), ("mbpp.jsonl", 974)])
def test_every_reference_passes(name, count):
    data = rows(name)
    assert len(data) == count
    with NamespaceSandbox(workers=2) as sandbox:
        outcomes = sandbox.map(Program(source=source(r), task=task(r), limits=LIMITS) for r in data)
    assert {r["id"]: o.message for r, o in zip(data, outcomes, strict=True) if o.pass_fraction != 1.0} == {}


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["humaneval.jsonl", "mbpp.jsonl"])
def test_a_broken_reference_fails(name, step):
    data = rows(name)[::step]
    with NamespaceSandbox(workers=2) as sandbox:
        outcomes = sandbox.map(
            Program(source=source(r) + BREAK.format(name=r["entry_point"]), task=task(r), limits=LIMITS)
            for r in data
        )
    assert [r["id"] for r, o in zip(data, outcomes, strict=True) if o.pass_fraction == 1.0] == []


def test_the_stdio_rows_run_and_judge():
    data = rows("code_stdio.jsonl")[::16]
    programs = []
    for row in data:
        tests = [StdioTest(stdin=t["stdin"], stdout=t["stdout"]) for t in row["tests"]]
        answers = {t["stdin"]: t["stdout"] for t in row["tests"]}
        knows = f"import sys\nprint({answers!r}[sys.stdin.read()])"
        programs.append(Program(source=knows, task=StdioTask(tests=tests)))
        programs.append(Program(source="print('no')", task=StdioTask(tests=tests)))
    with NamespaceSandbox(workers=2) as sandbox:
        outcomes = sandbox.map(programs)
    assert {o.ending for o in outcomes[::2]} == {Ending.passed}
    assert all(o.pass_fraction < 1.0 for o in outcomes[1::2])
