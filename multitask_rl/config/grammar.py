"""Grammars of the tasks file: checks, and the source text that both engines compile.

A grammar is passed on as the JSON text of its configuration (``SamplingParams.grammar``). The library is
llguidance (extra ``grammar``), which vLLM's guidance backend uses too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from multitask_rl.config.schema.build import check_keys
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import ConfigError, require_extra

GRAMMAR_KEYS = ("regex", "json_schema", "choices")


class _Bytes:
    """A tokenizer of single bytes: it can write every text."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def check_grammar(config: Mapping[str, Any], where: Where) -> None:
    """Refuse a grammar that is malformed, uses what the library lacks, or has no sentence."""
    check_keys(config, GRAMMAR_KEYS, where)
    if len(config) != 1:
        got = ", ".join(config) or "none"
        raise ConfigError(f"{where}: a grammar has exactly one of {', '.join(GRAMMAR_KEYS)}; got {got}")
    ((kind, value),) = config.items()
    place = where.at(kind)
    if kind == "regex":
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{place}: expected a regular expression (text), got {value!r}")
    elif kind == "json_schema":
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place}: expected a JSON schema (a mapping), got {value!r}")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{place}: the schema is no JSON: {error}; put dates in quotes") from error
        if not isinstance(value.get("x-guidance", {}), Mapping):
            raise ConfigError(f"{place.at('x-guidance')}: expected a mapping, got {value['x-guidance']!r}")
    else:
        if not isinstance(value, (list, tuple)) or len(value) < 2:
            raise ConfigError(f"{place}: expected a list of at least two texts, got {value!r}")
        for index, choice in enumerate(value):
            if not isinstance(choice, str):
                got = f"{choice!r} ({type(choice).__name__})"
                raise ConfigError(f"{place.at(index)}: expected text, got {got}; put it in quotes")
            if not choice:
                raise ConfigError(f"{place.at(index)}: a choice must not be empty")
            if choice in value[:index]:
                raise ConfigError(f"{place.at(index)}: the choice {choice!r} is there twice")
    require_extra("llguidance", "grammar", "constraints of mode grammar need llguidance")
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    source = lark_source(json.dumps(config))
    is_error, messages = LLMatcher.validate_grammar_with_warnings(source)
    if is_error:
        lines = [line.strip() for line in messages[0].splitlines() if line.strip()]
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        first = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", lines[0])
        raise ConfigError(f"{place}: {[first, *errors][-1]} (in {value!r})")
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), source, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ConfigError(f"{place}: no text matches {value!r}, so no response could be sampled")


def lark_source(grammar: str, alphabet: str | None = None) -> str:
    """Return ``grammar`` (JSON text of a checked configuration) in llguidance's Lark dialect.

    With ``alphabet``, the characters that the vocabulary can write, no sentence begins with a part that the
    vocabulary cannot complete.
    """
    from llguidance import regex_to_lark

    ((kind, value),) = json.loads(grammar).items()
    if kind == "json_schema":
        # compact: with optional white space a model may write nothing else up to the token limit
        options = {"whitespace_flexible": False, **value.get("x-guidance", {})}
        return "start: %json " + json.dumps({**value, "x-guidance": options})
    pattern = value if kind == "regex" else "|".join(re.escape(choice) for choice in value)
    pattern = regex_to_lark(pattern, use_ascii="")
    if alphabet is None:
        return f"start: TEXT\nTEXT: /{pattern}/"
    letters = "".join(rf"\x{{{ord(character):x}}}" for character in sorted(set(alphabet)))
    return f"start: TEXT\nTEXT: /(?:{pattern})/ & /[{letters}]*/"
