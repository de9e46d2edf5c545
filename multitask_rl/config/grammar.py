"""Grammars of the tasks file: read, checked and written as the source that both engines compile.

A grammar travels as the JSON text of its configuration (``SamplingParams.grammar``): it names the
distribution a response was drawn from, so it stands beside temperature and top-p. The library is llguidance
(extra ``grammar``): no dependencies of its own, and what vLLM's guidance backend runs too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from multitask_rl.config.schema.build import check_keys
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import ConfigError, MissingExtraError

__all__ = ["GRAMMAR_KEYS", "check_grammar", "lark_source", "read_choices", "require_llguidance"]

GRAMMAR_KEYS = ("regex", "json_schema", "choices")


class _Bytes:
    """A vocabulary of single bytes: what any byte-complete tokenizer can write."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def require_llguidance() -> None:
    """Raise ``MissingExtraError`` unless llguidance is installed."""
    try:
        found = find_spec("llguidance") is not None
    except ValueError:  # blocked: sys.modules holds None
        found = False
    if not found:
        raise MissingExtraError(
            "constraints of mode grammar need the package llguidance, which is not installed: "
            "pip install 'multitask-rl[grammar]'"
        )


def check_grammar(config: Mapping[str, Any], where: Where) -> None:
    """Refuse a grammar that is malformed, uses what the library lacks, or has no sentence.

    Args:
        config: one of ``regex``, ``json_schema``, ``choices`` with its value.
        where: place of ``config``.

    Raises:
        ConfigError: says where, what and what is allowed.
        MissingExtraError: llguidance is not installed.
    """
    check_keys(config, GRAMMAR_KEYS, where)
    if len(config) != 1:
        got = ", ".join(config) or "none"
        raise ConfigError(f"{where}: a grammar has exactly one of {', '.join(GRAMMAR_KEYS)}; got {got}")
    ((kind, value),) = config.items()
    place = where.at(kind)
    {"regex": _check_regex, "json_schema": _check_schema, "choices": _check_choices}[kind](value, place)
    require_llguidance()
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    source = lark_source(json.dumps(config))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source)
    if is_error:
        raise ConfigError(f"{place}: {_first_line(messages[0])} (in {value!r})")
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), source, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ConfigError(f"{place}: no text matches {value!r}, so no response could be sampled")


def lark_source(grammar: str, alphabet: str | None = None) -> str:
    """Return ``grammar`` (JSON text of a checked configuration) in llguidance's Lark dialect.

    Args:
        grammar: see ``SamplingParams.grammar``.
        alphabet: the characters that can be written; None = all. A sentence then never starts what the
            vocabulary cannot finish.
    """
    from llguidance import regex_to_lark

    ((kind, value),) = json.loads(grammar).items()
    if kind == "json_schema":
        # compact: optional white space would be an invitation to write nothing else until the limit
        options = {"whitespace_flexible": False, **value.get("x-guidance", {})}
        return "start: %json " + json.dumps({**value, "x-guidance": options})
    pattern = value if kind == "regex" else "|".join(re.escape(choice) for choice in value)
    pattern = regex_to_lark(pattern, use_ascii="")
    if alphabet is None:
        return f"start: TEXT\nTEXT: /{pattern}/"
    letters = "".join(rf"\x{{{ord(character):x}}}" for character in sorted(set(alphabet)))
    return f"start: TEXT\nTEXT: /(?:{pattern})/ & /[{letters}]*/"


def read_choices(grammar: str) -> Sequence[str]:
    """Return the choices of ``grammar``; none if it is of another kind."""
    choices: Sequence[str] = json.loads(grammar).get("choices", ())
    return choices


def _check_regex(value: Any, where: Where) -> None:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where}: expected a regular expression (text), got {value!r}")


def _check_schema(value: Any, where: Where) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: expected a JSON schema (a mapping), got {value!r}")
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: the schema is no JSON: {error}; put dates in quotes") from error
    if not isinstance(value.get("x-guidance", {}), Mapping):
        raise ConfigError(f"{where.at('x-guidance')}: expected a mapping, got {value['x-guidance']!r}")


def _check_choices(value: Any, where: Where) -> None:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise ConfigError(f"{where}: expected a list of at least two texts, got {value!r}")
    for index, choice in enumerate(value):
        if not isinstance(choice, str):
            raise ConfigError(
                f"{where.at(index)}: expected text, got {choice!r} ({type(choice).__name__}); put it in "
                "quotes"
            )
        if not choice:
            raise ConfigError(f"{where.at(index)}: a choice must not be empty")
        if choice in value[:index]:
            raise ConfigError(f"{where.at(index)}: the choice {choice!r} is there twice")


def _first_line(message: str) -> str:
    """Return what a person needs of llguidance's report: the last ``error:`` line, or the first line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        return told[-1]
    return re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", lines[0])
