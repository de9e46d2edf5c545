"""Training at 32k tokens, and what its memory grows with: measured in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).with_name("long_context_child.py")
SLICES = (2, 16, 32)
"""MiB of logits that exist at once."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


def test_a_step_at_32k_tokens_and_memory_that_grows_with_the_slice_of_logits(tmp_path):
    # freed tensors go back to the system at once: what is counted is what is in use; waiting threads sleep
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144", "OMP_WAIT_POLICY": "PASSIVE"}
    environment["HF_HUB_OFFLINE"] = "1"
    command = [sys.executable, str(CHILD), str(tmp_path), *map(str, SLICES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["prompt_tokens"] >= 32_000
    assert found["grad_norm"] > 0.0
    assert found["moved"] > 0.0
    # queries times keys would be 4 GiB, bool masks of them 1 GiB
    assert found["train_mib"] < 512
    peaks = {int(size): peak for size, peak in found["peaks_mib"].items()}
    small, middle, large = (peaks[size] for size in SLICES)
    for growth in ((middle - small) / (16 - 2), (large - middle) / (32 - 16)):
        # logits and probabilities, then the gradient by blocks and of the slice: two of a slice
        assert 1.5 < growth < 3.0, f"MiB per MiB of slice, peaks {peaks}"
    assert small < found["all_logits_mib"], "less than a single copy of all logits"
    more = found["with_kept_mib"] - small
    assert 0.5 * found["kept_mib"] < more < 1.1 * found["kept_mib"], "the probabilities that are kept"
