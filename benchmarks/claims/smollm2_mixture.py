"""The scheduler's policies on the chat model where its tasks differ in what they have left to learn.

Five tasks whose answers are short, so that a step takes a fifth of the time of one of ``smollm2``: sums,
the largest of three or four numbers, the kind of a thing, the first word of a list, a number to repeat. The
last two are soon solved. No test prompt is a training prompt; no word of ``kind`` is in two splits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from claims.base import Arm, Claim, Options
from claims.smollm2 import Run, prepare, render, run_arm, write_mixture
from multitask_rl.seeding import random_stream
from multitask_rl_tasks.suite import write_rows

EVERY = 10
"""Steps between evaluations."""
NUM_TEST = 128
SPLITS = {"train": 800, "validation": 64, "test": NUM_TEST}
"""Rows of each split."""
KINDS = {
    "animal": (
        *("cat", "dog", "horse", "lion", "rabbit", "sheep", "goat", "tiger", "mouse", "wolf", "bear", "fox"),
        *("eagle", "cow", "pig", "duck", "frog", "snake", "monkey", "elephant", "zebra", "camel", "deer"),
        *("donkey", "whale", "shark", "owl", "parrot", "turtle", "spider", "crab", "penguin"),
    ),
    "food": (
        *("bread", "cheese", "apple", "rice", "soup", "cake", "pasta", "banana", "carrot", "lemon", "butter"),
        *("pizza", "potato", "onion", "tomato", "salad", "honey", "yogurt", "pancake", "sausage", "cookie"),
        *("grape", "peach", "bean", "noodle", "omelette", "sandwich", "spinach", "melon", "pear", "plum"),
        "cabbage",
    ),
    "tool": (
        *("hammer", "saw", "drill", "wrench", "pliers", "axe", "shovel", "chisel", "screwdriver", "ladder"),
        *("rake", "broom", "scissors", "knife", "needle", "crowbar", "file", "clamp", "hoe", "pickaxe"),
        *("spanner", "mallet", "trowel", "tweezers", "sickle", "vise", "level", "stapler", "brush", "spade"),
        *("plunger", "anvil"),
    ),
    "vehicle": (
        *("car", "truck", "bus", "train", "bicycle", "boat", "ship", "plane", "tractor", "tram", "van"),
        *("scooter", "motorcycle", "helicopter", "taxi", "ferry", "canoe", "ambulance", "wagon", "yacht"),
        *("submarine", "rocket", "kayak", "sled", "limousine", "trolley", "jeep", "raft", "minibus"),
        *("rickshaw", "glider", "lorry"),
    ),
}
ORDERS = (
    "an animal, a food, a tool or a vehicle",
    "a vehicle, a tool, a food or an animal",
    "a food, a vehicle, an animal or a tool",
    "a tool, an animal, a vehicle or a food",
)
QUOTAS = {"train": 16, "validation": 4, "test": 12}
"""Of the 32 words of a kind."""
WORDS = [word for words in KINDS.values() for word in words]
assert all(len(set(words)) == sum(QUOTAS.values()) for words in KINDS.values())

Row = dict[str, Any]
"""``prompt``, ``reference`` and, for ``label_match``, ``labels``."""


def _sum(stream: random.Random) -> Row:
    a, b = stream.randrange(11, 100), stream.randrange(11, 100)
    return {"prompt": f"What is {a} + {b}? Answer with the number only.", "reference": str(a + b)}


def _largest(stream: random.Random) -> Row:
    numbers = stream.sample(range(10, 1000), stream.choice((3, 4)))
    shown = ", ".join(map(str, numbers))
    prompt = f"Which number is the largest: {shown}? Answer with the number only."
    return {"prompt": prompt, "reference": str(max(numbers))}


def _first(stream: random.Random) -> Row:
    words = stream.sample(WORDS, 4)
    prompt = f"What is the first word of this list: {', '.join(words)}? Answer with one word."
    return {"prompt": prompt, "reference": words[0], "labels": words}


def _copy(stream: random.Random) -> Row:
    number = str(stream.randrange(1000, 10000))
    return {"prompt": f"Repeat this number and say nothing else: {number}", "reference": number}


def _rows_of(make: Callable[[random.Random], Row], name: str) -> list[Row]:
    stream, rows = random_stream(0, "smollm2_mixture", name), dict[str, Row]()
    for split, number in SPLITS.items():
        end = len(rows) + number
        while len(rows) < end:
            row = make(stream)
            rows.setdefault(row["prompt"], row | {"split": split})
    return list(rows.values())


def _kind_rows() -> Iterator[Row]:
    stream = random_stream(0, "smollm2_mixture", "kind")
    for kind, words in KINDS.items():
        shuffled: Sequence[str] = stream.sample(words, len(words))
        for split, number in QUOTAS.items():
            own, shuffled = shuffled[:number], shuffled[number:]
            for word in own:
                for order in ORDERS:
                    prompt = f"Is the word {word} {order}? Answer with one word."
                    yield {"prompt": prompt, "reference": kind, "labels": list(KINDS), "split": split}


def prepare_mixture(options: Options) -> None:
    """Make model and rows below ``options.directory``."""
    prepare(options)
    found = Run(arm=Arm(name="base"), seed=0, options=options).prepared
    data = options.directory / "smollm2" / "prepared" / "data"
    rows = {
        "sum": (_rows_of(_sum, "sum"), "math_answer"),
        "largest": (_rows_of(_largest, "largest"), "math_answer"),
        "kind": (list(_kind_rows()), "label_match"),
        "first": (_rows_of(_first, "first"), "label_match"),
        "copy": (_rows_of(_copy, "copy"), "math_answer"),
    }
    tasks: dict[str, Any] = {}
    for name, (own, reward) in rows.items():
        tasks[name] = {
            "type": "grpo",
            "dataset": str(write_rows(data / f"mixture_{name}.jsonl", own)),
            "system": "You answer questions.",
            "rewards": [reward],
            "sampling": {"max_new_tokens": 12},
        }
    write_mixture(options, "mixture", {"actor": found["actor"], "tasks": tasks, "anchors": {}})


def _arm(name: str, **scheduler: Any) -> Arm:
    run = {
        "batch": {"prompts_per_step": 12},
        # with the 4e-5 of ``smollm2`` tasks fell again after 30 steps (seed 0)
        "optimizer": {"learning_rate": 2e-5},
        "eval": {"every": EVERY, "num_prompts": 64},
        "checkpoint": {"every": EVERY},
        "tracking": {"store_rollouts": 0},
    }
    settings = {"mixture": "mixture", "num_test": NUM_TEST, "scheduler": scheduler, "run": run}
    return Arm(name=name, settings=settings)


CLAIM = Claim(
    name="smollm2_mixture",
    statement=(
        "On SmolLM2-135M-Instruct, five tasks with short answers, paired over seeds: the default "
        "scheduler's worst task is better than with equal shares and its mean not worse."
    ),
    steps=40,
    arms=(
        _arm("base"),
        _arm("default"),
        _arm("uniform", policy="uniform"),
        _arm("tac", policy="tac"),
    ),
    run=run_arm,
    render=render,
    prepare=prepare_mixture,
)
