"""Encoding of the plain values that pass between a program and its tester.

Scalars and lists are JSON; any other kind is an object with one key, its tag, so that the C scanner decodes
it with one hook. Only exact builtin values come out. A subclass becomes the value of its base; an object
without a value becomes a *handle*, a name for what stays in its process. Decoding builds data only: no
pickle, no eval.
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
_TYPES = {k: v for k, v in vars(builtins).items() if isinstance(v, type) and not k.startswith("_")}


class CodecError(ValueError):
    """A value that cannot be encoded, or text that is no value."""


class Encoder:
    """Turns values into text. ``to_handle`` returns tag and content for an object that is no value."""

    def __init__(self, to_handle: Callable[[Any], tuple[str, Any]]) -> None:
        self._to_handle = to_handle

    def dumps(self, message: Any) -> str:
        """Return JSON of a message of encoded values; ``CodecError`` if it is larger than ``MAX_MESSAGE``."""
        try:
            text = json.dumps(message, separators=(",", ":"))
        except ValueError as error:  # a RecursionError is the caller's: ``encode`` limits the depth of values
            raise CodecError(f"the value cannot be carried: {error}") from error
        if len(text) > MAX_MESSAGE:
            raise CodecError(f"the value takes {len(text)} bytes, more than {MAX_MESSAGE}")
        return text

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return ``value`` as a tree of JSON types; ``CodecError`` if it is deeper than ``MAX_DEPTH``."""
        kind = type(value)
        if kind in (str, bool, float) or value is None:
            return value
        if kind is int:
            return value if value.bit_length() < _PLAIN_INT_BITS else {"i": hex(value)}
        if depth > MAX_DEPTH:
            raise CodecError(f"the value is nested deeper than {MAX_DEPTH} levels, or holds itself")
        writer = _WRITERS.get(kind)
        if writer is not None:
            tag, content = writer(self, value, depth + 1)
            return content if tag is None else {tag: content}
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return {"T": value.__name__}
        if not isinstance(value, type):
            if kind.__module__ == "numpy" and (encoded := self._encode_numpy(value, depth)) is not None:
                return encoded
            for base in kind.__mro__[1:]:
                if base is tuple:
                    names = getattr(kind, "_fields", None)
                    if (
                        type(names) is tuple
                        and len(names) <= _MAX_FIELDS
                        and len(kind.__name__) <= _MAX_NAME
                        and all(type(name) is str and len(name) <= _MAX_NAME for name in names)
                    ):
                        return {"n": [kind.__name__, list(names), self.items(tuple(value), depth + 1)]}
                if base in _BASES:
                    return self.encode(_BASES[base](value), depth)
        tag, content = self._to_handle(value)
        return {tag: content}

    def _encode_numpy(self, value: Any, depth: int) -> Any:
        """Return a scalar or an array of numpy as a tree; None for its other objects."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self.encode(value.item(), depth + 1) if value.dtype.kind in "biufcUS" else None
        if numpy is None or not isinstance(value, numpy.ndarray):
            return None
        if value.dtype.kind not in "biufcU":
            return self.encode(value.tolist(), depth + 1)
        flat = self.items(value.ravel().tolist(), depth + 1)
        return {"N": [value.dtype.str, list(value.shape), flat]}

    def items(self, values: Iterable[Any], depth: int) -> list[Any]:
        """Return the encoded items; the JSON encoder takes scalars as they are."""
        found = list(values)
        is_large = (type(v) is int and v.bit_length() >= _PLAIN_INT_BITS for v in found)
        if set(map(type, found)) <= _SCALARS and not any(is_large):
            return found
        return [self.encode(value, depth) for value in found]


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
"""By base: its value in an object of a subclass, read past the methods that the subclass overrides."""

_WRITERS: dict[type, Callable[[Encoder, Any, int], tuple[str | None, Any]]] = {
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
    """A message holds an array, and this reader refuses arrays."""


class Decoder:
    """Turns text back into values, of exactly the types and sizes that ``Encoder`` writes.

    The values take memory in proportion to the text, whatever the text says. ``from_handle`` gets tag and
    content of a handle. Without ``has_arrays`` a message with an array is refused.
    """

    def __init__(self, from_handle: Callable[[str, Any], Any], *, has_arrays: bool = True) -> None:
        self._from_handle = from_handle
        self._has_arrays = has_arrays

    def loads(self, text: bytes | str) -> Any:
        """Return the message in ``text``; ``CodecError`` if it is none, ``NeedsArraysError`` for an array."""
        try:
            return json.loads(text, object_hook=self._read_tagged)
        except NeedsArraysError:
            raise
        except Exception as error:
            raise CodecError(f"not a message: {type(error).__name__}") from error

    def _read_tagged(self, tagged: dict[str, Any]) -> Any:
        ((tag, content),) = tagged.items()
        entry = _READERS.get(tag)
        if entry is None:
            return self._from_handle(tag, content)
        if tag == "N" and not self._has_arrays:
            raise NeedsArraysError("an array")
        kinds, reader = entry
        if type(kinds) is tuple and type(content) is list and tuple(map(type, content)) == kinds:
            return reader(*content)
        if type(content) is not kinds:
            raise CodecError(f"the content of {tag} has other types")
        return reader(content)


def _all(values: list[Any], *kinds: type) -> list[Any]:
    """Return ``values`` if the type of each is one of ``kinds``."""
    if not set(map(type, values)) <= set(kinds):
        raise CodecError("a container's content has other types")
    return values


def _read_deque(content: list[Any]) -> collections.deque[Any]:
    items, length = content
    if type(items) is not list or type(length) not in (int, type(None)):
        raise CodecError("a container's content has other types")
    return collections.deque(items, length)


def _read_pairs(content: list[Any]) -> Any:
    if any(len(pair) != 2 for pair in _all(content, tuple)):
        raise CodecError("an item of a mapping is not a pair")
    return dict(content).items()


def _read_array(kind: str, shape: list[Any], flat: list[Any]) -> Any:
    match = _ARRAY_KIND.fullmatch(kind)
    if match is None or math.prod(_all(shape, int)) != len(flat) or len(shape) > _MAX_AXES:
        raise CodecError("the items of an array do not fit its shape")
    _all(flat, bool, int, float, complex, str)
    if match[1] == "U":
        kind = "U"  # as wide as its longest text, not as it says
        if max(map(len, _all(flat, str)), default=0) * len(flat) > MAX_MESSAGE:
            raise CodecError("the items of an array are too large")
    elif int(match[2]) > _MAX_ITEM_BYTES:
        raise CodecError("the items of an array are too large")
    import numpy  # 60 ms, where no test names it and an answer is an array all the same

    return numpy.array(flat, dtype=kind).reshape(shape)


def _read_named(name: str, fields: list[Any], values: list[Any]) -> Any:
    longest = max(map(len, [name, *_all(fields, str)]))
    if longest > _MAX_NAME or len(fields) > _MAX_FIELDS:
        raise CodecError("a named tuple is too large")
    return _named_tuple(name, tuple(fields))(*values)


_named_tuple: Callable[[str, tuple[str, ...]], Any] = functools.lru_cache(64)(collections.namedtuple)

_READERS: dict[str, tuple[type | tuple[type, ...], Callable[..., Any]]] = {
    "i": (str, lambda c: int(c, 16)),
    "t": (list, tuple),
    "s": (list, set),
    "f": (list, frozenset),
    "d": ((list, list), lambda keys, values: dict(zip(keys, values, strict=True))),
    "b": (str, lambda c: base64.b64decode(c, validate=True)),
    "y": (str, lambda c: bytearray(base64.b64decode(c, validate=True))),
    "c": ((float, float), complex),
    "D": (str, Decimal),
    "F": ((int, int), Fraction),
    "q": (list, _read_deque),
    "r": ((int, int, int), range),
    "a": ((str, list), lambda code, items: array.array(code, _all(items, int, float, str))),
    "e": (list, iter),
    "k": ((str, str), lambda name, text: _DATES[name].fromisoformat(text)),
    "l": ((int, int, int), datetime.timedelta),
    "K": (list, lambda c: dict.fromkeys(c).keys()),
    "V": (list, lambda c: dict(enumerate(c)).values()),
    "I": (list, _read_pairs),
    "z": (int, {0: NotImplemented, 1: ...}.__getitem__),
    "n": ((str, list, list), _read_named),
    "N": ((str, list, list), _read_array),
    "T": (str, _TYPES.__getitem__),
}
"""By tag: the type of the content, or the types of its parts, and the function that makes a value of them."""
