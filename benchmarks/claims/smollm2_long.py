"""The scheduler's policies on the chat model, over as many steps as its shares need to move far."""

from __future__ import annotations

from claims.base import Arm, Claim
from claims.smollm2 import prepare, render, run_arm

EVERY = 8
"""Steps between evaluations: half of the other claim's, so that more of the time is training."""
NUM_TEST = 192


def _arm(policy: str) -> Arm:
    scheduler = {} if policy == "default" else {"policy": policy}
    run = {"eval": {"every": EVERY}, "checkpoint": {"every": EVERY}}
    return Arm(name=policy, settings={"scheduler": scheduler, "run": run, "num_test": NUM_TEST})


CLAIM = Claim(
    name="smollm2_long",
    statement=(
        "On SmolLM2-135M-Instruct, four tasks, three times the steps of `smollm2`: the default scheduler's "
        "worst task is better than with equal shares and its mean not worse."
    ),
    steps=48,
    arms=(
        Arm(name="base", settings={"num_test": NUM_TEST}),
        *map(_arm, ("default", "uniform", "tac")),
    ),
    run=run_arm,
    render=render,
    prepare=prepare,
)
