"""The scheduler's policies on the chat model where its tasks differ in what they have left to learn.

Four tasks whose answers are short, so that a step takes a fifth of the time of one of ``smollm2``: sums,
products, the largest of three or four numbers and the kind of a thing. No test prompt is a training prompt,
and none asks for a thing that training prompts ask for.
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
assert all(len(set(words)) == sum(QUOTAS.values()) for words in KINDS.values())

Item = tuple[str, str]
"""Prompt and reference."""


def _sum(stream: random.Random) -> Item:
    a, b = stream.randrange(11, 100), stream.randrange(11, 100)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def _product(stream: random.Random) -> Item:
    a, b = stream.randrange(3, 100), stream.randrange(3, 20)
    return f"What is {a} * {b}? Answer with the number only.", str(a * b)


def _largest(stream: random.Random) -> Item:
    numbers = stream.sample(range(10, 1000), stream.choice((3, 4)))
    shown = ", ".join(map(str, numbers))
    return f"Which number is the largest: {shown}? Answer with the number only.", str(max(numbers))


def _number_rows(make: Callable[[random.Random], Item], name: str) -> list[dict[str, Any]]:
    stream, rows = random_stream(0, "smollm2_mixture", name), dict[str, dict[str, Any]]()
    for split, number in SPLITS.items():
        end = len(rows) + number
        while len(rows) < end:
            prompt, reference = make(stream)
            rows.setdefault(prompt, {"prompt": prompt, "reference": reference, "split": split})
    return list(rows.values())


def _kind_rows() -> Iterator[dict[str, Any]]:
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
        "sum": (_number_rows(_sum, "sum"), "math_answer"),
        "product": (_number_rows(_product, "product"), "math_answer"),
        "largest": (_number_rows(_largest, "largest"), "math_answer"),
        "kind": (list(_kind_rows()), "label_match"),
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
        "eval": {"every": EVERY, "num_prompts": 64},
        "checkpoint": {"every": EVERY},
        "tracking": {"store_rollouts": 0},
    }
    settings = {"mixture": "mixture", "num_test": NUM_TEST, "scheduler": scheduler, "run": run}
    return Arm(name=name, settings=settings)


CLAIM = Claim(
    name="smollm2_mixture",
    statement=(
        "On SmolLM2-135M-Instruct, four tasks with short answers, paired over seeds: the default "
        "scheduler's worst task is better than with equal shares and its mean not worse."
    ),
    steps=20,
    arms=(
        _arm("base"),
        _arm("default"),
        _arm("prior_40", policy_config={"prior_prompts": 40}),
        _arm("sharpness_3", policy_config={"sharpness": 3}),
        _arm("uniform", policy="uniform"),
        _arm("tac", policy="tac"),
    ),
    run=run_arm,
    render=render,
    prepare=prepare_mixture,
)
