"""Faults planted into a run through its public seams: a stage in the flow, a guard around the guard.

A fault is counted in steps *made*: a rollback does not undo what broke outside of the run.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from multitask_rl.guard.base import Confirm
from multitask_rl.guard.decision import GuardAction, GuardDecision
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.records import Scored, TaskEvaluation
from multitask_rl.seeding import random_stream
from multitask_rl.step.flow import Stage
from multitask_rl.trainer import Trainer

FAULTS: Mapping[str, Mapping[str, Any]] = {
    "sign_flip": {"flips": 1.0},
    "lr_spike": {"lr_factor": 30.0, "lr_steps": 5},
    "corrupted": {"noise": 0.6},
    "slow_leak": {"flips": 1.0, "flips_over": 100},
    "dropped": {"drops": True},
    "flips_20": {"flips": 0.2},
    "noise_30": {"noise": 0.3},
}
"""Kind -> what breaks (the last two are controls).

``flips``: share of the victim's rewards that become 1 - reward, from the first step on or growing from 0 to
this share over ``flips_over`` steps; ``lr_factor`` on the learning rate for ``lr_steps`` steps; ``noise``:
once, normal noise of this many standard deviations of each weight tensor on the weights; ``drops``: the
victim's samples no longer reach the learner.
"""


def flip_rate(fault: Mapping[str, Any], age: int) -> float:
    """Return the share of flipped rewards ``age`` steps after the plant.

    >>> flip_rate({"flips": 1.0, "flips_over": 100}, 25), flip_rate({"flips": 0.2}, 25), flip_rate({}, 25)
    (0.25, 0.2, 0.0)
    """
    full = float(fault.get("flips", 0.0))
    over = fault.get("flips_over", 0)
    return full * min(1.0, age / over) if over else full


class Plant(Stage):
    """Breaks what comes out of the rewards, or the weights, from its first step on."""

    name = "plant"
    consumes = Scored
    produces = Scored

    def __init__(self, fault: Mapping[str, Any], *, victim: str, seed: int, trainer: Trainer) -> None:
        self.age = -1
        """Steps made since the plant."""
        self._fault = fault
        self._victim = victim
        self._stream = random_stream(seed, "plant")
        self._trainer = trainer

    def process(self, items: list[Scored]) -> list[Scored]:
        """Return the step's records with the fault."""
        self.age += 1
        if self.age == 0 and "noise" in self._fault:
            _corrupt(self._trainer, self._fault["noise"], self._stream)
        rate = flip_rate(self._fault, self.age)
        broken = []
        for scored in items:
            is_victim = scored.rollout.task == self._victim
            if is_victim and self._fault.get("drops"):
                continue
            if is_victim and scored.reward is not None and self._stream.random() < rate:
                scored = replace(scored, reward=1.0 - scored.reward)
            broken.append(scored)
        return broken

    def lr_factor(self) -> float:
        """Return the fault's factor on the learning rate of the step under way."""
        spikes = self.age < self._fault.get("lr_steps", 0)
        return float(self._fault["lr_factor"]) if spikes else 1.0


def _corrupt(trainer: Trainer, noise: float, stream: random.Random) -> None:
    """Add noise to every weight tensor, in proportion to its standard deviation."""
    import torch

    generator = torch.Generator().manual_seed(stream.getrandbits(32))
    with torch.no_grad():
        for weights in trainer.actor.model.parameters():
            if weights.numel() > 1:
                weights += noise * weights.std() * torch.randn(weights.shape, generator=generator)
    trainer.push_weights()


class GuardWithPlant(SafetyGuard):
    """The guard of a run with a plant: the plant's learning rate passes through it, and it may be deaf."""

    def __init__(self, *, is_deaf: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.plant: Plant | None = None
        self.actions: list[tuple[int, str]] = []
        """(index of the evaluation, action) of every decision that changes the run, or that names a task
        which has left training."""
        self._is_deaf = is_deaf
        self._num_observed = 0

    def observe(
        self,
        step: int,
        evaluations: Mapping[str, TaskEvaluation],
        confirm: Confirm | None = None,
    ) -> GuardDecision:
        """Judge as the guard does; a deaf one finds nothing.

        Raises:
            RuntimeError: at a plant's first evaluation nothing is known of those before it, so that no fall
                could be found: the checkpoint is of a run with a guard of another class.
        """
        if self._is_deaf:
            return GuardDecision()
        if (
            self.plant
            and not self._num_observed
            and not any(name.endswith("/value") for name in self.metrics())
        ):
            raise RuntimeError(
                "the guard of a run with a plant has no history: train up to it with this class"
            )
        decision = super().observe(step, evaluations, confirm)
        is_starved = any(event.kind == "starved" for event in decision.events)
        if decision.action not in (GuardAction.keep, GuardAction.warn) or is_starved:
            self.actions.append((self._num_observed, "starved" if is_starved else str(decision.action)))
        self._num_observed += 1
        return decision

    def lr_factor(self, step: int) -> float:
        """Return the guard's factor times the plant's."""
        return super().lr_factor(step) * (self.plant.lr_factor() if self.plant else 1.0)
