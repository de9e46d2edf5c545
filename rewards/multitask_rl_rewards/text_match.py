"""``exact_match``, ``f1`` and ``rouge``: a response against reference texts, by ``evaluate``, offline."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from multitask_rl.config.schema.ranges import OneOf, Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError, import_extra
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.text import answer_of, data_failure, value_of

if TYPE_CHECKING:
    pass

_AROUND = " .,()*`\"'\n"


def extract_answer(rollout: Rollout, pattern: re.Pattern[str] | None) -> str:
    """Return the answer in a response: the last match of ``pattern``, else the whole, stripped.

    The match's first group that took part is the answer. No match is no answer: an empty string.
    """
    response = answer_of(rollout)
    if pattern is None:
        return response.strip()
    matches = list(pattern.finditer(response))
    if not matches:
        return ""
    return next((group for group in matches[-1].groups() if group is not None), matches[-1][0]).strip()


def _encodable(text: str) -> str:
    """Return ``text`` with lone surrogates replaced: ``evaluate`` keeps UTF-8."""
    return text.encode("utf-8", "replace").decode()


class _ReferenceReward(ABC):
    """Common part: find the answer, find the references, compare the batch in one ``compute``."""

    # evaluate takes seconds to import: one process does, not every worker. The comparison itself cannot
    # hang; a pattern can (see isolates).
    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, isolate=False)

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys in a tasks file."""

        reference_column: str = "reference"
        """Column with the accepted text, or a list of them."""
        pattern: str = ""
        """Regular expression whose last match (first group) is the answer; empty = the whole response."""

    name: ClassVar[str]

    @staticmethod
    def columns_of(config: Config) -> tuple[str, ...]:
        """Return the columns that every row must have."""
        return (config.reference_column,)

    def __init__(self, config: Config) -> None:
        """Compile the pattern.

        Raises:
            ConfigError: it is not a regular expression.
        """
        self.config = config
        self.traits = replace(type(self).traits, isolate=bool(config.pattern))  # type: ignore[misc]
        self.one_by_one = bool(config.pattern)
        try:
            self._pattern = re.compile(config.pattern, re.DOTALL | re.MULTILINE) if config.pattern else None
        except re.error as error:
            raise ConfigError(
                f"{self.name}: `pattern` {config.pattern!r} is not a regular expression: {error}"
            ) from error

    @classmethod
    def isolates(cls, config: Mapping[str, Any]) -> bool:
        """Whether there is a pattern: one that backtracks without an end ends only with its process."""
        return bool(config.get("pattern"))

    def warm_up(self) -> None:
        """Import ``evaluate`` (seconds), before step 1.

        Raises:
            MissingExtraError: it is not installed.
        """
        _metrics()

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one value in [0, 1] per rollout; an empty answer is 0, a missing reference a failure."""
        accepted = [self._references(rollout) for rollout in rollouts]
        answers = [_encodable(extract_answer(rollout, self._pattern)) for rollout in rollouts]
        asked = [i for i, texts in enumerate(accepted) if not isinstance(texts, Failure) and answers[i]]
        values = dict(
            zip(asked, self._compare([answers[i] for i in asked], [accepted[i] for i in asked]), strict=True)
        )
        return [
            texts
            if isinstance(texts, Failure)
            else Score(value=values.get(i, 0.0), answer=self._vote(answers[i]))
            for i, texts in enumerate(accepted)
        ]

    def _vote(self, answer: str) -> str:
        """Return what counts as the same answer in ``maj@k``; empty = answers are not counted."""
        return ""

    @abstractmethod
    def _compare(self, answers: list[str], references: list[Any]) -> list[float]:
        """Return one value per answer; each has at least one reference."""

    def _references(self, rollout: Rollout) -> list[str] | Failure:
        value = value_of(rollout.row, self.config.reference_column, self.name)
        if isinstance(value, Failure):
            return value
        if isinstance(value, Mapping):
            return data_failure(
                f"column {self.config.reference_column!r} is a mapping (keys: {', '.join(map(str, value))}), "
                "which no response equals; put the reference into a column of its own",
                self.name,
            )
        texts = [
            str(text)
            for text in ([value] if isinstance(value, str) or not isinstance(value, Sequence) else value)
        ]
        texts = [text for text in texts if text.strip()]
        if not texts:
            return data_failure(
                f"column {self.config.reference_column!r} is empty: nothing would match it", self.name
            )
        return texts


class ExactMatch(_ReferenceReward):
    """1 if the answer equals one of the references, else 0."""

    name = "exact_match"

    @dataclass(kw_only=True, slots=True)
    class Config(_ReferenceReward.Config):
        """Keys of ``exact_match`` in a tasks file."""

        normalise: bool = True
        """Ignore case, articles, spacing, the punctuation of sentences, and how a number is written (2.50 is
        2.5). Signs that carry meaning count: -5 is not 5, 3.14 not 314, C++ not C."""

    config: Config

    def _compare(self, answers: list[str], references: list[Any]) -> list[float]:
        metrics = _metrics()

        def same(answer: str, reference: str) -> float:
            if not self.config.normalise:
                return float(answer == reference.strip())
            left, right = metrics.normalise(answer), metrics.normalise(reference)
            if right:
                return float(left == right)
            # Articles and punctuation alone would equal any other such text: the choice "A", "!".
            return float(
                answer.strip(_AROUND) == reference.strip(_AROUND) != "" or answer == reference.strip()
            )

        values: list[float] = metrics.per_prediction(self.name, same, answers, references)
        return values

    def _vote(self, answer: str) -> str:
        return (self.config.normalise and _metrics().normalise(answer)) or answer


class F1(_ReferenceReward):
    """Overlap of words with the best reference: harmonic mean of precision and recall."""

    name = "f1"

    def _compare(self, answers: list[str], references: list[Any]) -> list[float]:
        metrics = _metrics()
        values: list[float] = metrics.per_prediction(self.name, metrics.compute_f1, answers, references)
        return values


class Rouge(_ReferenceReward):
    """ROUGE F-measure against the best reference."""

    name = "rouge"

    @dataclass(kw_only=True, slots=True)
    class Config(_ReferenceReward.Config):
        """Keys of ``rouge`` in a tasks file."""

        kind: Annotated[str, OneOf("rouge1", "rouge2", "rougeL")] = "rougeL"
        """Unigrams, bigrams or the longest common subsequence."""

    config: Config

    def _compare(self, answers: list[str], references: list[Any]) -> list[float]:
        metrics = _metrics()
        compute = metrics.compute_rouge(self.config.kind)
        values: list[float] = metrics.per_prediction(self.config.kind, compute, answers, references)
        return values


def _metrics() -> Any:
    needs = "exact_match, f1 and rouge compute through evaluate"
    return import_extra("multitask_rl_rewards.evaluate_metrics", "eval", needs)
