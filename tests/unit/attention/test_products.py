import os
import re
import subprocess
import sys

import pytest
import torch

from multitask_rl.attention import products

IS_SLOW_WITH_MKL = torch.cpu.get_capabilities().get("avx512_f") and str(
    torch.cpu.get_capabilities().get("cpu_name")
).startswith("AMD")

PRODUCT = """
import torch
from multitask_rl.attention.products import multiply_with_onednn
{before}
multiply_with_onednn()
left, right = torch.arange(20000.0).cos().view(100, 200), torch.arange(30000.0).sin().view(200, 150)
exact = left.double() @ right.double()
error = (left @ right - exact).abs().max() / exact.abs().max()
print("error", float(error), "precision", torch.get_float32_matmul_precision())
"""


def multiply(before=""):
    """Multiply in a process of its own; return its output, with a line of oneDNN for each of its products."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT.format(before=before)],
        env=os.environ | {"ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(not IS_SLOW_WITH_MKL, reason="not an AMD CPU with AVX-512")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_onednn_multiplies_float32_on_an_amd_cpu_with_avx512():
    lines = [
        line for line in multiply().splitlines() if ",exec,cpu,matmul" in line and "100x200:200x150" in line
    ]
    assert lines
    assert all("src:f32" in line and "dst:f32" in line for line in lines)


def test_a_product_has_the_precision_of_float32_on_every_cpu():
    error = re.search(r"error (\S+)", multiply())
    assert float(error[1]) < products.EXACT


@pytest.mark.parametrize("chosen", ["high", "medium"])
def test_a_precision_that_the_process_chose_stays(chosen):
    assert f"precision {chosen}" in multiply(f"torch.set_float32_matmul_precision({chosen!r})")
