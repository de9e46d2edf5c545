"""The interpreter of an episode: state stays from call to call; what a program does stays in the sandbox."""

from __future__ import annotations

import threading

import pytest

from multitask_rl.errors import ConfigError, SandboxError
from multitask_rl.plugins import TASKS, build_plugin, load_plugin
from multitask_rl.sandbox.base import Ending, Outcome
from multitask_rl_tasks.environments import python_tool

PLACE = "multitask_rl_tasks.environments.python_tool:PythonTool"


def build(**config):
    tool = build_plugin(load_plugin(TASKS, PLACE), config, where="test")
    assert tool.reset(prompt="How much is 2 + 2?", reference="4") is None
    return tool


def test_names_imports_and_functions_stay_from_call_to_call():
    tool = build()
    assert tool.python("import math\nx = 3\ndef square(n):\n    return n * n") == "(no output)"
    assert tool.python("y = square(x)\nprint(y, math.pi > 3)") == "9 True"
    assert tool.python("y += 1") == "(no output)"
    assert tool.python("y") == "10"


def test_a_call_shows_its_own_output_only_and_the_value_of_its_last_line():
    tool = build()
    assert tool.python("print('once')") == "once"
    assert tool.python("print('twice')\n6 * 7") == "twice\n42"
    assert tool.python("import sys; print('err', file=sys.stderr); None") == "err"


def test_an_error_is_told_and_what_was_done_before_it_stays_as_in_an_interpreter():
    tool = build()
    told = tool.python("a = 5\nb = a / 0\nc = 7")
    assert told.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "call 1", line 2' in told
    assert "b = a / 0" in told
    assert told.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert len(told.splitlines()) <= 5
    assert tool.python("a") == "5"
    assert tool.python("c").endswith("NameError: name 'c' is not defined")
    assert tool.python("def broken(").splitlines()[-1].startswith("SyntaxError")
    assert tool.python("a + 1") == "6"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("while True: pass", "time limit"),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("import os; os._exit(3)", "ended"),
        ("print('a' * 10**9)", "MemoryError"),
        ("import ctypes; ctypes.string_at(0)", "ended"),
        ("import socket; socket.socket()", ""),
    ],
    ids=["loop", "memory", "exit", "output", "crash", "network"],
)
def test_a_call_that_ends_the_program_is_told_and_leaves_the_state_before_it(code, word):
    tool = build(timeout=0.2, memory_mb=128)
    tool.python("kept = 1")
    assert word in tool.python(code)
    assert tool.python("kept") == "1"


def test_exit_ends_the_call_alone():
    tool = build()
    assert tool.python("a = 1\nexit()") == "(no output)"
    assert tool.python("a") == "1"


def test_packages_are_those_that_the_settings_name():
    assert "No module named 'mpmath'" in build().python("import mpmath")
    tool = build(packages=["mpmath"])
    tool.python("import mpmath")
    assert tool.python("mpmath.mpf(1) / 4") == "mpf('0.25')"


def test_random_numbers_do_not_change_when_they_are_read_again():
    tool = build()
    tool.python("import random, numpy\nx = [random.random(), numpy.random.rand()]")
    first = tool.python("x")
    assert tool.python("x") == first
    assert build().python("import random\nrandom.random()") != build(seed=1).python(
        "import random\nrandom.random()"
    )


def test_episodes_share_nothing_and_run_at_once():
    tools = [build() for _ in range(8)]
    found = {}

    def play(index: int) -> None:
        tools[index].python(f"n = {index}")
        found[index] = tools[index].python("n")

    threads = [threading.Thread(target=play, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: str(i) for i in range(8)}


def test_a_new_episode_begins_empty():
    tool = build()
    tool.python("n = 1")
    tool.reset(prompt="again")
    assert "NameError" in tool.python("n")


def test_long_output_is_cut_in_the_middle():
    told = build(max_output_chars=100).python("print('a' * 300 + 'b')")
    assert len(told) < 180
    assert told.startswith("aaa")
    assert told.endswith("b")
    assert "[201 characters left out]" in told


class FakeSandbox:
    """Answers every program with one outcome, and keeps the limits that it was given."""

    def __init__(self, **outcome) -> None:
        self.outcome, self.cpu_s = Outcome(**outcome), []

    def run(self, program):
        self.cpu_s.append(program.limits.cpu_s)
        return self.outcome


def test_the_time_of_earlier_calls_is_not_counted_against_a_later_one_until_the_episode_has_used_its_time(
    monkeypatch,
):
    fake = FakeSandbox(ending=Ending.runtime_error, exit_code=42, cpu_s=2.5)
    monkeypatch.setattr(python_tool, "shared_sandbox", lambda packages: fake)
    tool = build(timeout=1.0, total_timeout=3.0)
    assert [tool.python("1") for _ in range(2)] == ["(no output)"] * 2
    assert fake.cpu_s == [1.0, 0.5 + 1.5 * 2.5]
    fake.outcome = Outcome(ending=Ending.runtime_error, exit_code=42, cpu_s=3.1)
    tool.python("1")
    assert tool.python("1") == "Not run: the calls have used their 3 s of computing time."
    assert len(fake.cpu_s) == 3


def test_rewards_come_from_plugins_and_a_sandbox_that_failed_makes_the_episode_a_failure(monkeypatch):
    tool = build()
    assert tool.get_reward() is None
    fake = FakeSandbox(ending=Ending.infrastructure_error, message="no cell")
    monkeypatch.setattr(python_tool, "shared_sandbox", lambda packages: fake)
    assert tool.python("1") == "The sandbox failed; the code was not run."
    with pytest.raises(SandboxError, match="no cell"):
        tool.get_reward()


def test_the_tool_describes_itself():
    assert "state" in python_tool.PythonTool.python.__doc__
    with pytest.raises(ConfigError, match="timeout must be > 0"):
        build(timeout=0.0)
