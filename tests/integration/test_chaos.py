"""A few random kills and damages; many: ``benchmarks/chaos.py`` (docs/checkpoints.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kills_leave_the_run_as_if_undisturbed_and_damage_is_never_silent(tmp_path):
    arguments = ["--kills", "3", "--damage", "15", "--seed", "2", "--json", str(tmp_path / "found.json")]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    killed, damaged = json.loads((tmp_path / "found.json").read_text())
    assert (killed["kills"], damaged["damages"]) == (3, 15)
    assert killed["wrong"] == damaged["wrong"] == []
    assert {"previous", "newest"} <= damaged["outcomes"].keys()
