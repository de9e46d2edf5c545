"""The short cut for asserts of literals gives what the tester gives."""

import socket
import threading

import pytest

from multitask_rl.sandbox import AssertsTask, Program
from multitask_rl.sandbox.cell import candidate
from multitask_rl.sandbox.cell.channel import CellChannel
from multitask_rl.sandbox.cell.literals import NeedsTesterError, compare_literals
from multitask_rl.sandbox.worker import to_job


def literal_tests(*asserts, **options):
    header, _ = to_job(Program(source="", task=AssertsTask(entry_point="f", asserts=asserts, **options)))
    return header.get("literals")


def judged(source, *asserts):
    ours, theirs = socket.socketpair()
    program = threading.Thread(target=candidate.serve, args=(theirs.fileno(), source.encode()))
    program.start()
    try:
        return [line[1] for line in compare_literals(CellChannel(ours.fileno()), literal_tests(*asserts))][1:]
    finally:
        ours.close()
        program.join(timeout=10)
        theirs.close()


def test_calls_with_literals_need_no_tester():
    tests = literal_tests(
        "assert f(1, [2], k='a') == {'x': (1,)}", "assert f() is None", "assert f(-1) == 2j, 'why'"
    )
    assert [test[1] for test in tests] == ["==", "is", "=="]


@pytest.mark.parametrize(
    "statement",
    [
        "assert f(1) != 2",
        "assert f(1)",
        "assert f(x) == 1",
        "assert g(1) == 1",
        "assert f(*[1]) == 1",
        "assert f(**{'a': 1}) == 1",
        "assert f(1) is 1",
        "assert abs(f(1) - 1.5) < 1e-6",
        "assert f(1) == f(2)",
        "assert 1 < f(1) == 2",
        "x = 1\nassert f(1) == 1",
    ],
)
def test_anything_else_goes_to_the_tester(statement):
    assert literal_tests("assert f(1) == 1", statement) is None


def test_set_up_and_operators_go_to_the_tester():
    assert literal_tests("assert f(1) == 1", setup="x = 1") is None
    assert literal_tests("assert f(1) == 1", allow_dunder=True) is None


def test_endings_are_those_of_the_tester():
    source = "def f(x):\n    return {0: 1, 1: [1.0], 2: None, 3: True}[x]"
    asserts = ["f(0) == 1", "f(1) == [1]", "f(2) is None", "f(3) is False", "f(3) == 1", "f(9) == 1"]
    assert judged(source, *[f"assert {a}" for a in asserts]) == [
        "passed",
        "passed",
        "passed",
        "failed",
        "passed",
        "runtime_error",
    ]


def test_an_object_that_calls_itself_equal_passes_nothing():
    source = "class E:\n    __eq__ = lambda s, o: True\ndef f(x): return [E()] if x else E()"
    assert judged(source, "assert f(0) == 1", "assert f(1) == [1]") == ["runtime_error"] * 2


def test_an_array_is_left_to_the_tester():
    pytest.importorskip("numpy")
    with pytest.raises(NeedsTesterError):
        judged("import numpy\ndef f(x): return numpy.array([[1, 2], [3, 4]])", "assert f(1) == [1, 2, 3, 4]")


def test_a_large_answer_is_left_to_the_tester():
    with pytest.raises(NeedsTesterError):
        judged("def f(x): return 'x' * 100_000", "assert f(1) == 'y'")
