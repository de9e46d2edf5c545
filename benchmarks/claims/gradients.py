"""Do the tasks' gradients conflict? Cosines of different tasks, against a task and its twin on other prompts.

The twin is the ceiling of what a comparison can see: both gradients have the same mean, and noise of few
prompts pulls their cosine towards 0. A projection of conflicting gradients (PCGrad, arXiv:2001.06782) takes
from a gradient the part ``max(0, -cosine)`` of its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from claims.base import Arm, Arms, Claim, Metrics, Options, mean, table, with_interval
from claims.suite import TASKS, SuiteRun, build_trainer, prepare_actor, step_metrics, twin
from multitask_rl.statistics.intervals import compare_means

COMPARED = ("arithmetic", "sort", "safe")


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train with equal shares; return means over steps and pairs of the cosines in every step."""
    evaluated = {"every": 0, "num_prompts": 8}
    compared = {"policy": "uniform", "policy_config": {"gradients_every": 1}}
    run = SuiteRun(
        seed=seed,
        steps=options.steps,
        directory=options.directory,
        name=f"gradients-{arm.name}",
        tasks={name: TASKS[name] for name in COMPARED},
        overrides={"batch": dict(arm.settings), "eval": evaluated, "scheduler": compared},
        num_held_out=8,
    )
    twins = {f"{name}_twin": twin(name, run) for name in COMPARED}
    trainer = build_trainer(replace(run, tasks={**run.tasks, **twins}))
    trainer.train()
    same, others = list[float](), list[float]()
    for row in step_metrics(trainer):
        for name, value in row.items():
            _, task, kind, other = [*name.split("/"), "", "", ""][:4]
            if kind == "cosine" and task < other:
                (same if task == other.removesuffix("_twin") else others).append(value)
    return {
        "same task": mean(same),
        "other task": mean(others),
        "abs other": mean([abs(value) for value in others]),
        "projected": mean([max(0.0, -value) for value in others]),
    }


def render(arms: Arms) -> str:
    """Return means over seeds with their 95 % intervals."""
    columns = list(arms[next(iter(arms))])
    rows = [[arm, *(_cell(own[column]) for column in columns)] for arm, own in arms.items()]
    return table(["arm", *columns], rows)


def _cell(values: Sequence[float]) -> str:
    return with_interval(compare_means([0.0] * len(values), values, paired=True))


CLAIM = Claim(
    name="gradients",
    statement=(
        "Gradients of different tasks neither agree nor conflict on the suite: their mean cosine is within "
        "0.01 of 0, while that of a task and its twin (the same task on other prompts) is above 0."
    ),
    steps=30,
    arms=(
        Arm(name="12 prompts", settings={"prompts_per_step": 12}),
        Arm(name="96 prompts", settings={"prompts_per_step": 96}),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory) and None,
)
