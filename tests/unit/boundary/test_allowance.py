"""Cores and memory of a container, read from control groups of both versions."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from multitask_rl.boundary import allowance
from multitask_rl.boundary.allowance import limit_threads, thread_limit, usable_cores, usable_memory

MANY = 64
MIB = 2**20


@pytest.fixture(autouse=True)
def _large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(MANY)))


def groups(tmp_path: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write ``files`` below a directory of groups, and ``own`` beside it."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "groups", tmp_path / "own"


BOX = "0::/pod/box\n"
VERSION_1 = "5:memory:/pod/box\n4:cpu,cpuacct:/pod/box\n1:name=systemd:/\n0::/\n"
V1 = "cpu/pod/box/cpu"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (BOX, {}, MANY),
        (BOX, {"pod/box/cpu.max": "max 100000\n"}, MANY),
        (BOX, {"pod/box/cpu.max": "150000 100000\n"}, 2),
        (BOX, {"pod/box/cpu.max": "5000 100000\n"}, 1),
        (BOX, {"pod/box/cpu.max": ""}, MANY),
        ("nothing that is known\n" + BOX, {"pod/box/cpu.max": "150000 100000\n"}, 2),
        # the least of a group and those above it
        (BOX, {"pod/box/cpu.max": "800000 100000\n", "pod/cpu.max": "400000 100000\n"}, 4),
        # a container has a path of the host, and its own group as the root
        ("0::/kubepods/pod7/box\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/../../box\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/box\n", {"unified/box/cpu.max": "300000 100000\n"}, 3),
        (VERSION_1, {f"{V1}.cfs_quota_us": "600000", f"{V1}.cfs_period_us": "100000"}, 6),
        (VERSION_1, {f"{V1}.cfs_quota_us": "-1", f"{V1}.cfs_period_us": "100000"}, MANY),
        ("0::/box\n", {"box/cpu.max": "99900000 100000\n"}, MANY),
    ],
)
def test_cores_are_those_of_the_affinity_or_of_the_smallest_quota(
    tmp_path: Path, own: str, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(*groups(tmp_path, own, files)) == cores


def test_a_quota_of_this_machine_s_kernel_is_seen() -> None:
    root = Path("/sys/fs/cgroup")
    is_first = (root / "cpu").is_dir()
    group = root.joinpath(*["cpu"] * is_first, f"multitask-rl-test-{os.getpid()}")
    name, quota = ("cpu.cfs_quota_us", "50000") if is_first else ("cpu.max", "50000 100000")
    script = f"""
import os
from multitask_rl.boundary.allowance import thread_limit, usable_cores
before = usable_cores()
open({str(group / "cgroup.procs")!r}, "w").write("0")
print(before, usable_cores(), thread_limit())
"""
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        try:
            (group / name).write_text(quota)
        except OSError as error:
            pytest.skip(f"this control group takes no quota: {error}")
        environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        before, now, limit = done.stdout.split(maxsplit=2)
        expected = "{}" if before == "1" else "{'OMP_NUM_THREADS': '1'}"
        assert (now, limit.strip()) == ("1", expected), done.stderr
    finally:
        group.rmdir()


def test_a_machine_without_control_groups_has_all_its_cores_and_memory(tmp_path: Path) -> None:
    nowhere = tmp_path / "groups", tmp_path / "own"
    assert usable_cores(*nowhere) == MANY
    assert usable_memory(*nowhere) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(
    ("own", "files", "left_mib"),
    [
        (
            "0::/box\n",
            {
                "box/memory.max": f"{512 * MIB}\n",
                "box/memory.current": f"{500 * MIB}\n",
                "box/memory.stat": f"anon {440 * MIB}\ninactive_file {50 * MIB}\n",
            },
            62,
        ),
        (
            VERSION_1,
            {
                "memory/pod/box/memory.limit_in_bytes": f"{512 * MIB}\n",
                "memory/pod/box/memory.usage_in_bytes": f"{500 * MIB}\n",
                "memory/pod/box/memory.stat": f"inactive_file 0\ntotal_inactive_file {50 * MIB}\n",
            },
            62,
        ),
        (
            "0::/box\n",
            {"box/memory.max": f"{512 * MIB}", "box/memory.current": f"{600 * MIB}"},
            0,
        ),
        ("0::/box\n", {"box/memory.max": "max\n", "box/memory.current": "1\n"}, math.inf),
    ],
)
def test_memory_is_what_the_container_has_left(
    tmp_path: Path, own: str, files: dict[str, str], left_mib: float
) -> None:
    found = usable_memory(*groups(tmp_path, own, files))
    if math.isinf(left_mib):
        assert found == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    else:
        assert found == left_mib * MIB


@pytest.mark.parametrize(
    ("number", "chosen", "cores", "expected", "told"),
    [
        (0, "", 1, 1, "1"),
        (0, "", 5, 3, "5"),
        (0, "", MANY, 3, None),
        (0, "3", 1, 3, None),
        (2, "", 1, 2, "1"),
        (2, "3", 1, 2, None),
    ],
)
def test_torch_gets_no_more_threads_than_the_container_has_cores(
    monkeypatch: pytest.MonkeyPatch, number: int, chosen: str, cores: int, expected: int, told: str | None
) -> None:
    monkeypatch.setattr(allowance, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        limit_threads(number)
        assert torch.get_num_threads() == expected
        assert thread_limit().get("OMP_NUM_THREADS") == told, "of the processes that rewards run in"
    finally:
        torch.set_num_threads(before)
