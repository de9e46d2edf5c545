"""Claim (j): forgetting follows the KL to the initial actor, and RL moves less far than SFT (RL's Razor).

Shenfeld et al. (arXiv:2509.04259) fine-tune a model on a new task by SFT and by RL. They find that what it
forgets is predicted by KL(initial actor || actor) on the new task's prompts, and that RL forgets less at an
equal score of the new task. Here SmolLM2-135M-Instruct learns ``extraction`` of ``examples/smollm2``:

- ``grpo_*`` learns by its reward, ``sft_*`` from the answers of the same rows: ``BATCH`` prompts a step, with
  the learning rate of the arm's name.
- The new task's score is the mean reward of held-out prompts; the KL is measured on the same prompts.
- Forgetting is the rise of the loss on answers that people wrote (nats per token), and the fall of the mean
  reward of ``instructions``. No arm trains on either.

Each evaluation after the first is one point.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import variance
from typing import Any

import numpy as np
import yaml

from claims.base import Arm, Arms, Claim, Metrics, Options, mean, table, with_interval
from claims.smollm2 import CONFIG, prepare_example
from multitask_rl.config.run import RunConfig, merged
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where, load_yaml
from multitask_rl.models.actor import multiplies_bfloat16
from multitask_rl.statistics.intervals import compare_means
from multitask_rl.trainer import Trainer
from multitask_rl_tasks.suite import write_rows

NEW, OLD, PROSE, KL = "extraction", "instructions", "prose", "moved"
BATCH = 8
EVERY = 3
"""Steps between evaluations."""
NUM_HELD_OUT = 24
SETTINGS: Mapping[str, Any] = {
    "num_threads": 1,
    "model": {"autocast": multiplies_bfloat16("cpu")},
    "batch": {"prompts_per_step": BATCH, "group_size": 8, "tokens_per_microbatch": 512, "refill_rounds": 0},
    # greedy, so that equal weights give equal responses
    "eval": {"every": EVERY, "num_prompts": NUM_HELD_OUT, "temperature": 0.0},
    "checkpoint": {"every": 0, "resume": "never"},
    "guard": {"enabled": False},
    "tracking": {"trackers": ["jsonl"], "store_rollouts": 2},
    "scoring": {"num_workers": 1},
}
"""Laid over ``configs/experiment/smollm2.yaml``."""
MEASURES = {"score": NEW, "loss": PROSE, "old": OLD}
"""Number -> the task whose primary metric it is."""
FORGETTING = ("loss", "old")
RESAMPLES = 2000
LEAST_RUNS = 6
"""For an interval over runs; fewer say nothing of others."""


def prepare(options: Options) -> None:
    """Make the model and the rows below ``options.directory``; seconds where they are there."""
    from multitask_rl_tasks.helpful_instructions import HelpfulInstructions

    directory = options.directory / "razor" / "prepared"
    others = ["math", "safety", "preference"]
    made, source = prepare_example(directory, options.directory / "cache", others)
    tasks = yaml.safe_load(made.tasks_file.read_text(encoding="utf-8"))["tasks"]
    texts = HelpfulInstructions(HelpfulInstructions.Config(**source)).rows("train")
    file = directory / "data" / "prose.jsonl"
    write_rows(file, ({k: row[k] for k in ("prompt", "reference")} for row in texts[:NUM_HELD_OUT]))
    new = {**tasks[NEW], "primary_metric": "reward"}
    unscored = {k: v for k, v in new.items() if k in ("dataset", "prompt", "system", "sampling")}
    found = {
        "actor": str(made.actor),
        NEW: new,
        "others": {
            OLD: {**tasks[OLD], "primary_metric": "reward", "evaluation_only": True},
            KL: {**unscored, "type": "anchor"},
            PROSE: {
                "type": "anchor",
                "dataset": str(file),
                "prompt": "",
                "answer": "{reference}",
                "algorithm_config": {"kl": False, "max_tokens": 64},
            },
        },
    }
    (directory / "claim.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once; return the numbers of each evaluation as ``<number>/<step>``, and errors of changes."""
    prepared = json.loads((options.directory / "razor" / "prepared" / "claim.json").read_text())
    folder = options.directory / "runs" / f"razor-{arm.name}" / str(seed)
    shutil.rmtree(folder, ignore_errors=True)
    document, _ = load_yaml(CONFIG)
    own = {
        "tasks_file": "",
        "tasks": {NEW: {**prepared[NEW], **arm.settings["task"]}, **prepared["others"]},
        "model": {"name_or_path": prepared["actor"]},
        "optimizer": {"learning_rate": arm.settings["learning_rate"]},
        "output_dir": str(folder),
        "seed": seed,
        "max_steps": options.steps,
    }
    for layer in (SETTINGS, own, options.extra):
        document = merged(document, layer)
    began = time.process_time()
    with Trainer.from_config(build_dataclass(RunConfig, document, Where(arm.name))) as trainer:
        trainer.train()
    metrics = points(folder / "evaluations.jsonl") | {"cpu_s": time.process_time() - began}
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return metrics


def points(file: Path) -> Metrics:
    """Return the means of each evaluation, and of each change since the first its standard error.

    Changes are paired by prompt. The KL is 0 at first: its error is that of the mean.
    """
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    metrics: Metrics = {}
    for row in (row for row in rows if row["task"] == KL):
        metrics[f"kl/{row['step']}"] = row["metrics"]["kl"]["mean"]
        metrics[f"kl_error/{row['step']}"] = row["metrics"]["kl"]["error"]
    for name, task in MEASURES.items():
        history = [row for row in rows if row["task"] == task]
        for row in history:
            changes = [b - a for a, b in zip(history[0]["values"], row["values"], strict=True)]
            metrics[f"{name}/{row['step']}"] = mean(row["values"])
            metrics[f"{name}_error/{row['step']}"] = math.sqrt(variance(changes) / len(changes))
    return metrics


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One evaluation of one run after the first."""

    arm: str
    run: int
    """Index of the seed."""
    step: int
    score: float
    """Mean reward of the new task."""
    gain: float
    """Its rise since the first evaluation."""
    kl: float
    loss: float
    """Rise of the loss on prose, nats per token: forgetting."""
    old: float
    """Fall of the mean reward of the old task: forgetting."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Standard errors of ``gain``, ``kl``, ``loss`` and ``old`` over held-out prompts."""

    @property
    def is_rl(self) -> bool:
        """Whether the arm learns by reward."""
        return self.arm.startswith("grpo")


def all_points(arms: Arms) -> list[Point]:
    """Return the points of all finished runs."""
    found = []
    for name, own in arms.items():
        steps = sorted(int(key.partition("/")[2]) for key in own if key.startswith("kl/"))
        for run in range(len(own["cpu_s"])):
            first, *later = [{m: own[f"{m}/{s}"][run] for m in ("kl", *MEASURES)} for s in steps]
            for step, now in zip(steps[1:], later, strict=True):
                changes = {"loss": now["loss"] - first["loss"], "old": first["old"] - now["old"]}
                numbers = {"score": now["score"], "gain": now["score"] - first["score"], "kl": now["kl"]}
                names = {"gain": "score", "kl": "kl", "loss": "loss", "old": "old"}
                errors = {n: own[f"{m}_error/{step}"][run] for n, m in names.items()}
                if math.isfinite(now["kl"]):
                    found.append(Point(arm=name, run=run, step=step, **numbers, **changes, errors=errors))
    return found


def render(arms: Arms) -> str:
    """Return the points, how KL and score predict forgetting, and RL against SFT at equal scores."""
    found = all_points(arms)
    numbers = ("score", "gain", "kl", "loss", "old")
    rows = []
    for name, step in dict.fromkeys((p.arm, p.step) for p in found):
        own = [p for p in found if (p.arm, p.step) == (name, step)]
        cells = []
        for n in numbers:
            error = math.sqrt(math.fsum(p.errors.get(n, 0.0) ** 2 for p in own)) / len(own)
            shown = f"{mean([getattr(p, n) for p in own]):.3f}"
            cells.append(shown + (f" ± {1.96 * error:.3f}" if error else ""))
        rows.append([name, str(step), str(len(own)), *cells])
    parts = [
        table(["arm", "step", "seeds", *numbers], rows),
        "± : 95 % over held-out prompts, of these runs; loss and old above 0 are forgetting.",
    ]
    parts.append(
        "Correlation of forgetting with a number of the same point (+1: more of it, more forgotten), and "
        "forgetting of RL minus SFT in a line on the KL with one offset. Intervals: bootstrap of "
        f"{LEAST_RUNS} or more runs."
    )
    subsets = {"all": found, "grpo": [p for p in found if p.is_rl], "sft": [p for p in found if not p.is_rl]}
    rows = [
        [f"{by}, {name}", *(_bootstrapped(own, partial(correlation, by=by, of=of)) for of in FORGETTING)]
        for by in ("kl", "gain")
        for name, own in subsets.items()
        if len(own) > 2
    ]
    rows.append(
        ["RL - SFT at equal KL", *(_bootstrapped(found, partial(offset, of=of)) for of in FORGETTING)]
    )
    parts.append(table(["", *FORGETTING], rows))
    parts.append(
        "At the best score that RL reaches, per seed: of the SFT points that score as well, the one of"
    )
    rows = []
    for by, told in (("loss", "least forgetting (loss)"), ("kl", "least KL")):
        pairs = list(matched(found, by))
        for rl, sft in pairs:
            delta = f"{getattr(sft, by) - getattr(rl, by):+.3f}"
            rows.append([told, str(rl.run), _told(rl), _told(sft), delta])
        if len(pairs) > 1:
            d = compare_means(*([getattr(pair[at], by) for pair in pairs] for at in (0, 1)), paired=True)
            rows.append([told, "mean", "", "", with_interval(d)])
    parts.append(table(["", "seed", "RL", "SFT", "SFT - RL"], rows))
    costs = ", ".join(f"{name} {mean(own['cpu_s']):.0f}" for name, own in arms.items())
    return "\n\n".join([*parts, f"CPU seconds a run: {costs}."])


def _told(point: Point) -> str:
    return (
        f"{point.arm} step {point.step}: score {point.score:.3f}, KL {point.kl:.4f}, loss {point.loss:+.4f}"
    )


def correlation(found: Sequence[Point], by: str, of: str) -> float:
    """Return the correlation of two numbers of points; NaN where one does not vary."""
    x, y = ([getattr(p, name) for p in found] for name in (by, of))
    if len(found) < 3 or min(np.ptp(x), np.ptp(y)) < 1e-12:
        return math.nan
    return float(np.corrcoef(x, y)[0, 1])


def offset(found: Sequence[Point], of: str) -> float:
    """Return b of the fit ``forgetting = a + slope * KL + b * [RL]``; NaN without both kinds."""
    if len({p.is_rl for p in found}) < 2 or len(found) < 4:
        return math.nan
    design = np.array([[1.0, p.kl, float(p.is_rl)] for p in found])
    fitted, *_ = np.linalg.lstsq(design, np.array([getattr(p, of) for p in found]), rcond=None)
    return float(fitted[2])


def matched(found: Sequence[Point], by: str) -> Iterator[tuple[Point, Point]]:
    """Yield per seed RL's point of the best score, and of SFT's as good points that of the least ``by``."""
    for run in sorted({p.run for p in found}):
        rl = max((p for p in found if p.run == run and p.is_rl), key=lambda p: p.score, default=None)
        as_good = [p for p in found if p.run == run and not p.is_rl and rl and p.score >= rl.score]
        if rl is not None and as_good:
            yield rl, min(as_good, key=attrgetter(by))


def _bootstrapped(found: Sequence[Point], number: Callable[[Sequence[Point]], float]) -> str:
    """Return a number and its 95 % percentile interval over resampled runs (their points stay together)."""
    runs = list(dict.fromkeys((p.arm, p.run) for p in found))
    if len(runs) < LEAST_RUNS:
        return f"{number(found):.3f} of {len(found)} points, no interval"
    rng = random.Random(0)
    by_run = {run: [p for p in found if (p.arm, p.run) == run] for run in runs}
    drawn = ([p for run in rng.choices(runs, k=len(runs)) for p in by_run[run]] for _ in range(RESAMPLES))
    values = sorted(v for v in map(number, drawn) if math.isfinite(v))
    if not values:
        return "-"
    low, high = (values[round(q * (len(values) - 1))] for q in (0.025, 0.975))
    return f"{number(found):.3f} [{low:.3f}, {high:.3f}]"


def _grpo(rate: float) -> Arm:
    return Arm(name=f"grpo_{rate:.0e}", settings={"task": {"type": "grpo"}, "learning_rate": rate})


def _sft(rate: float) -> Arm:
    task = {"type": "sft", "answer": "{reference}"}
    return Arm(name=f"sft_{rate:.0e}", settings={"task": task, "learning_rate": rate})


CLAIM = Claim(
    name="razor",
    statement=(
        "The KL to the initial actor on a new task's prompts predicts what training on it forgets, across RL "
        "and SFT and better than the new task's score does; at an equal score RL forgets less than SFT."
    ),
    steps=6,
    arms=(_grpo(1e-4), _sft(3e-5), _sft(1e-4), _grpo(4e-5), _sft(1e-5)),
    run=run_arm,
    render=render,
    prepare=prepare,
)
