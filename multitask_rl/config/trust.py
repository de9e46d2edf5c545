"""Protection from code that a tasks file or a run's record names and that may not be the user's own.

A file below the working directory is the user's own. A file from elsewhere may name installed plugins and
``.py`` files below the working directory; other code needs ``--trust``. Only the command line checks this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.checks import FUNCTION_PREFIXES, GENERATOR_PREFIX, is_file
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import ConfigError

TRUST = "--trust"
"""The option that allows a file from elsewhere to name code."""

_REMOTE_CODE = "trust_remote_code"
_NAMES = (
    *("plugin", "reward_model", "constraint_model", "environment", "reward_function", "type"),
    *("policy", "engine", "backend"),
)
"""Keys that name code."""
_LISTS = ("rewards", "constraints", "trackers")
"""Keys of lists that name code."""
_DATA = ("dataset", "eval_dataset")
"""Keys that name code behind ``plugin:``."""


def refuse_code_in(path: str | Path, *, is_only_read: bool = False) -> None:
    """Refuse a tasks file or a run's record from elsewhere that names code, or that is not YAML.

    ``is_only_read``: no plugin is built, so only the task plugins count, which already reading the file runs.
    """
    if _is_own(Path(os.path.abspath(path))):
        return
    named = _named(load_yaml(path)[0], "")
    refuse_code(path, (n for n in named if not is_only_read or n[0].rpartition(".")[2] in _DATA))


def refuse_code(path: str | Path, named: Iterable[tuple[str, str]]) -> None:
    """Refuse code that the file ``path`` from elsewhere names.

    ``named`` holds key path and plugin reference (or ``trust_remote_code``) of each thing that it names.
    """
    file = Path(os.path.abspath(path))
    if _is_own(file):
        return
    for key, reference in named:
        if _is_code(reference, file.parent):
            raise ConfigError(
                f"{path}: {key} names code to run, {reference!r}, and the file lies outside the working "
                f"directory {str(Path.cwd())!r}: it may come from another user. Read that code; then give "
                f"{TRUST}, or work in a directory above the file. Installed plugins, and .py files below the "
                "working directory, need neither"
            )


def _named(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield every plugin reference of a document with its key path."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            here = f"{key}.{name}" if key else str(name)
            if name == _REMOTE_CODE and below:
                yield here, _REMOTE_CODE
            elif name in _NAMES and isinstance(below, str):
                yield here, below
            elif name in _DATA and isinstance(below, str) and below.startswith("plugin:"):
                yield here, below.removeprefix("plugin:")
            elif name in _LISTS and isinstance(below, list):
                yield from ((f"{here}[{i}]", item) for i, item in enumerate(below) if isinstance(item, str))
            yield from _named(below, here)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _named(below, f"{key}[{index}]")


def _is_code(reference: str, directory: Path) -> bool:
    """Whether ``reference``, in a file of ``directory``, names code that needs trust."""
    if reference == _REMOTE_CODE:
        return True
    prefix, colon, rest = reference.partition(":")
    if not colon or reference.startswith(GENERATOR_PREFIX):
        return False
    if prefix in FUNCTION_PREFIXES:
        return _is_code(rest, directory)
    place = Path(reference.rpartition(":")[0])
    if place.suffix != ".py":
        return True  # an importable module, or a script of a hub
    place = place.expanduser()
    beside = directory / place
    return not _is_own((beside if is_file(beside) else place).resolve())


def _is_own(file: Path) -> bool:
    """Whether the absolute path ``file`` lies below the working directory, outside installed packages."""
    roots = (Path.cwd(), Path.cwd().resolve())
    return "site-packages" not in file.parts and any(file.is_relative_to(root) for root in roots)
