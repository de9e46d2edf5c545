"""Claim (a): a scheduler that watches the tasks beats fixed shares on the same rollouts.

Four tasks, one starting near 0.1: with equal shares the actor goes on practising what it knows. Levels are
held-out success rates at temperature 1, the mean of three evaluations in a row; *worst* is the lowest of the
tasks'. ``test_*`` are the same of the final weights on prompts that no evaluation of the run has seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from claims.base import Arm, Arms, Claim, Metrics, Options, difference, mean, table, with_interval
from claims.suite import TASKS, SuiteRun, build_trainer, levels, prepare_actor, unseen_levels

TUNED_STATIC: Mapping[str, float] = {"arithmetic": 0.08, "sort": 0.76, "code": 0.08, "safe": 0.08}
"""The best worst task of ``multitask.py static_search --first-seed 100``: tuned on seeds of its own."""
TARGETS = (0.5, 0.6, 0.7)
COMPARED = ("worst", "mean", "auc_worst", "auc_mean", "test_worst", "test_mean")
SMOOTHED = 3
"""Evaluations averaged for a level: one alone has a standard error of 0.03."""


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once; return final levels, areas under the curve, steps until all tasks reach a target."""
    scheduler = {key: value for key, value in arm.settings.items() if key != "weights"}
    tasks = {n: {**t, "weight": arm.settings.get("weights", {}).get(n, 1.0)} for n, t in TASKS.items()}
    run = SuiteRun(
        seed=seed,
        steps=options.steps,
        directory=options.directory,
        name=f"scheduler-{arm.name}",
        tasks=tasks,
        overrides={"scheduler": scheduler},
        num_held_out=256,
    )
    trainer = build_trainer(run)
    trainer.train()
    return summarise(levels(trainer)) | summarise_test(unseen_levels(run, trainer.actor))


def summarise_test(final: Mapping[str, float]) -> Metrics:
    """Return the metrics of levels on prompts that the run never saw."""
    values = list(final.values())
    return {"test_worst": min(values), "test_mean": mean(values)} | {f"test/{t}": v for t, v in final.items()}


def summarise(history: Mapping[int, Mapping[str, float]]) -> Metrics:
    """Return the claim's metrics of one run's ``step -> task -> level``."""
    marks = sorted(history)
    tasks = list(history[marks[0]])
    smoothed: dict[int, dict[str, float]] = {}
    for i, step in enumerate(marks):
        window = marks[max(0, i - SMOOTHED + 1) : i + 1]
        smoothed[step] = {t: mean([history[s][t] for s in window]) for t in tasks}
    worst = {step: min(own.values()) for step, own in smoothed.items()}
    final = smoothed[marks[-1]]
    metrics = {
        "worst": worst[marks[-1]],
        "mean": mean(list(final.values())),
        "auc_worst": mean(list(worst.values())),
        "auc_mean": mean([mean(list(own.values())) for own in smoothed.values()]),
    }
    for target in TARGETS:
        reached = [step for step in marks if worst[step] >= target]
        metrics[f"steps_to_{target}"] = float(reached[0]) if reached else math.nan
    return metrics | {f"final/{task}": value for task, value in final.items()}


def render(arms: Arms) -> str:
    """Return levels per arm, then every arm's paired difference from uniform."""
    names = list(arms)
    columns = list(arms[names[0]])
    first = table(["arm", *columns], [[a, *(_cell(arms[a][c], c) for c in columns)] for a in names])
    parts = [first]
    for base in ("uniform", "static_tuned"):
        if base in arms:
            others = [a for a in names if a not in (base, "uniform")]
            rows = [[a, *(_difference(arms, base, a, c) for c in COMPARED)] for a in others]
            if base == "uniform":
                rows = [[*row, *(_ratio(arms, row[0], t) for t in TARGETS)] for row in rows]
            header = [f"minus {base}", *COMPARED]
            header += [f"steps ratio {t}" for t in TARGETS] if base == "uniform" else []
            parts.append(table(header, rows))
    return "\n\n".join(parts)


def _cell(values: Sequence[float], column: str) -> str:
    if column.startswith("steps"):
        reached = [v for v in values if math.isfinite(v)]
        shown = f"{mean(reached):.0f}" if reached else "-"
        return f"{shown} ({len(reached)} of {len(values)})"
    return f"{mean(values):.3f}"


def _difference(arms: Arms, base: str, other: str, metric: str) -> str:
    return with_interval(difference(arms, base, other, metric))


def _ratio(arms: Arms, other: str, target: float) -> str:
    """Return the median ratio of steps over seeds; a base that never arrives counts with the run's end."""
    key = f"steps_to_{target}"
    ratios = []
    for base, own in zip(arms["uniform"][key], arms[other][key], strict=True):
        if math.isnan(own):
            ratios.append(math.inf)
        else:
            ratios.append(own / (base if math.isfinite(base) else CLAIM.steps))
    middle = sorted(ratios)[(len(ratios) - 1) // 2 : len(ratios) // 2 + 1]
    value = sum(middle) / len(middle)
    return "not reached" if math.isinf(value) else f"<= {value:.2f}"


CLAIM = Claim(
    name="scheduler",
    statement=(
        "At equal rollouts the default scheduler (deficit_learnability) against uniform shares: worst task "
        ">= +0.08 and mean > 0 with both 95 % intervals above 0, all tasks at their target in <= 0.7x the "
        "steps; mt_grpo: worst task >= +0.15; against the best tuned static mixture: worst not lower, mean "
        "not lower than -0.01."
    ),
    steps=1500,
    arms=(
        Arm(name="uniform", settings={"policy": "uniform"}),
        Arm(name="deficit_learnability", settings={"policy": "deficit_learnability"}),
        Arm(name="mt_grpo", settings={"policy": "mt_grpo"}),
        Arm(name="static_tuned", settings={"policy": "static", "weights": dict(TUNED_STATIC)}),
        Arm(name="learnability", settings={"policy": "learnability"}),
        Arm(name="tac", settings={"policy": "tac"}),
        Arm(
            name="patience_literal",
            settings={"policy": "patience", "policy_config": {"patience": 25, "literal": True}},
        ),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_actor(options.directory),
)
