"""From the text in a tasks file to the Python object it names.

``name`` (entry point), ``package.module:object`` or ``path/to/file.py:object``. A file is loaded under a
private name of its own: ``math.py`` or ``code.py`` neither shadows nor is taken for a module of that name.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from multitask_rl.errors import MissingExtraError, PluginError, path_errors
from multitask_rl.plugins import PLUGIN_FORMS, list_plugins, load_plugin

__all__ = ["Located", "absolute_reference", "locate"]


@dataclass(frozen=True, slots=True)
class Located:
    """An object with what identifies it."""

    value: Any
    label: str
    """Short name for messages: the entry point's name or the object's."""
    version: str
    """Changes when its distribution or its source file changes; part of every cache key."""


def locate(reference: str, group: str, where: str = "") -> Located:
    """Return the object that ``reference`` names.

    Args:
        reference: ``name``, ``package.module:object`` or ``file.py:object``.
        group: entry-point group of a plain name.
        where: place for messages.

    Raises:
        PluginError: it does not exist, cannot be imported, or has no such object.
        MissingExtraError: it needs an optional dependency that is not installed.
    """
    prefix = f"{where}: " if where else ""
    place, separator, name = reference.rpartition(":")
    if not separator and reference.endswith(".py"):
        raise PluginError(f"{prefix}{reference!r} is a file; name an object in it: '{reference}:FUNCTION'")
    if not separator:
        plugin = load_plugin(group, reference)
        info = next(info for info in list_plugins(group) if info.name == reference)
        return Located(plugin, reference, f"{info.distribution} {info.version}")
    if not place or not name:
        raise PluginError(f"{prefix}cannot read the plugin {reference!r}; expected {PLUGIN_FORMS}")
    try:
        module = _load_file(Path(place).expanduser()) if place.endswith(".py") else _load_module(place)
    except (PluginError, MissingExtraError) as error:
        raise type(error)(f"{prefix}{error}") from error
    except Exception as error:
        raise PluginError(
            f"{prefix}the plugin {reference!r} cannot be loaded: importing {place!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise PluginError(f"{prefix}{place!r} has no {name!r}{_offer(module, name)}")
        value = getattr(value, part)
    return Located(value, name, _file_version(getattr(module, "__file__", None)))


def absolute_reference(reference: str) -> str:
    """Return ``reference`` with the path of its file made absolute: it survives a change of directory."""
    prefix, place, name = "", *reference.rpartition(":")[::2]
    if place.count(":") == 1 and place.endswith(".py"):  # verl:file.py:compute_score
        prefix, _, place = place.partition(":")
        prefix += ":"
    return f"{prefix}{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else reference


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
    # A console script has no working directory on its path. At the end of it, nothing there can shadow.
    _append_path(Path.cwd())
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    with path_errors("the plugin file", path, PLUGIN_FORMS, PluginError):
        source = path.read_bytes()
    digest = hashlib.blake2b(str(path).encode() + source, digest_size=8).hexdigest()
    private = f"_multitask_rl_plugin_{digest}"
    if private in sys.modules:
        return sys.modules[private]
    _append_path(path.parent)  # the file may import its neighbours
    spec = importlib.util.spec_from_file_location(private, path)
    assert spec is not None, path  # it ends in .py
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module  # dataclasses look their module up while it is being executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[private]
        raise
    return module


def _append_path(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def _offer(module: ModuleType, name: str) -> str:
    public = sorted(
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    )
    close = difflib.get_close_matches(name, public, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (it has: {', '.join(public) or 'no function or class'})"


def _file_version(file: str | None) -> str:
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
