"""Recompute the coverage of the intervals of ``compare``: ``python docs/simulate_compare.py``.

Two arms are drawn from a population of seeds and of held-out prompts whose true difference is known. An
interval covers if it holds this difference. Prompts differ in difficulty, and the arms agree on it but for a
part (``prompt``); a seed moves all prompts of its run (``seed``), in part in both arms alike (``shared``).
Values are 0 or 1, or continuous.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import numpy as np
from numpy.typing import NDArray
from scipy import special

from multitask_rl.statistics.seeds import compare_arms

SEEDS = {"paired": [(2, 2), (3, 3), (5, 5)], "not paired": [(2, 2), (3, 2), (5, 5)]}
DIFFICULTY = 1.0
"""Standard deviation of the prompts' difficulty, in logits or units of a continuous value."""
DELTA = 0.3


def draw(
    stream: np.random.Generator,
    kind: str,
    runs: tuple[int, int],
    n: int,
    seed: float,
    prompt: float,
    shared: float,
) -> list[NDArray[np.float64]]:
    """Return the values [runs, prompts] of both arms; the difference of the logits is ``DELTA``."""
    difficulty = stream.normal(0, DIFFICULTY, n)
    common = stream.normal(0, 1, max(runs))
    arms = []
    for number, offset in zip(runs, (0.0, DELTA), strict=True):
        own = np.sqrt(shared) * common[:number] + np.sqrt(1 - shared) * stream.normal(0, 1, number)
        logits = (
            offset
            + seed * own[:, None]
            + difficulty
            + prompt * stream.normal(0, 1, n)
            + np.zeros((number, n))
        )
        if kind == "binary":
            arms.append((stream.random((number, n)) < special.expit(logits)).astype(float))
        else:
            arms.append(logits + stream.normal(0, 1, (number, n)))
    return arms


def true_difference(kind: str, seed: float, prompt: float) -> float:
    """Return the difference of the means over all seeds and prompts."""
    if kind != "binary":
        return DELTA
    points, weights = np.polynomial.hermite_e.hermegauss(61)
    spread = np.sqrt(DIFFICULTY**2 + seed**2 + prompt**2) * points
    return float(weights @ (special.expit(DELTA + spread) - special.expit(spread)) / weights.sum())


def coverage(
    stream: np.random.Generator,
    kind: str,
    runs: tuple[int, int],
    n: int,
    seed: float,
    prompt: float,
    paired: bool,
    rounds: int,
) -> float:
    """Return the share of intervals that hold the true difference."""
    truth, hits = true_difference(kind, seed, prompt), 0
    for _ in range(rounds):
        base, other = draw(stream, kind, runs, n, seed, prompt, 0.5 if paired else 0.0)
        found = compare_arms(base.tolist(), other.tolist(), paired=True, paired_seeds=paired)
        hits += found.low <= truth <= found.high
    return hits / rounds


def main() -> int:
    """Print a row per setting; 1 if one covers less than 93 % or more than 97 %, in whole percents."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4000)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256])
    options = parser.parse_args()
    sys.stdout.write(
        "| values | runs | by seed | prompts | sd of seeds | sd of prompts | covers |\n" + "|---" * 7 + "|\n"
    )
    found = []
    cases = [
        (kind, how, runs) for kind in ("binary", "continuous") for how, own in SEEDS.items() for runs in own
    ]
    cases += [("binary", "one run", (1, 1)), ("continuous", "one run", (1, 1))]
    for index, ((kind, how, runs), n, seed, prompt) in enumerate(
        itertools.product(cases, options.prompts, (0.0, 0.1, 0.5), (0.0, 0.5))
    ):
        if how == "one run" and seed:
            continue  # the interval of one run is that of other prompts
        stream = np.random.default_rng(index)
        share = coverage(stream, kind, runs, n, seed, prompt, how == "paired", options.rounds)
        found.append(share)
        counts = f"{runs[0]} + {runs[1]}"
        sys.stdout.write(f"| {kind} | {counts} | {how} | {n} | {seed:g} | {prompt:g} | {share:.1%} |\n")
        sys.stdout.flush()
    sys.stdout.write(
        f"\n{len(found)} settings: {min(found):.1%} to {max(found):.1%}, mean {np.mean(found):.1%}\n"
    )
    return int(round(100 * min(found)) < 93 or round(100 * max(found)) > 97)


if __name__ == "__main__":
    sys.exit(main())
