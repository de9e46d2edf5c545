"""Directories of Ray clusters whose trainer was killed go, also if a process of the cluster still starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.executor.group import _Session

AGENT = """
import os, sys
print("started", flush=True)
sys.stdin.readline()
os.makedirs(sys.argv[1] + "/session_1/logs", exist_ok=True)
"""
"""Makes the directory of its logs a while after its start, as Ray's agents do."""


def dead_session(parent: Path) -> Path:
    """Return a directory as a killed trainer leaves it: with a lock that no process holds."""
    directory = parent / "ray_dead"
    (directory / "session_1" / "logs").mkdir(parents=True)
    (directory / "multitask_rl.lock").touch()
    return directory


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="only Linux tells what processes run")
@pytest.mark.parametrize("is_gone_first", [False, True])
def test_an_agent_that_starts_after_its_cluster_died_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gone_first: bool
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    dead = dead_session(tmp_path)
    command = [sys.executable, "-c", AGENT, str(dead)]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    # a process that has just been made shows no command line for a moment
    assert agent.stdout is not None
    assert agent.stdout.readline() == b"started\n"
    following = _Session()
    if not is_gone_first:
        following.remove()
    agent.communicate(b"\n", timeout=60)
    assert (dead / "session_1" / "logs").is_dir()
    (following if is_gone_first else _Session()).remove()
    assert list(tmp_path.iterdir()) == []
