"""The in-process judge of the suite's ``code`` task: right programs only, and nothing is executed."""

from __future__ import annotations

import random

import pytest

from multitask_rl.testing import make_rollout
from multitask_rl_tasks.suite import SUITE, build_rows
from multitask_rl_tasks.suite.expressions import ExpressionTests

ROWS = build_rows(SUITE["code"], seed=3, split="train", num_rows=60)


def _score(response: str, row: dict[str, object]) -> float:
    return ExpressionTests().score([make_rollout(response, row=row)])[0]


def _run(response: str, row: dict[str, object]) -> float:
    """Return the verdict of Python itself; only for responses made here."""
    scope: dict[str, object] = {}
    try:
        exec(f"def f(x):\n    {response}", scope)
        for test in row["tests"]:
            exec(test, scope)
    except (AssertionError, ArithmeticError):
        return 0.0
    return 1.0


def test_it_agrees_with_python_on_right_and_corrupted_programs() -> None:
    stream, task = random.Random(0), SUITE["code"]
    for row in ROWS:
        for response in (task.answer(row, stream), task.corrupt(row, stream)):
            assert _score(response, row) == _run(response, row), response


@pytest.mark.parametrize(
    "response",
    [
        "",
        "return",
        "(x*2)",
        "return __import__('os').getpid()",
        "return [x for x in (1,)]",
        "return x if x else x",
        "return 9**9**9**9",
        "return x//0",
        "return 1.5*x",
        "return True",
        "return " + "(" * 300 + "x" + ")" * 300,
        "return x; x",
    ],
)
def test_anything_outside_the_grammar_earns_nothing_and_costs_nothing(response: str) -> None:
    assert all(_score(response, row) == 0.0 for row in ROWS[:5])
