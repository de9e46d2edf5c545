"""What happens outside of the step: prompts, responses and scores, by name, the same for both sides."""

import math
import random
from dataclasses import dataclass, field

VOCABULARY = ["<pad>", "<eos>", *"0123456789abcdefghijklmnopqrst"]
PAD, EOS = 0, 1
NUM_ROWS = 40
NUM_HELD_OUT = 12


def stream(*name: object) -> random.Random:
    return random.Random(repr(name))


@dataclass(frozen=True)
class Response:
    ids: list[int]
    logprobs: list[float]
    """Of the engine that sampled it: close to the trainer's, not equal."""
    finish: str


def prompt_ids(seed: int, task: str, row: int) -> list[int]:
    rng = stream(seed, "prompt", task, row)
    return [rng.randrange(2, len(VOCABULARY)) for _ in range(rng.randint(1, 6))]


def respond(prompt: list[int], seed: int, version: int, limit: int) -> Response:
    rng = stream("response", tuple(prompt), seed, version)
    ids: list[int] = []
    while len(ids) < limit:
        ids.append(EOS if rng.random() < 0.2 else rng.randrange(2, len(VOCABULARY)))
        if ids[-1] == EOS:
            break
    logprobs = [-math.log(len(VOCABULARY)) + rng.gauss(0.0, 0.7) for _ in ids]
    return Response(ids, [min(x, 0.0) for x in logprobs], "stop" if ids[-1] == EOS else "length")


FAILED = "failed"


@dataclass(frozen=True)
class Script:
    """How a reward or a constraint answers. ``values`` are equally likely."""

    name: str
    values: tuple[float, ...] = (0.0, 1.0)
    same: float = 0.3
    """Chance that a whole group gets one value."""
    failing: float = 0.0
    silent: float = 0.0
    """Chance that it says it is not its business."""
    same_silent: float = 0.0
    """Chance that it says so of a whole group."""


@dataclass(frozen=True)
class Sample:
    """Names one response."""

    task: str
    draw: int
    index: int
    attempt: int
    ids: tuple[int, ...] = field(default=())


def answer(seed: int, script: Script, sample: Sample) -> float | str | None:
    """A value, ``FAILED`` or None (not applicable)."""
    group = stream(seed, script.name, sample.task, sample.draw)
    own = stream(seed, script.name, sample)
    is_same, value, is_silent = group.random() < script.same, group.choice(script.values), group.random()
    if is_silent < script.same_silent or own.random() < script.silent:
        return None
    if own.random() < script.failing:
        return FAILED
    return value if is_same else own.choice(script.values)


@dataclass(frozen=True)
class Past:
    """How a task went before the first step: groups without a difference, then as ``after`` says."""

    dead_steps: int
    level: float
    """Of the rewards' range, while its groups are alike."""
    after: str
    """``alive`` (responses differ), ``form`` (they differ a little), ``solved`` (all earn the most), ``dead``
    or ``rare`` (one in eight groups differs)."""


def past_rewards(seed: int, task: str, past: Past, step: int, ends: tuple[float, float]) -> list[list[float]]:
    """Rewards of every group of one step of the past."""
    rng = stream(seed, "past", task, step)
    low, high = ends
    groups = []
    for _ in range(rng.randint(0, 4)):
        state = "dead" if step < past.dead_steps else past.after
        if state == "rare":
            state = "alive" if rng.random() < 0.125 else "dead"
        same = {"dead": past.level, "solved": 1.0}.get(state)
        places = [rng.random() if same is None else same for _ in range(3)]
        if state == "form":
            places = [0.1 * (past.level + place) for place in places]
        groups.append([low + (high - low) * place for place in places])
    return groups
