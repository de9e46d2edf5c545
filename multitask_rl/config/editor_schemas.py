"""JSON schemas of a tasks file and of a run's configuration: completion and red lines in an editor."""

from __future__ import annotations

from typing import Any

from multitask_rl.config.checks import NAME_PATTERN, RESERVED_NAMES
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.json_schema import object_schema
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import SHORT_FORMS

__all__ = ["run_schema", "tasks_schema"]

_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
_NAME = {"type": "string", "pattern": f"^(?!({'|'.join(RESERVED_NAMES)})$){NAME_PATTERN}$"}


def tasks_schema() -> dict[str, Any]:
    """Return the schema of a tasks file: its keys, types, ranges and choices.

    What depends on several keys or on installed plugins is left to ``multitask-rl tasks validate``.
    """
    named = _task()
    named["properties"] = {"name": _NAME, **named["properties"]}
    named["required"] = ["name"]
    listed = {"type": "array", "items": named, "minItems": 1}
    mapped = {"type": "object", **_by_name(_task()), "minProperties": 1}
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
    schema["properties"]["tasks"] |= _by_name(_task(references=True))
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {**_DRAFT, "title": "multitask-rl: run", **schema}


def _by_name(task: dict[str, Any]) -> dict[str, Any]:
    return {"propertyNames": _NAME, "additionalProperties": task}


def _task(*, references: bool = False) -> dict[str, Any]:
    """Return the schema of a task's keys, short forms included, without its name."""
    task = object_schema(TaskSpec, skip=["name"], references=references)
    for short, (config, long) in SHORT_FORMS.items():
        plugins = task["properties"][long]
        plugins["items"] = {"anyOf": [{"type": "string"}, plugins["items"]]}
        task["properties"] |= {
            short: {"type": ["string", "null"], "description": f"Short form of one of `{long}`: its plugin."},
            config: {"type": ["object", "null"], "description": f"`config` of `{short}`."},
        }
    return task
