"""JSON schemas of a tasks file and of a run's configuration, for editors: keys, types, ranges, meanings."""

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
from multitask_rl.config.checks import NAME_PATTERN, RESERVED_NAMES
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import setting_fields
from multitask_rl.config.schema.ranges import Rule, field_hints
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import SHORT_FORMS
from multitask_rl.plugins import ALGORITHMS, CONSTRAINTS, ENVIRONMENTS, REWARDS, list_plugins

REFERENCE = {"type": "string", "pattern": r"^\$\{"}
"""A reference that Hydra replaces: ``${oc.env:NAME}``."""

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number"}

_GROUPS = {"rewards": REWARDS, "constraints": CONSTRAINTS}
_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
_NAME = {"type": "string", "pattern": f"^(?!({'|'.join(RESERVED_NAMES)})$){NAME_PATTERN}$"}


def tasks_schema() -> dict[str, Any]:
    """Return the schema of a tasks file: its keys, types, ranges and choices.

    Installed plugins are ``examples``, which editors offer. ``multitask-rl tasks validate`` checks them, and
    rules over several keys.
    """
    task = _task()
    named = {**task, "properties": {"name": _NAME, **task["properties"]}, "required": ["name"]}
    listed = {"type": "array", "items": named, "minItems": 1}
    mapped = {"type": "object", "propertyNames": _NAME, "additionalProperties": task, "minProperties": 1}
    return {
        **_DRAFT,
        "title": "multitask-rl: tasks file",
        "type": "object",
        "properties": {"tasks": {"anyOf": [mapped, listed]}},
        "required": ["tasks"],
        "additionalProperties": False,
    }


def run_schema() -> dict[str, Any]:
    """Return the schema of a run's configuration (``configs/experiment/*.yaml``), Hydra's own keys included.

    A value may be a reference, ``${oc.env:NAME}``.
    """
    schema = object_schema(RunConfig, references=True)
    tasks = {"propertyNames": _NAME, "additionalProperties": _task(references=True)}
    schema["properties"]["tasks"] |= tasks
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {**_DRAFT, "title": "multitask-rl: run", **schema}


def _task(*, references: bool = False) -> dict[str, Any]:
    """Return the schema of a task's keys, short forms included, without its name."""
    task = object_schema(TaskSpec, skip=["name"], references=references)
    for key, group in (("type", ALGORITHMS), ("environment", ENVIRONMENTS)):
        task["properties"][key]["examples"] = _installed(group)
    for short, (config, long) in SHORT_FORMS.items():
        plugins = task["properties"][long]
        installed = {"examples": _installed(_GROUPS[long])}
        plugins["items"]["properties"]["plugin"] |= installed
        plugins["items"] = {"anyOf": [{"type": "string", **installed}, plugins["items"]]}
        meaning = f"Short form of one of `{long}`: its plugin."
        task["properties"] |= {
            short: {"type": ["string", "null"], "description": meaning, **installed},
            config: {"type": ["object", "null"], "description": f"`config` of `{short}`."},
        }
    return task


def _installed(group: str) -> list[str]:
    return [info.name for info in list_plugins(group)]


def object_schema(cls: Any, *, skip: Iterable[str] = (), references: bool) -> dict[str, Any]:
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


def value_schema(hint: Any, rules: Sequence[Rule] = (), *, references: bool) -> dict[str, Any]:
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
