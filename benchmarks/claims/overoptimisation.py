"""Claim (e): a reward model is over-optimised by training; the guard stops and hands over the best weights.

The suite's preference task: the training reward is a reward model fitted to noisy pairs of short answers, the
held-out metric the hidden utility that labelled them (``gold``, 1 = the best answer). Unguarded, the policy
learns the reward model's mistakes: proxy up, gold down (arXiv:2210.10760). The actor and the reward model are
the same for every seed; the seed draws prompts and rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from claims.base import Arm, Arms, Claim, Metrics, Options, mean, table
from claims.suite import SMALL, SuiteRun, build_trainer, delivered_step, prepare_actor, step_metrics
from multitask_rl.errors import GuardStop
from multitask_rl.statistics.intervals import compare_means
from multitask_rl_tasks.suite.judges import save_reward_model
from multitask_rl_tasks.suite.settings import RewardModelSettings, WarmStartSettings, WarmTask

ACTOR = WarmStartSettings(tasks={"preference": WarmTask(share=1.0, corruption=0.0)}, size=SMALL, steps=300)
REWARD_MODEL = RewardModelSettings(num_examples=4000, noise=0.25, longest=9)
"""Nothing it was fitted to is longer than nine letters: what it says of longer answers is a guess."""
EVERY = 5
SMOOTHED = 3
"""Evaluations averaged for a level."""
MEASURED = 1e-6
"""Coefficient that keeps a reference to measure the KL against and changes nothing."""
KEPT, LOST = 0.95, 0.5
COLUMNS = ("gold_start", "gold_max", "gold_end", "ratio", "proxy_start", "proxy_end", "kl", "length", "steps")


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once; return where gold, proxy, KL and length started and ended."""
    rewards = [
        {"plugin": "rm_hf", "name": "proxy", "config": {"model_name": _reward_model(options)}},
        {"plugin": "multitask_rl_tasks.suite.preference:gold_utility", "name": "gold", "weight": 0},
    ]
    trainer = build_trainer(
        SuiteRun(
            seed=seed,
            steps=options.steps,
            directory=options.directory,
            name=f"overoptimisation-{arm.name}",
            tasks={"preference": {"rewards": rewards, "primary_metric": "gold", "kl": arm.settings["kl"]}},
            overrides={
                "batch": {"prompts_per_step": 4},
                "optimizer": {"learning_rate": 1.5e-4},
                "guard": arm.settings["guard"],
                "eval": {"every": EVERY if arm.settings["kl"]["coefficient"] == MEASURED else 2 * EVERY},
                "checkpoint": {"every": EVERY, "keep": 22} if arm.settings["guard"]["enabled"] else {},
            },
            warm_start=ACTOR,
        )
    )
    stopped_with = None
    try:
        trainer.train()
    except GuardStop:
        stopped_with = delivered_step(trainer)
    history = [
        (step, {name: own.mean for name, own in evaluations["preference"].metrics.items()})
        for step, evaluations in trainer.history
    ]
    # a step that was made again after a rollback replaces the former one
    kl = {int(n["step"]): n["task/preference/kl"] for n in step_metrics(trainer)}
    return summarise(history, kl, stopped_with)


def summarise(
    history: Sequence[tuple[int, Mapping[str, float]]], kl: Mapping[int, float], stopped_with: int | None
) -> Metrics:
    """Return the claim's metrics of one run.

    Args:
        history: (step, held-out means) of every evaluation, in the order they were made.
        kl: training step -> nats per response.
        stopped_with: step of the checkpoint that a stopped run hands over; None = it ran to its end.
    """
    smooth: list[float] = []
    course: list[tuple[int, float]] = []
    for step, found in history:
        course = [point for point in course if point[0] < step]  # a rollback undoes the others
        course.append((step, found["reward/gold"]))
        smooth.append(mean([gold for _, gold in course[-SMOOTHED:]]))
    last = len(history) - 1
    end = last
    if stopped_with is not None:
        end = max(i for i, (step, _) in enumerate(history) if step == stopped_with)
    step, final = history[end]
    before = [value for at, value in kl.items() if at <= step]
    return {
        "gold_start": smooth[0],
        "gold_max": max(smooth),
        "gold_end": smooth[end],
        "ratio": smooth[end] / max(smooth),
        "proxy_start": history[0][1]["reward/proxy"],
        "proxy_end": final["reward/proxy"],
        "kl": before[-1] if before else 0.0,
        "length": final["length"],
        "steps": float(step),
        "steps_made": float(history[last][0]),
    }


def render(arms: Arms) -> str:
    """Return the means per arm, and the ratio of gold at the end to its maximum with its interval."""
    header = ["arm", *COLUMNS, f"ratio >= {KEPT:g}", f"ratio < {LOST:g}"]
    rows = []
    for name, own in arms.items():
        ratios = [v for v in own["ratio"] if math.isfinite(v)]
        counts = [sum(v >= KEPT for v in ratios), sum(v < LOST for v in ratios)]
        cells = [f"{mean(own[c]):.0f}" if c == "steps" else f"{mean(own[c]):.2f}" for c in COLUMNS]
        rows.append([name, *cells, *(f"{n} of {len(ratios)}" for n in counts)])
    parts = [table(header, rows)]
    if "unguarded" in arms:
        best = arms["unguarded"]["gold_max"]
        lines = []
        for name, own in arms.items():
            share = [end / top for end, top in zip(own["gold_end"], best, strict=True)]
            found = compare_means([0.0] * len(share), share, paired=True)
            lines.append(
                f"- {name}: gold at the end is {found.other:.2f} [{found.low:.2f}, {found.high:.2f}] of the "
                "unguarded run's maximum."
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _reward_model(options: Options) -> str:
    return str(options.directory / "reward_model")


def _prepare(options: Options) -> None:
    prepare_actor(options.directory, ACTOR)
    target = options.directory / "reward_model"
    figures = save_reward_model(target, REWARD_MODEL, cache_dir=options.directory / "cache")
    print(f"reward model: {figures}")


def _arm(name: str, *, kl: Mapping[str, Any] | None = None, is_guarded: bool = False) -> Arm:
    settings = {"kl": dict(kl or {"coefficient": MEASURED}), "guard": {"enabled": is_guarded}}
    return Arm(name=name, settings=settings)


CLAIM = Claim(
    name="overoptimisation",
    statement=(
        "Against a trained reward model the guard, watching the hidden utility, ends with >= 0.95 of the "
        "run's best utility; without it the run ends below 0.5 of it."
    ),
    steps=120,
    arms=(
        _arm("unguarded"),
        _arm("guarded", is_guarded=True),
        _arm("kl_penalty", kl={"coefficient": 0.1}),
        _arm("kl_budget", kl={"coefficient": 0.05, "target": 8.0, "horizon": 10.0}),
    ),
    run=run_arm,
    render=render,
    runs_per_process=None,
    prepare=_prepare,
)
