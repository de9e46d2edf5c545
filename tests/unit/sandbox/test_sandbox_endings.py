"""From exit statuses and texts to endings."""

import json
import tracemalloc

import pytest

from multitask_rl.sandbox.cell.endings import Execution, of_execution, of_function, of_stdio_test, same_text
from multitask_rl.sandbox.cell.wire import Exit

LIMITS = {"cpu_s": 2, "wall_s": 4, "mem_mb": 64, "stdout_bytes": 100}


def ended(status=0, *, stdout=b"", stderr=b"", cpu_s=0.1, timed_out=False, failure="", is_killed_by_us=False):
    return Execution(
        exit=Exit(1, status, 0.2, cpu_s, 0, 0.0, timed_out, failure),
        stdout=stdout[:100],
        stderr=stderr,
        stderr_end=stderr,
        stdout_length=len(stdout),
        stderr_length=len(stderr),
        is_full=False,
        is_killed_by_us=is_killed_by_us,
    )


@pytest.mark.parametrize(
    ("execution", "ending"),
    [
        (ended(), "ok"),
        (ended(1 << 8), "runtime_error"),
        (ended(1 << 8, stderr=b"Traceback\nMemoryError\n"), "memory_limit"),
        (ended(77 << 8, stderr=b"SyntaxError: x"), "compile_error"),
        (ended(77 << 8, stdout=b"x"), "runtime_error"),
        (ended(11), "runtime_error"),
        (ended(31), "violation"),
        (ended(9, cpu_s=1.9), "timeout"),
        (ended(9, cpu_s=0.1), "killed"),
        (ended(9, timed_out=True), "timeout"),
        (ended(stdout=b"x" * 101), "output_limit"),
        (ended(1 << 8, failure="clone: no memory"), "infrastructure_error"),
    ],
)
def test_an_end_has_one_ending(execution, ending):
    assert of_execution(execution, LIMITS)[0] == ending


@pytest.mark.parametrize(
    ("actual", "expected", "tolerance", "is_same"),
    [
        (b"1 2 \n3\n\n", b"1 2\n3", None, True),
        (b"1\n2", b"1\n2\n3", None, False),
        (b"1\n2\n3", b"1\n2", None, False),
        (b"", b"1", None, False),
        (b" 1", b"1", None, False),
        (b"1\r2", b"1\n2", None, False),
        (b"0.333333", b"0.3333334", None, False),
        (b"0.333333", b"0.3333334", 1e-5, True),
        (b"nan", b"1.0", 1e9, False),
        (b"inf", b"1e400", 1e-6, False),
        (b"\xff", "�".encode(), None, False),
    ],
)
def test_texts_are_compared_whole(actual, expected, tolerance, is_same):
    assert same_text(actual, expected, tolerance) is is_same


def test_the_right_text_and_a_failing_end_is_no_pass():
    assert of_stdio_test(ended(stdout=b"4\n"), LIMITS, b"4", None)[0] == "passed"
    assert of_stdio_test(ended(1 << 8, stdout=b"4\n"), LIMITS, b"4", None)[0] == "runtime_error"


def lines_of_tester(*lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


JOB = {"num_tests": 3, "limits": LIMITS}
LOADED = ["load", "passed", ""]


def test_tests_after_a_death_are_failed_not_missing():
    lines = lines_of_tester(LOADED, [0, "passed", ""], ["load", "gone", "ended"])
    ending, _, tests = of_function(JOB, lines, ended().exit, ended(0))
    assert [test[0] for test in tests] == ["passed", "runtime_error", "runtime_error"]
    assert ending == "runtime_error"


def test_a_time_out_is_named_when_tests_are_missing():
    lines = lines_of_tester(LOADED, [0, "passed", ""], [1, "failed", ""])
    ending, _, tests = of_function(JOB, lines, ended().exit, ended(9, timed_out=True))
    assert ending == "timeout"
    assert [test[0] for test in tests] == ["passed", "failed", "timeout"]


def test_a_cut_line_of_the_tester_does_not_count():
    lines = lines_of_tester(LOADED, [0, "passed", ""]) + b'[1, "passed"'
    _, _, tests = of_function(JOB, lines, ended(9).exit, ended(9, is_killed_by_us=True))
    assert tests[0][0] == "passed"
    assert all(test[0] != "passed" for test in tests[1:])


def test_nothing_reported_is_nothing_passed():
    ending, _, tests = of_function(JOB, b"", ended().exit, ended(9, is_killed_by_us=True))
    assert ending != "passed"
    assert len(tests) == 3
    assert all(test[0] != "passed" for test in tests)


def test_an_error_while_a_program_is_loaded_is_told_however_its_process_ended():
    lines = lines_of_tester(["load", "compile_error", "SyntaxError: invalid syntax"])
    for execution in (ended(1 << 8), ended(9, is_killed_by_us=True)):
        ending, message, _ = of_function(JOB, lines, ended().exit, execution)
        assert (ending, message) == ("compile_error", "SyntaxError: invalid syntax")


def test_a_program_that_stops_speaking_ends_its_tests_with_an_error():
    lines = lines_of_tester(["load", "passed", ""], [0, "passed", ""], ["load", "gone", "nonsense"])
    ending, message, tests = of_function(JOB, lines, ended().exit, ended(9, is_killed_by_us=True))
    assert (ending, message) == ("runtime_error", "nonsense")
    assert [test[0] for test in tests] == ["passed", "runtime_error", "runtime_error"]


@pytest.mark.parametrize(
    "line",
    [
        [1, "excellent", ""],
        [1, "infrastructure_error", ""],
        [1, ["passed"], ""],
        [1, "passed", 5],
        ["load", "timeout", ""],
        ["count", "99999999", ""],
        ["count", 3, ""],
        {"1": "passed"},
        [1, "passed", "x" * 20_000],
        3,
    ],
)
def test_a_line_that_no_tester_writes_ends_its_report(line):
    lines = lines_of_tester(["load", "passed", ""], [0, "passed", ""], line, [2, "passed", ""])
    _, _, tests = of_function(JOB, lines, ended().exit, ended(9, is_killed_by_us=True))
    assert [test[0] for test in tests] == ["passed", "failed", "failed"]


def test_deep_lines_of_the_tester_end_its_report():
    lines = lines_of_tester(["load", "passed", ""]) + b"[" * 8000 + b"\n"
    assert of_function(JOB, lines, ended().exit, ended(9, is_killed_by_us=True))[0] == "failed"


@pytest.mark.parametrize("tolerance", [None, 1e-6])
@pytest.mark.parametrize("piece", [b"\n", b"12 ", b"12\n"])
def test_comparing_large_outputs_takes_memory_in_proportion(piece, tolerance):
    output = b"1 " + piece * ((1 << 16) // len(piece)) + b"x"
    tracemalloc.start()
    try:
        assert not same_text(output, b"2 3\n", tolerance)
        assert same_text(output, output, tolerance)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(output)
    finally:
        tracemalloc.stop()
