"""The ``evaluate`` adapter: text metrics as ``evaluate.Metric`` subclasses, defined here, working offline.

``evaluate.load`` fetches a script from the hub even for exact match; a subclass needs nothing. Each metric
returns its mean under its own name (what ``evaluate`` users expect) and one value per prediction under
``values`` (what a reward needs). Importing this module costs seconds.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

import datasets

if "transformers" in sys.modules:
    import evaluate
else:
    # for its pipelines alone it would load transformers and torch into a reward worker: 9 s, 370 MiB
    sys.modules["transformers"] = None  # type: ignore[assignment]  # its import fails, as if not installed
    try:
        import evaluate
    finally:
        del sys.modules["transformers"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_SIGNS = str.maketrans(
    "\u2212\u2013\u2010\u2011\u2018\u2019\u201c\u201d\u00ab\u00bb\u300c\u300d"
    "\u3002\uff0e\uff0c\uff01\uff1f\uff1a\uff1b\uff08\uff09",
    "----''" + 6 * '"' + "..,!?:;()",
    "\u200b\u2026",
)
"""Dashes, typographic quotes, signs of Chinese and Japanese; zero-width spaces and ellipses go."""
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_LONE_SIGN = re.compile(r"(?<!\S)[^\w\s]++(?!\S)")
_DROPPED = re.compile(
    r"[!\"'();?\[\]`{}]|,(?!\d)|(?<!\d),|\.(?!\d)|(?<!\d):|:(?!\d)|-(?![\d-])|(?<=[^\W\d])-|(?<!\S)\+(?=\d)"
    r"|(?<![^\W_])_|_(?![^\W_])|(?<![\w*])\*++|(?<!\*)\*++(?![\w*])"
)
"""Without the signs that carry meaning: see ``normalise``."""
_DECIMAL = re.compile(r"-?\d+\.\d+", re.ASCII)
_WORDS = re.compile(r"\w+")
_SIGNS = re.compile(r"\S")


def normalise(text: str) -> str:
    """Lower-case, without articles, repeated spaces and the punctuation of sentences.

    Based on SQuAD (arXiv:1606.05250, section 6.1), which drops all punctuation and so takes -5 for 5, 3.14
    for 314 and C++ for C. Here signs that carry meaning stay: a minus before a digit, ``. , : -`` between
    digits, ``* _`` inside words, and ``+ # / % $ = < > & @ ^ | ~`` and backslash anywhere but alone. Commas
    between thousands and zeros at the end of decimals go. Quotes and accents count alike in all spellings.

    >>> normalise("The  Eiffel-Tower!"), normalise("-1,000.50"), normalise("**C++**.")
    ('eiffeltower', '-1000.5', 'c++')
    """
    text = _THOUSANDS.sub("", normalize("NFC", text.lower()).translate(_ASCII_SIGNS))
    text = _DROPPED.sub("", _LONE_SIGN.sub(" ", text))
    words = _ARTICLES.sub(" ", text).split()
    return " ".join(word.rstrip("0").rstrip(".") if _DECIMAL.fullmatch(word) else word for word in words)


class ReferenceMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Best value of ``compute_one(prediction, reference)`` over each prediction's references.

    Args:
        name: key of the mean in the result.
        compute_one: similarity of two texts in [0, 1].
    """

    def __init__(self, name: str, compute_one: Callable[[str, str], float]) -> None:
        self._compute_one = compute_one
        self._metric_name = name
        # A home that cannot be written to must not stop a metric that writes nothing.
        super().__init__(
            keep_in_memory=True, cache_dir=str(Path(tempfile.gettempdir()) / "multitask-rl-evaluate")
        )

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=f"{self._metric_name}: best over the references, 0 to 1.",
            citation="",
            inputs_description="predictions: texts; references: list of accepted texts each",
            features=datasets.Features({"predictions": text, "references": datasets.Sequence(text)}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
        pairs = zip(predictions, references, strict=True)
        values = [
            max(self._compute_one(prediction, one) for one in accepted) for prediction, accepted in pairs
        ]
        return {self._metric_name: sum(values) / len(values), "values": values}


def per_prediction(
    name: str,
    compute_one: Callable[[str, str], float],
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
) -> list[float]:
    """Return one value per prediction (``references`` holds at least one text each)."""
    if not predictions:
        return []
    metric = ReferenceMetric(name, compute_one)
    values: list[float] = metric.compute(predictions=list(predictions), references=list(references))["values"]
    return values


def _f_measure(overlap: int, predicted: int, expected: int) -> float:
    """Harmonic mean of precision and recall; 0 when nothing overlaps."""
    return 2.0 * overlap / (predicted + expected) if overlap else 0.0


def compute_f1(prediction: str, reference: str) -> float:
    """Return the F1 of normalised words as bags (SQuAD, arXiv:1606.05250, section 6.1).

    >>> compute_f1("the red house", "house red big")
    0.8
    """
    words = [normalise(text).split() for text in (prediction, reference)]
    if not words[1]:  # a reference of signs or articles alone: compare as it stands
        words = [prediction.split(), reference.split()]
    predicted, expected = Counter(words[0]), Counter(words[1])
    return _f_measure((predicted & expected).total(), predicted.total(), expected.total())


def compute_rouge(kind: str) -> Callable[[str, str], float]:
    """Return the F-measure of ``rouge1``, ``rouge2`` or ``rougeL``, without stemming.

    Source: ROUGE, A Package for Automatic Evaluation of Summaries (Lin, 2004), sections 2 and 3.1.
    """
    if kind == "rougeL":
        return _rouge_l
    size = int(kind.removeprefix("rouge"))

    def rouge_n(prediction: str, reference: str) -> float:
        given, wanted = _tokens(prediction, reference)
        predicted, expected = _ngrams(given, size), _ngrams(wanted, size)
        return _f_measure((predicted & expected).total(), predicted.total(), expected.total())

    return rouge_n


def _tokens(prediction: str, reference: str) -> tuple[list[str], list[str]]:
    """Words of both; signs of both where the reference has no word (``:-)``)."""
    pattern = _WORDS if _WORDS.search(reference) else _SIGNS
    given, wanted = (pattern.findall(normalize("NFC", text.lower())) for text in (prediction, reference))
    return given, wanted


def _ngrams(words: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + size]) for i in range(len(words) - size + 1))


def _rouge_l(prediction: str, reference: str) -> float:
    predicted, expected = _tokens(prediction, reference)
    return _f_measure(_common_subsequence(predicted, expected), len(predicted), len(expected))


def _common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, a row of the table as one integer.

    Source: A fast and practical bit-vector algorithm for the longest common subsequence problem (Crochemore
    et al., Information Processing Letters 80, 2001), section 3.
    """
    places: dict[str, int] = {}
    for index, word in enumerate(right):
        places[word] = places.get(word, 0) | 1 << index
    full = (1 << len(right)) - 1
    row = full
    for word in left:
        if found := row & places.get(word, 0):
            row = ((row + found) | (row - found)) & full
    return len(right) - row.bit_count()
