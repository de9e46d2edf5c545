"""Dataclasses of settings as JSON schema, for editors: keys, types, ranges, defaults and meanings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.schema.build import setting_fields
from multitask_rl.config.schema.ranges import Rule, field_hints

REFERENCE = {"type": "string", "pattern": r"^\$\{"}
"""A reference that Hydra replaces: ``${oc.env:NAME}``."""

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}


def object_schema(cls: Any, *, skip: Iterable[str] = (), references: bool = False) -> dict[str, Any]:
    """Return the schema of the mappings that ``build_dataclass`` accepts for the dataclass ``cls``.

    ``skip`` names fields that are not keys; ``references`` allows ``REFERENCE`` as a value.
    """
    hints, texts, properties, required = field_hints(cls), meanings(cls), {}, []
    for field in setting_fields(cls, skip):
        own = value_schema(hints[field.name], references=references)
        if field.name in texts:
            own["description"] = texts[field.name]
        if field.default is not dataclasses.MISSING:
            own["default"] = list(field.default) if isinstance(field.default, tuple) else field.default
        elif field.default_factory is dataclasses.MISSING:
            required.append(field.name)
        properties[field.name] = own
    needs = {"required": required} if required else {}
    return {"type": "object", "properties": properties, **needs, "additionalProperties": False}


def value_schema(hint: Any, rules: Sequence[Rule] = (), *, references: bool = False) -> dict[str, Any]:
    """Return the schema of a value of type ``hint`` that keeps ``rules``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return value_schema(args[0], (*rules, *args[1:]), references=references)
    if origin in (typing.Union, types.UnionType):
        some = [value_schema(arg, rules, references=references) for arg in args if arg is not type(None)]
        return {"anyOf": [*some, {"type": "null"}]} if type(None) in args else {"anyOf": some}
    if dataclasses.is_dataclass(hint):
        return object_schema(hint, references=references)
    inner = args[0 if origin is tuple else -1] if args else Any
    of = {} if inner is Any else value_schema(inner, rules, references=references)
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": of}
    if origin in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": of} if of else {})}
    own: dict[str, Any] = {"type": _TYPES[hint]} if hint in _TYPES else {}
    for rule in rules:
        own |= rule.schema()
    return {"anyOf": [own, REFERENCE]} if references and own and own != {"type": "string"} else own


def meanings(cls: type) -> dict[str, str]:
    """Return the string under every field of the dataclass and its bases."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        body = parse_python(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for node, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                text = ast.literal_eval(below.value) if isinstance(below, ast.Expr) else ""
                found[node.target.id] = " ".join(text.split()).replace("``", "`")
    return found
