"""Runs whose tasks change at resumes: stopped at random, they must equal runs that were not stopped.

    python benchmarks/histories.py --histories 40 --seed 0 --json histories.json

A history is a run of two to four parts. Each part trains some steps with its own tasks file: between parts
tasks are added, removed, renamed and brought back, and get another weight, reward or curriculum, or are only
evaluated from then on. A part goes on with the run, goes back to one of its checkpoints, forks it, or goes on
in its moved or copied directory; it may have another scheduler, learning rate or number of rollouts. Types,
worlds, constraints, curricula, scheduler, guard and intervals are drawn at random. One run goes through the
parts undisturbed. The other is stopped at three random moments, by SIGTERM, after which it saves, or by a
kill, and begun again with the same settings. Weights, and records of every directory, must be equal, and each
directory must give a report.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from multitask_rl.cli.comparison import main_compare
from multitask_rl.cli.report import main_report
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
)
from multitask_rl.errors import ConfigError
from multitask_rl.records import Scored
from multitask_rl.step.flow import Stage
from multitask_rl.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

from run_builders import lines, run_config, weights_hash, write_run

POLICIES = (
    "deficit_learnability",
    "bandit",
    "patience",
    "mt_grpo",
    "learnability",
    "static",
    "tac",
    "straggler",
)
RECORDS = ("metrics.jsonl", "evaluations.jsonl", "rollouts.jsonl", "events.jsonl")
WORLD = """
import random
from multitask_rl.environments.base import StepResult


class World:
    def __init__(self, seed):
        self.random, self.turn = random.Random(seed), 0

    def reset(self, row):
        return []

    def step(self, message):
        self.turn += 1
        reply = [{"role": "user", "content": self.random.choice("abc") * 3}]
        reward = self.random.random() if message["content"] else 0.0
        return StepResult(messages=reply, done=self.turn == 3, reward=reward)
"""
Tasks = dict[str, dict[str, Any]]


class Part(NamedTuple):
    """Steps of a history under one tasks file."""

    tasks: Tasks
    end: int
    """The step at which it ends."""
    begins: str
    """``on`` (with the run), ``back`` (at one of its checkpoints), ``fork``, ``move`` or ``copy``."""
    place: float
    """``back`` and ``fork``: which checkpoint, from the oldest (0) to the newest (1)."""
    changes: dict[str, Any]
    """Settings that change with this part."""


class Stop(NamedTuple):
    """One end of the process before its time."""

    step: int
    """It comes in this step, or in a later one."""
    kills_after_s: float | None
    """Seconds from the step's rewards to a kill; None = SIGTERM instead."""


class Stopper(Stage):
    """Stops this process once the samples of the step have come by."""

    name = "stopper"
    consumes = produces = Scored

    def __init__(self, trainer: Trainer, stop: Stop) -> None:
        self._trainer, self._stop = trainer, stop
        self._is_done = False

    def process(self, items: list[Scored]) -> list[Scored]:
        """Return ``items``."""
        if self._trainer.step + 1 >= self._stop.step and not self._is_done:
            self._is_done = True
            if self._stop.kills_after_s is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process at once
                signal.setitimer(signal.ITIMER_REAL, self._stop.kills_after_s)
        return items


def is_learner(task: dict[str, Any]) -> bool:
    """Return whether the task is trained by GRPO or PPO: a history always has one."""
    return task["type"] in ("grpo", "ppo") and not task.get("evaluation_only")


def draw_task(rng: random.Random) -> dict[str, Any]:
    """Return the definition of a random task."""
    kinds = "grpo grpo ppo reward_conditioned constrained_decoding world sft anchor distill dapo gdpo"
    kind, data = rng.choice(f"{kinds} reinforce_pp".split()), rng.choice(["copy.jsonl", "digit.jsonl"])
    task: dict[str, Any] = {"type": kind, "dataset": data, "weight": rng.choice([1, 2, 3])}
    if kind == "world":
        task |= {"type": "grpo", "environment": "worlds.py:World", "max_turns": 4}
    elif kind in ("sft", "anchor"):
        task["answer"] = "{reference}"
    elif kind == "distill":
        task["teacher"] = "actor"
    else:
        task["rewards"] = [rng.choice(["rewards.py:starts_right", "rewards.py:is_short"])]
    if kind == "anchor":
        del task["weight"]
    elif kind == "constrained_decoding":
        task["constraints"] = [{"plugin": "rewards.py:has_no_digit", "mode": "reject", "max_attempts": 3}]
    elif kind in ("grpo", "ppo") and rng.random() < 0.3:
        task["constraints"] = [{"plugin": "rewards.py:has_no_digit", "mode": "lagrangian", "limit": 0.3}]
    if kind in ("ppo", "reward_conditioned"):
        task["kl"] = {"coefficient": 0.01}
    if kind == "reward_conditioned":
        task["algorithm_config"] = {"quantiles": 3}
    elif kind == "grpo" and rng.random() < 0.4:
        task["algorithm_config"] = {"mask_truncated": True}
    if is_learner(task) and rng.random() < 0.5:
        task["curriculum"] = {"by": rng.choice(["pass_rate", "id"]), "pools": 3}
    if kind != "anchor" and rng.random() < 0.2:
        task["select"] = {"reference": ["a", "b"] if data == "copy.jsonl" else ["0", "1"]}
    if kind not in ("anchor", "sft") and rng.random() < 0.2:
        task["sampling"] = {"temperature": 0.7}
    if kind not in ("anchor", "sft", "distill") and rng.random() < 0.2:
        task["eval_samples"] = 2
    return task


def change(tasks: Tasks, first: Tasks, rng: random.Random, number: int) -> None:
    """Change the tasks at random; new ones are called ``t<number>``."""
    name, what = rng.choice(list(tasks)), rng.choice(["add", "remove", "rename", "back", "edit", "edit"])
    task = tasks[name]
    num_learners = sum(map(is_learner, tasks.values()))
    if what == "add":
        tasks[f"t{number}"] = draw_task(rng)
    elif what == "remove" and num_learners > is_learner(task):
        del tasks[name]
    elif what == "rename":
        tasks[f"t{number}"] = {**tasks.pop(name), "renamed_from": task.get("renamed_from", name)}
    elif what == "back":
        known = {*tasks, *(task.get("renamed_from") for task in tasks.values())}
        tasks.update({own: copy.deepcopy(first[own]) for own in list(first)[:1] if own not in known})
    elif what == "edit":
        if task.get("rewards") and rng.random() < 0.4:
            task["rewards"] = [rng.choice(["rewards.py:starts_right", "rewards.py:is_short"])]
        elif is_learner(task) and num_learners > 1 and rng.random() < 0.3:
            task["evaluation_only"] = True
        elif is_learner(task) and rng.random() < 0.5:
            task["curriculum"] = {"by": "pass_rate", "pools": rng.choice([2, 4])}
        elif "weight" in task:
            task["weight"] = rng.choice([1, 2, 5])


def draw_history(rng: random.Random) -> list[Part]:
    """Return the parts of a random history."""
    tasks = {f"t{i}": draw_task(rng) for i in range(rng.randint(2, 4))}
    if not any(map(is_learner, tasks.values())):
        reward = "rewards.py:starts_right"
        tasks["t0"] = {"type": "grpo", "dataset": "copy.jsonl", "weight": 1, "rewards": [reward]}
    parts = list[Part]()
    end = 0
    for index in range(rng.randint(2, 4)):
        end += rng.randint(2, 4)
        begins = rng.choice(["on", "on", "back", "fork", "fork", "move", "copy"]) if index else "on"
        changes = draw_changes(rng) if index and rng.random() < 0.4 else {}
        parts.append(Part(copy.deepcopy(tasks), end, begins, rng.random(), changes))
        for task in tasks.values():
            task.pop("renamed_from", None)
        for number in range(rng.randint(0, 2)):
            change(tasks, parts[0].tasks, rng, 10 * end + number)
    return parts


def draw_changes(rng: random.Random) -> dict[str, Any]:
    """Return a change of the settings."""
    return rng.choice(
        [
            {"scheduler": SchedulerConfig(policy=rng.choice(POLICIES))},
            {"optimizer": OptimizerConfig(learning_rate=1e-2)},
            {"batch": BatchConfig(prompts_per_step=8, group_size=4)},
            {"eval": EvalConfig(every=1, num_prompts=rng.choice([6, 9]))},
            {"seed": rng.randrange(1000)},
        ]
    )


def draw_settings(rng: random.Random) -> dict[str, Any]:
    """Return the settings of a run."""
    settings: dict[str, Any] = {
        "rollout": RolloutConfig(max_new_tokens=4, lockstep=True),
        "batch": BatchConfig(prompts_per_step=rng.choice([6, 9]), group_size=rng.choice([2, 3])),
        "scheduler": SchedulerConfig(policy=rng.choice(POLICIES)),
        "optimizer": OptimizerConfig(learning_rate=rng.choice([1e-3, 3e-2])),
        "eval": EvalConfig(every=rng.choice([1, 2, 3]), num_prompts=6),
        "checkpoint": CheckpointConfig(every=rng.choice([1, 2, 3]), keep=100),
        "guard": GuardConfig(enabled=rng.random() < 0.7),
        "seed": rng.randrange(1000),
    }
    if settings["guard"].enabled:  # an interrupt's checkpoint would be one more that a rollback may return to
        settings["checkpoint"] = CheckpointConfig(every=1, keep=100)
    return settings


def train_in_child(config: RunConfig, stop: Stop | None, result: Path) -> int:
    """Train in a process of its own, which writes the hash of the weights to ``result``.

    Returns:
        Its exit status: 0, that of an error, 130 after SIGTERM, below 0 if it was killed.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            trainer = Trainer.from_config(config)
            if stop is not None:
                trainer.insert_stage(Stopper(trainer, stop), after="rewards")
            trainer.train()
            result.write_text(weights_hash(trainer))
            status = 0
        except KeyboardInterrupt:
            status = 130
        except Exception as error:  # noqa: BLE001 - the parent ends with it
            status = error.exit_code if isinstance(error, ConfigError) else 1
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_history(
    place: Path,
    name: str,
    parts: list[Part],
    settings: dict[str, Any],
    stops: list[Stop],
    chosen: dict[int, str],
) -> tuple[dict[str, Any], Counter[str]]:
    """Go through the parts, stopped at ``stops``; return weights and records, and the stops that came.

    ``chosen`` gets, and then gives, the checkpoint at which a part begins.

    Raises:
        ConfigError: the combination is not allowed.
    """
    waiting, came = list(stops), Counter[str]()
    directories = [place / name]
    for index, part in enumerate(parts):
        tasks, end, begins = part.tasks, part.end, part.begins
        former = directories[-1]
        saved = sorted(path.name for path in (former / "checkpoints").glob("step_*"))
        checkpoint = {}
        if begins in ("back", "fork"):
            at = chosen.setdefault(index, saved[round(part.place * (len(saved) - 1))])
            kept = settings["checkpoint"]
            checkpoint = {"checkpoint": replace(kept, resume=str(former / "checkpoints" / at))}
        if begins in ("fork", "move", "copy"):
            directories.append(place / f"{name}_{index}")
        if begins == "copy":
            shutil.copytree(former, directories[-1])
        elif begins == "move":
            former.rename(directories[-1])
            del directories[-2]
        settings = settings | part.changes
        (place / "tasks.yaml").write_text(yaml.safe_dump({"tasks": tasks}, sort_keys=False))
        config: RunConfig = run_config(place, directories[-1].name, end, **(settings | checkpoint))
        while status := train_in_child(config, waiting[0] if waiting else None, place / "hash"):
            if status == ConfigError.exit_code:
                raise ConfigError(f"part {index} is refused")
            if status == 1:
                raise RuntimeError(f"part {index} failed")
            came["kills" if status < 0 else "interrupts"] += 1
            del waiting[0]
            # a fork without a checkpoint begins again; else as `multitask-rl train output_dir=RUN` does
            if begins != "fork" or any((directories[-1] / "checkpoints").glob("step_*")):
                config = replace(config, checkpoint=settings["checkpoint"])
    found: dict[str, Any] = {"weights": (place / "hash").read_text()}
    for number, directory in enumerate(directories):
        (directory / "events.jsonl").touch()  # there is none without an event
        for own in RECORDS:
            rows = lines(directory, own, without=("/reward_cache_hits",))
            found[f"{number}/{own}"] = [row.replace(f"/{name}", "/NAME") for row in rows]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        for directory in directories:
            main_report([str(directory), "--html", str(directory / "report.html")])
        main_report([*map(str, directories), "--json"])
        if len(directories) > 1:
            main_compare([*map(str, directories), "--json"])
    if "NaN" in told.getvalue() or "Traceback" in told.getvalue():
        found["told"] = told.getvalue()
    return found, came


def main() -> None:
    """Run as many histories as the arguments say; exit 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--histories", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next has the next")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"same": 0, "refused": 0, "interrupts": 0, "kills": 0, "wrong": []}
    for seed in range(options.seed, options.seed + options.histories):
        rng = random.Random(seed)
        parts, settings = draw_history(rng), draw_settings(rng)
        steps, chosen = sorted(rng.sample(range(1, parts[-1].end + 1), 3)), dict[int, str]()
        kinds = rng.sample([None, rng.uniform(0, 0.3), rng.uniform(0, 0.3)], 3)
        stops = [Stop(*stop) for stop in zip(steps, kinds, strict=True)]
        with tempfile.TemporaryDirectory(prefix="history_") as folder:
            write_run(Path(folder))
            (Path(folder) / "worlds.py").write_text(WORLD)
            try:
                expected, _ = run_history(Path(folder), "undisturbed", parts, settings, [], chosen)
            except ConfigError as error:  # a combination that is not allowed
                print(f"history {seed}: {error}", file=sys.stderr)
                result["refused"] += 1
                continue
            found, came = run_history(Path(folder), "stopped", parts, settings, stops, chosen)
        for kind, number in came.items():
            result[kind] += number
        differing = [name for name in expected if found[name] != expected[name]]
        result["same"] += not differing
        if differing:
            result["wrong"].append({"history": seed, "stops": stops, "differing": differing})
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    raise SystemExit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
