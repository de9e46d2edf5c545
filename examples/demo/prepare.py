"""What the demo needs before it trains: a warm-started actor, two trained judges, data, a tasks file.

Takes about 90 s on one core the first time, a second afterwards (cached by a hash of all that shapes the
result). The models are the same for every seed; the seed draws the data.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

from multitask_rl_tasks.suite import SUITE, build_rows, write_rows
from multitask_rl_tasks.suite.judges import save_reward_model, save_safety_classifier
from multitask_rl_tasks.suite.settings import (
    FIGURES_FILE,
    JudgeSettings,
    RewardModelSettings,
    WarmStartSettings,
    WarmTask,
)
from multitask_rl_tasks.suite.warm_start import save_actor

__all__ = ["Prepared", "prepare"]

QUANTILES = 5
"""Reward levels of the ``code`` task, as in ``tasks.yaml``."""
ACTOR = WarmStartSettings(
    tasks={
        "arithmetic": WarmTask(share=3.0, corruption=0.5),
        "code": WarmTask(share=2.5, corruption=0.7, control_levels=QUANTILES, control_signal=0.5),
        "preference": WarmTask(share=0.4, corruption=0.0),
        "safe": WarmTask(share=1.0, corruption=0.35),
    },
    steps=1200,
)
REWARD_MODEL = RewardModelSettings(num_examples=4000, noise=0.25, epochs=4)
SAFETY_CLASSIFIER = JudgeSettings(num_examples=2000, noise=0.05, epochs=2)
NUM_TRAIN, NUM_HELD_OUT = 1024, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Where everything is, and what was measured while making it."""

    directory: Path
    actor: Path
    tasks_file: Path
    figures: dict[str, dict[str, Any]]
    """By model: parameters, seconds, error rates."""


def prepare(directory: Path, seed: int, cache_dir: Path, effort: float = 1.0) -> Prepared:
    """Write models, data and the tasks file under ``directory``.

    Args:
        directory: becomes ``actor/``, ``reward_model/``, ``safety_classifier/``, ``data/``, ``tasks.yaml``.
        seed: of the rows.
        cache_dir: where trained models are kept for the next call.
        effort: share of the models' training, in [0.05, 1].
    """
    directory, cache_dir = directory.resolve(), cache_dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for name in ACTOR.tasks:
        train = build_rows(SUITE[name], seed=seed, split="train", num_rows=NUM_TRAIN)
        held_out = build_rows(SUITE[name], seed=seed, split="heldout", num_rows=NUM_HELD_OUT)
        write_rows(directory / "data" / f"{name}.train.jsonl", train)
        write_rows(directory / "data" / f"{name}.heldout.jsonl", held_out)
    template = Path(__file__).with_name("tasks.yaml").read_text(encoding="utf-8")
    tasks_file = directory / "tasks.yaml"
    tasks_file.write_text(Template(template).substitute(directory=directory.as_posix()), encoding="utf-8")
    # The judges train in a second process while this one warms up the actor. Not by `multiprocessing`: its
    # fresh interpreter would run the caller's main module again.
    command = [sys.executable, str(Path(__file__).resolve()), str(directory), str(cache_dir)]
    with subprocess.Popen([*command, str(effort)]) as judges:
        figures = {"actor": _make_actor(directory, cache_dir, effort)}
    if judges.returncode:
        raise RuntimeError(
            f"training the judges failed with exit code {judges.returncode}; its error is above"
        )
    for name in ("reward_model", "safety_classifier"):
        figures[name] = json.loads((directory / name / FIGURES_FILE).read_text(encoding="utf-8"))
    return Prepared(directory=directory, actor=directory / "actor", tasks_file=tasks_file, figures=figures)


def _make_actor(directory: Path, cache_dir: Path, effort: float) -> dict[str, Any]:
    _make_quiet_and_repeatable()
    settings = replace(ACTOR, steps=round(effort * ACTOR.steps))
    return save_actor(directory / "actor", settings, cache_dir=cache_dir)


def _make_judges(directory: Path, cache_dir: Path, effort: float) -> None:
    _make_quiet_and_repeatable()
    reward_model, classifier = (
        replace(settings, num_examples=round(effort * settings.num_examples))
        for settings in (REWARD_MODEL, SAFETY_CLASSIFIER)
    )
    save_reward_model(directory / "reward_model", reward_model, cache_dir=cache_dir)
    save_safety_classifier(directory / "safety_classifier", classifier, cache_dir=cache_dir)


def _make_quiet_and_repeatable() -> None:
    """More threads than one slow a model of this size, and would make its weights depend on the machine."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()


if __name__ == "__main__":
    _make_judges(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
