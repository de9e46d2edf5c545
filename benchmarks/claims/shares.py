"""Claim (b): a task's weight is its share of the training, also when many of its groups teach nothing.

Groups whose rollouts all earn the same give no gradient. Without refilling, a hard task's share of what is
*trained on* falls far below its weight; the scheduler's carry-over and the refill rounds make up for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from claims.base import Arm, Arms, Claim, Metrics, Options, mean, table
from claims.suite import TASKS, SuiteRun, build_trainer, prepare_actor, step_metrics

WINDOW = 50
LIMIT = 0.05
_KEYS = ("share_trained", "weight")


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once and return, per task, the largest error of the trained share over windows of 50 steps."""
    run = SuiteRun(
        seed=seed,
        steps=options.steps,
        directory=options.directory,
        name=f"shares-{arm.name}",
        tasks=TASKS,
        overrides={**arm.settings, "eval": {"every": 0}},
        num_held_out=32,
    )
    trainer = build_trainer(run)
    trainer.train()
    rows = list(step_metrics(trainer))
    return {
        **largest_errors(rows, list(TASKS)),
        "rollouts_per_step": mean([_rollouts(row) for row in rows]),
    }


def largest_errors(rows: Sequence[Mapping[str, float]], tasks: Sequence[str]) -> Metrics:
    """Return the largest ``|trained - weight|`` of each task and of all, over sliding windows of steps.

    Of a window: the mean share of the task among the groups with a gradient that were trained on, against
    the mean of its weight.
    """
    worst = dict.fromkeys(tasks, 0.0)
    for start in range(max(1, len(rows) - WINDOW + 1)):
        window = rows[start : start + WINDOW]
        for t in tasks:
            trained, weight = (mean([row[f"task/{t}/{key}"] for row in window]) for key in _KEYS)
            worst[t] = max(worst[t], abs(trained - weight))
    return {"max_error": max(worst.values()), **{f"max_error/{t}": value for t, value in worst.items()}}


def _rollouts(row: Mapping[str, float]) -> float:
    return row["time/step_s"] * sum(row[f"task/{t}/samples_per_s"] for t in TASKS)


def render(arms: Arms) -> str:
    """Return the largest error of each arm over its seeds."""
    columns = list(next(iter(arms.values())))
    rows = [
        [name, *(f"{max(own[c]) if c != 'rollouts_per_step' else mean(own[c]):.3f}" for c in columns)]
        for name, own in arms.items()
    ]
    return table(["arm (largest over seeds)", *columns], rows)


CLAIM = Claim(
    name="shares",
    statement=f"A task's share of the training is within {LIMIT} of its weight over any {WINDOW} steps.",
    steps=300,
    arms=(
        Arm(name="default", settings={"batch": {"refill_rounds": 1}}),
        Arm(name="uniform", settings={"batch": {"refill_rounds": 1}, "scheduler": {"policy": "uniform"}}),
        Arm(name="mt_grpo", settings={"batch": {"refill_rounds": 1}, "scheduler": {"policy": "mt_grpo"}}),
        Arm(name="without_refill", settings={"scheduler": {"policy": "uniform"}}),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory),
)
