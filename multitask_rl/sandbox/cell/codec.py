"""Encoding of the plain values that pass between a program and its judge.

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
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

__all__ = ["MAX_DEPTH", "MAX_MESSAGE", "CodecError", "Decoder", "Encoder", "NeedsArraysError"]

MAX_DEPTH = 100
MAX_MESSAGE = 8 << 20
"""Bytes of one message."""
_PLAIN_INT_BITS = 10_000
_MAX_NAME, _MAX_FIELDS, _MAX_AXES = 100, 128, 64
"""Characters of a name, fields of a named tuple, axes of an array."""
_MAX_ITEM_BYTES = 32
_ARRAY_KIND = re.compile(r"[<>|=]?([biufcU])(\d{1,7})")
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
    return (
        type(fields) is tuple
        and len(fields) <= _MAX_FIELDS
        and len(kind.__name__) <= _MAX_NAME
        and all(type(name) is str and len(name) <= _MAX_NAME for name in fields)
    )


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


class NeedsArraysError(CodecError):
    """A message holds an array, and this reader has none."""


class Decoder:
    """Turns text back into values, of exactly the types and sizes that ``Encoder`` writes.

    What a message builds takes memory in proportion to its text, whatever the text says.

    Args:
        from_handle: gets tag and content of a name for an object.
        has_arrays: arrays become arrays (numpy is imported for the first one); False: a message with one is
            refused.
    """

    def __init__(self, from_handle: Callable[[str, Any], Any], *, has_arrays: bool = True) -> None:
        self._from_handle = from_handle
        self._has_arrays = has_arrays

    def loads(self, text: bytes | str) -> Any:
        """Return the message in ``text``.

        Raises:
            NeedsArraysError: it holds an array, and ``has_arrays`` is False.
            CodecError: it is not a message, whatever is wrong with it.
        """
        try:
            return json.loads(text, object_hook=self._hook)
        except NeedsArraysError:
            raise
        except Exception as error:
            raise CodecError(f"not a message: {type(error).__name__}") from error

    def _hook(self, tagged: dict[str, Any]) -> Any:
        ((tag, content),) = tagged.items()
        entry = _READERS.get(tag)
        if entry is None:
            return self._from_handle(tag, content)
        kind, reader = entry
        if type(content) is not kind:
            raise CodecError(f"{tag} of {type(content).__name__}")
        if tag == "N" and not self._has_arrays:
            raise NeedsArraysError("an array")
        return reader(content)


def _exact(values: list[Any], *kinds: type) -> list[Any]:
    """Return ``values`` if they are one of each of ``kinds``, in this order."""
    if tuple(map(type, values)) != kinds:
        raise CodecError("content of other types")
    return values


def _all(values: list[Any], *kinds: type) -> list[Any]:
    """Return ``values`` if each is one of ``kinds``."""
    if not set(map(type, values)) <= set(kinds):
        raise CodecError("content of other types")
    return values


def _read_integer(digits: str) -> int:
    return int(digits, 16)


def _read_dict(content: list[Any]) -> dict[Any, Any]:
    keys, values = _exact(content, list, list)
    return dict(zip(keys, values, strict=True))


def _read_deque(content: list[Any]) -> collections.deque[Any]:
    items, length = content
    if type(items) is not list or type(length) not in (int, type(None)):
        raise CodecError("content of other types")
    return collections.deque(items, length)


def _read_typed_array(content: list[Any]) -> array.array[Any]:
    code, items = _exact(content, str, list)
    return array.array(code, _all(items, int, float, str))


def _read_pairs(content: list[Any]) -> Any:
    if any(len(pair) != 2 for pair in _all(content, tuple)):
        raise CodecError("an item that is no pair")
    return dict(content).items()


def _read_date(content: list[Any]) -> Any:
    name, text = _exact(content, str, str)
    return _DATES[name].fromisoformat(text)


def _read_type(name: str) -> type:
    return _TYPES[name]


def _read_singleton(number: int) -> Any:
    return {0: NotImplemented, 1: ...}[number]


def _read_array(content: list[Any]) -> Any:
    kind, shape, flat = _exact(content, str, list, list)
    match = _ARRAY_KIND.fullmatch(kind)
    if match is None or math.prod(_all(shape, int)) != len(flat) or len(shape) > _MAX_AXES:
        raise CodecError("an array of another shape")
    _all(flat, bool, int, float, complex, str)
    if match[1] == "U":
        kind = "U"  # as wide as its longest text, not as it says
        if max(map(len, _all(flat, str)), default=0) * len(flat) > MAX_MESSAGE:
            raise CodecError("an array of wide items")
    elif int(match[2]) > _MAX_ITEM_BYTES:
        raise CodecError("an array of wide items")
    import numpy  # 60 ms, where no test names it and an answer is an array all the same

    return numpy.array(flat, dtype=kind).reshape(shape)


@functools.lru_cache(maxsize=64)
def _named(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


def _read_named(content: list[Any]) -> Any:
    name, fields, values = _exact(content, str, list, list)
    longest = max(map(len, [name, *_all(fields, str)]))
    if longest > _MAX_NAME or len(fields) > _MAX_FIELDS:
        raise CodecError("a named tuple that is too large")
    return _named(name, tuple(fields))(*values)


_READERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "i": (str, _read_integer),
    "t": (list, tuple),
    "s": (list, set),
    "f": (list, frozenset),
    "d": (list, _read_dict),
    "b": (str, lambda c: base64.b64decode(c, validate=True)),
    "y": (str, lambda c: bytearray(base64.b64decode(c, validate=True))),
    "c": (list, lambda c: complex(*_exact(c, float, float))),
    "D": (str, Decimal),
    "F": (list, lambda c: Fraction(*_exact(c, int, int))),
    "q": (list, _read_deque),
    "r": (list, lambda c: range(*_exact(c, int, int, int))),
    "a": (list, _read_typed_array),
    "e": (list, iter),
    "k": (list, _read_date),
    "l": (list, lambda c: datetime.timedelta(*_exact(c, int, int, int))),
    "K": (list, lambda c: dict.fromkeys(c).keys()),
    "V": (list, lambda c: dict(enumerate(c)).values()),
    "I": (list, _read_pairs),
    "z": (int, _read_singleton),
    "n": (list, _read_named),
    "N": (list, _read_array),
    "T": (str, _read_type),
}
"""By tag: the type of the content, and what makes the value of it."""
