"""Code that a file names: it runs if the file is the user's own, else only after ``--trust``.

A tasks file and the record of a run name functions to run. The command line takes a file for the user's own
if it lies below the working directory. A file from elsewhere may name installed plugins and ``.py`` files
below the working directory; any other code needs ``--trust``. A program that calls this package decides by
itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from multitask_rl.config.checks import FUNCTION_PREFIXES, GENERATOR_PREFIX, is_file
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import ConfigError

__all__ = ["TRUST", "refuse_code", "refuse_code_in"]

TRUST = "--trust"
"""The option that lets code run that a file from elsewhere names."""

_PLUGIN_KEYS = ("plugin", "reward_model", "constraint_model")
_PLUGIN_LISTS = ("rewards", "constraints")
_REMOTE_CODE = "trust_remote_code"


def refuse_code_in(path: str | Path) -> None:
    """Refuse a tasks file or the record of a run that lies elsewhere and names code.

    Raises:
        ConfigError: it does, or it is no YAML.
    """
    if not _is_own(Path(os.path.abspath(path))):
        refuse_code(path, _named(load_yaml(path)[0], ""))


def refuse_code(path: str | Path, named: Iterable[tuple[str, str]]) -> None:
    """Refuse code that the file ``path`` names and that is not the user's own.

    Args:
        path: the file.
        named: key path and plugin reference (or ``trust_remote_code``) of what it names.

    Raises:
        ConfigError: ``path`` lies outside the working directory and names such code.
    """
    file = Path(os.path.abspath(path))
    if _is_own(file):
        return
    for key, reference in named:
        if _is_code(reference, file.parent):
            raise ConfigError(
                f"{path}: {key} names code to run, {reference!r}, and the file lies outside the working "
                f"directory {str(Path.cwd())!r}: it may be somebody else's. Read that code; then give "
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
            elif name in _PLUGIN_KEYS and isinstance(below, str):
                yield here, below
            elif name in _PLUGIN_LISTS and isinstance(below, list):
                yield from ((f"{here}[{i}]", item) for i, item in enumerate(below) if isinstance(item, str))
            yield from _named(below, here)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _named(below, f"{key}[{index}]")


def _is_code(reference: str, directory: Path) -> bool:
    """Whether ``reference``, in a file of ``directory``, names code neither installed nor the user's own."""
    if reference == _REMOTE_CODE:
        return True
    prefix, colon, rest = reference.partition(":")
    if not colon or reference.startswith(GENERATOR_PREFIX):
        return False
    if prefix in FUNCTION_PREFIXES:
        return _is_code(rest, directory)
    place = Path(reference.rpartition(":")[0])
    if place.suffix != ".py":
        return True  # any module that can be imported, any script of a hub
    place = place.expanduser()
    beside = directory / place
    return not _is_own((beside if is_file(beside) else place).resolve())


def _is_own(file: Path) -> bool:
    """Whether the absolute path ``file`` lies below the working directory, outside installed packages."""
    roots = (Path.cwd(), Path.cwd().resolve())
    return "site-packages" not in file.parts and any(file.is_relative_to(root) for root in roots)
