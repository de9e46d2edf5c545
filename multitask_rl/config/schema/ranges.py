"""Ranges and choices, declared on the field: ``dropout: Annotated[float, Range("[0, 1)")] = 0.0``.

``build_dataclass`` and ``Settings`` check them; docs/configuration.md and the JSON schemas show them.
"""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from multitask_rl.errors import ConfigError


def suggest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest known word, or an empty string."""
    words = list(known)
    close = [w for w in words if sorted(w) == sorted(word)]  # letters in the wrong order
    close = close or difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    close = close or [w for w in words if len(word) > 2 and w.startswith(word)]
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``unknown <kind> '<name>'; did you mean 'x'? (allowed: x, y)``."""
    known = list(known)
    return f"unknown {kind} {name!r}{suggest(name, known)} (allowed: {', '.join(known) or 'none'})"


class Range:
    """A rule: the value is a finite number in an interval such as ``[0, 1)`` or ``(0, inf)``.

    Args:
        interval: ``[`` and ``]`` include the end, ``(`` and ``)`` do not.
        off: a further allowed value, which turns the setting off.
    """

    def __init__(self, interval: str, *, off: float | None = None) -> None:
        self._low, self._high = (float(end) for end in interval[1:-1].split(","))
        self._above, self._below = interval[0] == "(", interval[-1] == ")"
        self._off = off
        text = f"in {interval}"
        if interval == "(-inf, inf)":
            text = "a finite number"
        elif self._high == math.inf:
            text = f"{'>' if self._above else '>='} {self._low:g}"
        self._text = text if off is None else f"{off:g} or {text}"

    def __str__(self) -> str:
        return self._text

    def refuses(self, value: Any) -> bool:
        """Whether ``value`` is not a number in the range."""
        if not isinstance(value, int | float) or not math.isfinite(value):
            return True
        too_low = value <= self._low if self._above else value < self._low
        too_high = value >= self._high if self._below else value > self._high
        return value != self._off and (too_low or too_high)

    def schema(self) -> dict[str, Any]:
        """Return the same rule as keywords of JSON schema."""

        def plain(number: float) -> float:
            return int(number) if number == int(number) else number

        ends: dict[str, Any] = {}
        if self._low != -math.inf:
            ends["exclusiveMinimum" if self._above else "minimum"] = plain(self._low)
        if self._high != math.inf:
            ends["exclusiveMaximum" if self._below else "maximum"] = plain(self._high)
        return ends if self._off is None else {"anyOf": [{"const": plain(self._off)}, ends]}


class OneOf:
    """A rule: the value is one of the given ones."""

    def __init__(self, *values: str | int) -> None:
        self._values = values

    def __str__(self) -> str:
        return f"one of {', '.join(str(value) or repr('') for value in self._values)}"

    def refuses(self, value: Any) -> bool:
        """Whether ``value`` is not one of them."""
        return value not in self._values

    def schema(self) -> dict[str, Any]:
        """Return the same rule as keywords of JSON schema."""
        return {"enum": list(self._values)}


class NotEmpty:
    """A rule: the value is a text of at least one character."""

    def __str__(self) -> str:
        return "not empty"

    def refuses(self, value: Any) -> bool:
        """Whether ``value`` is the empty text."""
        return not value

    def schema(self) -> dict[str, Any]:
        """Return the same rule as keywords of JSON schema."""
        return {"minLength": 1}


Rule = Range | OneOf | NotEmpty

Natural = Annotated[int, Range("[0, inf)")]
Count = Annotated[int, Range("[1, inf)")]
NotNegative = Annotated[float, Range("[0, inf)")]
Positive = Annotated[float, Range("(0, inf)")]
Finite = Annotated[float, Range("(-inf, inf)")]
Fraction = Annotated[float, Range("[0, 1]")]
PositiveFraction = Annotated[float, Range("(0, 1]")]


class Settings:
    """Base of a dataclass of settings: refuses values outside the ranges of its fields.

    A subclass with rules between its fields calls ``Settings.__post_init__(self)`` before it checks them.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the type of every number, text, list and part, and the rules; make a path a text."""
        for name, hint in field_hints(type(self)).items():  # type: ignore[arg-type]
            value, where = getattr(self, name), f"{type(self).__qualname__}.{name}"
            kind = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
            if kind is str and isinstance(value, Path):
                value = str(value)
                setattr(self, name, value)
            if kind is str and not isinstance(value, str):
                raise ConfigError(f"{where} must be a text, got {value!r}")
            if is_dataclass(kind) and not isinstance(value, kind):  # type: ignore[arg-type]
                raise ConfigError(f"{where} must be of type {kind.__name__}, got {value!r}")  # type: ignore[union-attr]
            if kind is int and not isinstance(value, int):
                raise ConfigError(f"{where} must be a whole number, got {value!r}")
            if kind is float and isinstance(value, str):
                raise ConfigError(f"{where} must be a number, got {value!r}")
            if typing.get_origin(kind) in (list, tuple) and isinstance(value, str):
                raise ConfigError(f"{where} must be a list, got {value!r}")
            check_value(list(rules_of(hint)), value, where)


def rules_of(hint: Any) -> Iterator[Rule]:
    """Yield the rules that a type hint declares, at any depth (``list[Fraction]``, ``Fraction | None``)."""
    for part in typing.get_args(hint):
        if isinstance(part, Rule):
            yield part
        else:
            yield from rules_of(part)


def check_value(rules: Iterable[Rule], value: Any, where: object) -> None:
    """Raise a ConfigError if ``value`` breaks a rule; None passes, lists and mappings are checked by item."""
    if value is None:
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_value(rules, item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_value(rules, item, f"{where}[{index}]")
    else:
        for rule in rules:
            if rule.refuses(value):
                known = rule.schema().get("enum", ())
                close = suggest(value, map(str, known)) if isinstance(value, str) else ""
                raise ConfigError(f"{where} must be {rule}, got {value!r}{close}")


@cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the type hint of every field of the dataclass ``cls``, with its rules.

    A field that a subclass declares again without rules keeps the rules of the base.
    """
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        known = typing.get_type_hints(base, include_extras=True)
        for name in inspect.get_annotations(base):
            if any(rules_of(known[name])) or not any(rules_of(hints.get(name))):
                hints[name] = known[name]
    return hints
