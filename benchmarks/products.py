"""float32 products on this CPU: oneDNN against torch's own choice.

    python benchmarks/products.py --json products.json

The shapes are those of SmolLM2-135M's linear layers: rows of a decoding step and of a micro-batch, forward,
and both products of the backward pass. The two libraries take turns, one thread each. A rate is the median
over the turns, in GFLOP per second of processor time; a ratio is the median of the ratios turn by turn.

A pass of a run has other lengths than the one before. So products that come once are timed as well: a square
weight times rows of a number that no product before had, in models of several widths.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from speed import machine
from torch import Tensor

from multitask_rl.attention import products

SIZES = {"attention": (576, 576), "up": (576, 1536), "down": (1536, 576), "head": (576, 49152)}
"""Inputs and outputs of a layer."""
ROWS = [32, 64, 1024]
TURN_S = 0.2
WIDTHS = [32, 64, 128, 256, 512, 1024]
NEW_ROWS = range(17, 117)
"""More shapes than the library keeps (``products.KEPT``), so that each turn finds them new."""


def rate(multiply: Callable[[], Tensor], operations: float) -> float:
    """Return GFLOP per second of processor time."""
    multiply()
    calls, began = 0, time.process_time()
    while (seconds := time.process_time() - began) < TURN_S:
        multiply()
        calls += 1
    return operations * calls / seconds / 1e9


def once(width: int) -> float:
    """Return microseconds of processor time of a product of ``width`` that comes once; the mean of many."""
    weight = torch.randn(width, width)
    given = [torch.randn(rows, width) for rows in NEW_ROWS]
    began = time.process_time()
    for states in given:
        torch.matmul(states, weight)
    return (time.process_time() - began) / len(given) * 1e6


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    own = torch.get_float32_matmul_precision()
    products.multiply_with_onednn(products.MIN_WIDTH)
    if not products.with_onednn:
        raise SystemExit("torch's own choice is kept on this machine: see multitask_rl/attention/products.py")
    other = torch.get_float32_matmul_precision()
    found = {}
    for layer, (width, outputs) in SIZES.items():
        for rows in ROWS:
            states, weight = torch.randn(rows, width), torch.randn(outputs, width)
            gradient = torch.randn(rows, outputs)
            passes: dict[str, Callable[[], Tensor]] = {
                "forward": partial(torch.matmul, states, weight.t()),
                "backward, states": partial(torch.matmul, gradient, weight),
                "backward, weight": partial(torch.matmul, gradient.t(), states),
            }
            for name, multiply in passes.items():
                rates: dict[str, list[float]] = {own: [], other: []}
                for _ in range(args.turns):
                    for precision, known in rates.items():
                        torch.set_float32_matmul_precision(precision)
                        known.append(rate(multiply, 2.0 * rows * width * outputs))
                ratios = [b / a for a, b in zip(rates[own], rates[other], strict=True)]
                found[f"{layer}, {rows} rows, {name}"] = {
                    "torch": round(statistics.median(rates[own]), 1),
                    "onednn": round(statistics.median(rates[other]), 1),
                    "ratio": round(statistics.median(ratios), 2),
                }
    new: dict[int, dict[str, float]] = {}
    for width in WIDTHS:
        times: dict[str, list[float]] = {own: [], other: []}
        for _ in range(args.turns):
            for precision, spent in times.items():
                torch.set_float32_matmul_precision(precision)
                spent.append(once(width))
        first = [b / a for a, b in zip(times[own], times[other], strict=True)]
        new[width] = {
            "torch": round(statistics.median(times[own]), 1),
            "onednn": round(statistics.median(times[other]), 1),
            "ratio": round(statistics.median(first), 2),
        }
    result = {
        "microseconds_of_a_new_shape": new,
        "gflop_per_cpu_s": found,
        "smallest_ratio": min(own["ratio"] for own in found.values()),
        "largest_ratio": max(own["ratio"] for own in found.values()),
        "machine": machine(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
