"""Random combinations of settings: the product's step equals the reference's."""

import ast
import importlib
import logging
from pathlib import Path

import pytest
import torch

from .cases import draw_case
from .compare import Comparison, compare

NAIVE = sorted((Path(__file__).parent / "naive").glob("*.py"))
COMBINATIONS = 60
"""``python -m tests.reference --n 1000`` compares more."""
AT_ONCE = 10
ROLLED_BACK = (323, 345, 417)
REDEFINED = (706071, 706238)
"""Rolled back to before resumes at which tasks get other names, rewards and algorithms."""
ONCE_DIFFERENT = {
    "a task whose steps give no reward": 8310178,
    "a watched metric whose declared range lies in [0, 1]": 8310236,
    "groups dropped as too old without refill": 8310252,
    "gdpo on a task of penalties alone": 5510194,
    "gdpo with a minibatch of groups without variance": 6610349,
    "a sampled token whose log-probability the engine rounds": 12010061,
}


@pytest.fixture(autouse=True)
def one_thread(caplog):
    caplog.set_level(logging.ERROR)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(1, COMBINATIONS, AT_ONCE))
def test_the_step_equals_the_reference(first):
    compared = 0
    for seed in range(first, first + AT_ONCE):
        case = draw_case(seed)
        result = compare(case)
        again = f"python -m tests.reference --n 1 --seed {seed}"
        assert not result.problems, "\n".join([*result.problems[:8], again, case.describe()])
        compared += result.compared
    assert compared >= AT_ONCE, "too few steps were compared"


def test_a_run_after_rollbacks_equals_the_reference():
    """Also one with groups that come late, a curriculum or a resume behind the rollback."""
    results = [compare(draw_case(seed, acting=True)) for seed in ROLLED_BACK]
    assert [result.problems for result in results] == [[]] * len(results)
    assert sum(result.rollbacks for result in results) >= len(results)


def test_a_run_that_goes_back_to_before_its_tasks_changed_equals_the_reference():
    results = [compare(draw_case(seed, acting=True, changing=True)) for seed in REDEFINED]
    assert [result.problems for result in results] == [[]] * len(results)
    assert all(result.rollbacks for result in results)


@pytest.mark.parametrize("seed", ONCE_DIFFERENT.values(), ids=ONCE_DIFFERENT)
def test_the_step_equals_the_reference_where_it_once_did_not(seed):
    assert not compare(draw_case(seed, with_more=False)).problems


@pytest.mark.parametrize(("too_close", "code"), [(3, 0), (4, 1)])
def test_the_command_refuses_to_leave_out_more_than_three_percent(too_close, code, monkeypatch, capsys):
    command = importlib.import_module("reference.__main__")
    results = iter([Comparison(compared=1, too_close=int(i < too_close)) for i in range(100)])
    monkeypatch.setattr(command, "compare", lambda case: next(results))

    assert command.main(["--n", "100"]) == code
    assert ("too little was compared" in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize("path", NAIVE, ids=lambda path: path.stem)
def test_the_reference_shares_no_code_with_the_product(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "nothing from outside of naive/"
            names = [node.module or ""] if node.level == 0 else []
        for name in names:
            assert name.split(".")[0] in (
                "__future__",
                "collections",
                "copy",
                "dataclasses",
                "itertools",
                "math",
                "scipy",
                "torch",
                "typing",
            )
