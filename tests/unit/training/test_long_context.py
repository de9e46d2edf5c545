"""Training at 32k tokens: memory follows the slice of the vocabulary's logits, not tokens x vocabulary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MIB_OF_ALL_LOGITS = 2**15 * 2048 * 4 / 2**20
"""256 MiB: one float32 tensor of all tokens times the smaller vocabulary."""


@pytest.mark.slow
def test_at_32k_tokens_memory_grows_with_the_slice_and_not_with_the_vocabulary() -> None:
    script = Path(__file__).with_name("long_context_run.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    small, wide, whole = result["runs"]
    # three updates of real size: a gradient flowed through 32k tokens each time
    assert all(run["grad_norm"] > 0 for run in result["runs"])
    assert whole["grad_norm"] == pytest.approx(small["grad_norm"], rel=1e-3)
    assert small["peak"] - result["start"] < MIB_OF_ALL_LOGITS
    assert wide["peak"] - small["peak"] < 0.1 * MIB_OF_ALL_LOGITS
    assert whole["peak"] - wide["peak"] > MIB_OF_ALL_LOGITS / 2
