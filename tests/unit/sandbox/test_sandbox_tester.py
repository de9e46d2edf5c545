"""Tester and program face to face over a socket pair, both in threads of this process."""

import json
import os
import socket
import threading

import pytest

from multitask_rl.sandbox import AssertsTask, Program, UnittestTask
from multitask_rl.sandbox.cell import candidate, tester
from multitask_rl.sandbox.cell.channel import CellChannel
from multitask_rl.sandbox.cell.peer import CandidateGone, Peer
from multitask_rl.sandbox.worker import to_job


def judged(source, task):
    """Return the lines of the tester after the first, as (index, ending, message)."""
    ours, theirs = socket.socketpair()
    _, (_, tests) = to_job(Program(source=source, task=task))
    results_read, results = os.pipe()
    program = threading.Thread(target=candidate.serve, args=(theirs.fileno(), source.encode()))
    program.start()
    tester.run_tests(ours.fileno(), results, tests)
    ours.close()
    program.join(timeout=10)
    theirs.close()
    os.close(results)
    with os.fdopen(results_read) as lines:
        return [tuple(json.loads(line)) for line in lines][1:]


def endings(source, *asserts, setup="", allow_dunder=False, exports=()):
    task = AssertsTask(
        entry_point="f", asserts=asserts, setup=setup, allow_dunder=allow_dunder, exports=exports
    )
    return [ending for _, ending, _ in judged(source, task)]


def test_each_statement_gets_its_own_ending():
    source = "def f(x):\n    return 1 // x"
    assert endings(source, "assert f(1) == 1", "assert f(1) == 2", "assert f(0) == 0") == [
        "passed",
        "failed",
        "runtime_error",
    ]


def test_arguments_changed_in_place_are_changed_for_the_tests_too():
    source = "def f(a, d):\n    a.sort()\n    d['n'] = len(a)"
    test = "a, d = [2, 1], {}\nassert f(a, d) is None\nassert a == [1, 2] and d == {'n': 2}"
    assert endings(source, test) == ["passed"]


def test_functions_cross_in_both_directions():
    source = "def f(g):\n    return lambda x: g(x) + 1"
    assert endings(source, "assert f(lambda x: x * 2)(5) == 11") == ["passed"]
    assert endings("def f(k): return k(3)", "assert f(str) == '3'") == ["passed"]


def test_iterators_of_the_tests_arrive_as_iterators():
    source = "def f(items):\n    return next(items), list(items)"
    asserts = ["assert f(iter('abc')) == ('a', ['b', 'c'])", "assert f(n for n in (1, 2)) == (1, [2])"]
    assert endings(source, *asserts) == ["passed", "passed"]
    assert endings(source, "import itertools\nf(itertools.count())") == ["runtime_error"]


def test_an_error_in_a_callback_reaches_the_program():
    source = "def f(g):\n    try: return g(0)\n    except ZeroDivisionError: return 'caught'"
    assert endings(source, "assert f(lambda x: 1 / x) == 'caught'") == ["passed"]


def test_an_object_of_the_program_does_not_tester_itself():
    source = (
        "class Yes:\n"
        "    def __eq__(s, o): return True\n"
        "    def __bool__(s): return True\n"
        "    def __len__(s): return 3\n"
        "    def __contains__(s, o): return True\n"
        "    def __getattr__(s, n): return lambda *a: True\n"
        "def f(x): return Yes()"
    )
    claims = ("f(1) == 1", "f(1)", "len(f(1)) == 3", "1 in f(1)", "f(1) != 1")
    tests = [f"assert {claim}" for claim in claims]
    assert endings(source, *tests) == ["runtime_error"] * 5


def test_operators_count_where_the_task_is_about_them():
    source = (
        "class f:\n"
        "    def __init__(s, v): s.v = v\n"
        "    def __eq__(s, o): return s.v == o.v\n"
        "    def __len__(s): return s.v"
    )
    tests = ("assert f(1) == f(1)", "assert f(1) != f(2)", "assert len(f(2)) == 2", "assert f(1)")
    assert endings(source, *tests, allow_dunder=True) == ["passed"] * 4


def test_a_builtin_name_of_the_program_is_not_lent_to_the_tests():
    source = "def len(x): return 2\ndef f(x): return 'abc'"
    assert endings(source, "assert len(f(1)) == 2") == ["failed"]


def test_the_programs_own_exceptions_can_be_caught():
    source = "class Full(Exception): pass\ndef f():\n    raise Full('now')"
    test = "try:\n    f()\nexcept Full as e:\n    assert str(e) == 'now'\nelse:\n    assert False"
    assert endings(source, test, exports=["Full"]) == ["passed"]


def test_leaving_and_interrupting_are_errors_not_ends():
    for what in ("SystemExit(0)", "KeyboardInterrupt()", "GeneratorExit()"):
        source = f"def f():\n    raise {what}"
        assert endings(source, "assert f() == 1", "assert True") == ["runtime_error", "passed"]


def test_instances_are_recognised_by_their_class():
    source = "class Node:\n    pass\ndef f(): return Node()"
    tests = ("assert isinstance(f(), Node)", "assert not isinstance(3, Node)")
    assert endings(source, *tests, exports=["Node"]) == ["passed"] * 2


@pytest.mark.parametrize(
    "test",
    [
        "assert near(f(2), 2)",
        "assert np.allclose(f(2), 2)",
        "assert f(2) == WANTED",
        "assert f(2) == helper(2)",
    ],
)
def test_a_program_lends_the_tests_no_name_that_is_not_asked_for(test):
    source = (
        "class np:\n    allclose = staticmethod(lambda *a: True)\n"
        "near = lambda *a: True\nWANTED = 7\nhelper = f = lambda x: 7"
    )
    assert endings(source, test) == ["runtime_error"]


@pytest.mark.parametrize("error", ["StopIteration", "StopAsyncIteration"])
@pytest.mark.parametrize(
    "test",
    [
        "assert all(map(lambda x: f(x) == x, [1, 2]))",
        "assert not [x for x in filter(lambda x: f(x) != x, [1, 2])]",
        "assert next(map(f, [1, 2]), 3) == 3",
        "assert list(f(x) for x in (1, 2)) == []",
    ],
)
def test_the_program_cannot_end_a_loop_of_the_tests(error, test):
    assert endings(f"def f(x):\n    raise {error}", test) == ["runtime_error"]


def test_an_exception_of_the_program_that_ends_loops_ends_none():
    source = "class Done(StopIteration): pass\ndef f(x):\n    raise Done"
    assert endings(source, "assert all(map(f, [1]))", exports=["Done"]) == ["runtime_error"]


def test_only_what_can_be_called_is_callable():
    source = "class C:\n    pass\ndef f(x): return C() if x else len"
    assert endings(source, "assert callable(f(1))", "assert callable(f(0))", "assert callable(f)") == [
        "failed",
        "passed",
        "passed",
    ]
    assert endings(source, "assert not callable(f(1))", "f(1)()", allow_dunder=True) == [
        "passed",
        "runtime_error",
    ]


CLEARS = "def f(a):\n    a.clear()\n    return []"


@pytest.mark.parametrize(
    ("source", "test", "ending"),
    [
        (CLEARS, "a = [2, 1]\nassert f(a) == sorted(a)", "failed"),
        (CLEARS, "def check(a):\n    assert f(a) == sorted(a)\ncheck([2, 1])", "failed"),
        (CLEARS, "for a in ([2, 1], [3]):\n    assert f(a) == sorted(a)", "failed"),
        (CLEARS, "a = [2, 1]\nr = f(a)\nassert r == a == []", "passed"),
        (CLEARS, "a = [2, 1]\nif f(a) == []:\n    assert a == []", "passed"),
        (CLEARS, "a = [1]\nassert [f(a), f(a)] == [[], []]", "passed"),
        ("def f(a):\n    a.sort()", "a = [2, 1]\nassert f(a) is None and a == [1, 2]", "passed"),
        ("def f(a):\n    return a.pop()", "a = [2, 1]\nassert [f(a), f(a)] == [1, 2]", "passed"),
    ],
)
def test_a_statement_sees_its_arguments_as_they_were(source, test, ending):
    assert endings(source, test) == [ending]


def test_a_failed_statement_leaves_its_changes_to_the_next():
    tests = ("a = [2, 1]", "assert f(a) == sorted(a)", "assert a == []")
    assert endings(CLEARS, *tests) == ["passed", "failed", "passed"]


@pytest.mark.parametrize(
    "change", [[-1, [7]], [1, [7]], ["0", [7]], [True, [7]], [0, 7], [0, {"t": [7]}], [0], 0]
)
def test_a_forged_change_of_an_argument_ends_the_conversation(change):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        CellChannel(theirs.fileno()).send(json.dumps(["ok", 1, [change]]).encode())
        peer = Peer(CellChannel(ours.fileno()), allow_dunder=False)
        with pytest.raises(CandidateGone):
            peer.ask("call", "f", [[9]], {})


@pytest.mark.parametrize("handle", [{"j": 0}, {"j": -1}, {"h": 3}, {"h": [0, "x"]}, {"q2": [0, "a", "b"]}])
def test_a_forged_handle_ends_the_conversation(handle):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        CellChannel(theirs.fileno()).send(json.dumps(["ok", handle, []]).encode())
        peer = Peer(CellChannel(ours.fileno()), allow_dunder=False)
        with pytest.raises(CandidateGone):
            peer.ask("call", "f", [], {})


def test_an_array_is_no_list_though_it_holds_the_same():
    pytest.importorskip("numpy")
    source = "import numpy as np\ndef f(x): return np.array([[1, 2], [3, 4]])"
    tests = ("assert f(1) == [1, 2, 3, 4]", "assert f(1).tolist() == [[1, 2], [3, 4]]")
    assert endings(source, *tests) == ["runtime_error", "passed"]


def test_a_program_that_does_not_load_reports_why():
    ours, theirs = socket.socketpair()
    candidate.serve(theirs.fileno(), b"def f(:")
    peer = Peer(CellChannel(ours.fileno()), allow_dunder=False)
    ending, message = peer.await_load()
    assert (ending, message[:11]) == ("compile_error", "SyntaxError")
    ours.close()
    theirs.close()


def test_skipped_and_expected_failures_do_not_pass():
    code = """
import unittest
class T(unittest.TestCase):
    def test_a(self): self.assertEqual(f(1), 1)
    @unittest.skip("x")
    def test_b(self): pass
    @unittest.expectedFailure
    def test_c(self): self.assertEqual(f(1), 2)
    def test_d(self):
        with self.subTest(): self.assertEqual(f(1), 2)
"""
    lines = judged("def f(x): return x", UnittestTask(entry_point="f", test_code=code))
    assert lines[0][:2] == ("count", "4")
    assert [ending for _, ending, _ in lines[1:]] == ["passed", "failed", "failed", "failed"]
