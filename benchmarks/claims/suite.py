"""Training runs on the synthetic suite, small enough for ten seeds: what most claims are made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from multitask_rl.config.run import RunConfig, merged
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.guard.decision import CheckpointInfo
from multitask_rl.models.actor import Actor
from multitask_rl.trainer import Trainer
from multitask_rl_tasks.suite import SUITE, build_rows, write_rows
from multitask_rl_tasks.suite.settings import ModelSize, WarmStartSettings, WarmTask
from multitask_rl_tasks.suite.warm_start import save_actor

SMALL = ModelSize(hidden_size=64, num_layers=2, intermediate_size=168)
WARM_START = WarmStartSettings(
    tasks={
        "arithmetic": WarmTask(share=3.0, corruption=0.25),
        "sort": WarmTask(share=0.4, corruption=0.96),
        "code": WarmTask(share=1.5, corruption=0.6),
        "safe": WarmTask(share=1.0, corruption=0.2),
    },
    size=SMALL,
    steps=1500,
)
"""An actor of 0.11M parameters that starts at about .73, .06, .32 and .79 on the four tasks."""

EXACT = [{"plugin": "exact_match", "name": "exact"}]
TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {"rewards": EXACT},
    "sort": {"rewards": EXACT},
    "code": {
        "rewards": [{"plugin": "multitask_rl_tasks.suite.expressions:ExpressionTests", "name": "tests"}],
        "sampling": {"max_new_tokens": 20},
    },
    "safe": {"rewards": EXACT},
}
"""Entries of a tasks file, without data. ``sampling`` defaults to the longest useful answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRun:
    """One training run."""

    seed: int
    steps: int
    directory: Path
    """Of the claim; the run gets a folder of its own below."""
    name: str
    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: TASKS)
    """Entries of the tasks file; ``dataset`` is added."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the run's configuration, nested, laid over the defaults below."""
    warm_start: WarmStartSettings = WARM_START
    num_train: int = 2048
    num_held_out: int = 256
    skip_held_out: int = 0
    """Held-out prompts left out, in front: those that another run was evaluated on."""


def prepare_actor(directory: Path, settings: WarmStartSettings = WARM_START) -> Path:
    """Return the warm-started actor's directory, made on first use."""
    import torch

    torch.set_num_threads(1)
    text = json.dumps(asdict(settings), sort_keys=True)
    target = directory / "actors" / hashlib.sha256(text.encode()).hexdigest()[:12]
    if not (target / "config.json").is_file():
        save_actor(target, settings, cache_dir=directory / "cache")
    return target


def build_trainer(run: SuiteRun, actor: Actor | None = None) -> Trainer:
    """Write the run's data and return its trainer; ``actor`` goes on where another run left it.

    The same seed draws the same prompts whatever the arm.
    """
    folder = run.directory / "runs" / run.name / str(run.seed)
    shutil.rmtree(folder, ignore_errors=True)
    document: dict[str, Any] = {
        "tasks": {name: _task(name, entry, run, folder) for name, entry in run.tasks.items()},
        "output_dir": str(folder / "run"),
        "max_steps": run.steps,
        "seed": run.seed,
        "num_threads": 1,
        "model": {"name_or_path": str(prepare_actor(run.directory, run.warm_start))},
        # no refill: every arm then spends the same rollouts
        "batch": {"prompts_per_step": 8, "group_size": 8, "refill_rounds": 0},
        "optimizer": {"learning_rate": 1e-4},
        "guard": {"enabled": False},
        "eval": {"every": 50, "num_prompts": run.num_held_out},
        "checkpoint": {"every": 0, "resume": "never"},
        "tracking": {"trackers": ["jsonl"], "store_rollouts": 0},
        "scoring": {"num_workers": 1},
    }
    config: RunConfig = build_dataclass(RunConfig, merged(document, run.overrides), Where(run.name))
    return Trainer.from_config(config) if actor is None else Trainer(actor, config=config)


def levels(trainer: Trainer) -> dict[int, dict[str, float]]:
    """Return step -> task -> mean of the held-out primary metric."""
    return {
        step: {name: sum(e.values) / len(e.values) for name, e in evaluations.items()}
        for step, evaluations in trainer.history
    }


def unseen_levels(run: SuiteRun, actor: Actor, num_prompts: int = 1280) -> dict[str, float]:
    """Return each task's level on held-out prompts that no evaluation of ``run`` has seen.

    A scheduler that corrects itself by its evaluations is judged by others.
    """
    test = replace(
        run,
        name=f"{run.name}-test",
        num_held_out=num_prompts,
        skip_held_out=run.num_held_out,
        overrides={**run.overrides, "eval": {"every": 0, "num_prompts": num_prompts}},
    )
    evaluations = build_trainer(test, actor=actor).evaluate()
    return {name: sum(e.values) / len(e.values) for name, e in evaluations.items()}


def step_metrics(trainer: Trainer) -> Iterator[dict[str, float]]:
    """Yield the numbers of each training step."""
    file = Path(trainer.config.output_dir) / "metrics.jsonl"
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        numbers: dict[str, float] = record.get("metrics", record)
        if any(key.endswith("/weight") for key in numbers):
            yield numbers


def delivered_step(trainer: Trainer) -> int | None:
    """Return the step of the checkpoint that a run stopped by its guard hands over."""
    assert trainer.guard is not None
    entries = trainer.parts.store.checkpoints.entries
    infos = [CheckpointInfo(step=s, judged_good=entries[s].judged_good) for s in sorted(entries)]
    target = trainer.guard.rollback_target(infos)
    good = [info.step for info in infos if info.judged_good]
    return target.step if target is not None else max(good, default=None)


def _task(name: str, entry: Mapping[str, Any], run: SuiteRun, folder: Path) -> dict[str, Any]:
    if name not in SUITE:  # the entry brings its data
        return {"type": "grpo", **entry}
    task = SUITE[name]
    limits = {"train": 1024, "heldout": 395} if name == "code" else {}  # it has no more prompts
    sizes = {"train": run.num_train, "heldout": run.skip_held_out + run.num_held_out}
    files = {}
    for split, number in sizes.items():
        rows = _rows(name, run.seed, split, min(number, limits.get(split, number)))
        if split == "heldout":
            # few prompts: each is answered several times
            rows = list(islice(cycle(rows[run.skip_held_out :]), run.num_held_out))
        files[split] = str(write_rows(folder / f"{name}.{split}.jsonl", rows))
    return {
        "type": "grpo",
        "prompt": task.template,
        "sampling": {"max_new_tokens": task.max_new_tokens},
        **entry,
        "dataset": files["train"],
        "eval_dataset": files["heldout"],
    }


def twin(name: str, run: SuiteRun) -> dict[str, Any]:
    """Return the entry of a second task with the rows of ``name``, drawn in another order."""
    return _task(name, TASKS[name], run, run.directory / "runs" / f"{run.name}-twin" / str(run.seed))


def _rows(name: str, seed: int, split: Any, number: int) -> Sequence[dict[str, Any]]:
    return build_rows(SUITE[name], seed=seed, split=split, num_rows=number)
