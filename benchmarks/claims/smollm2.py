"""Claim (i): the controllers on a pretrained chat model.

Four tasks of ``examples/smollm2`` on SmolLM2-135M-Instruct. Every run evaluates ``NUM_TEST`` prompts of the
split ``test`` per task with the weights that it hands over; they decide nothing. A seed has the same test
prompts and seeds in all arms, so what two arms do to a prompt is paired. Anchors measure what no task trains:
the loss on written answers of people, and KL(initial actor, actor) there and on answers to questions.

- ``base``: the model as it is.
- ``default``, ``uniform``, ``tac``: policies of the scheduler; ``static_best``, once there is one, is the
  best mixture of ``smollm2_static``.
- ``no_constraint``: ``default`` without the multiplier of the safety task; its classifier only measures.
- ``fault``, ``fault_no_guard``: after ``PLANT_AT`` steps the rewards of ``VICTIM`` become 1 minus the reward,
  for good. The steps before are those of ``default``, made once per seed.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import variance
from typing import Any

import yaml
from filelock import FileLock

from claims.base import Arm, Arms, Claim, Metrics, Options, difference, mean, table, with_interval
from claims.guard import ALARMS
from claims.plants import FAULTS, GuardWithPlant, Plant
from claims.suite import delivered_step, step_metrics
from multitask_rl.config.run import RunConfig, merged
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where, load_yaml
from multitask_rl.errors import GuardStop
from multitask_rl.models.actor import multiplies_bfloat16
from multitask_rl.run.checkpoint import model_directory
from multitask_rl.trainer import Trainer
from multitask_rl_tasks.suite import write_rows

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "experiment" / "smollm2.yaml"
TASKS = ("math", "instructions", "safety", "extraction")
VICTIM = "extraction"
PLANT_AT = 8
EVERY = 4
"""Steps between evaluations."""
FOUND_WITHIN = 2
"""Evaluations in which the guard has to find the fault."""
NUM_TEST = 96
"""Test prompts per task; an arm's ``num_test`` is another number."""
NUM_ANCHORS = 16
SETTINGS: Mapping[str, Any] = {
    "num_threads": 1,
    "model": {"autocast": multiplies_bfloat16("cpu")},
    # no refill: every arm then spends the same rollouts
    "batch": {"prompts_per_step": 8, "group_size": 8, "tokens_per_microbatch": 1024, "refill_rounds": 0},
    "optimizer": {"learning_rate": 4e-5},
    "eval": {"every": EVERY, "num_prompts": 24},
    "checkpoint": {"every": EVERY, "keep": 2},
    "guard": {"guard_config": {"warmup": 3}},
    "tracking": {"trackers": ["jsonl"], "store_rollouts": 2},
    "scoring": {"num_workers": 1},
}
"""Laid over ``configs/experiment/smollm2.yaml``."""
COMPARED = ("worst", "mean", "auc_worst", "auc_mean", "level/", "flagged", "kl/questions", "loss/prose")
"""Metrics of the tables; ``level/`` is those of all tasks."""
PAIRS = (
    *(("uniform", arm) for arm in ("default", "prior_40", "sharpness_3", "tac", "static_best")),
    ("no_constraint", "default"),
    ("fault_no_guard", "fault"),
)
"""(base, other) of the table of differences."""

Values = dict[str, list[float]]
"""Task -> value per test prompt; ``flagged`` -> 1 per test prompt whose exchange the classifier flags."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """An arm with a seed: its directory, tasks and configuration."""

    arm: Arm
    seed: int
    options: Options

    @property
    def folder(self) -> Path:
        """Where it writes."""
        name = f"smollm2-{self.mixture}-{self.arm.name}-{self.options.steps}"
        return self.options.directory / "runs" / name / str(self.seed)

    @property
    def num_test(self) -> int:
        """Test prompts per task."""
        own = self.arm.settings.get("num_test", NUM_TEST)
        return int(self.options.extra.get("eval", {}).get("num_prompts", own))

    @property
    def mixture(self) -> str:
        """The name of what ``prepare`` or ``write_mixture`` wrote."""
        return str(self.arm.settings.get("mixture", "claim"))

    @property
    def prepared(self) -> dict[str, Any]:
        """``actor``: directory of the model; ``tasks`` and ``anchors``: entries of a tasks file by name."""
        file = self.options.directory / "smollm2" / "prepared" / f"{self.mixture}.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def config(self, tasks: Mapping[str, Any], **overrides: Any) -> RunConfig:
        """Return the configuration; ``options.extra`` lies over the claim's settings."""
        document, _ = load_yaml(CONFIG)
        own = {
            "tasks_file": "",
            "tasks": tasks,
            "model": {"name_or_path": self.prepared["actor"]},
            "output_dir": str(self.folder / "run"),
            "seed": self.seed,
            "scheduler": self.arm.settings.get("scheduler", {}),
        }
        for layer in (SETTINGS, own, self.arm.settings.get("run", {}), self.options.extra, overrides):
            document = merged(document, layer)
        return build_dataclass(RunConfig, document, Where(self.arm.name))


def prepare_example(directory: Path, cache: Path, leave_out: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return what ``examples/smollm2/prepare.py`` made, and ``{"source": ...}`` of its data sets."""
    sys.path.insert(0, str(ROOT / "examples" / "smollm2"))
    example: Any = importlib.import_module("prepare")
    data = example.data_directory()
    made = example.prepare(directory, 0, cache, model=None, data=data, leave_out=leave_out)
    return made, {} if data is None else {"source": str(data)}


def prepare(options: Options) -> None:
    """Make model, rows, classifier and anchors below ``options.directory``; seconds where they are there."""
    from multitask_rl_tasks.helpful_instructions import HelpfulInstructions
    from multitask_rl_tasks.nq_open import NQOpen

    directory = options.directory / "smollm2" / "prepared"
    made, source = prepare_example(directory, options.directory / "cache", ["preference"])
    tasks = yaml.safe_load(made.tasks_file.read_text(encoding="utf-8"))["tasks"]
    questions = NQOpen(NQOpen.Config(**source)).rows("test")
    texts = HelpfulInstructions(HelpfulInstructions.Config(**source)).rows("train")
    anchors = {
        "questions": {
            "dataset": str(_write_some(directory / "data" / "questions.jsonl", questions)),
            "prompt": "{prompt}?",
            "sampling": {"max_new_tokens": 24},
        },
        "prose": {
            "dataset": str(_write_some(directory / "data" / "prose.jsonl", texts)),
            "prompt": "",
            "answer": "{reference}",
            "algorithm_config": {"max_tokens": 64},
        },
    }
    # the primary metric of the example, whole right answers, stays near 0 in so few steps
    tasks["extraction"]["primary_metric"] = "reward"
    for task in tasks.values():
        task.pop("min_share", None)  # the claims are about shares that scheduler and mixtures choose
    found = {
        "actor": str(made.actor),
        "tasks": {name: tasks[name] for name in TASKS if name in tasks},
        "anchors": {name: {"type": "anchor", **entry} for name, entry in anchors.items()},
        "figures": made.figures,
    }
    write_mixture(options, "claim", found)


def write_mixture(options: Options, name: str, found: Mapping[str, Any]) -> None:
    """Write what ``Run.prepared`` reads for arms whose setting ``mixture`` is ``name``."""
    file = options.directory / "smollm2" / "prepared" / f"{name}.json"
    file.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _write_some(file: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    return write_rows(file, ({k: row[k] for k in ("prompt", "reference")} for row in rows[:NUM_ANCHORS]))


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once; return levels and changes on test prompts, anchors, what the controllers did."""
    run = Run(arm=arm, seed=seed, options=options)
    before = base_values(run)
    if arm.name == "base":
        return summarise(before, before)
    began = time.process_time()
    weights, metrics = _train(run)
    metrics["cpu_s"] = time.process_time() - began
    gc.collect()  # the optimizer's state, before the next model is loaded
    after = test_values(run, str(weights))
    for kept in ("checkpoints", "reference"):
        shutil.rmtree(run.folder / "run" / kept, ignore_errors=True)
    return summarise(before, after) | metrics


def summarise(before: Values, after: Values) -> Metrics:
    """Return levels, and changes with their standard errors, paired by prompt."""
    levels = {task: mean(values) for task, values in after.items() if task != "flagged"}
    metrics = {
        "worst": min(levels.values()),
        "mean": mean(list(levels.values())),
        **{f"level/{task}": level for task, level in levels.items()},
    }
    if "flagged" in after:
        metrics["flagged"] = mean(after["flagged"])
    for name, values in after.items():
        changes = [b - a for a, b in zip(before[name], values, strict=True)]
        metrics[f"change/{name}"] = mean(changes)
        metrics[f"change_error/{name}"] = math.sqrt(variance(changes) / len(changes))
    return metrics


def base_values(run: Run) -> Values:
    """Return the values of the untrained model on the seed's test prompts; the arms share them."""
    file = run.options.directory / "smollm2" / "base" / run.mixture / f"{run.seed}-{run.num_test}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):  # another process may need them, too
        if not file.is_file():
            values = test_values(run, run.prepared["actor"])
            file.write_text(json.dumps(values), encoding="utf-8")
    found: Values = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_values(run: Run, weights: str) -> Values:
    """Return the values of a model directory on the seed's test prompts."""
    tasks = run.prepared["tasks"]
    config = run.config(
        {name: {**entry, "eval_split": "test", "evaluation_only": True} for name, entry in tasks.items()},
        model={"name_or_path": weights},
        eval={"num_prompts": run.num_test},
        guard={"enabled": False},
        checkpoint={"resume": "never"},
        output_dir=str(run.folder / "test"),
    )
    with Trainer.from_config(config) as trainer:
        found = trainer.evaluate()
    values = {name: list(evaluation.values) for name, evaluation in found.items()}
    for evaluation in found.values():
        for name, statistic in evaluation.metrics.items():
            if name.startswith("constraint/") and name.endswith("/violation_rate"):
                values["flagged"] = list(statistic.values)
    return values


def _train(run: Run) -> tuple[Path, Metrics]:
    """Train to the end; return the directory of the weights that are handed over, and metrics."""
    arm, folder = run.arm, run.folder / "run"
    victim = arm.settings.get("victim")
    if arm.settings.get("branches") and not (folder / "checkpoints").is_dir():
        _branch(run, folder)
    trainer = _build(run, run.options.steps)
    assert isinstance(trainer.guard, GuardWithPlant)
    if victim:
        plant = Plant(FAULTS["sign_flip"], victim=victim, seed=run.seed, trainer=trainer)
        trainer.insert_stage(plant, after="rewards")
    weights, is_stopped = folder, False
    try:
        trainer.train()
    except GuardStop:
        is_stopped = True
        step = delivered_step(trainer)
        assert step is not None
        weights = trainer.parts.store.checkpoints.path(step)
    alarms = [e.step for e in trainer.events if e.source == "guard" and e.kind in ALARMS]
    rollbacks = sum(e.source == "guard" and e.kind == "rollback" for e in trainer.events)
    metrics = {"false_alarms": float(sum(s <= PLANT_AT or not victim for s in alarms))}
    if victim:
        late = [step for step in alarms if step > PLANT_AT]
        delay = math.ceil((late[0] - PLANT_AT) / EVERY) if late else math.nan
        metrics |= {
            "detected": float(delay <= FOUND_WITHIN),
            "delay": float(delay),
            "rollbacks": float(rollbacks),
            "stopped": float(is_stopped),
        }
    steps = list(step_metrics(trainer))
    ends = ("/weight", "/multiplier/safety_classifier")
    keys = {key for row in steps for key in row if key.startswith("task/") and key.endswith(ends)}
    for key in sorted(keys):
        metrics[key.removeprefix("task/")] = mean([row[key] for row in steps if key in row])
    return Path(model_directory(str(weights))), metrics | _over_the_run(run, folder) | _anchors(run, folder)


def _build(run: Run, steps: int) -> Trainer:
    prepared, settings = run.prepared, run.arm.settings
    tasks = prepared["tasks"] | prepared["anchors"]
    for name, weight in settings.get("weights", {}).items():
        tasks[name]["weight"] = weight
    if settings.get("unconstrained"):
        for entry in tasks.values():
            for constraint in entry.get("constraints", ()):
                constraint |= {"mode": "penalty", "weight": 0.0}  # only measured
    config = run.config(tasks, max_steps=steps)
    trainer = Trainer.from_config(config)
    section = config.guard
    guard = GuardWithPlant(
        is_deaf=settings.get("deaf", False),
        threshold_delta=section.threshold_delta,
        rollback_steps=section.rollback_steps,
        **section.guard_config,
    )
    trainer.add_guard(guard)
    return trainer


def _branch(run: Run, folder: Path) -> None:
    """Copy the first steps, which some arms share, to ``folder``; make them where they are not there yet."""
    settings = {"run": run.arm.settings.get("run", {})}
    before = Run(arm=Arm(name="shared", settings=settings), seed=run.seed, options=run.options)
    before.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(before.folder / ".lock"), _build(before, PLANT_AT) as trainer:
        trainer.train()
    del trainer
    gc.collect()
    shutil.rmtree(folder, ignore_errors=True)
    aside = folder.with_name("aside")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(before.folder / "run", aside)
    aside.replace(folder)


def _anchors(run: Run, folder: Path) -> Metrics:
    """Return per anchor the KL at the end, and the loss there minus the loss at the start."""
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    metrics: Metrics = {}
    for name in run.prepared["anchors"]:
        own = [dict(_means(row)) for row in rows if row["task"] == name]
        metrics[f"kl/{name}"] = own[-1]["kl"]
        metrics[f"loss/{name}"] = own[-1]["loss"] - own[0]["loss"]
    return metrics


def _over_the_run(run: Run, folder: Path) -> Metrics:
    """Return the worst and the mean level of the evaluations after the first, averaged over them."""
    levels: dict[int, dict[str, float]] = {}
    for line in (folder / "evaluations.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["task"] in run.prepared["tasks"] and row["step"] > 0:
            levels.setdefault(row["step"], {})[row["task"]] = row["mean"]
    return {
        "auc_worst": mean([min(own.values()) for own in levels.values()]),
        "auc_mean": mean([mean(list(own.values())) for own in levels.values()]),
    }


def _means(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    yield row["metric"], row["mean"]
    for name, numbers in row["metrics"].items():
        yield name, numbers["mean"]


def render(arms: Arms) -> str:
    """Return the arms' means, what training changed, and the differences between arms, paired by seed."""
    names = list(arms)
    known = dict.fromkeys(key for own in arms.values() for key in own)
    compared = [key for c in COMPARED for key in known if key == c or (c == "level/" and key.startswith(c))]
    columns = [*compared, *(["cpu_s"] if "cpu_s" in known else [])]
    parts = [table(["arm", "seeds", *columns], [[n, *_means_of(arms[n], columns)] for n in names])]
    changed = [n for n in names if n != "base"]
    if changed:
        measured = [key.removeprefix("change/") for key in arms[changed[0]] if key.startswith("change/")]
        rows = [[n, *(_pooled(arms[n], task) for task in measured)] for n in changed]
        parts.append("Change on the test prompts of all seeds, paired by prompt:")
        parts.append(table(["arm", *measured], rows))
    pairs = [(base, other) for base, other in PAIRS if base in arms and other in arms]
    if pairs:
        rows = [[f"{b} -> {a}", *(_difference(arms, b, a, c) for c in compared)] for b, a in pairs]
        parts.append("Differences, paired by seed:")
        parts.append(table(["", *compared], rows))
    for name, own in arms.items():
        if "detected" in own:
            parts.append(_guarded(name, own))
    alarms = [v for n in changed for v in arms[n]["false_alarms"] if math.isfinite(v)]
    parts.append(f"Alarms without a fault: {sum(alarms):.0f} in {len(alarms)} runs.")
    return "\n\n".join(parts)


def _means_of(own: Mapping[str, Sequence[float]], columns: Sequence[str]) -> list[str]:
    number = sum(math.isfinite(v) for v in own["worst"])
    digits = {"cpu_s": 0}
    return [str(number)] + [
        f"{mean(own[c]):.{digits.get(c, 3)}f}" if c in own and number else "-" for c in columns
    ]


def _pooled(own: Mapping[str, Sequence[float]], task: str) -> str:
    """Return mean and 95 % interval over the prompts of all seeds, of these trained models."""
    errors = [e for e in own.get(f"change_error/{task}", ()) if math.isfinite(e)]
    if not errors:
        return "-"
    middle = mean(own[f"change/{task}"])
    half = 1.96 * math.sqrt(sum(e * e for e in errors)) / len(errors)
    return f"{middle:+.3f} [{middle - half:+.3f}, {middle + half:+.3f}]"


def _difference(arms: Arms, base: str, other: str, metric: str) -> str:
    if metric not in arms[base] or metric not in arms[other]:
        return "-"
    return with_interval(difference(arms, base, other, metric))


def _guarded(name: str, own: Mapping[str, Sequence[float]]) -> str:
    found, delays = ([v for v in own[key] if math.isfinite(v)] for key in ("detected", "delay"))
    after = f", after {', '.join(f'{d:.0f}' for d in delays)} evaluations" if delays else ""
    return (
        f"`{name}`: the guard acted within {FOUND_WITHIN} evaluations in {sum(found):.0f} of {len(found)} "
        f"runs{after}; {mean(own['rollbacks']):.1f} rollbacks a run, {mean(own['stopped']):.0%} stopped."
    )


CLAIM = Claim(
    name="smollm2",
    statement=(
        "On SmolLM2-135M-Instruct, four tasks, paired over seeds: the default scheduler's worst task is "
        "better than with equal shares and its mean not worse; the guard finds a flipped reward within "
        f"{FOUND_WITHIN} evaluations and undoes it; the constraint lowers the rate of flagged exchanges."
    ),
    steps=16,
    arms=(
        Arm(name="base"),
        Arm(name="default", settings={"branches": True}),
        Arm(name="uniform", settings={"scheduler": {"policy": "uniform"}}),
        Arm(name="fault", settings={"branches": True, "victim": VICTIM}),
        Arm(name="fault_no_guard", settings={"branches": True, "victim": VICTIM, "deaf": True}),
        Arm(name="no_constraint", settings={"unconstrained": True}),
        Arm(name="tac", settings={"scheduler": {"policy": "tac"}}),
    ),
    run=run_arm,
    render=render,
    prepare=prepare,
)
