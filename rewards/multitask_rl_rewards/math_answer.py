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
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from multitask_rl.config.schema.ranges import OneOf, Settings
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import import_extra
from multitask_rl.records import Failure, RewardResult, Rollout, Score
from multitask_rl_rewards.text import answer_of, data_failure, question_of, value_of, without_question

_MARK = re.compile(
    r"####|\banswer\b(?:\s*[:=]|[ \t]*(?=\n\s*\S)|(?:\s[^.:=\n]{0,40}?)?\s(?:is|would be)\b)\s*[:=]?",
    re.IGNORECASE,
)
_DISPLAYED = re.compile(r"\\\[(.*?)\\\]", re.DOTALL)
_MINUS = re.compile("\u2212|(?<![\\w\u2013])\u2013(?=\\s?[\\d.\\\\])")
_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\})\s?(?=\d{3}(?!\d))")
_CJK = "[\u3000-\u30ff\u3400-\u9fff\uac00-\ud7af\uff01-\uff0f\uff1a-\uff20]"
_BESIDE_CJK = re.compile(rf"(?<={_CJK})(?=[-\d.$\\])|(?<=[\d$}}])(?={_CJK})")
_QUOTES = "`\"'*_\u201c\u201d\u2018\u2019"
_QUOTED = re.compile(f"[{_QUOTES}]+([^{_QUOTES}]+)[{_QUOTES}]+[.!]?")
_IN_PARENTHESES = re.compile(r"\(\s*([-+]?\d+(?:\.\d+)?)\s*\)\.?")
_COMPUTATION = r"\d[\d.]*(?:\s*[+*/\u00d7\u00b7-]\s*\d[\d.]*)+"
_EXPLAINED = re.compile(
    rf"\$?([-+]?\d[\d,]*(?:\.\d+)?)\$?[ \t]*(?:\(\s*{_COMPUTATION}\s*\)|\n\s*{_COMPUTATION})\.?"
)
_SENTENCE_END = re.compile(r"\n|(?<=\S)\.(?=\s)")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_EMPHASIS = re.compile(r"(?<![\w*])\*\*(?=\S)([^*\n]+)\*\*(?![\w*])")
_PERCENT = re.compile(r"%|\bper ?cent", re.IGNORECASE)
_PERCENT_SIGN = re.compile(r"(?<=[\d)}.])\s?(?:\\?%|per ?cent\b)", re.IGNORECASE)
_POWER_OF_TEN = re.compile(r"(?<![\w.\\])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w)")
_MIXED = re.compile(r"(?<![\w./^_])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\w/])")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALED = re.compile(
    r"(?<![\w.,/\\])(?P<number>\d[\d,]{0,30}(?:\.\d{1,30}|/[1-9]\d{0,30})?)(?:[\s~]|\\[ ,;:!])*"
    r"(?P<opened>\\(?:text|textbf|mathrm|mbox)\{\s*)?"
    rf"(?P<word>{'|'.join(_SCALES)})s?\b(?(opened)(?P<closed>\s*\}})?)",
    re.IGNORECASE,
)
_THOUSANDS = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?: \d{3})+(?! ?\d)")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[ \t]+(?=\d)")
_NO_LETTERS = re.compile(r"[^A-Za-z\\/^_]*")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:[ ,]\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_RATIONAL = re.compile(r"-?\d{1,99}(?:\.\d{1,99}|/[1-9]\d{0,99})?")
_BETWEEN_GUESSES = re.compile(r"[,;|]|\b(?:or|and)\b", re.IGNORECASE)
_DIVISION = re.compile(r"\\[cdt]?frac|\\(?:over|div)(?![a-z])|[\d)}]\s*[/:÷]\s*[\d({\\]")
_FRACTION = re.compile(r"\\[dt]?frac\s?(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))")
_TYPESETTING = re.compile(r"[{}$\s]|\\(?:left|right|text|textbf|mathrm|mbox)(?![A-Za-z])")
_COUNTED = re.compile(r"\\[dt]?binom|\\choose|\\det(?![a-z])|matrix\}")
_COMPUTED = re.compile(f"{_DIVISION.pattern}|{_COUNTED.pattern}")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox)\{\s*([-+]?[\d.,]+)\s*\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_WITH_UNIT = re.compile(
    r"([-+]?\d[\d.,]*)(?:[\s~]|\\[ ,;:!])*"
    r"(?:\\(?:text|textbf|mathrm|mbox)\{\s*([^{}\\]+)\}|(?<!\d)([A-Za-z]{2}[A-Za-z .]*"
    rf"|{_CJK}+))"
)
_NO_UNIT = re.compile(
    r"(?:pi|squared|cubed|halves|thirds|fourths)\b|hundred|thousand|[mbtr]+illion"
    "|[\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104]",
    re.IGNORECASE,
)
_MAX_CHARS = 4_000
"""Only the end of a response can hold its final answer; extraction time grows with the length."""


class MathAnswer:
    r"""1 if the response's final answer equals the reference, else 0.

    The final answer is the last ``\boxed{...}``, else the last ``<answer>...</answer>``, else the sentence
    after the last "####" or "answer is", else (``answer: any``) the last expression. LaTeX, fractions,
    intervals, sets, units and percentages are compared by value. "5%" is 5 only where the reference or the
    question speaks of percent; elsewhere it is 0.05. "2 million" is 2000000 and, where the question speaks of
    millions, 2, too. "7 2" is no number; "12 345" is. An empty response, or one without an answer, scores 0.
    A repetition of the question is no answer: its last number is the right one in 2 % of the rows of common
    data sets.

    A computation is no answer unless the reference is one: "12 * 34" is right without being worked out, and a
    policy that is rewarded for it learns to repeat the question's numbers. So

    - where the reference is a number, a number counts. A fraction is one, unless the reference is whole;
    - elsewhere roots and fractions count, sums, products and powers of numbers do not;
    - an expression of the question counts only if the reference is written so ("Factor ...", "Simplify ...").

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
        "####", ``<answer>`` or ``\boxed``), ``boxed`` (only ``\boxed``)."""

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
        # math-verify takes no digit beside a letter for a number
        response = _MINUS.sub("-", answer_of(rollout).replace("\uff05", "%"))
        response = _BESIDE_CJK.sub(" ", response)
        answer = self._final_answer(_EMPHASIS.sub(r"\1", without_question(response, rollout)))
        if not answer:
            return Score(value=0.0)
        if _are_guesses(answer) and not _are_guesses(reference):
            return Score(value=0.0)
        answer = _WRAPPED.sub(r"\1", _plain(answer))
        in_words = _drop_words(answer, question_of(rollout))
        answer = _write_out(answer)
        if _is_spaced(answer) and not _is_spaced(reference):
            return Score(value=0.0)
        unit = _WITH_UNIT.fullmatch((last_boxed(answer) or "").strip())
        if unit and _is_number(gold[0]) and not _NO_UNIT.match(unit[2] or unit[3]):
            # as text: in a formula math-verify takes letters of unknown words for variables
            answer = f"{unit[1]} {unit[2] or unit[3]}"
        if _is_copied(answer, reference, question_of(rollout)):
            return Score(value=0.0)
        if "\\" in answer and not re.search(r"\$|\\[\[(]", answer) and not _WORD.search(answer):
            # Without dollar signs math-verify would read the fraction alone in 4\frac{1}{2}.
            answer = f"${answer.rstrip(' .,')}$"
        readings = [answer, _PERCENT_SIGN.sub("", answer)]
        golds, is_percent = [gold], False
        if not _PERCENT.search(f"{reference} {question_of(rollout)}"):
            readings, is_percent = [_PERCENT_SIGN.sub("/100", answer)], bool(_PERCENT_SIGN.search(answer))
        elif _PERCENT_SIGN.search(reference):
            golds += filter(None, [_parse_reference(_PERCENT_SIGN.sub("", reference))])
        try:
            is_right = any(
                _bare(text) == _bare(reference) or _equal(own, text, is_percent=is_percent)
                for text in dict.fromkeys([*readings, *in_words])
                for own in golds
            )
            return Score(value=float(is_right), answer=_canonical(readings[-1]))
        except (ValueError, ArithmeticError, RecursionError):  # of sympy, e.g. a number of 5,000 digits
            return Score(value=0.0)

    def _final_answer(self, response: str) -> str:
        """Return the text for math-verify to read, empty if there is no answer."""
        boxed = last_boxed(response)
        if boxed is not None or self.config.answer == "boxed":
            return f"$\\boxed{{{boxed}}}$" if boxed and boxed.strip() and len(boxed) <= _MAX_CHARS else ""
        _, tag, tagged = response.rpartition("</answer>")[0].rpartition("<answer>")
        if tag and tagged.strip():
            return tagged.strip()[:_MAX_CHARS]
        marks = list(_MARK.finditer(response))
        if marks:
            text = response[marks[-1].end() :].strip()
            if displayed := _DISPLAYED.match(text):
                return f"${displayed[1].strip()}$"[:_MAX_CHARS]
            return _SENTENCE_END.split(text, maxsplit=1)[0][:_MAX_CHARS]
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
    """Return ``text`` without box, dollar signs, final full stop and spaces but those between digits."""
    inner = last_boxed(text)
    parts = _BETWEEN_DIGITS.split(text if inner is None else inner)
    return " ".join(re.sub(r"[\s$]", "", part) for part in parts).rstrip(".").removeprefix("+")


def _plain(answer: str) -> str:
    """Return ``answer`` without what math-verify cannot read around or in a number.

    That is a quote, a code mark, a parenthesis, a dollar sign of a price, a space between thousands. Of a
    number with a computation below or in parentheses, such as "92 (34 + 58)", the number is returned.
    """
    answer = _IN_NUMBER.sub("", answer.strip().replace("\\$", ""))
    for wrapped in (_QUOTED, _IN_PARENTHESES, _EXPLAINED):
        if found := wrapped.fullmatch(answer):
            answer = found[1].strip()
    return answer


def _is_copied(answer: str, reference: str, question: str) -> bool:
    """Whether ``answer`` is an expression of the question, and the reference is written otherwise.

    What is to be simplified, factored or written as a decimal equals the reference before any work.
    """
    texts = _bare(answer).rpartition("=")[2], _bare(reference).rpartition("=")[2], question
    bare, right, asked = (_TYPESETTING.sub("", _FRACTION.sub(r"\1\2/\3\4", text)) for text in texts)
    if _NUMBER.fullmatch(bare) or bare.strip("()") == right.strip("()") or bare not in asked:
        return False
    if re.fullmatch(r"[A-Za-z()]*", bare):  # a word, or the letter of a choice
        return False
    return not _NUMBER.fullmatch(right) or bool(_DIVISION.search(answer))


def _are_guesses(text: str) -> bool:
    """Whether ``text`` is nothing but several different numbers; math-verify would read the last one."""
    text = text.replace("$", " ").strip(" \n()[].")
    if _GROUPED.fullmatch(text):
        return False
    numbers = _BETWEEN_GUESSES.sub(" ", text).split()
    return all(map(_NUMBER.fullmatch, numbers)) and len({float(number) for number in numbers}) > 1


def _is_spaced(text: str) -> bool:
    """Whether ``text`` has but a space between two numbers; math-verify would add or multiply them."""
    inner = last_boxed(text)
    text = text if inner is None else inner
    return bool(_NO_LETTERS.fullmatch(text) and _BETWEEN_DIGITS.search(text))


def _write_out(text: str) -> str:
    """Return ``text`` with numbers that math-verify would misread written out.

    1e5 is 100000, -.5 is -0.5, 1 1/2 is 3/2, 12 345 is 12345, and 2 million is 2000000.
    """
    text = _BARE_POINT.sub("0.", text)
    text = _THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    text = _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{int(m[3])}", text)
    for _ in range(2):  # 3 hundred thousand
        text = _SCALED.sub(_scaled, text)
    return _POWER_OF_TEN.sub(lambda match: format(Decimal(match[0]), "f"), text)


def _scaled(match: re.Match[str]) -> str:
    number = Fraction(match["number"].replace(",", "")) * 10 ** _SCALES[match["word"].lower()]
    return f"{number}{'' if match['closed'] else match['opened'] or ''}"


def _drop_words(answer: str, question: str) -> list[str]:
    """Return ``answer`` without the number word behind its number, if ``question`` has it, too."""
    found = _SCALED.search(answer)
    if not found or found["word"].lower() not in question.lower():
        return []
    opened = "" if found["closed"] else found["opened"] or ""
    return [f"{answer[: found.end('number')]}{opened}{answer[found.end() :]}"]


@lru_cache(maxsize=4096)
def _parse_reference(reference: str) -> tuple[Any, ...]:
    parse, _ = _library()
    return tuple(parse(f"${reference}$", parsing_timeout=None) or ()) if reference else ()


def _equal(gold: tuple[Any, ...], answer: str, *, is_percent: bool = False) -> bool:
    """Whether ``answer`` states the value of ``gold``; with ``is_percent``, "/100" is a percent sign."""
    parse, verify = _library()
    found = parse(answer, parsing_timeout=None)
    if found and not isinstance(found[0], str) and not isinstance(gold[0], str):
        # the parser has worked out \frac{12}{4}: only the text shows the division
        stated = str(found[-1]).rpartition("=")[2]
        stated = stated.replace("/100", "") if is_percent else stated
        if not _is_number(gold[0]):
            if _is_worked_out(gold[0]) and not _is_worked_out(found[0]):
                return False
        elif not _is_number(found[0]) or (_COMPUTED if gold[0].is_Integer else _COUNTED).search(stated):
            return False
    return bool(verify(list(gold), found, timeout_seconds=None))


def _is_number(value: Any) -> bool:
    """Whether ``value``, as math-verify reads it, is a number and no computation that is left to do.

    A number has one factor besides sign, percent sign, denominator and a power of ten.
    """
    value = _stated(value)
    if isinstance(value, str) or not getattr(value, "is_number", False):
        return False
    parts = value.args if value.is_Mul else (value,)
    parts = [part for part in parts if part != -1 and part * 100 != 1]  # sign, percent
    powers = [part for part in parts if part.is_Pow]
    numbers = [part for part in parts if part.is_Number]
    return (
        len(numbers) + len(powers) == len(parts)
        and max(len(numbers), len(powers)) <= 1
        and all(p.base.is_Number and (p.exp == -1 if p.base != 10 else p.exp.is_Integer) for p in powers)
    )


def _is_worked_out(value: Any) -> bool:
    """Whether ``value`` has no computation of numbers that is left to do; roots and fractions may stay.

    math-verify's parser does no computation, and sympy does it when it builds an expression anew. So a number
    that the new one lacks was part of a computation.
    """
    from sympy import Symbol
    from sympy.core.parameters import distribute

    if getattr(value, "is_Relational", False):  # built anew, "x = a set" is False
        return all(map(_is_worked_out, value.args))

    def built_anew(part: Any) -> Any:
        if _may_stay(part):
            return Symbol(str(part), positive=True)
        return part.func(*map(built_anew, part.args)) if part.args else part

    with distribute(False):  # 3 (x + 1) stays as it is
        try:
            return _numbers(value) <= {*_numbers(built_anew(value)), 1}
        except (AttributeError, TypeError, ValueError):  # sympy cannot build it anew
            return True


def _numbers(value: Any) -> set[Any]:
    if value.is_Rational:
        return {abs(value.p), value.q}
    if _may_stay(value):
        return set()
    return {abs(value)} if value.is_Number else set().union(*map(_numbers, value.args))


def _may_stay(value: Any) -> bool:
    """Whether ``value`` is a fraction of two whole numbers, or the root of a number."""
    if value.is_Mul and len(value.args) == 2:
        top, bottom = value.args
        return bool(top.is_Integer and bottom.is_Pow and bottom.base.is_Integer and bottom.exp == -1)
    if not value.is_Pow or not value.exp.is_Rational or value.exp.is_Integer:
        return False
    return bool(value.base.is_Rational or (value.base.is_Mul and _may_stay(value.base)))


def _canonical(answer: str) -> str:
    """Return the text of the value that ``answer`` states, the same for 1/2 and 0.5; else its own text."""
    parse, _ = _library()
    found = parse(answer, parsing_timeout=None)
    text = str(_stated(found[0])) if found else _bare(answer)
    if not _RATIONAL.fullmatch(text):
        return text
    number = Fraction(text)
    return text if "/" in text and number.denominator == 1 else str(number)  # 12/4 is left to do


def _stated(value: Any) -> Any:
    """Return the right side of an equation, such as x = 408; else ``value``."""
    return value.rhs if getattr(value, "rel_op", "") == "==" else value


@lru_cache(maxsize=1)
def _library() -> tuple[Any, Any]:
    library = import_extra("math_verify", "math", "math_answer compares through math-verify")
    # It warns at every first use that its own time limit is off; the pool's is on.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return library.parse, library.verify
