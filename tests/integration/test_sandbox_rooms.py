"""The file system of a program: its own, empty at the start, gone at the end, though mounts are shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from multitask_rl.sandbox import AssertsTask, Ending, Limits, Program, StdioTask, StdioTest
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox

LOOK = Program(
    source=(
        "import os, stat\n"
        "print(oct(os.stat('/tmp').st_mode), os.listdir('/tmp'), os.listdir('.'), os.getcwd(), "
        "os.listxattr('/tmp'), os.listdir('/tmp/..') == os.listdir('/'))\n"
        "open('/tmp/mine', 'w').write('x')\n"
    )
)
FRESH = b"0o40700 [] [] /tmp [] True\n"
SPITEFUL = {
    "leaves files": "for i in range(50): open(f'/tmp/{i}', 'w').write('x' * 4096)",
    "leaves a tree": "import os\nos.makedirs('/tmp/a/b/c')\nos.symlink('/tmp/a', '/tmp/link')",
    "fills it": "try:\n    open('/tmp/big', 'wb').write(bytes(64 << 20))\nexcept OSError: pass",
    "shuts it": "import os\nopen('/tmp/secret', 'w').write('x')\nos.chmod('/tmp', 0)",
    "shuts it, empty": "import os\nos.chmod('/tmp', 0)",
    "goes away": "import os\nos.mkdir('/tmp/d')\nos.chdir('/tmp/d')\nos.rmdir('/tmp/d')",
    "marks it": (
        "import os\nos.utime('/tmp', (1, 1))\n"
        "try: os.setxattr('/tmp', 'user.left', b'1')\nexcept OSError: pass"
    ),
    "keeps it open": "import os\nf = open('/tmp/held', 'w')\nos.unlink('/tmp/held')\nf.write('x' * 9999)",
    "never ends": "open('/tmp/hung', 'w').write('x')\nwhile True: pass",
}


@pytest.fixture(scope="module")
def sandbox():
    with NamespaceSandbox(workers=1) as one:
        yield one


def count_mounts(sandbox):
    """Return how many file systems lie on the first room's /tmp."""
    zygote = min(descendants(sandbox.keeper_pids[0]))
    lines = Path(f"/proc/{zygote}/mountinfo").read_text().splitlines()
    return sum(line.split()[4] == "/tmp/0/tmp" for line in lines)


@pytest.mark.parametrize("name", SPITEFUL)
def test_the_next_program_finds_an_empty_one(sandbox, name):
    sandbox.run(Program(source=SPITEFUL[name], limits=Limits(wall_s=1, cpu_s=1)))
    for _ in range(2):
        outcome = sandbox.run(LOOK)
        assert (outcome.ending, outcome.stdout) == (Ending.completed, FRESH), outcome.stderr_text


def test_what_a_program_left_is_gone_with_it(sandbox):
    assert sandbox.run(Program(source="open('/tmp/x', 'w').write('x' * 100000)")).ending is Ending.completed
    sandbox.run(Program(source="pass"))  # has been served: the first one was put away before
    assert count_mounts(sandbox) == 1


def test_mounts_do_not_pile_up(sandbox):
    counts = []
    for _ in range(70):
        assert sandbox.run(Program(source="print(1)")).stdout == b"1\n"
        counts.append(count_mounts(sandbox))
    assert 1 < max(counts) <= 32
    assert min(counts) <= 1


def test_each_test_of_a_program_starts_empty(sandbox):
    source = "import os\ninput()\nprint(os.listdir('/tmp'))\nopen('/tmp/left', 'w').write('x')"
    task = StdioTask(tests=[StdioTest(stdin=f"{n}\n", stdout="[]\n") for n in range(4)])
    assert sandbox.run(Program(source=source, task=task)).pass_fraction == 1.0


def test_judge_and_program_do_not_see_each_others(sandbox):
    source = (
        "import os\nopen('/tmp/of_program', 'w').write('x')\n"
        "def see():\n    return sorted(os.listdir('/tmp'))\n"
    )
    tests = (
        "import os\nassert os.listdir('/tmp') == []",
        "import os\nopen('/tmp/of_judge', 'w').write('x')\nassert see() == ['of_program']",
        "import os\nassert os.listdir('/tmp') == ['of_judge']",
    )
    outcome = sandbox.run(Program(source=source, task=AssertsTask(entry_point="see", asserts=tests)))
    assert outcome.pass_fraction == 1.0, outcome.tests


def test_a_program_may_not_take_its_file_system_away(sandbox):
    source = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.umount2(b'/tmp', 2), ctypes.get_errno(), libc.chroot(b'/usr'), ctypes.get_errno(), "
        "libc.unshare(0x20000), ctypes.get_errno())"
    )
    assert sandbox.run(Program(source=source)).stdout == b"-1 1 -1 1 -1 1\n"
    assert sandbox.run(LOOK).stdout == FRESH


def test_zygotes_with_other_modules_have_their_own_mounts(sandbox):
    numpy = Program(source="import numpy, os\nprint(os.listdir('/tmp'))\nopen('/tmp/n', 'w').write('x')")
    for _ in range(40):
        assert sandbox.run(numpy).stdout == b"[]\n"
        assert sandbox.run(LOOK).stdout == FRESH
    assert count_mounts(sandbox) <= 1
