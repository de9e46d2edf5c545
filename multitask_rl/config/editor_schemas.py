"""JSON schemas of a tasks file and of a run's configuration, for completion and errors in an editor."""

from __future__ import annotations

from typing import Any

from multitask_rl.config.checks import NAME_PATTERN, RESERVED_NAMES
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.json_schema import object_schema
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import SHORT_FORMS

_DRAFT = {"$schema": "http://json-schema.org/draft-07/schema#"}
_NAME = {"type": "string", "pattern": f"^(?!({'|'.join(RESERVED_NAMES)})$){NAME_PATTERN}$"}


def tasks_schema() -> dict[str, Any]:
    """Return the schema of a tasks file: its keys, types, ranges and choices.

    Rules over several keys and installed plugins are checked by ``multitask-rl tasks validate``.
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
    for short, (config, long) in SHORT_FORMS.items():
        plugins = task["properties"][long]
        plugins["items"] = {"anyOf": [{"type": "string"}, plugins["items"]]}
        task["properties"] |= {
            short: {"type": ["string", "null"], "description": f"Short form of one of `{long}`: its plugin."},
            config: {"type": ["object", "null"], "description": f"`config` of `{short}`."},
        }
    return task
