"""What may be asked of a sandbox, and what its records say."""

import subprocess
import sys

import pytest

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import (
    AssertsTask,
    Ending,
    Limits,
    Outcome,
    StdioTask,
    TestResult,
    UnittestTask,
)
from multitask_rl.sandbox.base import imported_modules, undefined_names
from multitask_rl.sandbox.pool import acceptable_levels
from multitask_rl.sandbox.worker import LEVELS

UNITTEST = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"


def test_a_task_without_tests_is_refused():
    with pytest.raises(ValueError, match="at least one test"):
        StdioTask(tests=[])
    with pytest.raises(ValueError, match="at least one statement"):
        AssertsTask(entry_point="f", asserts=[])
    with pytest.raises(ValueError, match=r"asserts\[1\] holds no statement"):
        AssertsTask(entry_point="f", asserts=["assert f()", "# nothing"])
    with pytest.raises(ValueError, match="no test method"):
        UnittestTask(entry_point="f", test_code="import unittest")


def test_tests_that_are_not_python_are_refused_with_their_place():
    with pytest.raises(ValueError, match=r"asserts\[0\] is not Python"):
        AssertsTask(entry_point="f", asserts=["assert f( == 1"])


@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "mem_mb", "nofile"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "5"])
def test_a_limit_that_is_no_positive_number_is_refused(name, value):
    with pytest.raises(ValueError, match=f"limit {name} must be"):
        Limits(**{name: value})


def test_tests_take_from_the_program_the_entry_point_alone_if_nothing_else_is_said():
    task = AssertsTask(
        entry_point="solve",
        setup="root = Node(1)",
        asserts=["import math\nassert math.sqrt(solve(root)) == len([Pair(1, 2)])", "assert sys.argv"],
    )
    assert task.exported == ("solve",)
    assert undefined_names([task.setup, *task.asserts]) == ["Node", "solve", "Pair"]
    assert undefined_names(["from a import *\nassert b"]) == []
    assert imported_modules(task.asserts, task.exported) == ["sys"]


def test_explicit_exports_are_all_that_is_taken():
    task = AssertsTask(entry_point="f", asserts=["assert f(Node(1)) == g(2)"], exports=["g"])
    assert task.exported == ("f", "g")


def test_the_fraction_is_none_for_infrastructure_errors_alone():
    tests = (TestResult(ending=Ending.passed), TestResult(ending=Ending.failed))
    assert Outcome(ending=Ending.failed, tests=tests).pass_fraction == 0.5
    assert Outcome(ending=Ending.completed).pass_fraction == 0.0
    assert Outcome(ending=Ending.infrastructure_error, tests=tests).pass_fraction is None


def test_cut_output_is_flagged_and_any_bytes_decode():
    outcome = Outcome(ending=Ending.completed, stdout=b"\xff\x00a", stdout_length=10)
    assert outcome.is_truncated
    assert outcome.stdout_text == "�\x00a"


def test_levels_are_only_weakened_down_to_the_minimum():
    assert acceptable_levels(None, "namespaces") == ["namespaces"]
    assert acceptable_levels(None, "landlock") == list(LEVELS)
    assert acceptable_levels("landlock", "namespaces") == ["landlock"]
    with pytest.raises(SandboxError, match="unknown isolation level 'docker'"):
        acceptable_levels("docker", "namespaces")


def test_a_limit_of_the_process_that_opens_the_sandbox_is_not_the_programs() -> None:
    """Reward workers have a limit of data memory; a program has its own."""
    script = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, resource.getrlimit(resource.RLIMIT_DATA)[1]))
from multitask_rl.sandbox import AssertsTask, Program, open_sandbox
from multitask_rl.sandbox.base import Limits
task = AssertsTask(entry_point="f", asserts=["assert f(2) == 700000000"])
source = "def f(x): return len(bytearray(700000000))"
with open_sandbox("namespaces", workers=1) as sandbox:
    print(sandbox.run(Program(source=source, task=task, limits=Limits(mem_mb=1500))).ending)
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip() == "passed"
