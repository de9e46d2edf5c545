"""The real package verifiers, in a folder of its own: its dependencies clash with vLLM's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(sys.prefix) / "verifiers"


@pytest.mark.skipif(not SITE.is_dir(), reason=f"verifiers is not installed in {SITE} (make test does it)")
def test_a_taskset_of_the_real_package_scores_unchanged():
    test = "tests/unit/scoring/test_adapt.py::test_a_verifiers_taskset_scores_unchanged"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
