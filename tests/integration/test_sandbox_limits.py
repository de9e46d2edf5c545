"""What a keeper and its cell may use, and what they give up before the trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.sandbox import AssertsTask, Ending, Limits, Program, StdioTask, StdioTest
from multitask_rl.sandbox.cell.trainer import MAX_FRAME
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox

WRITE = """
import json, os, struct, time
def say(message):
    text = json.dumps(message).encode()
    os.write(3, struct.pack("<I", len(text)) + text)
say(["ready"])
"""


@pytest.fixture(scope="module")
def sandbox():
    with NamespaceSandbox(workers=1) as one:
        yield one


def status(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_a_keeper_has_a_filter_limits_and_no_network(sandbox):
    (keeper,) = sandbox.keeper_pids
    facts = status(keeper)
    assert (facts["Seccomp"], facts["NoNewPrivs"]) == ("2", "1")
    assert os.readlink(f"/proc/{keeper}/ns/net") != os.readlink("/proc/self/ns/net")
    limits = Path(f"/proc/{keeper}/limits").read_text()
    address_space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
    assert int(address_space.split()[3]) <= 1 << 30
    assert int(next(line for line in limits.splitlines() if "processes" in line).split()[2]) == 0


def test_out_of_memory_the_programs_go_before_the_keeper_and_it_before_the_trainer(sandbox):
    (keeper,) = sandbox.keeper_pids
    cell = {Path(f"/proc/{pid}/oom_score_adj").read_text().strip() for pid in descendants(keeper)}
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert cell == {"1000"}
    assert own < int(Path(f"/proc/{keeper}/oom_score_adj").read_text()) < 1000


@pytest.mark.parametrize(
    "answer",
    [
        {"t": {"r": [0, 12_000_000, 1]}},
        {"q": [{"r": [0, 12_000_000, 1]}, None]},
        {"F": ["1e3000000", 1]},
    ],
    ids=["tuple", "deque", "fraction"],
)
def test_a_keeper_builds_nothing_larger_than_the_message(sandbox, answer):
    (keeper,) = sandbox.keeper_pids
    source = f"{WRITE}say(['ok', {answer!r}, []])\ntime.sleep(0.2)"
    task = AssertsTask(entry_point="f", asserts=["assert f(1) == 2"])
    outcome = sandbox.run(Program(source=source, task=task))
    assert (outcome.ending, outcome.pass_fraction) == (Ending.runtime_error, 0.0)
    assert int(status(keeper)["VmHWM"].split()[0]) < 150 << 10


def test_a_channel_that_a_program_would_keep_open_ends_with_it(sandbox):
    source = f"{WRITE}import socket\nsocket.send_fds(socket.socket(fileno=3), [b'x'], [3])\ntime.sleep(9)"
    task = AssertsTask(entry_point="f", asserts=[f"assert f({'x' * 300_000!r}) == 1"])
    outcome = sandbox.run(Program(source=source, task=task, limits=Limits(wall_s=3, cpu_s=2)))
    assert (outcome.ending, outcome.pass_fraction) == (Ending.violation, 0.0)
    assert sandbox.restarts == 0


def test_sockets_keep_the_size_of_their_buffers(sandbox):
    source = """
import socket
a, b = socket.socketpair()
try: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
except OSError as error: print(error.errno)
try: a.getsockopt(socket.SOL_SOCKET, 77, 4)
except OSError as error: print(error.errno)
print(a.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
"""
    assert sandbox.run(Program(source=source)).stdout == b"1\n1\n0\n"


def test_the_interpreters_own_packages_are_out_of_reach(sandbox):
    source = """
import glob, os
places = [p for lib in ("/usr/lib", "/opt/python/lib") for p in glob.glob(lib + "/python3*/*-packages")]
print(sum(len(os.listdir(p)) for p in places))
"""
    assert sandbox.run(Program(source=source)).stdout == b"0\n"


def test_a_program_that_sleeps_through_its_tests_does_not_get_all_their_time(sandbox):
    tests = [StdioTest(stdin="", stdout="1")] * 12
    program = Program(
        source="import time\ntime.sleep(0.4)\nprint(1)",
        task=StdioTask(tests=tests),
        limits=Limits(wall_s=0.8, cpu_s=1),
    )
    outcome = sandbox.run(program)
    assert outcome.ending is Ending.timeout
    assert outcome.wall_s - outcome.starved_s < 2.0
    assert outcome.tests[0].is_passed
    assert "earlier tests used up the time" in outcome.tests[-1].message


def test_a_task_too_large_to_be_judged_is_refused_and_its_neighbours_run(sandbox):
    huge = StdioTest(stdin="", stdout="x" * (MAX_FRAME // 4))
    too_large = sandbox.submit(Program(source="", task=StdioTask(tests=[huge] * 5)))
    neighbour = sandbox.submit(Program(source="print(1)"))
    with pytest.raises(ValueError, match="at most 256 MiB"):
        too_large.result(timeout=60)
    assert neighbour.result(timeout=60).stdout == b"1\n"


@pytest.mark.parametrize("limit", [8, 16, 24, 64])
@pytest.mark.parametrize("is_fixed", [True, False])
def test_with_few_open_files_it_works_or_says_so(limit, is_fixed):
    code = f"""
import os, resource, sys
from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import Program
from multitask_rl.sandbox.pool import NamespaceSandbox
if {is_fixed} and os.geteuid() == 0:
    os.setgroups([]); os.setresgid(1001, 1001, 1001); os.setresuid(1001, 1001, 1001)
resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit} if {is_fixed} else 4096))
try:
    with NamespaceSandbox(workers=2, packages=()) as sandbox:
        print(*[o.stdout for o in sandbox.map([Program(source="print(1)")] * 3)])
except SandboxError as error:
    print("refused:", error)
"""
    python = Path(f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")
    if is_fixed and not python.exists():
        pytest.skip("no interpreter that any user may run")
    done = subprocess.run(
        [str(python) if is_fixed else sys.executable, "-c", code],
        env={
            "PATH": "/usr/bin",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
    )
    works = done.stdout == "b'1\\n' b'1\\n' b'1\\n'\n"
    assert works or ("refused:" in done.stdout and "ulimit -n" in done.stdout), done.stderr
    assert works or is_fixed or limit < 24
