"""Claim (h): tasks of many turns are learnt, scheduled and guarded as tasks of one turn are.

Two games, with one token per answer:

- ``guess``: a number from 1 to 7 in three guesses; the world answers "+" or "-". A player that hears nothing
  wins 3 of 7 games at most, one that halves the range wins all.
- ``look_up``: ask for a key, hear its value in a table of this episode, answer the value. Without the world
  one of ten answers is right.

The suite's actor has no words for games: after the prompt it almost always says "2", and reinforcement ends
in a fixed list of guesses. So it first learns the formats from given answers (``type: sft``): in ``guess``
each guess is drawn at random, in ``look_up`` the actor asks for the key most times and then answers at
random. The suite's own tasks are among these rows, partly wrong, so that none is forgotten.

- ``heard``, ``blind``: the two games; the blind player hears "+" or "?", whatever it says.
- ``equal``, ``scheduled``: the games, arithmetic and ``safe``, with equal shares or the default scheduler.
- ``guarded``, ``unguarded``: after ``PLANT_AT`` steps the world of ``guess`` begins to lie ("+" for "-"), in
  training and evaluation, for good. ``honest`` is the level of the weights that are handed over.

Levels are success rates at temperature 1 of the weights handed over, on ``NUM_TEST`` prompts that no
evaluation has seen, in honest worlds (the blind player's stays deaf).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from claims.base import Arm, Arms, Claim, Metrics, Options, difference, mean, table, with_interval
from claims.guard import ALARMS
from claims.plants import GuardWithPlant
from claims.suite import (
    TASKS,
    WARM_START,
    SuiteRun,
    build_trainer,
    delivered_step,
    levels,
    prepare_actor,
)
from multitask_rl.environments.base import Message, StepResult
from multitask_rl.errors import GuardStop
from multitask_rl.records import Scored
from multitask_rl.run.checkpoint import model_directory
from multitask_rl.seeding import random_stream
from multitask_rl.step.flow import Stage
from multitask_rl_tasks.environments.number_game import NumberGame
from multitask_rl_tasks.suite import SUITE, build_rows, write_rows

EVERY = 10
"""Steps between evaluations of the guarded runs."""
PLANT_AT = 100
GUARDED_STEPS = 180
MIXED_STEPS = 300
FOUND_WITHIN = 5
"""Evaluations in which the guard has to find the lie."""
NUM_TEST = 1024
FORMAT_STEPS = 300
NUM_FORMAT_ROWS = 3000
ASKED = 0.8
"""Share of the format rows of ``look_up`` that ask for the key of the prompt."""
WRONG = {"arithmetic": 0.25, "safe": 0.2}
"""Share of wrong answers in the format rows of the suite's tasks."""
WIDE: Mapping[str, Any] = {
    "batch": {"prompts_per_step": 32, "group_size": 4},
    "optimizer": {"learning_rate": 5e-4},
}
"""Many prompts a step: with few, the numbers that a step happens to draw decide which guesses it favours."""
MIXED: Mapping[str, Any] = {
    "batch": {"prompts_per_step": 8, "group_size": 8},
    "optimizer": {"learning_rate": 3e-4, "schedule": "linear"},
}


class LyingGame(NumberGame):
    """The game of ``guess``; it lies from the moment that the file which ``unclear`` names exists."""

    def step(self, message: Message) -> StepResult:
        """Swap the answers once it lies."""
        if Path(self.config.unclear).exists():
            higher, lower = self.config.higher, self.config.lower
            self.config.higher, self.config.lower = lower, higher
            try:
                return super().step(message)
            finally:
                self.config.higher, self.config.lower = higher, lower
        return super().step(message)


class LookUp:
    """Ask for a key, hear its value, answer the value; the table of ten digits depends on the row's seed."""

    @dataclass(kw_only=True)
    class Config:
        """Keys of ``environment_config``."""

        mute: bool = False
        """Answer "?" to any question."""

    def __init__(self, config: Config) -> None:
        self._mute = config.mute
        self._table: dict[str, str] = {}
        self._value = ""
        self._has_asked = False

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Draw the table; the row has ``seed`` and ``key``."""
        values = random_stream(row["seed"], "look_up").sample(range(10), 10)
        self._table = {str(key): str(value) for key, value in enumerate(values)}
        self._value = self._table[row["key"]]
        return []

    def step(self, message: Message) -> StepResult:
        """Answer a question; the second answer ends the episode with 1 for the value, else 0."""
        said = message["content"]
        if self._has_asked:
            return StepResult(done=True, reward=float(said == self._value))
        self._has_asked = True
        heard = "?" if self._mute else self._table.get(said, "?")
        return StepResult(messages=[{"role": "user", "content": heard}], reward=0.0)


class _Plant(Stage):
    """Creates the file at the step of the plant."""

    name = "plant"
    consumes = produces = Scored

    def __init__(self, flag: Path) -> None:
        super().__init__()
        self._flag = flag
        self._steps = 0

    def process(self, items: list[Scored]) -> list[Scored]:
        self._steps += 1
        if self._steps > PLANT_AT:
            self._flag.touch()
        return items


def game_row(name: str, seed: int) -> dict[str, Any]:
    """Return the row of a game; ``seed`` decides what the world hides."""
    if name == "guess":
        return {"prompt": "1-7?", "seed": seed, "level": 3}
    return {"prompt": f"L{seed % 10}>", "seed": seed, "key": str(seed % 10)}


def games(
    directory: Path, seed: int, names: Sequence[str], *, held_out: int, deaf: bool = False, lies: str = ""
) -> dict[str, dict[str, Any]]:
    """Return the entries of games, with their rows written into ``directory``.

    ``held_out`` numbers the set of held-out rows; ``deaf``: worlds say nothing of use; ``lies``: file that
    makes ``guess`` lie.
    """
    worlds: dict[str, dict[str, Any]] = {
        "guess": {
            "environment": f"{__file__}:LyingGame" if lies else "number_game",
            "environment_config": {"higher": "+", "lower": "+" if deaf else "-", "unclear": lies or "?"},
            "max_turns": 3,
        },
        "look_up": {
            "environment": f"{__file__}:LookUp",
            "environment_config": {"mute": deaf},
            "max_turns": 2,
        },
    }
    entries = {}
    for name in names:
        files = {}
        for split, first, number in (("train", 0, 2048), ("heldout", held_out * 10**6, NUM_TEST)):
            rows = [game_row(name, seed * 10**8 + first + i) for i in range(number)]
            files[split] = str(write_rows(directory / f"{name}.{split}.{held_out}.jsonl", rows))
        entries[name] = {
            **worlds[name],
            "dataset": files["train"],
            "eval_dataset": files["heldout"],
            "prompt": "{prompt}",
            "sampling": {"max_new_tokens": 1},
            "rewards": ["environment"],
            "primary_metric": "environment",
        }
    return entries


def format_rows(name: str) -> Iterator[dict[str, str]]:
    """Yield prompts with a given answer: the form of a game's turns, or the suite's answers, partly wrong."""
    stream = random_stream(0, "turns", "format", name)
    if name in SUITE:
        task = SUITE[name]
        for row in build_rows(task, seed=0, split="train", num_rows=NUM_FORMAT_ROWS):
            shown = task.corrupt if stream.random() < WRONG[name] else task.answer
            yield {"prompt": task.render(row), "answer": shown(row, stream)}
    for seed in range(0 if name in SUITE else NUM_FORMAT_ROWS):
        row = game_row(name, seed)
        if name == "guess":
            said, guesses = _guesses(stream), stream.randint(0, 2)
            yield {"prompt": row["prompt"] + "".join(said[:guesses]), "answer": str(stream.randint(1, 7))}
        elif stream.random() < 0.5:
            yield {"prompt": row["prompt"], "answer": _question(row, stream)}
        else:
            said_before = f"{_question(row, stream)}\n{stream.randint(0, 9)}\n"
            yield {"prompt": row["prompt"] + said_before, "answer": str(stream.randint(0, 9))}


def _guesses(stream: Random) -> list[str]:
    """Return two random guesses with what the world says to them."""
    number = stream.randint(1, 7)
    drawn = [stream.randint(1, 7) for _ in range(2)]
    return [f"{guess}\n{'+' if guess < number else '-'}\n" for guess in drawn]


def _question(row: Mapping[str, Any], stream: Random) -> str:
    return str(row["key"] if stream.random() < ASKED else stream.randint(0, 9))


def prepare_formats(directory: Path) -> Path:
    """Return the directory of the actor that knows the formats, made on first use."""
    names = ("guess", "look_up", *WRONG)
    rows = {name: list(format_rows(name)) for name in names}
    key = json.dumps([rows, FORMAT_STEPS, str(prepare_actor(directory, WARM_START).name)], sort_keys=True)
    target = directory / "actors" / f"turns-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    tasks = {
        f"format_{name}": {
            "type": "sft",
            "dataset": str(write_rows(directory / "formats" / f"{name}.jsonl", rows[name])),
            "prompt": "{prompt}",
            "sampling": {"max_new_tokens": 9},
        }
        for name in names
    }
    settings = {
        "batch": {"prompts_per_step": 64, "group_size": 1},
        "optimizer": {"learning_rate": 5e-4},
        "eval": {"every": 0, "num_prompts": 8},
    }
    run = SuiteRun(
        seed=0, steps=FORMAT_STEPS, directory=directory, name="turns-formats", tasks=tasks, overrides=settings
    )
    with build_trainer(run) as trainer:
        trainer.train()
        newest = trainer.parts.store.checkpoints.newest()
    assert newest is not None
    shutil.copytree(newest.actor_dir, target)
    return target


def run_arm(arm: Arm, seed: int, options: Options) -> Metrics:
    """Train once; return the metrics of the arm's part of the claim."""
    part = arm.settings["part"]
    if part == "guard":
        return _guarded(arm, seed, options)
    folder = options.directory / "games" / arm.name / str(seed)
    names = ("guess", "look_up")
    if part == "learning":
        deaf = arm.settings["blind"]
        tasks, test = (games(folder, seed, names, held_out=n, deaf=deaf) for n in (1, 2))
        steps, settings = options.steps, {**WIDE, "scheduler": {"policy": "uniform"}}
    else:
        own = {name: TASKS[name] for name in WRONG}
        tasks, test = ({**games(folder, seed, names, held_out=n), **own} for n in (1, 2))
        steps, settings = MIXED_STEPS, {**MIXED, "scheduler": {"policy": arm.settings["policy"]}}
    run = _run(arm, seed, options, steps, tasks, **settings)
    with build_trainer(run) as trainer:
        trainer.train()
        found = levels(trainer)
    final = tested(replace(run, tasks=test), Path(trainer.config.output_dir))
    if part == "learning":
        before = {f"{name}_before": found[0][name] for name in names}
        return {**before, **{f"{name}_after": final[name] for name in names}}
    return {
        "worst": min(final.values()),
        "mean": mean(list(final.values())),
        # over the run: how early the last task gets on
        "worst_over_run": mean([min(found[step].values()) for step in sorted(found)]),
        **{f"final/{task}": level for task, level in final.items()},
    }


def tested(run: SuiteRun, weights: Path) -> dict[str, float]:
    """Return the level of each task of ``run`` with the weights of a run or a checkpoint."""
    test = replace(
        run,
        name=f"{run.name}-test",
        skip_held_out=run.num_held_out,
        num_held_out=NUM_TEST,
        overrides={
            **run.overrides,
            "model": {"name_or_path": model_directory(str(weights))},
            "eval": {"every": 0, "num_prompts": NUM_TEST},
            "guard": {"enabled": False},
        },
    )
    with build_trainer(test) as trainer:
        return {name: mean(evaluation.values) for name, evaluation in trainer.evaluate().items()}


def _run(
    arm: Arm, seed: int, options: Options, steps: int, tasks: Mapping[str, Any], **overrides: Any
) -> SuiteRun:
    return SuiteRun(
        seed=seed,
        steps=steps,
        directory=options.directory,
        name=f"turns-{arm.name}",
        tasks=tasks,
        overrides={
            "model": {"name_or_path": str(prepare_formats(options.directory))},
            # arms of a pair are equal up to what they differ in
            "rollout": {"lockstep": True, "environment_workers": 1},
            "eval": {"every": 50, "num_prompts": 256},
            **overrides,
        },
        num_held_out=256,
    )


def _guarded(arm: Arm, seed: int, options: Options) -> Metrics:
    folder = options.directory / "games" / arm.name / str(seed)
    flag = folder / "lies"
    folder.mkdir(parents=True, exist_ok=True)
    flag.unlink(missing_ok=True)
    tasks = games(folder, seed, ["guess"], held_out=1, lies=str(flag))
    # a player that has stopped trying would not notice what pays in the world that lies
    tasks["guess"]["algorithm_config"] = {"entropy_coefficient": 0.01}
    settings = {
        **WIDE,
        "guard": {"enabled": True},
        "eval": {"every": EVERY, "num_prompts": 256},
        "checkpoint": {"every": EVERY, "keep": 12, "resume": "never"},
    }
    run = _run(arm, seed, options, GUARDED_STEPS, tasks, **settings)
    with build_trainer(run) as trainer:
        trainer.add_guard(GuardWithPlant(is_deaf=arm.settings["deaf"]))
        trainer.insert_stage(_Plant(flag), after="rewards")
        weights = Path(trainer.config.output_dir)
        try:
            trainer.train()
        except GuardStop:
            step = delivered_step(trainer)
            assert step is not None
            weights = trainer.parts.store.checkpoints.path(step)
        found = levels(trainer)
        alarms = [e.step for e in trainer.events if e.source == "guard" and e.kind in ALARMS]
    late = [step for step in alarms if step > PLANT_AT]
    delay = (late[0] - PLANT_AT + EVERY - 1) // EVERY if late else math.nan
    honest = tested(replace(run, tasks=games(folder, seed, ["guess"], held_out=2)), weights)
    return {
        "level_before": mean([found[s]["guess"] for s in sorted(found) if PLANT_AT - 30 < s <= PLANT_AT]),
        "false_alarms": float(sum(step <= PLANT_AT for step in alarms)),
        "detected": float(bool(late) and delay <= FOUND_WITHIN),
        "delay": float(delay),
        "honest": honest["guess"],
    }


PARTS = (
    (
        ("blind", "heard"),
        ("guess_before", "guess_after", "look_up_before", "look_up_after"),
        ("guess_after", "look_up_after"),
    ),
    (("equal", "scheduled"), ("worst", "mean", "worst_over_run"), ("worst", "mean", "worst_over_run")),
    (("unguarded", "guarded"), ("level_before", "false_alarms", "detected", "delay", "honest"), ("honest",)),
)
"""Arms of a part, their metrics in the table, the metrics that are compared."""


def render(arms: Arms) -> str:
    """Return a table per part, with the paired differences."""
    parts = []
    for names, metrics, compared in PARTS:
        known = [name for name in names if name in arms]
        if not known:
            continue
        more = [m for m in arms[known[0]] if m.startswith("final/")]
        header = ["arm", *metrics, *more]
        rows = [[n, *(f"{mean(arms[n][m]):.3f}" for m in (*metrics, *more))] for n in known]
        parts.append(table(header, rows))
        if len(known) == 2:
            parts.append("\n".join(_difference(arms, known[0], known[1], metric) for metric in compared))
    return "\n\n".join(parts)


def _difference(arms: Arms, base: str, other: str, metric: str) -> str:
    found = difference(arms, base, other, metric)
    pairs = zip(arms[base][metric], arms[other][metric], strict=True)
    each = ", ".join(f"{b - a:+.3f}" for a, b in pairs)
    return f"- {metric}, {other} minus {base}: {with_interval(found)} (per seed {each})."


CLAIM = Claim(
    name="turns",
    statement=(
        "Tasks that cannot be solved in one turn are learnt with feedback (without it at most 3 of 7 guesses "
        "and 1 of 10 look-ups succeed); two tasks of many turns and two of one, mixed by the default "
        "scheduler, beat equal shares in the worst task; a world that begins to lie is found within "
        f"{FOUND_WITHIN} evaluations, and what is handed over has not learnt from the lie."
    ),
    steps=150,
    arms=(
        Arm(name="heard", settings={"part": "learning", "blind": False, **WIDE}),
        Arm(name="blind", settings={"part": "learning", "blind": True, **WIDE}),
        Arm(name="equal", settings={"part": "mixture", "policy": "uniform", **MIXED}),
        Arm(name="scheduled", settings={"part": "mixture", "policy": "deficit_learnability", **MIXED}),
        Arm(name="guarded", settings={"part": "guard", "deaf": False, **WIDE}),
        Arm(name="unguarded", settings={"part": "guard", "deaf": True, **WIDE}),
    ),
    run=run_arm,
    render=render,
    prepare=lambda options: prepare_formats(options.directory) and None,
)
