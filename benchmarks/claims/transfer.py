"""Claim (g): one actor trained on all tasks at once, against the same rollouts spent task by task.

*Separate*: one actor per task, each with its share of the steps: what a user of single-task trainers does.
*Sequential*: one actor through the tasks one after another; what it loses of the earlier ones is forgetting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from claims.base import Arm, Arms, Claim, Metrics, Options, difference, mean, table, with_interval
from claims.suite import TASKS, SuiteRun, build_trainer, levels, prepare_actor

ORDER = tuple(TASKS)


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Spend the steps' rollouts in the arm's way; return final levels and what was forgotten."""
    run = SuiteRun(
        seed=seed,
        steps=options.steps,
        directory=options.directory,
        name=f"transfer-{arm.name}",
        overrides={"eval": {"every": 0}},
    )
    match arm.settings["how"]:
        case "joint":
            overrides = {**run.overrides, "scheduler": arm.settings["scheduler"]}
            trainer = build_trainer(replace(run, overrides=overrides))
            trainer.train()
            return _summary(levels(trainer)[options.steps])
        case "separate":
            return _summary({task: _alone(run, task) for task in ORDER})
        case _:
            return _in_sequence(run, arm.settings["order"])


def _alone(run: SuiteRun, task: str) -> float:
    steps = run.steps // len(ORDER)
    own = replace(run, name=f"{run.name}-{task}", tasks={task: TASKS[task]}, steps=steps)
    trainer = build_trainer(own)
    trainer.train()
    return levels(trainer)[steps][task]


def _in_sequence(run: SuiteRun, order: Sequence[str]) -> Metrics:
    steps, actor = run.steps // len(order), None
    after: dict[str, dict[str, float]] = {}
    for task in order:
        tasks: dict[str, dict[str, Any]] = {
            name: {**entry, "evaluation_only": name != task} for name, entry in TASKS.items()
        }
        phase = replace(run, name=f"{run.name}-{task}", tasks=tasks, steps=steps)
        trainer = build_trainer(phase, actor=actor)
        trainer.train()
        actor, after[task] = trainer.actor, levels(trainer)[steps]
    final = after[order[-1]]
    return _summary(final) | {f"forgotten/{task}": after[task][task] - final[task] for task in order}


def _summary(final: dict[str, float]) -> Metrics:
    values = list(final.values())
    return {"mean": mean(values), "worst": min(values)} | {f"final/{t}": v for t, v in final.items()}


def render(arms: Arms) -> str:
    """Return final levels per arm, forgetting, and every arm's paired difference from the joint default."""
    columns = ["mean", "worst", *(f"final/{task}" for task in ORDER)]
    rows = [[name, *(f"{mean(own[c]):.3f}" for c in columns)] for name, own in arms.items()]
    parts = [table(["arm", *columns], rows)]
    others = [name for name in arms if name != "joint"]
    cells = [[name, *(_difference(arms, name, c) for c in columns)] for name in others]
    parts.append(table(["joint minus", *columns], cells))
    forgetting = [name for name, own in arms.items() if any(k.startswith("forgotten/") for k in own)]
    if forgetting:
        rows = [[n, *(f"{mean(arms[n][f'forgotten/{t}']):+.3f}" for t in ORDER)] for n in forgetting]
        parts.append(table(["forgotten since its own phase", *ORDER], rows))
    return "\n\n".join(parts)


def _difference(arms: Arms, base: str, metric: str) -> str:
    return with_interval(difference(arms, base, "joint", metric))


CLAIM = Claim(
    name="transfer",
    statement=(
        "One run on all tasks against the same number of rollouts spent as separate single-task runs, and as "
        "one actor trained on the tasks one after another (which forgets)."
    ),
    steps=600,
    arms=(
        Arm(name="joint", settings={"how": "joint", "scheduler": {}}),
        Arm(name="joint_uniform", settings={"how": "joint", "scheduler": {"policy": "uniform"}}),
        Arm(name="separate", settings={"how": "separate"}),
        Arm(name="sequential", settings={"how": "sequential", "order": list(ORDER)}),
        Arm(name="sequential_reversed", settings={"how": "sequential", "order": list(reversed(ORDER))}),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory),
)
