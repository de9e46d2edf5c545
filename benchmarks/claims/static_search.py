"""The search behind ``scheduler``'s tuned static mixture: fixed shares, on seeds of their own."""

from __future__ import annotations

from claims.base import Arm, Arms, Claim, mean, table
from claims.scheduler import run_arm
from claims.suite import TASKS, prepare_actor

MIXTURES = (
    (0.2, 0.4, 0.2, 0.2),
    (0.2, 0.5, 0.2, 0.1),
    (0.15, 0.6, 0.15, 0.1),
    (0.1, 0.7, 0.1, 0.1),
    (0.08, 0.76, 0.08, 0.08),
    (0.05, 0.85, 0.05, 0.05),
)
"""Shares of arithmetic, sort, code, safe; equal shares are the arm ``uniform`` of the claim itself."""


def render(arms: Arms) -> str:
    """Return levels per mixture, the one with the best worst task first."""
    columns = ["worst", "mean", *(f"final/{task}" for task in TASKS)]
    ranked = sorted(arms, key=lambda name: -mean(arms[name]["worst"]))
    return table(["mixture", *columns], [[n, *(f"{mean(arms[n][c]):.3f}" for c in columns)] for n in ranked])


def _arm(mixture: tuple[float, ...]) -> Arm:
    weights = dict(zip(TASKS, mixture, strict=True))
    settings = {"policy": "static", "min_weight": 0.0, "weights": weights}
    return Arm(name="-".join(map(str, mixture)), settings=settings)


CLAIM = Claim(
    name="static_search",
    statement="Fixed mixtures, on seeds from 100 on: the best one is `static_tuned` of `scheduler`.",
    steps=1500,
    arms=tuple(map(_arm, MIXTURES)),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory),
)
