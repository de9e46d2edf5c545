"""``label_match``: classification by words: which of the row's labels does the response name?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.text import answer_of, data_failure, value_of, without_question

_NAME = "label_match"
_NEGATED = re.compile(
    r"(?:\b(?:not(?! only)|non|neither|nor|never|no|nothing|none(?! other)|cannot)\b|n['\u2019]t\b)"
    r"[^\w.,;:!?\n]*"
    r"(?:(?!but\b)[\w'\u2019/-]+[^\w.,;:!?\n]+){0,2}(?<![^\W_])\Z",
    re.IGNORECASE,
)
_BREAK = re.compile(r"\s[-\u2013\u2014>]+\s|[()\u2013\u2014\u2192]")
_CLAUSE_CHARS = 80


class LabelMatch:
    """1 if the response names the right label and no other, else 0.

    Labels are whole words, longest first, case ignored: ``non-hateful`` does not also name ``hateful``. A
    space may stand for a hyphen, and a plural for a label of three letters or more. A label at most three
    words behind "not", "no", "neither" or the like, without punctuation between, is not named; "not hateful"
    names ``non-hateful`` where there is such a label. A response that names two labels hedges and scores 0,
    and so does one that names none. Repetitions of the question, which lists the labels, do not count.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Keys of ``label_match`` in a tasks file."""

        reference_column: str = "reference"
        """Column with the right label."""
        labels_column: str = "labels"
        """Column with the list of all labels."""

    @staticmethod
    def columns_of(config: Config) -> tuple[str, ...]:
        """Return the columns that every row must have."""
        return (config.reference_column, config.labels_column)

    def __init__(self, config: Config) -> None:
        self.config = config

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return 1 or 0 per rollout; a row without labels is a ``data`` failure."""
        return [self._score_one(rollout) for rollout in rollouts]

    def _score_one(self, rollout: Rollout) -> RewardResult:
        reference = value_of(rollout.row, self.config.reference_column, _NAME)
        labels = value_of(rollout.row, self.config.labels_column, _NAME)
        if isinstance(reference, Failure):
            return reference
        if isinstance(labels, Failure):
            return labels
        if isinstance(labels, str) or reference not in labels:
            return data_failure(f"reference {reference!r} is not in labels {labels!r}", _NAME)
        named = find_labels(without_question(answer_of(rollout), rollout), labels)
        return Score(value=float(named == {reference}), answer=", ".join(sorted(named)))


def find_labels(text: str, labels: Sequence[str]) -> set[str]:
    """Return the labels that ``text`` names.

    >>> sorted(find_labels("It is Non-Hateful.", ["hateful", "non-hateful"]))
    ['non-hateful']
    >>> sorted(find_labels("It isn't hateful.", ["hateful", "non-hateful"]))
    ['non-hateful']
    """
    by_form = {_form(label): label for label in labels}
    pattern = "|".join(_pattern(form) for form in sorted(by_form, key=len, reverse=True))
    named = set[str]()
    for match in re.finditer(rf"(?<![^\W_])(?<!-)(?:{pattern})(?![^\W_])(?!-)", text, re.IGNORECASE):
        form = _form(match[0])
        form = form if form in by_form else form.removesuffix("s")
        if form not in by_form:
            continue  # a letter that equals another one but for its case: U+017F for s
        before = text[max(0, match.start() - _CLAUSE_CHARS) : match.start()]
        if not _NEGATED.search(_BREAK.sub(", ", before)):
            named.add(by_form[form])
        else:
            named.update(by_form[other] for word in ("non", "not") if (other := f"{word} {form}") in by_form)
    return named


def _form(label: str) -> str:
    return re.sub(r"(?<=[^\W_])[-_\s]+(?=[^\W_])", " ", label.lower())  # not the sign of -1


def _pattern(form: str) -> str:
    words = r"[-_\s]+".join(map(re.escape, form.split(" ")))
    return f"{words}s?" if len(form) > 2 and form[-1].isalpha() else words
