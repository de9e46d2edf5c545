"""Claim (c): the guard finds planted regressions early, takes the run back, and leaves clean runs alone.

Real training of two tasks with the guard's default settings: one run per seed up to the plant, and from its
last checkpoint one branch per fault, with the guard and with a deaf one. Levels are held-out success rates at
temperature 1 on 256 prompts, as a share of the mean of the last three evaluations before the plant; of the
two tasks the lower share counts. A fault that lasts (all but ``lr_spike``, ``corrupted``, ``noise_30``) is
still there after a rollback.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claims.base import Arm, Arms, Claim, Metrics, Options, mean, table
from claims.plants import FAULTS, GuardWithPlant, Plant
from claims.suite import TASKS, SuiteRun, build_trainer, delivered_step, prepare_actor
from multitask_rl.errors import GuardStop
from multitask_rl.records import TaskEvaluation
from multitask_rl.trainer import Trainer

VICTIM = "arithmetic"
PAIR = {VICTIM: TASKS[VICTIM], "safe": {**TASKS["safe"], "sampling": {"max_new_tokens": 7}}}
EVERY = 10
"""Steps between evaluations, each with a checkpoint."""
PLANT_AT = 120
"""Twelve evaluations: the guard has its reference."""
ABRUPT = {"sign_flip": 100, "lr_spike": 60, "corrupted": 60, "dropped": 60}
SLOW = {"slow_leak": 150}
CONTROLS = {"flips_20": 100, "noise_30": 60}
"""Kind -> steps of the branch. The controls are no regressions that a guard has to answer: GRPO learns from
rewards of which a fifth is flipped, and 30 % weight noise heals by itself."""
BRANCH_STEPS = {**ABRUPT, **SLOW, **CONTROLS}
LIMITS = {**dict.fromkeys(ABRUPT, 5), **dict.fromkeys((*SLOW, *CONTROLS), 20)}
"""Evaluations within which a fault has to be found."""
UNGUARDED_EVERY = 4
"""One seed in so many also runs the controls, and everything without the guard."""
RECOVERY_STEPS = 100
RECOVERED = 0.95
CLEAN_EVALUATIONS, CLEAN_EVERY = 200, 2
ALARMS = ("reweight", "freeze", "rollback", "stop", "hacking", "starved")
"""What counts as an alarm; a warning changes nothing."""


@dataclass(kw_only=True, slots=True)
class Timeline:
    """What happened after a plant, in the order it happened."""

    levels: list[float]
    """Per evaluation: the lower of the tasks' shares of their level before the plant."""
    actions: list[tuple[int, str]] = field(default_factory=list)
    """(index of the evaluation in ``levels``, what the guard did about it)."""
    delivered: float = math.nan
    """Level of the checkpoint that a stopped run hands over; NaN = it was not stopped."""


def summarise(timeline: Timeline, *, limit: int) -> Metrics:
    """Return the claim's metrics of one guarded run; ``limit`` in evaluations."""
    first = timeline.actions[0][0] if timeline.actions else None
    metrics = {
        "detected": float(first is not None and first < limit),
        "delay": math.nan if first is None else first + 1.0,
        "rollbacks": float(sum(action == "rollback" for _, action in timeline.actions)),
        "stopped": float(math.isfinite(timeline.delivered)),
        "level_end": timeline.delivered if math.isfinite(timeline.delivered) else timeline.levels[-1],
        "recovered": math.nan,
    }
    if first is not None:
        after = timeline.levels[first + 1 : first + 1 + RECOVERY_STEPS // EVERY]
        windows = [mean(after[i : i + 3]) for i in range(len(after) - 2)] or [metrics["level_end"]]
        metrics["recovered"] = float(max(windows) >= RECOVERED)
    return metrics


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Return the metrics of a clean run, or of every fault planted into the same run."""
    if arm.name == "clean":
        return _run_clean(seed, options)
    before, reference, false_alarms = _run_before(seed, options)
    metrics: Metrics = {"false_alarms_before": false_alarms}
    with_unguarded = seed % UNGUARDED_EVERY == UNGUARDED_EVERY - 1
    for kind in FAULTS if with_unguarded else (*ABRUPT, *SLOW):
        own = summarise(_branch(kind, seed, options, before, reference, is_deaf=False), limit=LIMITS[kind])
        if with_unguarded:
            own["end_unguarded"] = _branch(kind, seed, options, before, reference, is_deaf=True).levels[-1]
        metrics |= {f"{kind}/{name}": value for name, value in own.items()}
    shutil.rmtree(before)
    return metrics


def _run_clean(seed: int, options: Options) -> Metrics:
    """Train without a fault; count what the guard did about it."""
    trainer = _build(
        "clean",
        seed,
        options,
        steps=CLEAN_EVALUATIONS * CLEAN_EVERY,
        eval={"every": CLEAN_EVERY, "num_prompts": 256},
    )
    trainer.train()
    last = _levels(trainer.history[-1][1])
    return {
        "false_alarms": _alarms(trainer),
        "evaluations": float(len(trainer.history)),
        **{f"final/{name}": level for name, level in last.items()},
    }


def _build(name: str, seed: int, options: Options, *, steps: int, **overrides: Any) -> Trainer:
    settings = {
        "batch": {"prompts_per_step": 4},
        "guard": {"enabled": True},
        "eval": {"every": EVERY, "num_prompts": 256},
        "checkpoint": {"every": EVERY, "keep": 12, "resume": "auto"},
    }
    return build_trainer(
        SuiteRun(
            seed=seed,
            steps=steps,
            directory=options.directory,
            name=f"guard-{name}",
            tasks=PAIR,
            overrides={**settings, **overrides},
            num_held_out=256,
        )
    )


def _run_before(seed: int, options: Options) -> tuple[Path, dict[str, float], float]:
    """Train to the plant; return the run's directory, the level of each task there, false alarms."""
    trainer = _build("before", seed, options, steps=PLANT_AT)
    trainer.add_guard(GuardWithPlant())  # a branch's guard of another class would start without history
    trainer.train()
    last = [_levels(e) for _, e in trainer.history[-3:]]
    return Path(trainer.config.output_dir), {n: mean([x[n] for x in last]) for n in PAIR}, _alarms(trainer)


def _branch(
    kind: str, seed: int, options: Options, before: Path, reference: Mapping[str, float], *, is_deaf: bool
) -> Timeline:
    """Go on from the checkpoint in ``before`` with the fault."""
    evaluation = {"every": 0 if is_deaf else EVERY, "num_prompts": 256}
    name = f"{kind}-{'deaf' if is_deaf else 'guarded'}"
    trainer = _build(name, seed, options, steps=PLANT_AT + BRANCH_STEPS[kind], eval=evaluation)
    shutil.copytree(before, trainer.config.output_dir, dirs_exist_ok=True)
    guard = GuardWithPlant(is_deaf=is_deaf)
    guard.plant = Plant(FAULTS[kind], victim=VICTIM, seed=seed, trainer=trainer)
    trainer.add_guard(guard)
    trainer.insert_stage(guard.plant, after="rewards")
    is_stopped = False
    try:
        trainer.train()
    except GuardStop:
        is_stopped = True
    levels = [min(_levels(e)[n] / reference[n] for n in PAIR) for _, e in trainer.history]
    timeline = Timeline(levels=levels, actions=guard.actions)
    if is_stopped:
        step = delivered_step(trainer)
        known = [level for (s, _), level in zip(trainer.history, levels, strict=True) if s == step]
        timeline.delivered = known[-1] if known else 1.0  # 1: the checkpoint of the plant itself
    shutil.rmtree(trainer.config.output_dir)
    return timeline


def _levels(evaluations: Mapping[str, TaskEvaluation]) -> dict[str, float]:
    return {name: mean(evaluation.values) for name, evaluation in evaluations.items()}


def _alarms(trainer: Trainer) -> float:
    return float(sum(e.source == "guard" and e.kind in ALARMS for e in trainer.events))


def rate_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a rate.

    >>> [round(x, 3) for x in rate_interval(20, 20)]
    [0.839, 1.0]
    """
    z = 1.96
    centre = (successes + z * z / 2) / (trials + z * z)
    half = z * math.sqrt(successes * (trials - successes) / trials + z * z / 4) / (trials + z * z)
    return max(0.0, centre - half), min(1.0, centre + half)


def render(arms: Arms) -> str:
    """Return one line per fault, the totals with their intervals, the clean runs."""
    parts = []
    if plants := arms.get("plants"):
        kinds = [kind for kind in BRANCH_STEPS if f"{kind}/detected" in plants]
        header = ["fault", "found in time", "delay (evaluations)", "restored"]
        header += ["level at the end", "unguarded", "rollbacks", "stopped"]
        parts.append(table(header, [_row(plants, kind) for kind in kinds]))
        parts.append("\n".join(_totals(plants)))
    if clean := arms.get("clean"):
        alarms = [value for value in clean["false_alarms"] if math.isfinite(value)]
        parts.append(
            f"Clean runs (real training): {sum(value > 0 for value in alarms)} of {len(alarms)} with an "
            f"alarm, {sum(clean['evaluations']):.0f} evaluations."
        )
    return "\n\n".join(parts)


def _row(plants: Mapping[str, Sequence[float]], kind: str) -> list[str]:
    known = {k: [v for v in plants.get(f"{kind}/{k}", ()) if math.isfinite(v)] for k in _COLUMNS}
    delays = sorted(known["delay"])
    return [
        f"{kind} (control)" if kind in CONTROLS else kind,
        _count(known["detected"]),
        f"median {delays[len(delays) // 2]:.0f}, worst {delays[-1]:.0f}" if delays else "-",
        _count(known["recovered"]),
        f"{mean(known['level_end']):.2f} (lowest {min(known['level_end']):.2f})",
        f"{mean(known['end_unguarded']):.2f} (highest {max(known['end_unguarded']):.2f})"
        if known["end_unguarded"]
        else "-",
        f"{mean(known['rollbacks']):.1f}",
        f"{sum(known['stopped']):.0f}",
    ]


_COLUMNS = ("detected", "delay", "recovered", "level_end", "end_unguarded", "rollbacks", "stopped")


def _totals(plants: Mapping[str, Sequence[float]]) -> list[str]:
    lines = []
    for name, kinds in (("Abrupt faults", ABRUPT), ("Slow leaks", SLOW)):
        found = [v for kind in kinds for v in plants[f"{kind}/detected"] if math.isfinite(v)]
        limit = LIMITS[next(iter(kinds))]
        lines.append(f"- {name} found within {limit} evaluations: {_count(found, with_interval=True)}.")
    restored = [v for k in (*ABRUPT, *SLOW) for v in plants[f"{k}/recovered"] if math.isfinite(v)]
    lines.append(
        f"- Restored to >= {RECOVERED:.0%} within {RECOVERY_STEPS} steps of the answer: "
        f"{_count(restored, with_interval=True)}."
    )
    before = [v for v in plants["false_alarms_before"] if math.isfinite(v)]
    number = len(before) * (PLANT_AT // EVERY + 1)
    lines.append(f"- Alarms before the plant: {sum(before):.0f} in {number} evaluations.")
    return lines


def _count(values: Sequence[float], *, with_interval: bool = False) -> str:
    if not values:
        return "-"
    successes = round(sum(values))
    text = f"{successes} of {len(values)}"
    if with_interval:
        low, high = rate_interval(successes, len(values))
        text += f" ({successes / len(values):.0%}, 95 % interval {low:.0%} to {high:.0%})"
    return text


CLAIM = Claim(
    name="guard",
    statement=(
        "20 plants of each of 5 faults: >= 95 % of the abrupt ones found within 5 evaluations and of the "
        "slow leaks within 20, the metric restored to >= 95 % of its level before the plant within 100 "
        "steps, at most one alarm in 20 clean runs of 200 evaluations."
    ),
    steps=PLANT_AT,
    arms=(Arm(name="plants", settings={"faults": FAULTS, "steps": BRANCH_STEPS}), Arm(name="clean")),
    run=run_arm,
    render=render,
    runs_per_process=None,
    prepare=lambda options: prepare_actor(options.directory),
)
