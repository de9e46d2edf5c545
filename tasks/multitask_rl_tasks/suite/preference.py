"""Strings that please a hidden judge: no right answer, a learned reward model stands in for the judge.

The gold utility is known here and never shown to the training: it labels the (noisy) pairs the reward model
is fitted on, and it measures, on held-out prompts, whether the policy got better or only found the reward
model's mistakes (over-optimisation, arXiv:2210.10760).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from multitask_rl_tasks.suite.base import Row, SuiteTask

LETTERS = "abcdefghijklmnop"
VOWELS = frozenset("aeio")
IDEAL_LENGTH = 8
SHORTEST, LONGEST_SHOWN = 3, 9
"""Letters of the answers that a warm start imitates."""
GOLD_MAXIMUM = 5.5
"""Utility of the best response: four vowels, three shared letters, length 8, no letter twice in a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two responses to one prompt, as a (fallible) annotator ordered them."""

    prompt: str
    chosen: str
    rejected: str
    is_flipped: bool
    """The annotator erred: by the gold utility ``rejected`` is the better one."""


class Preference(SuiteTask):
    """``Rgab>`` -> a string of letters, scored by ``gold_utility``."""

    name: ClassVar[str] = "preference"
    max_new_tokens: ClassVar[int] = 17

    def sample(self, stream: random.Random) -> Row:
        """Draw three letters."""
        word = "".join(stream.choice(LETTERS) for _ in range(3))
        return {"task": self.name, "prompt": f"R{word}>"}

    def answer(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return three to nine letters at random: what the warm start imitates."""
        return _letters(stream, stream.randint(SHORTEST, LONGEST_SHOWN))

    def corrupt(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return another answer: any string of letters is as legitimate as the next."""
        return self.answer(row, stream)


def gold_utility(response: str, prompt: str, **row: object) -> float:
    """Return the hidden utility of a response as a share of the best one's (1 = ideal, may be negative).

    ``u = 1 per different vowel + 1/2 per different letter of the prompt used - 1/4 per letter away from
    length 8 - 1/2 per letter that repeats its neighbour``, divided by ``GOLD_MAXIMUM``.
    """
    letters = set(response)
    utility = (
        1.0 * len(letters & VOWELS)
        + 0.5 * len(letters & set(prompt[1:-1]))
        - 0.25 * abs(len(response) - IDEAL_LENGTH)
        - 0.5 * sum(left == right for left, right in pairwise(response))
    )
    return utility / GOLD_MAXIMUM


def sample_pair(
    row: Mapping[str, Any], stream: random.Random, *, flip_rate: float, longest: int
) -> PreferencePair:
    """Draw two random responses of different utility; the annotation is wrong with ``flip_rate``.

    Args:
        row: whose prompt the responses answer.
        stream: randomness.
        flip_rate: probability that the annotator prefers the worse one.
        longest: letters of a response at most. What is longer than anything compared, a reward model fitted
            on the pairs can only guess: a small value makes one that is easily hacked.
    """
    prompt = str(row["prompt"])
    while True:
        left, right = (_letters(stream, stream.randint(SHORTEST, longest)) for _ in range(2))
        left_utility, right_utility = gold_utility(left, prompt), gold_utility(right, prompt)
        if left_utility != right_utility:
            break
    better, worse = (left, right) if left_utility > right_utility else (right, left)
    if stream.random() < flip_rate:
        return PreferencePair(prompt=prompt, chosen=worse, rejected=better, is_flipped=True)
    return PreferencePair(prompt=prompt, chosen=better, rejected=worse, is_flipped=False)


def _letters(stream: random.Random, length: int) -> str:
    return "".join(stream.choice(LETTERS) for _ in range(length))
