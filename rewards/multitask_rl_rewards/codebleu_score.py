"""The ``codebleu`` adapter: CodeBLEU of two programs, the same in every process.

Source: CodeBLEU, a Method for Automatic Evaluation of Code Synthesis (arXiv:2009.10297), section 3.

Deliberate deviations from ``codebleu.calc_codebleu`` 0.7, against rewarding nonsense or noise:

* It counts a data-flow match of 0 as 1 (``score or 1``). Here 0 is 0, and where the *reference* has no data
  flow that part is left out and the other weights are scaled up.
* It orders merged data-flow edges by ``set``, so values change with ``PYTHONHASHSEED`` (0.5 % on average on
  MBPP). Here edges are ordered by first appearance in the program.
* It counts n-grams of up to four tokens. Here, of a reference of fewer tokens, up to their number: the
  same program earned 0.54.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from codebleu import bleu, dataflow_match, syntax_match, weighted_ngram_match
from codebleu.codebleu import PACKAGE_DIR
from codebleu.utils import AVAILABLE_LANGS, get_tree_sitter_language
from tree_sitter import Parser

LANGUAGES: tuple[str, ...] = tuple(sorted(AVAILABLE_LANGS))
_MAX_CHARS = 20_000
"""Beyond, a candidate scores 0: the matching of subtrees is quadratic."""
_MAX_DEPTH = 100
"""Beyond, a candidate earns nothing for structure: each level prints all levels below it."""
_KEYWORD_WEIGHT, _OTHER_WEIGHT = 1.0, 0.2
"""Weights of reference tokens in the weighted n-gram match (equation 3; keywords count five times)."""


@lru_cache(maxsize=16)
def load_language(language: str) -> tuple[Any, tuple[str, ...]]:
    """Return the grammar and the keywords of ``language``.

    Raises:
        ImportError: its tree-sitter grammar is not installed; the message names the package.
    """
    keywords = (Path(PACKAGE_DIR) / "keywords" / f"{language}.txt").read_text(encoding="utf-8")
    return get_tree_sitter_language(language), tuple(keywords.split())


def compute_codebleu(reference: str, candidate: str, language: str = "python") -> dict[str, float]:
    """Return ``codebleu`` and its parts ``ngram``, ``weighted_ngram``, ``syntax``, ``dataflow``, in [0, 1].

    An empty candidate, or one longer than 20,000 characters, scores 0 throughout.
    """
    reference, candidate = _encodable(reference), _encodable(candidate)
    parts = dict.fromkeys(("ngram", "weighted_ngram", "syntax", "dataflow"), 0.0)
    if not candidate or len(candidate) > _MAX_CHARS:
        return {"codebleu": 0.0, **parts}
    grammar, keywords = load_language(language)
    expected, given = reference.split(), candidate.split()
    weights = {token: _KEYWORD_WEIGHT if token in keywords else _OTHER_WEIGHT for token in expected}
    longest = min(4, max(1, len(expected)))
    orders = (1 / longest,) * longest
    parts["ngram"] = float(bleu.corpus_bleu([[expected]], [given], orders))
    parts["weighted_ngram"] = float(
        weighted_ngram_match.corpus_bleu([[[expected, weights]]], [given], orders)
    )
    if not _dataflow(reference, language, grammar):
        parts.pop("dataflow")
    if _is_shallow(candidate, grammar):
        parts["syntax"] = float(
            syntax_match.corpus_syntax_match([[reference]], [candidate], language, grammar)
        )
        if "dataflow" in parts:
            parts["dataflow"] = _dataflow_match(reference, candidate, language, grammar)
    return {"codebleu": sum(parts.values()) / len(parts), **parts}


def _encodable(code: str) -> str:
    """Without surrounding space, and with lone surrogates (which no parser takes) replaced."""
    return code.strip().encode("utf-8", "replace").decode()


def _is_shallow(code: str, grammar: Any) -> bool:
    cursor = _parser(grammar).parse(code.encode()).walk()
    depth = 0
    while depth <= _MAX_DEPTH:
        if cursor.goto_first_child():
            depth += 1
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return True
            depth -= 1
    return False


def _parser(grammar: Any) -> Any:
    parser = Parser()
    parser.language = grammar
    return parser


def _dataflow_match(reference: str, candidate: str, language: str, grammar: Any) -> float:
    """Return the share of the reference's data-flow edges (at least one) found in the candidate."""
    expected = _dataflow(reference, language, grammar)
    left = _dataflow(candidate, language, grammar)
    matched = 0
    for edge in expected:
        if edge in left:
            left.remove(edge)
            matched += 1
    return matched / len(expected)


def _dataflow(code: str, language: str, grammar: Any) -> list[Any]:
    """Return the edges (variable, relation, sources), variables numbered by first appearance."""
    with contextlib.suppress(Exception):  # the package's tokenizer raises what it likes on broken code
        code = dataflow_match.remove_comments_and_docstrings(code, language)
    edges = dataflow_match.get_data_flow(code, [_parser(grammar), dataflow_match.dfg_function[language]])
    appearance: dict[str, int] = {}
    for name, position, *_ in edges:
        appearance.setdefault(name, position)
    ordered = [
        (name, position, relation, sorted(set(sources), key=lambda s: (appearance.get(s, -1), s)), indices)
        for name, position, relation, sources, indices in edges
    ]
    return list(dataflow_match.normalize_dataflow(ordered))
