"""``label_match``: classification by words: which of the row's labels does the response name?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.text import data_failure, strip_thinking, value_of, without_question

_NAME = "label_match"


class LabelMatch:
    """1 if the response names the right label and no other, else 0.

    Labels are whole words, longest first, case ignored: ``non-hateful`` does not also name ``hateful``. A
    response that names two labels hedges and scores 0, and so does one that names none. Repetitions of the
    question, which lists the labels, do not count.
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
        named = find_labels(without_question(strip_thinking(rollout.response), rollout), labels)
        return Score(value=float(named == {reference}), answer=", ".join(sorted(named)))


def find_labels(text: str, labels: Sequence[str]) -> set[str]:
    """Return the labels that ``text`` names.

    >>> sorted(find_labels("It is Non-Hateful.", ["hateful", "non-hateful"]))
    ['non-hateful']
    """
    by_length = sorted(labels, key=len, reverse=True)
    pattern = "|".join(re.escape(label) for label in by_length)
    lowered = {label.lower(): label for label in labels}
    found = re.findall(rf"(?<![\w-])(?:{pattern})(?![\w-])", text, re.IGNORECASE)
    return {lowered[label.lower()] for label in found}
