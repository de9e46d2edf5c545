"""What a run recorded of its configuration, as one to start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import ConfigError

__all__ = ["RECORD", "as_given", "recorded_config"]

RECORD = "config.yaml"
"""Name of the file in the run's output directory."""


def recorded_config(run: Path) -> RunConfig:
    """Return the configuration of the run in ``run``, its tasks included, with ``checkpoint.resume=auto``.

    The tasks file it once had is not read again: it may say something else by now.

    Raises:
        ConfigError: the file is unreadable, or holds keys that this version does not have.
    """
    document, where = load_yaml(run / RECORD)
    tasks = document.get("tasks") if isinstance(document, Mapping) else None
    if not isinstance(tasks, Mapping):
        raise ConfigError(f"{where.file}: it holds no tasks; give the run's tasks file with tasks_file=PATH")
    for name, task in tasks.items():
        if not isinstance(task, Mapping):
            raise ConfigError(f"{where.at('tasks', name)}: expected a mapping, got {task!r}")
    given = {name: as_given(task) for name, task in tasks.items()}
    config = build_dataclass(RunConfig, {**document, "tasks_file": "", "tasks": given}, where)
    return replace(config, checkpoint=replace(config.checkpoint, resume="auto"))


def as_given(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved task with the keys of a tasks file."""
    derived = ("name", "source", "sampling_keys")
    given = {key: value for key, value in task.items() if key not in derived}
    if task.get("sampling") and task.get("sampling_keys"):
        sampling, keys = task["sampling"], task["sampling_keys"]
        if isinstance(sampling, Mapping) and isinstance(keys, list):
            given["sampling"] = {key: value for key, value in sampling.items() if key in keys}
    return given
