"""Plain values as text: what may cross between a program and its judge.

Scalars and lists are JSON as they are; every other kind is an object with one key, its tag, so that decoding
runs at the speed of the C scanner with one hook. Only exact builtin values come out: a subclass is encoded as
the value of its base, and whatever is not a value becomes a *handle*, a name for an object that stays where
it is. Decoding builds nothing but data: never pickle, never eval.
"""

from __future__ import annotations

import array
import base64
import builtins
import collections
import datetime
import json
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

__all__ = ["MAX_DEPTH", "MAX_MESSAGE", "CodecError", "Decoder", "Encoder"]

MAX_DEPTH = 100
MAX_MESSAGE = 8 << 20
"""Bytes of one message."""
_PLAIN_INT_BITS = 10_000
_SCALARS = frozenset({type(None), bool, int, float, str})
_DATES = {c.__name__: c for c in (datetime.date, datetime.datetime, datetime.time)}
_TYPES = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and not name.startswith("_")
}


class CodecError(ValueError):
    """A value that cannot cross, or text that is no value."""


class Encoder:
    """Turns values into text. ``to_handle`` names an object that is not a value: ``(tag, content)``."""

    def __init__(self, to_handle: Callable[[Any], tuple[str, Any]]) -> None:
        self._to_handle = to_handle

    def dumps(self, message: Any) -> str:
        """Return JSON of a message whose values went through ``encode``.

        Raises:
            CodecError: it is larger than ``MAX_MESSAGE``.
        """
        try:
            text = json.dumps(message, separators=(",", ":"))
        except (ValueError, RecursionError) as error:
            raise CodecError(f"the value cannot be carried: {error}") from error
        if len(text) > MAX_MESSAGE:
            raise CodecError(f"the value takes {len(text)} bytes, more than {MAX_MESSAGE}")
        return text

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return ``value`` as a tree of JSON types.

        Raises:
            CodecError: nested deeper than ``MAX_DEPTH`` (a cycle is).
        """
        kind = type(value)
        if kind in (str, bool, float) or value is None:
            return value
        if kind is int:
            return value if value.bit_length() < _PLAIN_INT_BITS else {"i": hex(value)}
        if depth > MAX_DEPTH:
            raise CodecError(f"the value is nested deeper than {MAX_DEPTH} levels, or holds itself")
        writer = _WRITERS.get(kind)
        if writer is None:
            return self._encode_other(value, depth)
        tag, content = writer(self, value, depth + 1)
        return content if tag is None else {tag: content}

    def items(self, values: Iterable[Any], depth: int) -> list[Any]:
        """Return the encoded items; scalars are left to the JSON encoder."""
        found = list(values)
        if set(map(type, found)) <= _SCALARS and not any(
            type(v) is int and v.bit_length() >= _PLAIN_INT_BITS for v in found
        ):
            return found
        return [self.encode(value, depth) for value in found]

    def _encode_other(self, value: Any, depth: int) -> Any:
        if isinstance(value, type):
            return {"T": value.__name__} if _TYPES.get(value.__name__) is value else self._handle(value)
        if type(value).__module__ == "numpy":
            encoded = _encode_numpy(self, value, depth)
            if encoded is not None:
                return encoded
        for base in type(value).__mro__[1:]:
            if base is tuple and _is_namedtuple(type(value)):
                fields = list(type(value)._fields)
                return {"n": [type(value).__name__, fields, self.items(tuple(value), depth + 1)]}
            if base in _BASES:
                return self.encode(_BASES[base](value), depth)
        return self._handle(value)

    def _handle(self, value: Any) -> Any:
        tag, content = self._to_handle(value)
        return {tag: content}


def _is_namedtuple(kind: Any) -> bool:
    fields = getattr(kind, "_fields", None)
    return type(fields) is tuple and all(type(name) is str for name in fields)


def _encode_numpy(encoder: Encoder, value: Any, depth: int) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.generic):
        return encoder.encode(value.item(), depth + 1) if value.dtype.kind in "biufcUS" else None
    if isinstance(value, numpy.ndarray):
        if value.dtype.kind in "biufcU":
            return {
                "N": [value.dtype.str, list(value.shape), encoder.items(value.ravel().tolist(), depth + 1)]
            }
        return encoder.encode(value.tolist(), depth + 1)
    return None


# the value of a subclass, read past whatever it overrides
_BASES: dict[type, Callable[[Any], Any]] = {
    bool: lambda v: bool(v),
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    complex: lambda v: complex(v.real, v.imag),
    bytes: lambda v: bytes.__getitem__(v, slice(None)) + b"",
    bytearray: lambda v: bytearray(bytearray.__getitem__(v, slice(None))),
    list: lambda v: list.__getitem__(v, slice(None)),
    tuple: lambda v: tuple.__getitem__(v, slice(None)),
    dict: lambda v: dict(dict.items(v)),
    set: lambda v: set(set.__iter__(v)),
    frozenset: lambda v: frozenset(frozenset.__iter__(v)),
    collections.deque: lambda v: collections.deque(collections.deque.__iter__(v), v.maxlen),
    Decimal: lambda v: Decimal(v.as_tuple()),
    Fraction: lambda v: Fraction(v.numerator, v.denominator),
}

_Writer = Callable[[Encoder, Any, int], tuple[str | None, Any]]
_WRITERS: dict[type, _Writer] = {
    list: lambda e, v, d: (None, e.items(v, d)),
    tuple: lambda e, v, d: ("t", e.items(v, d)),
    set: lambda e, v, d: ("s", e.items(v, d)),
    frozenset: lambda e, v, d: ("f", e.items(v, d)),
    dict: lambda e, v, d: ("d", [e.items(v, d), e.items(v.values(), d)]),
    bytes: lambda e, v, d: ("b", base64.b64encode(v).decode()),
    bytearray: lambda e, v, d: ("y", base64.b64encode(v).decode()),
    complex: lambda e, v, d: ("c", [v.real, v.imag]),
    Decimal: lambda e, v, d: ("D", str(v)),
    Fraction: lambda e, v, d: ("F", [e.encode(v.numerator), e.encode(v.denominator)]),
    collections.deque: lambda e, v, d: ("q", [e.items(v, d), v.maxlen]),
    range: lambda e, v, d: ("r", [v.start, v.stop, v.step]),
    array.array: lambda e, v, d: ("a", [v.typecode, v.tolist()]),
    datetime.date: lambda e, v, d: ("k", ["date", v.isoformat()]),
    datetime.datetime: lambda e, v, d: ("k", ["datetime", v.isoformat()]),
    datetime.time: lambda e, v, d: ("k", ["time", v.isoformat()]),
    datetime.timedelta: lambda e, v, d: ("l", [v.days, v.seconds, v.microseconds]),
    type({}.keys()): lambda e, v, d: ("K", e.items(v, d)),
    type({}.values()): lambda e, v, d: ("V", e.items(v, d)),
    type({}.items()): lambda e, v, d: ("I", e.items(v, d)),
    type(NotImplemented): lambda e, v, d: ("z", 0),
    type(...): lambda e, v, d: ("z", 1),
}


class Decoder:
    """Turns text back into values. ``from_handle`` gets tag and content of a name for an object."""

    def __init__(self, from_handle: Callable[[str, Any], Any]) -> None:
        self._from_handle = from_handle

    def loads(self, text: bytes | str) -> Any:
        """Return the message in ``text``.

        Raises:
            CodecError: it is not a message, whatever is wrong with it.
        """
        try:
            return json.loads(text, object_hook=self._hook)
        except Exception as error:
            raise CodecError(f"not a message: {type(error).__name__}") from error

    def _hook(self, tagged: dict[str, Any]) -> Any:
        ((tag, content),) = tagged.items()
        reader = _READERS.get(tag)
        return self._from_handle(tag, content) if reader is None else reader(content)


def _read_array(content: Any) -> Any:
    kind, shape, flat = content
    numpy = sys.modules.get("numpy")
    if numpy is None or kind[1] not in "biufcU":
        return flat
    return numpy.array(flat, dtype=kind).reshape(shape)


def _read_named(content: Any) -> Any:
    name, fields, values = content
    return collections.namedtuple(name, fields)(*values)


_READERS: dict[str, Callable[[Any], Any]] = {
    "i": lambda c: int(c, 16),
    "t": tuple,
    "s": set,
    "f": frozenset,
    "d": lambda c: dict(zip(*c, strict=True)),
    "b": lambda c: base64.b64decode(c, validate=True),
    "y": lambda c: bytearray(base64.b64decode(c, validate=True)),
    "c": lambda c: complex(*c),
    "D": Decimal,
    "F": lambda c: Fraction(*c),
    "q": lambda c: collections.deque(c[0], c[1]),
    "r": lambda c: range(*c),
    "a": lambda c: array.array(*c),
    "e": iter,
    "k": lambda c: _DATES[c[0]].fromisoformat(c[1]),
    "l": lambda c: datetime.timedelta(*c),
    "K": lambda c: dict.fromkeys(c).keys(),
    "V": lambda c: dict(enumerate(c)).values(),
    "I": lambda c: dict(c).items(),
    "z": lambda c: (NotImplemented, ...)[c],
    "n": _read_named,
    "N": _read_array,
    "T": lambda c: _TYPES[c],
}
