"""Strict building of dataclasses from mappings: errors say where a key or value is wrong.

The type hints of the dataclass, ranges included (``ranges.py``), are the only schema.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from multitask_rl.config.schema.located_yaml import Where, check_plain
from multitask_rl.config.schema.ranges import check_value, field_hints, unknown_name
from multitask_rl.errors import ConfigError

T = TypeVar("T")

_KINDS: dict[type, str] = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def check_keys(given: Iterable[str], allowed: Iterable[str], where: Where) -> None:
    """Raise ``ConfigError`` for the first key that is not allowed, with a close match and what is allowed."""
    allowed = sorted(allowed)
    for key in given:
        if key not in allowed:
            raise ConfigError(f"{where.at(key)}: {unknown_name('key', key, allowed)}")


def setting_fields(cls: Any, skip: Iterable[str] = ()) -> list[dataclasses.Field[Any]]:
    """Return the fields of the dataclass ``cls`` that are keys, less those named in ``skip``."""
    keys = (f for f in dataclasses.fields(cls) if f.init and not f.metadata.get("derived"))
    return [f for f in keys if f.name not in skip]


def build_dataclass(cls: type[T], values: Mapping[str, Any], where: Where) -> T:
    """Return ``cls(**values)`` after checking every key, type and range against the hints of ``cls``.

    Nested dataclasses, lists and tuples are built too; whole numbers are accepted as numbers. A field with
    the metadata ``derived`` is not a key.

    Raises:
        ConfigError: unknown or missing key, wrong type, value out of range, or refused by ``__post_init__``.
    """
    fields = {field.name: field for field in setting_fields(cls)}
    check_keys(values, fields, where)
    hints = field_hints(cls)  # type: ignore[arg-type]
    built = {key: _convert(hints[key], value, where.at(key)) for key, value in values.items()}
    for name, spec in fields.items():
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if required and name not in built:
            raise ConfigError(f"{where}: key {name!r} is missing; it has no default")
    try:
        return cls(**built)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error


def build_parts(settings: Any) -> None:
    """Build the parts of ``settings``, themselves settings, that were given as mappings.

    Raises:
        ConfigError: a part does not fit its dataclass.
    """
    for name, hint in field_hints(type(settings)).items():  # type: ignore[arg-type]
        value = getattr(settings, name)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
            setattr(settings, name, _convert(hint, value, Where(type(settings).__name__, (name,))))


def _convert(hint: Any, value: Any, where: Where) -> Any:
    """Check ``value`` against ``hint`` and return it, built if it is a nested dataclass."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        built = _convert(args[0], value, where)
        check_value(args[1:], built, where)
        return built
    if hint is Any:
        check_plain(value, where)
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        *options, last = (arg for arg in args if arg is not type(None))
        for option in options:
            with contextlib.suppress(ConfigError):
                return _convert(option, value, where)
        return _convert(last, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        return build_dataclass(hint, _expect(Mapping, value, "a mapping", where), where)
    if origin in (list, tuple, Sequence):
        items = _expect((list, tuple), value, "a list", where)
        built = [_convert(args[0] if args else Any, item, where.at(i)) for i, item in enumerate(items)]
        return tuple(built) if origin is tuple else built
    if origin in (dict, Mapping):
        mapping = dict(_expect(Mapping, value, "a mapping", where))
        check_plain(mapping, where)
        return {k: _convert(args[1], v, where.at(k)) for k, v in mapping.items()} if args else mapping
    if hint not in _KINDS:
        return value
    if hint is str and isinstance(value, Path):
        return str(value)
    accepted: Any = (int, float) if hint is float else hint
    if (isinstance(value, bool) and hint is not bool) or not isinstance(value, accepted):
        quote = "; put it in quotes" if hint is str and not isinstance(value, (dict, list)) else ""
        quote = "; give its name, package.module:NAME or file.py:NAME" if quote and callable(value) else quote
        raise ConfigError(f"{where}: expected {_KINDS[hint]}, got {value!r} ({type(value).__name__}){quote}")
    check_plain(value, where)
    if hint is float and not math.isfinite(value):
        raise ConfigError(f"{where}: must be a finite number, got {float(value)!r}")
    return float(value) if hint is float else value


def _expect(kind: Any, value: Any, words: str, where: Where) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: expected {words}, got {value!r} ({type(value).__name__})")
    return value
