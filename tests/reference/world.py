"""What happens outside of the step: prompts, responses and scores, by name, the same for both sides."""

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

VOCABULARY = ["<pad>", "<eos>", *"0123456789abcdefghijklmnopqrst"]
PAD, EOS = 0, 1
UNKNOWN = len(VOCABULARY) - 1
"""In place of a character that is no token."""
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


def tokens(text: str) -> list[int]:
    """Token ids of a text that may hold special tokens."""
    return [VOCABULARY.index(token) for token in re.findall("<\\w+>|.", text)]


@dataclass(frozen=True)
class Call:
    """One that an actor writes with a token of its own."""

    tool: str
    arguments: dict[str, object]
    problem: str = ""
    """How it is counted if it is not made."""


CALLS = [
    Call("look", {"place": 1}),
    Call("look", {"place": 2}),
    Call("fail", {"text": "x"}),
    Call("walk", {"place": 1}, "unknown_tool"),
    Call("look", {"place": "two"}, "bad_arguments"),
    Call("look", {"far": 1, "place": 1}, "bad_arguments"),
    Call("look", {}, "bad_json"),
]
FORMS = ("tag", "list", "function")


def written(call: Call, form: str) -> str:
    """A call in one of the forms that models write."""
    text = json.dumps({"name": call.tool, "arguments": call.arguments})
    if call.problem == "bad_json":
        text = text[:-4]
    if form == "tag":
        return f"<tool_call>{text}</tool_call>"
    if form == "list":
        return f"[TOOL_CALLS][{text}]"
    if call.problem == "bad_json":
        return f"<function={call.tool}>{text[:-2]}</function>"
    own = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in call.arguments.items())
    return f"<function={call.tool}>\n{own}</function>"


SPACES = (" ", "\n")


def vocabulary(form: str, template: str = "") -> list[str]:
    """Texts of the tokens; with a ``form`` calls are tokens, too, and with a chat template white space."""
    return [*VOCABULARY, *(written(call, form) for call in CALLS if form), *(SPACES if template else ())]


def encoded(text: str, form: str, template: str) -> list[int]:
    """Token ids of a text that may hold the end token; no call in it is one token."""
    known = {c: i for i, c in enumerate(vocabulary(form, template)) if len(c) == 1 or i == EOS}
    return [known.get(piece, UNKNOWN) for piece in re.findall("<eos>|[\\s\\S]", text)]


def prompt_ids(seed: int, task: str, row: int) -> list[int]:
    rng = stream(seed, "prompt", task, row)
    return [rng.randrange(2, len(VOCABULARY)) for _ in range(rng.randint(1, 6))]


def answer_ids(seed: int, task: str, row: int) -> list[int]:
    """The row's own answer, with its end."""
    rng = stream(seed, "answer", task, row)
    return [*(rng.randrange(2, len(VOCABULARY)) for _ in range(rng.randint(1, 4))), EOS]


def grade(seed: int, task: str, row: int) -> str:
    """A text of three that sorts the rows."""
    return stream(seed, "grade", task, row).choice(["easy", "hard", "middle"])


def difficulty(seed: int, task: str, row: int) -> float:
    """A number that no other row has."""
    return stream(seed, "number", task, row).random()


BAD = 2
"""Token that most responses of a collapsed policy begin with."""


def length(seed: int, task: str, row: int) -> int:
    """A whole number that many rows share, the smaller the more."""
    return min(30, int(stream(seed, "length", task, row).paretovariate(0.7)))


def respond(
    prompt: list[int],
    seed: int,
    version: int,
    limit: int,
    sentences: list[list[int]] | None = None,
    is_collapsed: bool = False,
    spelled: Sequence[Sequence[int]] = (),
) -> Response:
    """Tokens by chance, among them those ``spelled``; with a grammar, prefixes of its ``sentences``."""
    rng = stream("response", tuple(prompt), seed, version)
    ids: list[int] = []
    while len(ids) < limit:
        if not ids and is_collapsed and sentences is None and rng.random() < 0.9:
            ids.append(BAD)
        elif spelled and sentences is None and rng.random() < 0.25:
            ids += rng.choice(spelled)
        elif sentences is None:
            ids.append(EOS if rng.random() < 0.2 else rng.randrange(2, len(VOCABULARY)))
        else:
            longer = [s for s in sentences if s[: len(ids)] == ids]
            ids.append(rng.choice(sorted({s[len(ids)] if len(s) > len(ids) else EOS for s in longer})))
        if ids[-1] == EOS:
            break
    ids = ids[:limit]
    logprobs = [-math.log(len(VOCABULARY)) + rng.gauss(0.0, 0.7) for _ in ids]
    return Response(ids, [min(x, 0.0) for x in logprobs], "stop" if ids[-1] == EOS else "length")


@dataclass(frozen=True)
class Reply:
    """Of the world of an episode; ``text`` of characters that each are a token."""

    text: str = ""
    is_anew: bool = False
    is_done: bool = False
    reward: float | dict[str, float] | None = None
    fails: bool = False
    limits: tuple[tuple[tuple[str, ...], int], ...] = (((), 0), ((), 0))
    """Of the next answer, texts that end it and its most tokens: of the reply, and of what begins anew."""


def reply(
    seed: int, task: str, row: int, episode: int, turn: int, heard: str, ends: Sequence[str] | None = None
) -> Reply:
    """The world's words after the answer ``heard``; before the first answer (turn 0) what it says first.

    ``episode`` is the seed of its world. With ``ends`` it limits the next answer at times.
    """
    said = _reply(seed, task, row, episode, turn, heard)
    if ends is None:
        return said
    rng = stream(seed, "limits", task, row, episode, turn, heard)
    stops = [(), (), *((text,) for text in ends)]
    limits = [(rng.choice(stops), rng.choice([0, 0, 1, 2, 9])) for _ in range(2)]
    return replace(said, limits=(limits[0], limits[1] if said.is_anew else ((), 0)))


def _reply(seed: int, task: str, row: int, episode: int, turn: int, heard: str) -> Reply:
    rng = stream(seed, "world", task, row, episode, turn, heard)
    text = "".join(rng.choice(VOCABULARY[2:]) for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.08:
        return Reply(fails=True)
    if not turn:
        return Reply(text=text if rng.random() < 0.5 else "")
    reward = rng.choice([None, 0.0, 0.25, 1.0])
    end = rng.random()
    return Reply(text=text, is_anew=end < 0.25, is_done=0.25 <= end < 0.5, reward=reward)


def spaced(text: str) -> str:
    """The words of a world, if it is one that writes white space around them."""
    return f" {text} " if text else text


def kept(width: int) -> list[bool]:
    """What the dropout of adapters leaves of inputs of that width, in every pass that trains."""
    rng = stream("dropout", width)
    return [rng.random() < 0.6 for _ in range(width)]


def by_name(reward: float | None, *place: object) -> dict[str, float] | None:
    """A reward as a world gives it that names its parts."""
    if reward is None:
        return None
    names = stream("names", *place).choice([("right",), ("form",), ("right", "form")])
    return dict.fromkeys(names, reward / len(names))


def look(seed: int, task: str, row: int, episode: int, made: Sequence[str]) -> str | None:
    """What the tool answers after the calls ``made``, this one included; None: it raises."""
    rng = stream(seed, "look", task, row, episode, tuple(made))
    return None if made[-1] == "fail" or rng.random() < 0.2 else rng.choice(VOCABULARY[2:])


def earned(seed: int, task: str, row: int, episode: int, made: Sequence[str]) -> float | str | None:
    """What the world of tools gives an episode; ``FAILED``: it raises."""
    rng = stream(seed, "earned", task, row, episode, tuple(made))
    return rng.choice([None, 0.0, 0.5, 1.0, 1.0, 3.0]) if rng.random() < 0.95 else FAILED


def text_of(ids: list[int]) -> str:
    """Tokens as text, without special ones."""
    return "".join(VOCABULARY[i] for i in ids if i not in (PAD, EOS))


def with_usage(text: str, finish: str, read: int, written: int) -> str:
    """An answer as a world hears it that also looks at why it ended, and at numbers of tokens."""
    return f"{text} {finish} {read} {written}"


FAILED = "failed"
OVER = "over"
"""A response exceeds the limits of its check."""


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
    answers: tuple[str, ...] = ()
    """Those that it may read in a response, equally likely."""
    has_part: bool = False
    """Whether most scores have a named part."""
    over: float = 0.0
    """Chance that a response exceeds the limits of the check. An empty one never does."""
    if_bad: float | None = None
    """Value of a response of a collapsed policy; None: as of others."""


@dataclass(frozen=True)
class Sample:
    """Names one response."""

    task: str
    draw: int
    index: int
    attempt: int
    ids: tuple[int, ...] = field(default=())


def answer(seed: int, script: Script, sample: Sample) -> float | str | None:
    """A value, ``FAILED``, ``OVER`` or None (not applicable)."""
    group = stream(seed, script.name, sample.task, sample.draw)
    own = stream(seed, script.name, sample)
    if script.over and sample.ids and stream(seed, "over", script.name, sample).random() < script.over:
        return OVER
    is_same, value, is_silent = group.random() < script.same, group.choice(script.values), group.random()
    if is_silent < script.same_silent or own.random() < script.silent:
        return None
    if own.random() < script.failing:
        return FAILED
    if script.if_bad is not None and sample.ids[:1] == (BAD,):
        return script.if_bad
    return value if is_same else own.choice(script.values)


def part(seed: int, script: Script, sample: Sample) -> float | None:
    """The part of a score; None: it has none."""
    rng = stream(seed, script.name, "part", sample)
    return rng.choice([0.0, 0.5, 1.0, 3.0]) if script.has_part and rng.random() < 0.7 else None


def read_answer(seed: int, script: Script, sample: Sample) -> str:
    """What the reward reads in a response that it scores."""
    return stream(seed, script.name, "answer", sample).choice(script.answers) if script.answers else ""


@dataclass(frozen=True)
class Past:
    """How a task went before the first step: groups without a difference, then as ``after`` says."""

    dead_steps: int
    level: float
    """Of the rewards' range, while its groups are alike."""
    after: str
    """``alive`` (responses differ), ``form`` (they differ a little), ``solved`` (all earn the most), ``dead``
    or ``rare`` (one in eight groups differs)."""


def past_rewards(
    seed: int, task: str, past: Past, step: int, ends: tuple[float, float], number: int | None = None
) -> list[list[float]]:
    """Rewards of every group of one step of the past; without a ``number`` of them 0 to 4."""
    rng = stream(seed, "past", task, step)
    low, high = ends
    groups = []
    for _ in range(rng.randint(0, 4) if number is None else number):
        state = "dead" if step < past.dead_steps else past.after
        if state == "rare":
            state = "alive" if rng.random() < 0.125 else "dead"
        same = {"dead": past.level, "solved": 1.0}.get(state)
        places = [rng.random() if same is None else same for _ in range(3)]
        if state == "form":
            places = [0.1 * (past.level + place) for place in places]
        groups.append([low + (high - low) * place for place in places])
    return groups


def past_cosine(seed: int, task: str, other: str, step: int) -> float:
    """Of two tasks' gradients in a step of the past."""
    pair = sorted([task, other])
    usual = stream(seed, "gradients", *pair).choice([-0.9, -0.2, 0.5])
    return usual + stream(seed, "gradients", *pair, step).uniform(-0.1, 0.1)
