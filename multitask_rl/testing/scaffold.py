"""The kinds of plugins, and an installable plugin of each kind with tests that pass."""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from multitask_rl.errors import ConfigError
from multitask_rl.plugins import (
    ALGORITHMS,
    CONSTRAINTS,
    ENVIRONMENTS,
    GUARDS,
    REWARDS,
    ROLLOUT_ENGINES,
    SANDBOXES,
    SCHEDULERS,
    TASKS,
    TRACKERS,
    TRAINING_BACKENDS,
    list_plugins,
)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_TEMPLATES = Path(__file__).with_name("templates")
_TASK_KEYS = "tasks:\n      my_task:\n        dataset: data.jsonl\n        "


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin that ``plugins new`` writes (from ``<kind>.txt``) and ``plugins check`` checks."""

    group: str
    use: str
    """A line of a tasks file, or a command, that names the plugin."""
    suite: str = "multitask_rl.testing.kinds"
    """Module of its contract suite, ``check_<kind>``."""
    test: str = "contract_test.txt"
    """Template of its test."""


KINDS: dict[str, Kind] = {
    "reward": Kind(REWARDS, _TASK_KEYS + "rewards: [{plugin: $name}]", test="reward_test.txt"),
    "constraint": Kind(
        CONSTRAINTS, _TASK_KEYS + "constraints: [{plugin: $name}]", test="constraint_test.txt"
    ),
    "task": Kind(TASKS, "tasks:\n      my_task: {dataset: plugin:$name}"),
    "environment": Kind(
        ENVIRONMENTS,
        _TASK_KEYS + "environment: $name",
        "multitask_rl.testing.environment",
        "environment_test.txt",
    ),
    "algorithm": Kind(ALGORITHMS, _TASK_KEYS + "type: $name"),
    "scheduler": Kind(SCHEDULERS, "multitask-rl train scheduler.policy=$name"),
    "guard": Kind(GUARDS, "multitask-rl train guard.plugin=$name"),
    "engine": Kind(ROLLOUT_ENGINES, "multitask-rl train rollout.engine=$name", "multitask_rl.testing.engine"),
    "backend": Kind(
        TRAINING_BACKENDS, "multitask-rl train training.backend=$name", "multitask_rl.testing.backend"
    ),
    "sandbox": Kind(
        SANDBOXES, 'a reward calls multitask_rl.sandbox.open_sandbox("$name")', "multitask_rl.testing.sandbox"
    ),
    "tracker": Kind(TRACKERS, "multitask-rl train 'tracking.trackers=[console,jsonl,$name]'"),
}


def scaffold(kind: str, name: str, directory: str | Path = ".") -> Path:
    """Write a distribution with one plugin into ``directory/<name>`` and return that path.

    Args:
        kind: a key of ``KINDS``.
        name: the plugin's name: lower-case letters, digits, ``_``.
        directory: of the new folder.

    Raises:
        ConfigError: unknown kind, unusable or taken name, or the folder exists.
    """
    if kind not in KINDS:
        raise ConfigError(f"cannot write a plugin of kind {kind!r}; kinds: {', '.join(KINDS)}")
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a plugin: it starts with a lower-case letter, holds a-z, 0-9 and _, and "
            "is no word of Python"
        )
    chosen = KINDS[kind]
    for info in list_plugins(chosen.group):
        if info.name == name:
            raise ConfigError(
                f"a {kind} {name!r} is installed already ({info.distribution}); choose another name"
            )
    target = Path(directory) / name
    if target.exists():
        raise ConfigError(f"{str(target)!r} exists already; choose another name, or --directory")
    # The module's name has a prefix: a plugin called "math" must not hide the module math.
    values = {
        "kind": kind,
        "group": chosen.group,
        "name": name,
        "use": Template(chosen.use).substitute(name=name),
        "package": f"multitask_rl_{name}",
        "attribute": name,
        "distribution": f"multitask-rl-{name.replace('_', '-')}",
    }
    files = {
        "pyproject.toml": "pyproject.txt",
        f"multitask_rl_{name}.py": f"{kind}.txt",
        f"tests/test_{name}.py": chosen.test,
        "README.md": "readme.txt",
    }
    for path, template in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        text = Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)
        (target / path).write_text(text, encoding="utf-8")
    return target


def main(argv: Sequence[str]) -> int:
    """Write the plugin that ``argv`` asks for and print the next command."""
    parser = argparse.ArgumentParser(prog="multitask-rl plugins new", description=__doc__)
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("name")
    parser.add_argument("--directory", default=".")
    arguments = parser.parse_args(argv)
    target = scaffold(arguments.kind, arguments.name, arguments.directory)
    sys.stdout.write(
        f"wrote {target}\nnext: pip install -e {target} && multitask-rl plugins check {arguments.name}\n"
    )
    return 0
