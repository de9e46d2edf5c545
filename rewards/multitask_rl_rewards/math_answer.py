r"""``math_answer``: is the final answer of a response mathematically the reference? Through ``math-verify``.

Time limit: sympy can hang on a short answer (``10^{10^{10}}``). The limit of ``math_verify`` uses SIGALRM,
which fails off the main thread. It is switched off here: the reward runs in a killable worker process.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from multitask_rl.config.schema.ranges import OneOf, Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import MissingExtraError
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.text import data_failure, question_of, strip_thinking, value_of, without_question

_MARK = re.compile(r"####|\banswer\s*(?:is|:|=)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\n|(?<=\S)\.(?=\s)")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_EMPHASIS = re.compile(r"(?<![\w*])\*\*(?=\S)([^*\n]+)\*\*(?![\w*])")
_PERCENT = re.compile(r"%|\bper ?cent", re.IGNORECASE)
_PERCENT_SIGN = re.compile(r"(?<=[\d)}.])\s?(?:\\?%|per ?cent\b)", re.IGNORECASE)
_POWER_OF_TEN = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w)")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_BETWEEN_GUESSES = re.compile(r"[,;|]|\b(?:or|and)\b", re.IGNORECASE)
_DIVISION = re.compile(r"\\[cdt]?frac|\\(?:over|div)(?![a-z])|[\d)}]\s*[/:÷]\s*[\d({\\]")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox)\{\s*([-+]?[\d.,]+)\s*\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MAX_CHARS = 4_000
"""Only the end of a response can hold its final answer; extraction time grows with the length."""


class MathAnswer:
    r"""1 if the response's final answer equals the reference, else 0.

    The final answer is the last ``\boxed{...}``, else the sentence after the last "####" or "answer is",
    else (``answer: any``) the last expression. LaTeX, fractions, intervals, sets, units and percentages
    are compared by value. "5%" is 5 only where the reference or the question speaks of percent; elsewhere it
    is 0.05. An empty response, or one without an answer, scores 0. A repetition of the
    question is no answer: its last number is the right one in 2 % of the rows of common data sets. Where the
    reference is a number, a computation is no answer: "12 * 34" is right without being worked out, and a
    policy that is rewarded for it learns to repeat the question's numbers. Fractions count, unless the
    reference is a whole number.

    What it cannot see: whether the way to the answer is right.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, timeout_s=10.0)
    one_by_one: ClassVar[bool] = True

    @dataclass(kw_only=True, slots=True)
    class Config(Settings):
        """Keys of ``math_answer`` in a tasks file."""

        reference_column: str = "reference"
        """Column with the right answer: a number, or LaTeX without dollar signs."""
        answer: Annotated[str, OneOf("any", "boxed", "marked")] = "any"
        r"""Where an answer counts: ``any`` (last expression, if nothing marks one), ``marked`` ("answer is",
        "####" or ``\boxed``), ``boxed`` (only ``\boxed``)."""

    @staticmethod
    def columns_of(config: Config) -> tuple[str, ...]:
        """Return the columns that every row must have."""
        return (config.reference_column,)

    def __init__(self, config: Config) -> None:
        self.config = config

    def warm_up(self) -> None:
        """Import ``math_verify`` (a second) before the first call's clock runs.

        Raises:
            MissingExtraError: it is not installed.
        """
        _library()

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return 1 or 0 per rollout, or a ``data`` failure for a reference that is no mathematics."""
        return [self._score_one(rollout) for rollout in rollouts]

    def _score_one(self, rollout: Rollout) -> RewardResult:
        reference = value_of(rollout.row, self.config.reference_column, "math_answer")
        if isinstance(reference, Failure):
            return reference
        reference = _write_out(_WRAPPED.sub(r"\1", str(reference)).strip().strip("$").strip())
        gold = _parse_reference(reference)
        if not gold:
            return data_failure(f"reference {reference!r} is not a mathematical expression", "math_answer")
        response = strip_thinking(rollout.response).replace("\u2212", "-")
        answer = self._final_answer(_EMPHASIS.sub(r"\1", without_question(response, rollout)))
        if not answer:
            return Score(value=0.0)
        if _are_guesses(answer) and not _are_guesses(reference):
            return Score(value=0.0)
        answer = _write_out(_WRAPPED.sub(r"\1", answer))
        if "\\" in answer and "$" not in answer and not _WORD.search(answer):
            # Without dollar signs math-verify would read the fraction alone in 4\frac{1}{2}.
            answer = f"${answer.rstrip(' .,')}$"
        readings = [answer, _PERCENT_SIGN.sub("", answer)]
        is_percent = False
        if not _PERCENT.search(f"{reference} {question_of(rollout)}"):
            readings, is_percent = [_PERCENT_SIGN.sub("/100", answer)], bool(_PERCENT_SIGN.search(answer))
        is_right = any(
            _bare(text) == _bare(reference) or _equal(gold, text, is_percent=is_percent)
            for text in dict.fromkeys(readings)
        )
        return Score(value=float(is_right), answer=_canonical(readings[-1]))

    def _final_answer(self, response: str) -> str:
        """Return the text for math-verify to read, empty if there is no answer."""
        boxed = last_boxed(response)
        if boxed is not None or self.config.answer == "boxed":
            return f"$\\boxed{{{boxed}}}$" if boxed and boxed.strip() and len(boxed) <= _MAX_CHARS else ""
        marks = list(_MARK.finditer(response))
        if marks:
            return _SENTENCE_END.split(response[marks[-1].end() :].strip(), maxsplit=1)[0][:_MAX_CHARS]
        return "" if self.config.answer == "marked" else response.strip()[-_MAX_CHARS:]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}`` (or ``\fbox``), None if there is none.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    best = (-1, -1)
    opened: list[int] = []  # where a box's content begins; -1 for other braces
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            opened.append(-1 if match[0] == "{" else match.end())
        elif opened and (start := opened.pop()) > best[0]:
            best = (start, match.start())
    return None if best[0] < 0 else text[best[0] : best[1]]


def _bare(text: str) -> str:
    """Return ``text`` without box, dollar signs, spaces and final full stop, to compare without algebra."""
    inner = last_boxed(text)
    return re.sub(r"[\s$]", "", text if inner is None else inner).rstrip(".").removeprefix("+")


def _are_guesses(text: str) -> bool:
    """Whether ``text`` is nothing but several different numbers; math-verify would read the last one."""
    text = text.replace("$", " ").strip().rstrip(". ")
    if _GROUPED.fullmatch(text):
        return False
    numbers = _BETWEEN_GUESSES.sub(" ", text).split()
    return all(map(_NUMBER.fullmatch, numbers)) and len({float(number) for number in numbers}) > 1


def _write_out(text: str) -> str:
    """Return ``text`` with 1e5 as 100000: math-verify would read the 1 alone."""
    return _POWER_OF_TEN.sub(lambda match: format(Decimal(match[0]), "f"), text)


@lru_cache(maxsize=4096)
def _parse_reference(reference: str) -> tuple[Any, ...]:
    parse, _ = _library()
    return tuple(parse(f"${reference}$", parsing_timeout=None) or ()) if reference else ()


def _equal(gold: tuple[Any, ...], answer: str, *, is_percent: bool = False) -> bool:
    """Whether ``answer`` states the value of ``gold``; with ``is_percent``, "/100" is a percent sign."""
    parse, verify = _library()
    found = parse(answer, parsing_timeout=None)
    if found and _is_number(gold[0]) and not isinstance(found[0], str):
        # the parser has worked out \frac{12}{4}: only the text shows the division
        stated = str(found[-1]).rpartition("=")[2]
        stated = stated.replace("/100", "") if is_percent else stated
        if not _is_number(found[0]) or (gold[0].is_Integer and _DIVISION.search(stated)):
            return False
    return bool(verify(list(gold), found, timeout_seconds=None))


def _is_number(value: Any) -> bool:
    """Whether ``value``, as math-verify reads it, is a number and no computation that is left to do.

    A number has one factor besides sign, percent sign, denominator and a power of ten.
    """
    value = getattr(value, "rhs", value)  # x = 408
    if isinstance(value, str) or not getattr(value, "is_number", False):
        return False
    parts = value.args if value.is_Mul else (value,)
    parts = [part for part in parts if part != -1 and part * 100 != 1]  # sign, percent
    powers = [part for part in parts if part.is_Pow]
    numbers = [part for part in parts if part.is_Number]
    return (
        len(numbers) + len(powers) == len(parts)
        and max(len(numbers), len(powers)) <= 1
        and all(p.exp == -1 if p.base != 10 else p.exp.is_Integer for p in powers)
    )


def _canonical(answer: str) -> str:
    """Return the text of the value that ``answer`` states, the same for 1/2 and 0.5; else its own text."""
    parse, _ = _library()
    found = parse(answer, parsing_timeout=None)
    return str(found[0]) if found else _bare(answer)


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingExtraError(
            f"math_answer compares through `math-verify`, which cannot be imported ({error}). "
            "Install it with: pip install 'multitask-rl[math]'"
        ) from error
    # It warns at every first use that its own time limit is off; the pool's is on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify
