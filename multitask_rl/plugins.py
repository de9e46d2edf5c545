"""Finding, loading and building plugins: by entry point, as ``module:object`` or as ``file.py:object``.

Bundled and third-party plugins are found in the same way; the core has no table of names. Listing reads only
metadata, so a broken plugin is listed, and loading it raises an error that names its distribution. A file is
loaded under a private module name, so that ``math.py`` or ``code.py`` does not clash with a standard module.
"""

from __future__ import annotations

import base64
import dataclasses
import difflib
import hashlib
import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import (
    ConfigError,
    MissingExtraError,
    PluginError,
    described,
    is_installed,
    path_errors,
)

PLUGIN_FORMS = "an installed name, package.module:object or path/to/file.py:object"
"""Allowed forms of a plugin reference, for messages."""
_PRIVATE = "_multitask_rl_plugin_"
"""Beginning of the module name of a plugin file."""
TASKS = "multitask_rl.tasks"
REWARDS = "multitask_rl.rewards"
CONSTRAINTS = "multitask_rl.constraints"
ALGORITHMS = "multitask_rl.algorithms"
SCHEDULERS = "multitask_rl.schedulers"
GUARDS = "multitask_rl.guards"
TRAINING_BACKENDS = "multitask_rl.training_backends"
ROLLOUT_ENGINES = "multitask_rl.rollout_engines"
SANDBOXES = "multitask_rl.sandboxes"
TRACKERS = "multitask_rl.trackers"
ENVIRONMENTS = "multitask_rl.environments"
GROUPS = (
    TASKS,
    REWARDS,
    CONSTRAINTS,
    ALGORITHMS,
    SCHEDULERS,
    GUARDS,
    TRAINING_BACKENDS,
    ROLLOUT_ENGINES,
    SANDBOXES,
    TRACKERS,
    ENVIRONMENTS,
)


@dataclass(frozen=True, slots=True, order=True)
class PluginInfo:
    """One entry point from the metadata of its distribution."""

    group: str
    name: str
    value: str
    """``package.module:Object``."""
    distribution: str
    version: str


def list_plugins(group: str | None = None) -> list[PluginInfo]:
    """Return the installed plugins of ``group`` (None = all of ``GROUPS``), sorted; imports none.

    Raises:
        PluginError: no such group.
    """
    if group is not None and group not in GROUPS:
        raise PluginError(f"unknown plugin group {group!r}; groups: {', '.join(GROUPS)}")
    groups = GROUPS if group is None else (group,)
    return sorted(i for i in _entry_points(tuple(sys.path)) if i.group in groups)


@dataclass(frozen=True, slots=True)
class Located:
    """A loaded object with its label, version and owner."""

    value: Any
    label: str
    """Short name for messages: the entry point's name or the object's."""
    version: str
    """Version that changes with its distribution or source file; part of every cache key."""
    owner: str = ""
    """Distribution or module of the object, for messages."""


def load_plugin(
    group: str, reference: str, *, expects: type | str | Sequence[str] | None = None, where: str = ""
) -> Any:
    """Import and return the object that ``reference`` names.

    Args:
        group: one of ``GROUPS``; the group of a plain name.
        reference: ``name`` (an entry point), ``package.module:object`` or ``file.py:object``.
        expects: class that the object must inherit from, or attributes it must have (one name, or several).
        where: the key that names the plugin, for messages.

    Raises:
        PluginError: it is unknown, declared twice, cannot be imported, or does not fit ``expects``.
        MissingExtraError: the plugin needs an optional dependency that is not installed.
    """
    found, prefix = locate(reference, group, where), f"{where}: " if where else ""
    if isinstance(expects, type):
        if not (isinstance(found.value, type) and issubclass(found.value, expects)):
            raise PluginError(
                f"{prefix}{_kind(group)} {reference!r} of {found.owner} (group {group}) does not fit the "
                f"contract of the group: it has to be a subclass of {_label(expects)}"
            )
        return found.value
    required = [expects] if isinstance(expects, str) else list(expects or ())
    missing = [attribute for attribute in required if not hasattr(found.value, attribute)]
    if missing:
        raise PluginError(
            f"{prefix}{_kind(group)} {reference!r} of {found.owner} (group {group}) has no "
            f"{' and no '.join(repr(m) for m in missing)}: it does not fit the contract of the group. Add "
            "what is missing (docs/write-a-plugin.md)"
        )
    return found.value


def locate(reference: str, group: str, where: str = "") -> Located:
    """Return the object that ``reference`` names, which stands at ``where``; raises as ``load_plugin``."""
    prefix = f"{where}: " if where else ""
    place, separator, name = reference.rpartition(":")
    if not separator and reference.endswith(".py"):
        with path_errors(f"{prefix}the plugin file", reference, PLUGIN_FORMS, PluginError):
            Path(reference).expanduser().stat()
        raise PluginError(f"{prefix}{reference!r} is a file; name an object in it: '{reference}:NAME'")
    if not separator:
        return _load_entry_point(group, reference)
    if not place or not name:
        raise PluginError(f"{prefix}cannot read the plugin {reference!r}; expected {PLUGIN_FORMS}")
    try:
        module = _load_file(Path(place).expanduser()) if place.endswith(".py") else _load_module(place)
    except (PluginError, MissingExtraError) as error:
        raise type(error)(f"{prefix}{error}") from error
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{prefix}the plugin {reference!r} cannot be loaded: importing {place!r} failed with "
            f"{_import_failure(error)}"
        ) from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            public = sorted(
                key
                for key, found in vars(module).items()
                if not key.startswith("_")
                and callable(found)
                and getattr(found, "__module__", "") == module.__name__
            )
            close = difflib.get_close_matches(name, public, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            offer = f"{hint} (it has: {', '.join(public) or 'no function or class'})"
            found_in = "" if place.endswith(".py") else f" ({vars(module).get('__file__') or 'built in'})"
            raise PluginError(f"{prefix}{place!r}{found_in} has no {name!r}{offer}")
        value = getattr(value, part)
    file = Path(getattr(module, "__file__", None) or "")
    version = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest() if file.is_file() else ""
    return Located(value, name, version, repr(place))


def declared_elsewhere(name: str) -> str:
    """Return a hint for the error "unknown plugin": which distributions declare ``name``, in which groups.

    For a misspelt group (``multitask_rl.reward``) it names the right one. "" if none declares ``name``.
    """
    told = ""
    for info in sorted(_entry_points(tuple(sys.path))):
        if info.name == name:
            close = difflib.get_close_matches(info.group, GROUPS, n=1) or ["one of " + ", ".join(GROUPS)]
            unknown = "" if info.group in GROUPS else f", which is no group of plugins; use {close[0]}"
            told += f" ({info.distribution} {info.version} declares it in group {info.group}{unknown})"
    return told


def _load_entry_point(group: str, name: str) -> Located:
    infos = list_plugins(group)
    matches = [info for info in infos if info.name == name]
    if not matches:
        installed = sorted({info.name for info in infos})
        close = difflib.get_close_matches(name, installed, n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise PluginError(
            f"unknown {_kind(group)} {name!r}{declared_elsewhere(name)}.{hint} Installed in group {group}: "
            f"{', '.join(installed) or 'none'}. An entry point just added to a pyproject.toml is seen only "
            "after its distribution is installed again (pip install -e .)."
        )
    if len(matches) > 1:
        owners = "; ".join(f"{i.distribution} {i.version} ({i.value})" for i in matches)
        raise PluginError(
            f"{_kind(group)} {name!r} is declared by {len(matches)} distributions: {owners}. Uninstall one, "
            f"or name the object directly as 'module:object' instead of {name!r}."
        )
    (info,) = matches
    version = f"{info.distribution} {info.version}"
    try:
        loaded = _entry_points(tuple(sys.path))[info].load()
    except MissingExtraError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{_kind(group)} {name!r} of {version} cannot be loaded: importing {info.value!r} (group "
            f"{group}) failed with {_import_failure(error)}"
        ) from error
    return Located(loaded, name, version, f"{version} ({info.value})")


def build_plugin(cls: Any, config: Mapping[str, Any], *, where: str) -> Any:
    """Return ``cls(cls.Config(**config))``, or ``cls()`` for a class without ``Config``.

    Raises:
        ConfigError: see ``build_config``; ``where`` is the place it names (``tasks.math.rewards[0].config``).
        PluginError: ``cls`` cannot be built for another reason.
    """
    typed = build_config(cls, config, where=where)
    try:
        return cls() if typed is None else cls(typed)
    except (ConfigError, MissingExtraError, PluginError) as error:
        path = where.rpartition(": ")[2].removesuffix(".config")
        if f": {path}" in f": {error}":  # it names its key and line already
            raise
        raise type(error)(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        hint = ""
        if typed is None and isinstance(error, TypeError):
            hint = ". A class without a nested dataclass 'Config' is built without arguments"
        raise PluginError(f"{where}: {_label(cls)} could not be built: {described(error)}{hint}") from error


def build_config(cls: Any, config: Mapping[str, Any], *, where: str) -> Any:
    """Return ``cls.Config(**config)`` after checking keys and types; None for a class without ``Config``.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type, or ``Config`` refuses its values.
    """
    config_class = getattr(cls, "Config", None)
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        if config:
            raise ConfigError(
                f"{where}: {_label(cls)} takes no configuration, got {', '.join(map(repr, config))}. Remove "
                "the keys, or give the plugin a nested dataclass 'Config'."
            )
        return None
    return build_dataclass(config_class, config, Where(path=(where,)))


def check_config_extends(cls: type, where: str) -> None:
    """Raise ``PluginError`` if ``cls.Config`` lacks the keys that a base class of ``cls`` reads."""
    for base in cls.__mro__[1:]:
        wanted = vars(base).get("Config")
        if isinstance(wanted, type) and not issubclass(cls.Config, wanted):  # type: ignore[attr-defined]
            raise PluginError(
                f"{where}: {_label(cls)}.Config has to extend {_label(wanted)}, whose keys {base.__name__} "
                "reads"
            )


def is_importable(module: str) -> bool:
    """Whether the package of ``module`` is installed or in the working directory; nothing is imported."""
    package = module.partition(".")[0]
    return is_installed(package) or PathFinder.find_spec(package, [str(Path.cwd())]) is not None


def _parts(reference: str) -> tuple[str, str, str]:
    """Return prefix (``verl:``, or empty), file or module, and name; a directory's name may have colons."""
    place, _, name = reference.rpartition(":")
    prefix, colon, rest = place.partition(":")
    return (f"{prefix}:", rest, name) if colon and prefix.isidentifier() else ("", place, name)


def absolute_reference(reference: str) -> str:
    """Return ``reference`` with the path of its file made absolute: it survives a change of directory."""
    prefix, place, name = _parts(reference)
    return f"{prefix}{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else reference


def source_file(reference: str) -> Path | None:
    """Return the file of a plugin named by file or by a module that is imported; None for other names."""
    _, place, _ = _parts(reference)
    if place.endswith(".py"):
        return Path(place).expanduser().resolve()
    file = vars(sys.modules[place]).get("__file__") if place in sys.modules else None
    return Path(file) if file else None


@lru_cache(maxsize=8)
def _entry_points(path: tuple[str, ...]) -> dict[PluginInfo, importlib.metadata.EntryPoint]:
    """Return the entry points in ``path`` of groups that begin as ours, also the second of two equal names.

    A group that is none of ours (``multitask_rl.reward``) is a mistake to tell of. A distribution found twice
    (an editable install and its build directory) counts once, as for imports.
    """
    found: dict[tuple[str, str, str], tuple[PluginInfo, importlib.metadata.EntryPoint]] = {}
    for distribution in importlib.metadata.distributions(path=list(path)):
        if not (
            entries := [
                entry for entry in distribution.entry_points if entry.group.startswith("multitask_rl")
            ]
        ):
            continue
        owner, version = distribution.metadata["Name"] or "(unnamed distribution)", distribution.version
        normalized = re.sub(r"[-_.]+", "-", owner).lower()
        for entry in entries:
            info = PluginInfo(entry.group, entry.name, entry.value, owner, version)
            found.setdefault((normalized, entry.group, entry.name), (info, entry))
    return dict(found.values())


def _kind(group: str) -> str:
    kind = group.removeprefix("multitask_rl.").replace("_", " ")
    return kind.removesuffix("es" if kind == "sandboxes" else "s")


def _import_failure(error: BaseException) -> str:
    """Return the error of an import, and what to do where that is known."""
    told = described(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{told}; install that package beside multitask-rl, or correct the import"
    if isinstance(error, SystemExit):
        return f"{told}; put what a script does below `if __name__ == '__main__':`"
    return told


def _label(cls: Any) -> str:
    if isinstance(cls, type) and cls.__module__.startswith(_PRIVATE):
        return class_id(cls)
    return f"{getattr(cls, '__module__', '?')}.{getattr(cls, '__qualname__', repr(cls))}"


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise
    # a console script has no working directory on its path; at the end, nothing there can shadow
    _append_path(Path.cwd())
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    with path_errors("the plugin file", path, PLUGIN_FORMS, PluginError):
        source = path.read_bytes()
    # a file that was edited is another module
    digest = hashlib.blake2b(source, digest_size=8).hexdigest()
    place = base64.urlsafe_b64encode(os.fsencode(path)).decode()
    return importlib.import_module(f"{_PRIVATE}{digest}_{place}")


class _PluginFiles(importlib.abc.MetaPathFinder):
    """Finds a plugin file by the name of its module: another process unpickles what the file defines."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Return how to load the file; None for any other module."""
        if not fullname.startswith(_PRIVATE):
            return None
        place = fullname.removeprefix(_PRIVATE).partition("_")[2]
        file = Path(os.fsdecode(base64.urlsafe_b64decode(place)))
        _append_path(file.parent)  # the file may import its neighbours
        return importlib.util.spec_from_file_location(fullname, file, loader=_Source(fullname, str(file)))


class _Source(SourceFileLoader):
    """Loads a plugin file without bytecode: Python misses an edit within a second to the same size."""

    def path_stats(self, path: str) -> Any:  # OSError: no bytecode is read or written
        raise OSError


sys.meta_path.append(_PluginFiles())


def class_id(cls: type) -> str:
    """Return ``package.module:Class``; ``file.py:Class`` for a class of a plugin file, also after an edit."""
    module = cls.__module__
    file = sys.modules[module].__file__ if module.startswith(_PRIVATE) else None
    return f"{Path(file).name if file else module}:{cls.__qualname__}"


def _append_path(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
