"""How often graders err on numbers: wrong answers that score, right answers in other spellings that do not.

    python benchmarks/graders.py [numbers]

Prints a Markdown table: the bundled graders, exact match as SQuAD normalises it, and math-verify as it comes.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Callable

from math_verify import parse, verify

from multitask_rl.records import Score
from multitask_rl.testing import make_rollout
from multitask_rl.testing.hostile import numbers
from multitask_rl_rewards.math_answer import MathAnswer
from multitask_rl_rewards.text_match import F1, ExactMatch

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def bundled(reward: ExactMatch | F1 | MathAnswer) -> Callable[[str, str], bool]:
    """Return whether the reward gives its full value."""

    def full(answer: str, right: str) -> bool:
        (result,) = reward.score([make_rollout(answer, row={"reference": right, "prompt": "?"})])
        return isinstance(result, Score) and result.value == 1.0

    return full


def squad(answer: str, right: str) -> bool:
    """Exact match of SQuAD v1.1's normalisation."""

    def normal(text: str) -> str:
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())

    return normal(answer) == normal(right)


def plain_math_verify(answer: str, right: str) -> bool:
    """math-verify on the texts as they are."""
    return bool(verify(parse(right), parse(answer)))


def main() -> int:
    """Print the table."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    graders: dict[str, Callable[[str, str], bool]] = {
        "`exact_match`": bundled(ExactMatch(ExactMatch.Config())),
        "`f1` (full value)": bundled(F1(F1.Config())),
        "`math_answer`": bundled(MathAnswer(MathAnswer.Config())),
        "exact match, SQuAD's normalisation": squad,
        "math-verify alone": plain_math_verify,
    }
    print("| grader | wrong answers that score | right answers that do not |\n|---|---|---|")
    for name, grade in graders.items():
        wrong_n = same_n = scored = missed = 0
        for right, wrong, same in numbers(count):
            wrong_n, same_n = wrong_n + len(wrong), same_n + len(same)
            scored += sum(grade(text, right) for text in wrong)
            missed += sum(not grade(text, right) for text in same)
        rates = [f"{n} of {of} ({n / of:.1%})" for n, of in ((scored, wrong_n), (missed, same_n))]
        print(f"| {name} | {rates[0]} | {rates[1]} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
