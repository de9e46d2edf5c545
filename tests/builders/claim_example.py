"""A claim that takes no time to measure; a fresh process imports nothing heavy for it."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from claims.base import Arm, Claim, Options, difference, run_claim


def _measure(arm: Arm, seed: int, options: Options) -> dict[str, float]:
    with (options.directory / "calls").open("a") as calls:
        calls.write(f"{arm.name} {seed}\n")
    return {"level": arm.settings["level"] + seed / 10, "reached": math.nan}


def fail_at_1(arm: Arm, seed: int, options: Options) -> dict[str, float]:
    """Measure; seed 1 fails, and seeds after it measure half a second later."""
    while seed > 1 and f"{arm.name} 1\n" not in (options.directory / "calls").read_text():
        time.sleep(0.02)
    if seed > 1:
        time.sleep(0.5)
    metrics = _measure(arm, seed, options)
    if seed == 1:
        raise ValueError("seed 1 is broken")
    return metrics


def _never_end(arm: Arm, seed: int, options: Options) -> dict[str, float]:
    (options.directory / "pid").write_text(f"{os.getpid()}\n")
    time.sleep(600)
    return {}


CLAIM = Claim(
    name="example",
    statement="b is better than a",
    steps=3,
    arms=(Arm(name="a", settings={"level": 0.0}), Arm(name="b", settings={"level": 0.5})),
    run=_measure,
    render=lambda arms: f"{difference(arms, 'a', 'b', 'level').delta:+.2f}",
    runs_per_process=None,
)

if __name__ == "__main__":
    endless = replace(CLAIM, run=_never_end)
    run_claim(endless, Options(seeds=[0], steps=3, directory=Path(sys.argv[1])), arms=["a"], processes=1)
