"""Claim (h): tasks of many turns are learnt, scheduled and guarded as tasks of one turn are.

The game: guess a number from 1 to 2^level - 1 in ``level`` guesses; the world answers "+" or "-". A player
that hears nothing wins ``level`` games in 2^level - 1. Levels are held-out success rates at temperature 1.

- ``heard``, ``blind``: level 3 alone; the blind player's world answers "+" whatever it guesses.
- ``equal``, ``scheduled``: two games (levels 3 and 4) beside arithmetic and sorting, equal shares or the
  default scheduler; *worst* is the lowest task, of the last three evaluations.
- ``guarded``, ``unguarded``: after ``PLANT_AT`` steps the world of the game begins to lie ("+" for "-"), in
  training and evaluation, for good. ``honest`` is the level that is handed over, in an honest world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims.base import Arm, Arms, Claim, Metrics, Options, difference, mean, table
from claims.guard import ALARMS
from claims.plants import GuardWithPlant
from claims.suite import TASKS, SuiteRun, build_trainer, delivered_step, levels, prepare_actor, unseen_levels
from multitask_rl.environments.base import Message, StepResult
from multitask_rl.errors import GuardStop
from multitask_rl.records import Scored
from multitask_rl.step.flow import Stage
from multitask_rl_tasks.environments.number_game import NumberGame

EVERY = 10
PLANT_AT = 150
GUARDED_STEPS = 250
MIXED_STEPS = 500
FOUND_WITHIN = 5
"""Evaluations in which the guard has to find the lie."""


class LyingGame(NumberGame):
    """The game; it lies from the moment that the file ``NUMBER_GAME_LIES`` exists."""

    def step(self, message: Message) -> StepResult:
        """Swap the answers once it lies."""
        if self.config.unclear and Path(self.config.unclear).exists():
            higher, lower = self.config.higher, self.config.lower
            self.config.higher, self.config.lower = lower, higher
            try:
                return super().step(message)
            finally:
                self.config.higher, self.config.lower = higher, lower
        return super().step(message)


class _Plant(Stage):
    """Creates the file at the step of the plant."""

    name = "plant"
    consumes = produces = Scored

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self._flag = flag
        self._steps = 0

    def process(self, items: list[Scored]) -> list[Scored]:
        self._steps += 1
        if self._steps > PLANT_AT:
            self._flag.touch()
        return items


def game(level: int, environment: str = "number_game", **config: str) -> dict[str, Any]:
    """Return the entry of a game."""
    return {
        "dataset": "plugin:number_game",
        "dataset_config": {"level": level, "num_rows": 3000},
        "environment": environment,
        "environment_config": {"higher": "+", "lower": "-", "unclear": "?", **config},
        "prompt": "{prompt}",
        "max_turns": level,
        "sampling": {"max_new_tokens": 3},
        "rewards": ["environment"],
        # without it a player soon stops trying what it would hear an answer to
        "algorithm_config": {"entropy_coefficient": 0.02},
    }


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once; return the metrics of the arm's part of the claim."""
    part = arm.settings["part"]
    if part == "learning":
        tasks = {"game": game(3, lower="+") if arm.settings["blind"] else game(3)}
        trainer = build_trainer(_run(arm, seed, options, options.steps, tasks))
        trainer.train()
        found = levels(trainer)
        trainer.close()
        return {"before": found[0]["game"], "after": mean([found[s]["game"] for s in sorted(found)[-3:]])}
    if part == "mixture":
        tasks = {"game3": game(3), "game4": game(4), "arithmetic": TASKS["arithmetic"], "sort": TASKS["sort"]}
        scheduler = {"scheduler": {"policy": arm.settings["policy"]}}
        trainer = build_trainer(_run(arm, seed, options, MIXED_STEPS, tasks, **scheduler))
        trainer.train()
        found = levels(trainer)
        trainer.close()
        final = {task: mean([found[s][task] for s in sorted(found)[-3:]]) for task in tasks}
        return {
            "worst": min(final.values()),
            "mean": mean(list(final.values())),
            **{f"final/{task}": level for task, level in final.items()},
        }
    return _guarded(arm, seed, options)


def _run(
    arm: Arm, seed: int, options: Options, steps: int, tasks: Mapping[str, Any], **overrides: Any
) -> SuiteRun:
    return SuiteRun(
        seed=seed,
        steps=steps,
        directory=options.directory,
        name=f"turns-{arm.name}",
        tasks=tasks,
        overrides={
            "optimizer": {"learning_rate": 5e-4},
            "batch": {"group_size": 16},
            "rollout": {"lockstep": True},  # arms of a pair are equal up to what they differ in
            **overrides,
        },
        num_held_out=256,
    )


def _guarded(arm: Arm, seed: int, options: Options) -> Metrics:
    flag = options.directory / "runs" / f"turns-{arm.name}-{seed}.lies"
    flag.parent.mkdir(parents=True, exist_ok=True)
    flag.unlink(missing_ok=True)
    tasks = {"game": game(3, f"{__file__}:LyingGame", unclear=str(flag))}
    settings = {
        "guard": {"enabled": True},
        "eval": {"every": EVERY, "num_prompts": 256},
        "checkpoint": {"every": EVERY, "keep": 12, "resume": "never"},
    }
    trainer = build_trainer(_run(arm, seed, options, GUARDED_STEPS, tasks, **settings))
    guard = GuardWithPlant(is_deaf=arm.settings["deaf"])
    trainer.add_guard(guard)
    trainer.insert_stage(_Plant(flag), after="rewards")
    stopped_at: int | None = None
    try:
        trainer.train()
    except GuardStop:
        stopped_at = delivered_step(trainer)
    found = levels(trainer)
    alarms = [e.step for e in trainer.events if e.source == "guard" and e.kind in ALARMS]
    late = [step for step in alarms if step > PLANT_AT]
    delay = (late[0] - PLANT_AT + EVERY - 1) // EVERY if late else math.nan
    flag.unlink(missing_ok=True)
    if stopped_at is None:
        run = _run(arm, seed, options, 1, {"game": game(3)}, checkpoint={"every": 0, "resume": "never"})
        honest = unseen_levels(run, trainer.actor)["game"]
    else:
        # the checkpoint that is handed over was evaluated before the lie
        honest = found[stopped_at]["game"]
    return {
        "level_before": mean([found[s]["game"] for s in sorted(found) if PLANT_AT - 30 < s <= PLANT_AT]),
        "false_alarms": float(sum(step <= PLANT_AT for step in alarms)),
        "detected": float(bool(late) and delay <= FOUND_WITHIN),
        "delay": float(delay),
        "honest": honest,
    }


def render(arms: Arms) -> str:
    """Return a table per part, with the paired differences."""
    parts = []
    for names, metrics, compared in (
        (("blind", "heard"), ("before", "after"), ("after",)),
        (("equal", "scheduled"), ("worst", "mean"), ("worst", "mean")),
        (
            ("unguarded", "guarded"),
            ("level_before", "false_alarms", "detected", "delay", "honest"),
            ("honest",),
        ),
    ):
        known = [name for name in names if name in arms]
        if not known:
            continue
        more = [m for m in arms[known[0]] if m.startswith("final/")]
        header = ["arm", *metrics, *more]
        rows = [[n, *(f"{mean(arms[n][m]):.3f}" for m in (*metrics, *more))] for n in known]
        parts.append(table(header, rows))
        if len(known) == 2:
            parts.append("\n".join(_difference(arms, known[0], known[1], metric) for metric in compared))
    return "\n\n".join(parts)


def _difference(arms: Arms, base: str, other: str, metric: str) -> str:
    found = difference(arms, base, other, metric)
    values: Sequence[float] = arms[base][metric]
    return (
        f"- {metric}, {other} minus {base}: {found.delta:+.3f} [{found.low:+.3f}, {found.high:+.3f}], "
        f"{len(values)} seeds."
    )


CLAIM = Claim(
    name="turns",
    statement=(
        "A task that cannot be solved in one turn is learnt with feedback (blind players win 3 of 7); two "
        "tasks of many turns and two of one, mixed by the default scheduler, beat equal shares in the worst "
        f"task; a world that begins to lie is found within {FOUND_WITHIN} evaluations, and what is handed "
        "over has not learnt from the lie."
    ),
    steps=300,
    arms=(
        Arm(name="heard", settings={"part": "learning", "blind": False}),
        Arm(name="blind", settings={"part": "learning", "blind": True}),
        Arm(name="equal", settings={"part": "mixture", "policy": "uniform"}),
        Arm(name="scheduled", settings={"part": "mixture", "policy": "deficit_learnability"}),
        Arm(name="guarded", settings={"part": "guard", "deaf": False}),
        Arm(name="unguarded", settings={"part": "guard", "deaf": True}),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory) and None,
)
