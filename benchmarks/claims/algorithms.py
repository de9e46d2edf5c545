"""Claim (f): an algorithm per task, chosen on other seeds, against one algorithm for all tasks."""

from __future__ import annotations

from collections.abc import Mapping

from claims.base import Arm, Arms, Claim, Metrics, Options, difference, mean, table, with_interval
from claims.suite import TASKS, SuiteRun, build_trainer, levels, prepare_actor

CHOSEN: Mapping[str, str] = {
    "arithmetic": "reinforce_pp",
    "sort": "dr_grpo",
    "code": "dr_grpo",
    "safe": "grpo",
}
"""Per task the algorithm with the highest level among the one-for-all arms on seeds 100 and 101."""


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train with the arm's algorithms and return final levels, the mean of the last three evaluations."""
    tasks = {name: {**entry, "type": arm.settings["types"][name]} for name, entry in TASKS.items()}
    run = SuiteRun(
        seed=seed,
        steps=options.steps,
        directory=options.directory,
        name=f"algorithms-{arm.name}",
        tasks=tasks,
        num_held_out=256,
    )
    trainer = build_trainer(run)
    trainer.train()
    history = levels(trainer)
    last = sorted(history)[-3:]
    final = {task: mean([history[step][task] for step in last]) for task in tasks}
    values = list(final.values())
    return {"mean": mean(values), "worst": min(values)} | {f"final/{t}": v for t, v in final.items()}


def render(arms: Arms) -> str:
    """Return final levels per arm and the paired difference of ``per_task`` from every other."""
    columns = list(next(iter(arms.values())))
    parts = [
        table(
            ["arm", *columns],
            [[name, *(f"{mean(own[c]):.3f}" for c in columns)] for name, own in arms.items()],
        )
    ]
    if "per_task" in arms:
        rows = []
        for name in (n for n in arms if n != "per_task"):
            found = {c: difference(arms, name, "per_task", c) for c in columns}
            rows.append([name, *(with_interval(d) for d in found.values())])
        parts.append(table(["per_task minus", *columns], rows))
    return "\n\n".join(parts)


def _for_all(algorithm: str) -> Arm:
    return Arm(name=algorithm, settings={"types": dict.fromkeys(TASKS, algorithm)})


CLAIM = Claim(
    name="algorithms",
    statement="An algorithm per task, chosen on other seeds, against one algorithm for all tasks.",
    steps=400,
    arms=(
        *map(_for_all, ("grpo", "dr_grpo", "reinforce_pp", "ppo", "dapo")),
        Arm(name="per_task", settings={"types": dict(CHOSEN)}),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory),
)
