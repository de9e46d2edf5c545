"""Which library multiplies float32 matrices on a CPU, and how many compiled products it keeps.

On AMD's CPUs with AVX-512 torch's own choice, MKL, multiplies with AVX2. In most shapes it reaches half of
the rate of oneDNN (``python benchmarks/products.py``). torch gives products to oneDNN where the
precision of float32 products is ``medium``, which allows oneDNN to multiply in bfloat16. oneDNN does so only
on CPUs with AMX; on others it multiplies in float32.
"""

from __future__ import annotations

import os

import torch

KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Limits of the two caches of compiled products, of oneDNN and of torch; read at the first product.

oneDNN compiles products in bfloat16 on every CPU, those in float32 where it multiplies them. A compiled
product takes up to 1 MiB, and 1024 of them are kept by default. A pass makes some 40 and uses them in every
layer; the next pass has other lengths and makes others.
"""
EXACT = 1e-5
"""Largest error of a product in float32, as a share of its largest number; in bfloat16 it is 1e-3."""
MIN_WIDTH = 512
"""Least hidden width for oneDNN, which compiles a product for each new shape (0.4 ms); narrower: slower."""

with_onednn = False
"""oneDNN multiplies float32 in this process."""


def multiply_with_onednn(width: int) -> None:
    """Let oneDNN multiply this process's float32 matrices where that is faster and as exact.

    That is on an AMD CPU with AVX-512 and without an accelerator, for models of ``MIN_WIDTH`` or wider.
    A small product is tried: if its error is above ``EXACT``, the setting is taken back. A process that has
    chosen a precision itself keeps it. On any CPU the caches of compiled products are limited (``KEPT``).

    Args:
        width: of the model's hidden states.
    """
    global with_onednn
    if with_onednn or torch.accelerator.is_available():
        return
    for name, number in KEPT.items():
        os.environ.setdefault(name, number)
    if width < MIN_WIDTH:
        return
    known = torch.cpu.get_capabilities()
    if not (known.get("avx512_f") and str(known.get("cpu_name", "")).startswith("AMD")):
        return
    try:
        chosen = torch.get_float32_matmul_precision()
    except RuntimeError:  # another backend than cuda has a precision of its own
        return
    if chosen != "highest":
        return
    torch.set_float32_matmul_precision("medium")
    left = torch.arange(4096.0).cos().view(64, 64)
    exact = left.double() @ left.double()
    if float(((left @ left) - exact).abs().max() / exact.abs().max()) <= EXACT:
        with_onednn = True
    else:
        torch.set_float32_matmul_precision(chosen)
