"""Crashes, cancellation and the end of a sandbox: nothing is lost and nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import AssertsTask, Ending, Limits, Program, StdioTask, StdioTest
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox

NAP = Program(source="import time\ntime.sleep(0.5)\nprint('done')", limits=Limits(wall_s=5))
SLEEPS = Program(source="import time\ntime.sleep(50)", limits=Limits(wall_s=60))
"""It ends when it is cancelled or killed, however long a busy machine takes for that."""


def wait_until(is_true, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_asleep(pid):
    """Whether the process sleeps: a program of these tests that naps, and no part of the sandbox."""
    with contextlib.suppress(OSError):
        return "nanosleep" in Path(f"/proc/{pid}/wchan").read_text()
    return False


@pytest.mark.parametrize("victim", ["keeper", "zygote"])
def test_a_killed_process_of_the_sandbox_is_replaced_and_its_program_run_again(victim):
    with NamespaceSandbox(workers=1) as sandbox:

        def retries():
            future = sandbox.submit(NAP)
            (keeper,) = sandbox.keeper_pids
            wait_until(lambda: future.done() or any(map(is_asleep, descendants(keeper))))
            os.kill(keeper if victim == "keeper" else min(descendants(keeper)), signal.SIGKILL)
            outcome = future.result(timeout=20)
            assert (outcome.ending, outcome.stdout) == (Ending.completed, b"done\n")
            assert sandbox.run(Program(source="print(1)")).stdout == b"1\n"
            return outcome.retries

        kills = 1
        while (found := retries()) == 0 and kills < 5:  # a busy machine may delay a kill
            kills += 1
        assert (found, sandbox.restarts) == (1, kills)


@contextlib.contextmanager
def keepers_of_sleepers_die(sandbox):
    """Kill every keeper below which a process sleeps."""
    stop = threading.Event()

    def kill():
        while not stop.wait(0.02):
            for pid in sandbox.keeper_pids:
                if any(map(is_asleep, descendants(pid))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()


def test_a_program_under_which_workers_keep_dying_scores_nothing():
    with NamespaceSandbox(workers=1) as sandbox, keepers_of_sleepers_die(sandbox):
        outcome = sandbox.submit(SLEEPS).result(timeout=60)
        assert (outcome.ending, outcome.pass_fraction) == (Ending.killed, 0.0)
        assert "lost 2 times while it ran alone" in outcome.message


def test_close_leaves_no_process_and_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    sandbox = NamespaceSandbox(workers=2)
    family = {pid for keeper in sandbox.keeper_pids for pid in (keeper, *descendants(keeper))}
    futures = [sandbox.submit(SLEEPS) for _ in range(6)]
    wait_until(lambda: any(f.running() for f in futures))
    family |= {pid for keeper in sandbox.keeper_pids for pid in descendants(keeper)}
    sandbox.close()
    assert sandbox.keeper_pids == [], "a process 0 would be the group of whoever kills it"
    wait_until(lambda: not any(is_alive(pid) for pid in family))
    wait(futures, timeout=5)
    assert all(f.cancelled() or f.result().ending is Ending.infrastructure_error for f in futures)
    assert set(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run(SLEEPS)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_trainer_that_dies_takes_its_sandbox_along(how):
    code = """
import signal, sys, time
from multitask_rl.sandbox import Limits, Program
from multitask_rl.sandbox.pool import NamespaceSandbox
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
sandbox = NamespaceSandbox(workers=1)
sandbox.submit(Program(source="while True: pass", limits=Limits(cpu_s=50, wall_s=60)))
print(*sandbox.keeper_pids, flush=True)
time.sleep(60)
"""
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert trainer.stdout is not None
    keeper = int(trainer.stdout.readline())
    wait_until(lambda: len(descendants(keeper)) >= 2)
    family = {keeper, *descendants(keeper)}
    trainer.send_signal(how)
    trainer.wait(timeout=20)
    trainer.stdout.close()
    wait_until(lambda: not any(is_alive(pid) for pid in family))


def test_a_cancelled_program_is_not_run():
    with NamespaceSandbox(workers=1) as sandbox:
        running = sandbox.submit(SLEEPS)
        wait_until(running.running)
        waiting = sandbox.submit(Program(source="print(1)"))
        assert waiting.cancel()
        assert running.running()
        assert running.cancel()
        assert sandbox.run(Program(source="print(2)")).stdout == b"2\n"


FOREVER = "while True: pass"
NO_HURRY = Limits(cpu_s=50, wall_s=60)


@pytest.mark.parametrize(
    "program",
    [
        Program(source=FOREVER, limits=NO_HURRY),
        SLEEPS,
        Program(
            source=FOREVER, limits=NO_HURRY, task=StdioTask(tests=[StdioTest(stdin="1", stdout="1")] * 3)
        ),
        Program(
            source=f"def f():\n    {FOREVER}",
            limits=NO_HURRY,
            task=AssertsTask(entry_point="f", asserts=["assert f() == 1"]),
        ),
        Program(
            source=f"def f():\n    {FOREVER}",
            limits=NO_HURRY,
            task=AssertsTask(entry_point="f", asserts=["assert abs(f()) == 1"]),
        ),
    ],
    ids=["computes", "sleeps", "stdio", "literal", "judge"],
)
def test_a_running_program_can_be_cancelled(program):
    with NamespaceSandbox(workers=1) as sandbox:
        sandbox.run(Program(source="print(1)"))
        (keeper,) = sandbox.keeper_pids
        before = descendants(keeper)
        future = sandbox.submit(program)
        wait_until(lambda: len(descendants(keeper)) > len(before))
        assert future.running()
        assert future.cancel()
        assert future.cancelled()
        assert not future.running()
        with pytest.raises(CancelledError):
            future.result(timeout=0)
        after = sandbox.submit(Program(source="print(2)"))
        assert after.result(timeout=20).stdout == b"2\n"
        assert descendants(keeper) == before
        assert sandbox.restarts == 0


def test_cancelling_one_program_leaves_its_neighbours_alone():
    with NamespaceSandbox(workers=1) as sandbox:
        endless = Program(source=FOREVER, limits=NO_HURRY)
        futures = [
            sandbox.submit(endless if n % 3 == 1 else Program(source=f"print({n})")) for n in range(12)
        ]
        for n, future in enumerate(futures):
            if n % 3 == 1:
                assert future.cancel()
                assert future.cancel()  # twice is once
            else:
                assert future.result(timeout=20).stdout == b"%d\n" % n
        assert [f.cancelled() for f in futures] == [n % 3 == 1 for n in range(12)]
        assert not futures[0].cancel()
        assert futures[0].result().stdout == b"0\n"


def test_programs_behind_a_long_one_are_run_by_another_worker():
    with NamespaceSandbox(workers=2) as sandbox:
        blocked = sandbox.submit(SLEEPS)
        others = [sandbox.submit(Program(source=f"print({n})")) for n in range(40)]
        assert [f.result(timeout=20).stdout for f in others] == [b"%d\n" % n for n in range(40)]
        assert not blocked.done()


def test_of_several_programs_at_hand_only_the_deadly_one_is_lost():
    with NamespaceSandbox(workers=1) as sandbox:
        plain = [sandbox.submit(Program(source=f"print({n})")) for n in range(3)]
        deadly = sandbox.submit(SLEEPS)
        plain += [sandbox.submit(Program(source=f"print({n})")) for n in range(3, 8)]
        with keepers_of_sleepers_die(sandbox):
            outcome = deadly.result(timeout=60)
        assert outcome.ending is Ending.killed
        assert [f.result(timeout=30).stdout for f in plain] == [b"%d\n" % n for n in range(8)]


def test_large_programs_and_outputs_pass_each_other():
    size = 3 << 20
    source = "#" + "x" * size + f"\nprint('y' * {size})"
    with NamespaceSandbox(workers=1) as sandbox:
        outcomes = sandbox.map([Program(source=source, limits=Limits(wall_s=60, cpu_s=30))] * 6)
    assert [o.stdout_length for o in outcomes] == [size + 1] * 6


def test_a_full_queue_holds_the_caller_back():
    with NamespaceSandbox(workers=1, queue_size=2) as sandbox:
        started = time.monotonic()
        futures = [sandbox.submit(NAP) for _ in range(4)]
        assert time.monotonic() - started > 0.3
        assert [f.result().stdout for f in futures] == [b"done\n"] * 4


def test_many_threads_get_their_own_outcomes():
    found = {}
    with NamespaceSandbox(workers=2) as sandbox:

        def ask(number):
            for turn in range(5):
                program = Program(source=f"print({number * 100 + turn})")
                found[number, turn] = int(sandbox.run(program).stdout)

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {(n, t): n * 100 + t for n in range(8) for t in range(5)}


def test_a_forked_child_may_not_use_its_parents_sandbox():
    with NamespaceSandbox(workers=1) as sandbox:
        sandbox._owner += 1  # what a fork would change, without forking a test process that has threads
        with pytest.raises(SandboxError, match="fork"):
            sandbox.submit(NAP)
        sandbox._owner -= 1


def test_time_and_memory_are_measured_outside_the_program():
    source = """
import time, resource
block = bytearray(60 << 20)
for i in range(0, len(block), 4096): block[i] = 1
end = time.process_time() + 0.3
while time.process_time() < end: pass
time.sleep(0.2)
"""
    with NamespaceSandbox(workers=1) as sandbox:
        outcome = sandbox.run(Program(source=source))
    assert outcome.peak_mb > 55
    assert 0.25 < outcome.cpu_s < 2
    assert outcome.wall_s > 0.45


def test_a_program_that_times_out_in_one_test_keeps_what_it_earned():
    source = "n = int(input())\nwhile n == 2: pass\nprint(n)"
    tests = [StdioTest(stdin=f"{n}\n", stdout=f"{n}\n") for n in (1, 2, 3)]
    limits = Limits(cpu_s=1, wall_s=2)
    with NamespaceSandbox(workers=1) as sandbox:
        outcome = sandbox.run(Program(source=source, task=StdioTask(tests=tests), limits=limits))
        assert [t.ending.value for t in outcome.tests] == ["passed", "timeout", "passed"]
        hopeless = Program(source="while True: pass", task=StdioTask(tests=tests * 5), limits=limits)
        outcome = sandbox.run(hopeless)
        assert sum("not run" in test.message for test in outcome.tests) >= 10
        assert outcome.ending is Ending.timeout
        assert len(outcome.tests) == 15


def test_every_byte_of_the_output_survives():
    source = "import sys\nsys.stdout.buffer.write(bytes(range(256)))"
    with NamespaceSandbox(workers=1) as sandbox:
        outcome = sandbox.run(Program(source=source))
    assert outcome.stdout == bytes(range(256))
    assert not outcome.is_truncated


def test_as_many_workers_as_cpus_keep_to_one_each():
    ours = os.sched_getaffinity(0)
    look = Program(source="import os\nprint(sorted(os.sched_getaffinity(0)))")
    with NamespaceSandbox(workers=1) as sandbox:
        free = sandbox.run(look).stdout_text
    os.sched_setaffinity(0, {max(ours)})  # this thread alone
    try:
        with NamespaceSandbox(workers=2) as sandbox:
            pinned = {outcome.stdout_text for outcome in sandbox.map([look] * 8)}
    finally:
        os.sched_setaffinity(0, ours)
    assert pinned == {f"{[max(ours)]}\n"}
    assert free == f"{sorted(ours)}\n"


def test_programs_of_one_worker_share_nothing():
    leave = "open('/tmp/left', 'w').write('x')\nimport builtins, sys\nbuiltins.left = sys.left = 1"
    look = (
        "import os, builtins, sys\nprint(os.listdir('/tmp'), hasattr(builtins, 'left'), hasattr(sys, 'left'))"
    )
    with NamespaceSandbox(workers=1) as sandbox:
        assert sandbox.run(Program(source=leave)).ending is Ending.completed
        assert sandbox.run(Program(source=look)).stdout == b"[] False False\n"


@pytest.mark.slow
def test_two_thousand_programs_leave_memory_and_descriptors_flat():
    hostile = [
        "import os\nwhile True: os.fork()",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import os\nos.closerange(0, 100)\nos._exit(7)",
        "import ctypes\nctypes.string_at(0)",
    ]
    check = AssertsTask(entry_point="f", asserts=["assert f(2) == 4"])
    limits = Limits(cpu_s=1, wall_s=3, mem_mb=64)

    def program(n):
        if n % 20 == 0:
            return Program(source=hostile[n // 20 % len(hostile)], limits=limits)
        if n % 7 == 0:
            return Program(source="def f(x): return x * 2", task=check)
        return Program(source=f"print({n})")

    with NamespaceSandbox(workers=2) as sandbox:
        sandbox.map(program(n) for n in range(400))
        family = [*sandbox.keeper_pids, *(min(descendants(pid)) for pid in sandbox.keeper_pids)]
        before = [_memory_and_descriptors(pid) for pid in family]
        outcomes = sandbox.map(program(n) for n in range(2_000))
        assert all(o.ending is not Ending.infrastructure_error for o in outcomes)
        plain = [n for n in range(2_000) if n % 20 and n % 7]
        assert [outcomes[n].stdout for n in plain] == [b"%d\n" % n for n in plain]
        after = [_memory_and_descriptors(pid) for pid in family]
        assert sandbox.restarts == 0
        assert all(len(descendants(pid)) <= 2 for pid in sandbox.keeper_pids)
    for (memory, descriptors), (memory_after, descriptors_after) in zip(before, after, strict=True):
        assert descriptors_after == descriptors
        assert memory_after - memory < 1 << 10  # KiB: half of one a program


def _memory_and_descriptors(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(resident.split()[1]), len(os.listdir(f"/proc/{pid}/fd"))
