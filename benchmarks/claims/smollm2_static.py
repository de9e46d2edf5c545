"""Fixed mixtures of the chat model's tasks, each with half of the prompts for one task."""

from __future__ import annotations

from claims.base import Arm, Claim
from claims.smollm2 import CLAIM as CHAT_MODEL
from claims.smollm2 import TASKS, prepare, render, run_arm


def _arm(favourite: str) -> Arm:
    weights = {task: 3.0 if task == favourite else 1.0 for task in TASKS}
    return Arm(name=f"half_{favourite}", settings={"scheduler": {"policy": "static"}, "weights": weights})


CLAIM = Claim(
    name="smollm2_static",
    statement="Fixed mixtures on SmolLM2, on seeds from 100 on: the best one is `static_best` of `smollm2`.",
    steps=CHAT_MODEL.steps,
    arms=tuple(map(_arm, TASKS)),
    run=run_arm,
    render=render,
    prepare=prepare,
)
