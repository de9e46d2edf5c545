"""Arguments, prompts and rewards of every side that ``chat_speed.py`` drives."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

TEMPERATURE = 0.7
LEARNING_RATE = 2e-5
MICROBATCH_TOKENS = 1024
"""Of a forward and backward pass of our side, as in ``examples/smollm2``."""
QUESTIONS = (
    *("Why is the sea salty?", "How does a zip work?", "Write a diary entry about a lighthouse."),
    *("Tom has 3 apples and buys 5 more. How many has he now?", "What should I pack for a day at the beach?"),
    *("Return a JSON object with name, age and city. Text: Anna Adler, 34, works as a baker in Oslo.",),
    *("Write a short text about rain in April. Use fewer than 30 words. Leave out commas entirely.",),
    *("Give advice for a beginner about keeping bees, as a list of three points.",),
)


def arguments(description: str | None) -> argparse.Namespace:
    """Return the arguments every side takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--engine", required=True, help="a side of chat_speed.py")
    parser.add_argument("--model", required=True, help="directory")
    for size in ("prompts", "group", "new-tokens", "threads", "steps"):
        parser.add_argument(f"--{size}", type=int, required=True)
    parser.add_argument("--rows", nargs="*", default=[], help="JSON lines with prompts, instead of QUESTIONS")
    return parser.parse_args()


def questions(step: int, count: int, files: Sequence[str] = ()) -> list[str]:
    """Return a step's prompts: from each of ``files`` in turn, or ``QUESTIONS`` with the step's number."""
    if files:
        pools = [[json.loads(line)["prompt"] for line in Path(f).read_text().splitlines()] for f in files]
        places = range(step * count, (step + 1) * count)
        return [pools[i % len(pools)][i // len(pools)] for i in places]
    chosen = [QUESTIONS[i % len(QUESTIONS)] + " " * (i // len(QUESTIONS)) for i in range(count)]
    return [f"({step}) {text}" for text in chosen]


def reward(text: str) -> float:
    """Return the share of vowels: it differs within nearly every group, so that no side may skip one."""
    return sum(c in "aeiou" for c in text.lower()) / max(1, len(text))
