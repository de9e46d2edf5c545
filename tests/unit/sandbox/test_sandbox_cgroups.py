"""Limits of whole cells, on a directory that looks like a delegated cgroup (there may be none here)."""

import os

import pytest

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import Limits, Program
from multitask_rl.sandbox.cgroups import CellCgroup, delegated_cgroup, descendants
from multitask_rl.sandbox.pool import NamespaceSandbox


@pytest.fixture
def cgroup(tmp_path):
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    return tmp_path


def cell_of(cgroup):
    (cell,) = [path for path in cgroup.iterdir() if path.is_dir()]
    return cell


def test_the_controllers_are_switched_on_for_cells(cgroup):
    assert delegated_cgroup(str(cgroup)) == (cgroup, "")
    assert (cgroup / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_nothing_is_written_where_they_are_on(cgroup):
    (cgroup / "cgroup.subtree_control").write_text("memory pids")
    delegated_cgroup(str(cgroup))
    assert (cgroup / "cgroup.subtree_control").read_text() == "memory pids"


@pytest.mark.parametrize("controllers", ["", "cpu pids"])
def test_a_missing_controller_is_named(cgroup, controllers):
    (cgroup / "cgroup.controllers").write_text(controllers)
    found, why = delegated_cgroup(str(cgroup))
    assert found is None
    assert "memory" in why


def test_a_directory_that_is_no_cgroup_refuses_to_open(tmp_path):
    with pytest.raises(SandboxError, match="cells cannot be limited"):
        NamespaceSandbox(workers=1, cgroup=str(tmp_path))


def test_limits_grow_with_the_largest_program_and_never_shrink(cgroup):
    cell = CellCgroup(cgroup, 3)
    first = int((cell.path / "memory.max").read_text()), int((cell.path / "pids.max").read_text())
    cell.allow(Limits(mem_mb=4096, nproc=100))
    second = int((cell.path / "memory.max").read_text()), int((cell.path / "pids.max").read_text())
    cell.allow(Limits(mem_mb=64, nproc=1))
    third = int((cell.path / "memory.max").read_text()), int((cell.path / "pids.max").read_text())
    assert first[0] > 512 << 20
    assert second == third
    assert (second[0] - first[0]) >> 20 == 4096 - 512
    assert second[1] - first[1] == 2 * (100 - 32)


def test_what_a_dead_process_left_is_removed(cgroup):
    (cgroup / "multitask-rl-999999999-0").mkdir()
    alive = cgroup / f"multitask-rl-{os.getppid()}-0"
    alive.mkdir()
    cell = CellCgroup(cgroup, 0)
    assert sorted(p for p in cgroup.iterdir() if p.is_dir()) == sorted([alive, cell.path])


def test_every_cell_is_put_into_a_limited_group_of_its_own(cgroup):
    with NamespaceSandbox(workers=1, cgroup=str(cgroup)) as sandbox:
        cell = cell_of(cgroup)
        (keeper,) = sandbox.keeper_pids
        assert int((cell / "cgroup.procs").read_text()) in descendants(keeper)
        small = int((cell / "memory.max").read_text())
        assert sandbox.run(Program(source="print(1)", limits=Limits(mem_mb=2048))).stdout == b"1\n"
        assert int((cell / "memory.max").read_text()) > small
    assert (cell / "cgroup.kill").read_text() == "1"
