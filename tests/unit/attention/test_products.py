import os
import re
import subprocess
import sys
from functools import cache

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
multiply_with_onednn(511)
print("narrow", torch.get_float32_matmul_precision())
multiply_with_onednn(512)
left, right = torch.arange(20000.0).cos().view(100, 200), torch.arange(30000.0).sin().view(200, 150)
exact = left.double() @ right.double()
error = (left @ right - exact).abs().max() / exact.abs().max()
print("error", float(error), "precision", torch.get_float32_matmul_precision())
"""


@cache
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
@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there")
def test_onednn_multiplies_float32_on_an_amd_cpu_with_avx512():
    lines = [
        line for line in multiply().splitlines() if ",exec,cpu,matmul" in line and "100x200:200x150" in line
    ]
    assert lines
    assert all("src:f32" in line and "dst:f32" in line for line in lines)


def test_a_narrow_model_keeps_the_choice_of_torch():
    assert "narrow highest" in multiply()


def test_a_product_has_the_precision_of_float32_on_every_cpu():
    error = re.search(r"error (\S+)", multiply())
    assert float(error[1]) < products.EXACT


@pytest.mark.parametrize("chosen", ["high", "medium"])
def test_a_precision_that_the_process_chose_stays(chosen):
    assert f"precision {chosen}" in multiply(f"torch.set_float32_matmul_precision({chosen!r})")


MANY_SHAPES = """
import psutil, torch
from multitask_rl.attention.products import multiply_with_onednn
multiply_with_onednn(512)
torch.set_num_threads(1)
resident = psutil.Process().memory_info
right = torch.ones(64, 64, dtype=torch.{dtype})
(torch.ones(17, 64, dtype=right.dtype) @ right).sum()
before = resident().rss
for rows in range(18, 418):
    (torch.ones(rows, 64, dtype=right.dtype) @ right).sum()
print((resident().rss - before) // 2**20)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_of_many_shapes_take_little_memory(dtype):
    program = MANY_SHAPES.format(dtype=dtype)
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 130  # 255 with the limits of the libraries
