"""Public tests answer a wrong program; hidden ones decide what it earns, wherever the episode ends."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from multitask_rl.environments.base import StepResult
from multitask_rl.errors import DataError, SandboxError
from multitask_rl.plugins import TASKS, build_plugin, load_plugin
from multitask_rl.sandbox.base import Ending, Outcome
from multitask_rl_tasks.environments import code_repair

DATA = Path(os.environ.get("MULTITASK_RL_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
PLACE = "multitask_rl_tasks.environments.code_repair:CodeRepair"
ADD = {
    "prompt": "Write a function that adds.",
    "entry_point": "add",
    "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add('a', 'b') == 'ab'"],
}
SUM = {
    "prompt": "Add two numbers.",
    "tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "2 5\n", "stdout": "7\n"}],
}
RIGHT, HALF, WRONG = (
    f"def add(a, b):\n    return {value}" for value in ("a + b", "int(a) + int(b)", "a - b")
)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def begin(row=ADD, **config):
    world = build_plugin(load_plugin(TASKS, PLACE), {"timeout": 2.0, **config}, where="test")
    assert list(world.reset(row)) == []
    return world


def say(world, code: str) -> StepResult:
    return world.step({"role": "assistant", "content": fenced(code)})


def told(result: StepResult) -> str:
    (message,) = result.messages
    assert message["role"] == "user"
    return message["content"]


def test_a_program_that_passes_the_public_tests_ends_the_episode_with_the_share_of_hidden_ones():
    right = say(begin(), RIGHT)
    assert (right.done, right.reward, right.messages) == (True, 1.0, ())
    assert right.info == {"public_passed": 1.0, "repairs": 0}
    assert (say(begin(), HALF).done, say(begin(), HALF).reward) == (True, 0.5)
    assert say(begin(all_or_nothing=True), HALF).reward == 0.0
    assert say(begin(all_or_nothing=True), RIGHT).reward == 1.0


def test_a_failure_comes_back_with_what_the_program_returned_and_no_hidden_test():
    result = say(begin(), WRONG)
    assert not result.done
    assert "assert add(1, 2) == 3\nAssertionError: add(1, 2) is -1" in told(result)
    assert "add(0, 0)" not in told(result)
    assert "'ab'" not in told(result)
    assert "1 of 1 public tests failed" in told(result)
    assert "1 of 2 public tests failed" in told(say(begin(public=3), WRONG))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def add(a, b: return", "SyntaxError"),
        ("def sub(a, b):\n    return a + b", "NameError: name 'add' is not defined"),
        ("def add(a, b):\n    return a + c", "NameError: name 'c' is not defined"),
        ("def add(a, b):\n    while True: pass", "CPU limit|did not end in time|wall-clock limit"),
    ],
)
def test_other_failures_are_told_in_words(code, words):
    result = say(begin(timeout=0.5), code)
    assert re.search(words, told(result))
    assert result.reward == 0.0


def test_an_answer_without_a_program_is_told_and_costs_a_repair():
    world = begin(repairs=1)
    result = world.step({"role": "assistant", "content": "I cannot do that, I am sorry for it!"})
    assert told(result) == "No Python program found. Answer with one Python block."
    assert (result.done, result.reward) == (False, 0.0)
    assert say(world, RIGHT).reward == 1.0


@pytest.mark.parametrize(("all_or_nothing", "earned"), [(False, 0.5), (True, 0.0)])
def test_a_program_that_fails_a_public_test_earns_at_most_half(all_or_nothing, earned):
    row = {**ADD, "tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(0, 1 - 1) == 0"]}
    result = say(begin(row=row, all_or_nothing=all_or_nothing), "def add(a, b):\n    return 0")
    assert (result.done, result.reward) == (False, earned)


def test_the_rewards_of_an_episode_add_up_to_the_share_of_the_last_program():
    world = begin(row={**ADD, "tests": ["assert add(1, 2) == 4", *ADD["tests"][1:]]}, repairs=3)
    results = [say(world, code) for code in (WRONG, HALF, RIGHT, HALF)]
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].messages == ()
    earned = [sum(result.reward for result in results[: n + 1]) for n in range(4)]
    assert earned == pytest.approx([0.25, 0.25, 0.5, 0.25])
    assert [result.info["repairs"] for result in results] == [0, 1, 2, 3]


def test_programs_that_read_standard_input():
    world = begin(row=SUM)
    result = say(world, "a, b = map(int, input().split())\nprint(a - b)")
    assert "1 2\n" in told(result)
    assert "expected '3\\n', got '-1\\n'" in told(result)
    assert "7" not in told(result)
    assert say(world, "print(sum(map(int, input().split())))").reward == 1.0


def test_a_rows_own_public_tests_are_shown_and_the_others_are_hidden():
    row = {**ADD, "public_tests": [ADD["tests"][2]]}
    assert "assert add('a', 'b') == 'ab'" in told(say(begin(row=row), "def add(a, b): return a"))
    assert say(begin(row=row), "def add(a, b):\n    return 'ab'").reward == 0.0
    task = build_plugin(load_plugin(TASKS, "code_stdio"), {}, where="test")
    hub = {"name": "a", "description": "Add.", "public_tests": {"input": ["1"], "output": ["2"]}}
    hub |= {"private_tests": {"input": ["2"], "output": ["3"]}}
    found = task.translate(hub, 0)
    assert found["public_tests"] == [{"stdin": "1", "stdout": "2"}]
    assert say(begin(row=found), "print({'1': 2}[input()])").reward == 0.0


@pytest.mark.parametrize("tests", [ADD["tests"][:1], ADD["tests"][:1] * 2], ids=["one", "twice"])
@pytest.mark.parametrize("public_tests", [None, ADD["tests"][:1]], ids=["no column", "column"])
def test_the_only_test_is_hidden_and_its_first_program_decides(tests, public_tests):
    row = {**ADD, "tests": tests, "public_tests": public_tests}
    for code, earned in ((RIGHT, 1.0), (WRONG, 0.0)):
        result = say(begin(row=row), code)
        assert (result.done, result.reward, result.messages) == (True, earned, ())


def test_a_column_of_public_tests_that_leaves_no_hidden_one_does_not_count():
    row = {**ADD, "public_tests": ADD["tests"]}
    assert "1 of 1 public tests failed" in told(say(begin(row=row), WRONG))
    result = say(begin(row=row, public=5), "def add(a, b): return 9")
    assert "2 of 2 public tests failed" in told(result)
    assert "'ab'" not in told(result)


def test_long_texts_of_a_program_are_cut():
    result = say(begin(row=SUM), "raise ValueError('x' * 100_000)")
    assert len(told(result)) < 1000


def test_a_row_without_tests_and_a_sandbox_that_fails_are_errors_of_the_episode(monkeypatch):
    with pytest.raises(DataError, match="the row has no `tests`"):
        begin(row={"prompt": "p"})

    class Lost:
        def map(self, programs):
            return [Outcome(ending=Ending.infrastructure_error, message="no cell") for _ in programs]

    world = begin()
    monkeypatch.setattr(code_repair, "shared_sandbox", Lost)
    with pytest.raises(SandboxError, match="no cell"):
        say(world, RIGHT)


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["mbpp", "code_stdio"])
def test_good_programs_of_real_rows_end_at_once_and_bad_ones_are_told(name):
    if not DATA.is_dir():
        pytest.skip(f"real data absent: {DATA}")
    task = build_plugin(load_plugin(TASKS, name), {"source": str(DATA)}, where="test")
    for row in task.rows("train")[::25][:12]:
        if name == "mbpp":
            code = row["reference"]
        else:
            answers = {test["stdin"].strip(): test["stdout"] for test in row["tests"]}
            code = f"import sys\nprint({answers!r}[sys.stdin.read().strip()], end='')"
        good, bad = say(begin(row=row), code), say(begin(row=row), "def f(): pass")
        assert (good.done, good.reward) == (True, 1.0), row["id"]
        assert (bad.done, bad.reward) == (False, 0.0), row["id"]
        assert "public tests failed" in told(bad)
