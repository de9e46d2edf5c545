"""Write the generated pages and schemas of docs/: ``python docs/write_configuration.py``.

Pages: configuration.md and plugins.md from dataclasses, which hold names, types, ranges, defaults and
meanings; commands.md from the help of the commands. What is written is never edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any

from multitask_rl.cli import COMMANDS, main
from multitask_rl.config import run, task
from multitask_rl.config.editor_schemas import meanings, run_schema, tasks_schema
from multitask_rl.config.schema.build import setting_fields
from multitask_rl.config.schema.ranges import OneOf, field_hints
from multitask_rl.plugins import list_plugins, load_plugin
from multitask_rl.records import SamplingParams

PAGE = Path(__file__).with_name("configuration.md")
COMMANDS_PAGE = Path(__file__).with_name("commands.md")
PLUGINS_PAGE = Path(__file__).with_name("plugins.md")
SCHEMAS = {"tasks.schema.json": tasks_schema, "run.schema.json": run_schema}

_OWN_TABLE = ("curriculum", "kl", "multiplier")
"""Sections of a task; they get their tables from ``render``."""

_INTRODUCTION = """\
# Configuration

Written by `make docs` from the dataclasses; change those, not this page. YAML files and the command line
override the defaults given here, nothing else holds one:

    multitask-rl train --config-dir configs +experiment=math_code_safety tasks.math.weight=2

In VS Code (extension YAML), keys are completed and mistakes underlined in a file that begins with the line
`# yaml-language-server: $schema=tasks.schema.json`. That file is written beside it by
`multitask-rl tasks schema > tasks.schema.json`, for a run's configuration with `tasks schema --run`.
"""


def render() -> str:
    """Return the page."""
    parts = [_INTRODUCTION, "## The run\n", *_sections(run.RunConfig)]
    parts += [
        "## A task of the tasks file\n",
        _TASK_NOTE,
        _table(task.TaskSpec, skip=("name",)),
    ]
    for title, cls in (
        ("One of `rewards`", task.RewardSpec),
        ("One of `constraints`", task.ConstraintSpec),
        ("`multiplier` of a constraint", task.MultiplierSpec),
        ("`kl`", task.KLSpec),
        ("`curriculum`", task.CurriculumSpec),
        ("`sampling`", SamplingParams),
    ):
        parts += [f"### {title}\n", _table(cls)]
    return "\n".join(parts).rstrip() + "\n"


_TASK_NOTE = """\
`tasks:` is a list of `{name: ..., ...}` or a mapping `name: {...}`. Short forms: `reward_model` with
`reward_config` for one reward, `constraint_model` with `constraint_config` for one constraint.
"""


def _sections(cls: type, prefix: str = "") -> list[str]:
    """Return the table of ``cls`` and, below it, those of the sections inside it."""
    nested: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(cls) if _is_section(f)}
    parts = [_table(cls, prefix=prefix, skip=tuple(nested))]
    for name, section in nested.items():
        parts += [f"### `{prefix}{name}`: {_summary(section)}\n", *_sections(section, f"{prefix}{name}.")]
    return parts


def _table(cls: type, prefix: str = "", skip: tuple[str, ...] = ()) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    hints, texts = field_hints(cls), meanings(cls)
    for field in setting_fields(cls, skip):
        cells = (_kind(hints[field.name]), _default(field), texts.get(field.name, ""))
        lines.append(
            " | ".join((f"| `{prefix}{field.name}`", *(c.replace("|", "\\|") for c in cells))) + " |"
        )
    return "\n".join(lines) + "\n"


def _kind(hint: Any) -> str:
    """Return type and range in words: ``int >= 1``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return str(args[1]) if isinstance(args[1], OneOf) else f"{_kind(args[0])} {args[1]}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("None" if arg is type(None) else _kind(arg) for arg in args)
    if args and args[-1] is not Any:
        return f"{origin.__name__} of {_kind(args[0 if origin is tuple else -1])}"
    return str(getattr(origin or hint, "__name__", hint)).lower()


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is dataclasses.MISSING:
        return "required"
    return (
        "see below" if dataclasses.is_dataclass(field.default_factory) else f"`{field.default_factory()!r}`"
    )


def _is_section(field: dataclasses.Field[Any]) -> bool:
    default: Any = field.default_factory
    return dataclasses.is_dataclass(default) and field.name not in _OWN_TABLE


def _summary(cls: Any) -> str:
    return (inspect.getdoc(cls) or "").splitlines()[0].rstrip(".").replace("``", "`")


def render_commands() -> str:
    """Return the page of the commands: what each prints for ``--help``."""
    os.environ["COLUMNS"] = "100"  # argparse breaks lines there
    parts = ["# Commands\n", "Written by `make docs` from what the commands print.\n"]
    for name in ("", *COMMANDS):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*name.split(), "--help"])
        parts.append(f"{f'## {name}' if name else ''}\n\n```text\n{printed.getvalue().strip()}\n```\n")
    return "\n".join(parts)


_GROUPS = {
    "algorithms": "Algorithms: `type`, keys in `algorithm_config`",
    "rewards": "Rewards: `rewards`, keys in `config`",
    "constraints": "Constraints: `constraints`, keys in `config`",
    "tasks": "Data sets: `dataset: plugin:NAME`, keys in `dataset_config`",
    "environments": "Environments: `environment`, keys in `environment_config`",
    "schedulers": "Policies of the scheduler: `scheduler.policy`, keys in `scheduler.policy_config`",
    "guards": "Guards: `guard.plugin`, keys in `guard.guard_config`",
    "rollout_engines": "Engines: `rollout.engine`, keys in `rollout.engine_config`",
    "training_backends": "Training backends: `training.backend`, keys in `training.backend_config`",
}


def render_plugins() -> str:
    """Return the page of the bundled plugins: what each does, and its keys."""
    parts = [
        "# Plugins\n",
        "Every bundled plugin and its keys, written by `make docs` from their classes. `multitask-rl plugins "
        "list`\nshows what is installed here, yours included. [write-a-reward.md](write-a-reward.md) and its "
        "neighbours say how\none is written.\n",
    ]
    own = "multitask_rl"
    for kind, title in _GROUPS.items():
        parts.append(f"## {title}\n")
        for info in list_plugins(f"{own}.{kind}"):
            plugin = load_plugin(f"{own}.{kind}", info.name)
            if not plugin.__module__.startswith(own):
                continue
            about = re.split(r"\n\s*(?:Args|Raises|Returns|Attributes):", inspect.getdoc(plugin) or "")[0]
            parts.append(f"### `{info.name}`\n\n{about.strip().replace('``', '`')}\n")
            config = getattr(plugin, "Config", None)
            if isinstance(config, type) and dataclasses.is_dataclass(config) and list(setting_fields(config)):
                parts.append(_table(config))
    return "\n".join(parts).rstrip() + "\n"


def _for_everyone(schema: Any) -> Any:
    """Return the schema without ``examples``: the plugins that are installed here."""
    if isinstance(schema, list):
        return [_for_everyone(own) for own in schema]
    if isinstance(schema, dict):
        return {key: _for_everyone(own) for key, own in schema.items() if key != "examples"}
    return schema


def files() -> dict[Path, str]:
    """Return the text of every file that this script writes."""
    schemas = {PAGE.with_name("schema") / name: _for_everyone(make()) for name, make in SCHEMAS.items()}
    return {
        PAGE: render(),
        COMMANDS_PAGE: render_commands(),
        PLUGINS_PAGE: render_plugins(),
        **{path: json.dumps(s, indent=1) + "\n" for path, s in schemas.items()},
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
