"""The guard on the chat model, with as many held-out prompts as the example has.

The fault is that of ``smollm2``: after 8 steps the rewards of one task become 1 minus the reward, for good.
"""

from __future__ import annotations

from claims.base import Arm, Claim
from claims.smollm2 import FOUND_WITHIN, VICTIM, prepare, render, run_arm

RUN = {"eval": {"num_prompts": 64}}
"""``smollm2`` has 24: a fall from 0.34 to 0.13 is then too little evidence for an alarm."""

CLAIM = Claim(
    name="smollm2_guard",
    statement=(
        "On SmolLM2-135M-Instruct, four tasks, 64 held-out prompts each: the guard finds a flipped reward "
        f"within {FOUND_WITHIN} evaluations and undoes it."
    ),
    steps=24,
    arms=(
        Arm(name="base"),
        Arm(name="fault", settings={"branches": True, "victim": VICTIM, "run": RUN}),
        Arm(name="fault_no_guard", settings={"branches": True, "victim": VICTIM, "deaf": True, "run": RUN}),
    ),
    run=run_arm,
    render=render,
    prepare=prepare,
)
