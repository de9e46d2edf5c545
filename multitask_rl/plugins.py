"""Finding, loading and building plugins through packaging entry points.

Bundled and foreign plugins take the same road; core holds no table of names. Listing reads metadata only:
a broken plugin shows in the list and fails when somebody asks for it, with its distribution named.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.errors import ConfigError, MissingExtraError, PluginError

__all__ = [
    "ALGORITHMS",
    "CONSTRAINTS",
    "GROUPS",
    "GUARDS",
    "PLUGIN_FORMS",
    "REWARDS",
    "ROLLOUT_ENGINES",
    "SANDBOXES",
    "SCHEDULERS",
    "TASKS",
    "TRACKERS",
    "PluginInfo",
    "build_config",
    "build_plugin",
    "list_plugins",
    "load_plugin",
]

PLUGIN_FORMS = "an installed name, package.module:object or path/to/file.py:object"
"""What the name of a plugin may look like, for messages."""
TASKS = "multitask_rl.tasks"
REWARDS = "multitask_rl.rewards"
CONSTRAINTS = "multitask_rl.constraints"
ALGORITHMS = "multitask_rl.algorithms"
SCHEDULERS = "multitask_rl.schedulers"
GUARDS = "multitask_rl.guards"
ROLLOUT_ENGINES = "multitask_rl.rollout_engines"
SANDBOXES = "multitask_rl.sandboxes"
TRACKERS = "multitask_rl.trackers"
GROUPS = (
    TASKS,
    REWARDS,
    CONSTRAINTS,
    ALGORITHMS,
    SCHEDULERS,
    GUARDS,
    ROLLOUT_ENGINES,
    SANDBOXES,
    TRACKERS,
)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class PluginInfo:
    """One entry point, as its distribution's metadata declares it."""

    group: str
    name: str
    value: str
    """``package.module:Object``."""
    distribution: str
    version: str


def list_plugins(group: str | None = None) -> list[PluginInfo]:
    """Return the installed plugins of ``group`` (all groups of ours without one), sorted; imports none.

    Raises:
        PluginError: ``group`` is not one of ``GROUPS``.
    """
    if group is not None and group not in GROUPS:
        raise PluginError(f"unknown plugin group {group!r}; groups: {', '.join(GROUPS)}")
    return sorted(i for i, _ in _entry_points(tuple(sys.path)) if group is None or i.group == group)


def load_plugin(group: str, name: str, *, expects: str | Sequence[str] | None = None) -> Any:
    """Import and return the object behind the entry point ``name`` of ``group``.

    Args:
        group: one of ``GROUPS``.
        name: the entry point's name.
        expects: attributes the object must have (a method name, or several).

    Raises:
        PluginError: no such name, two distributions declare it, it cannot be imported, or it lacks an
            attribute in ``expects``.
        MissingExtraError: the plugin needs an optional dependency that is not installed.
    """
    infos = list_plugins(group)
    matches = [info for info in infos if info.name == name]
    if not matches:
        raise PluginError(_unknown(group, name, sorted({info.name for info in infos})))
    if len(matches) > 1:
        owners = "; ".join(f"{i.distribution} {i.version} ({i.value})" for i in matches)
        raise PluginError(
            f"{_kind(group)} {name!r} is declared by {len(matches)} distributions: {owners}. Uninstall one, "
            f"or name the object directly as 'module:object' instead of {name!r}."
        )
    info = matches[0]
    entry = next(e for i, e in _entry_points(tuple(sys.path)) if i == info)
    try:
        loaded = entry.load()
    except MissingExtraError:
        raise
    except Exception as error:
        raise PluginError(
            f"{_kind(group)} {name!r} of {info.distribution} {info.version} cannot be loaded: importing "
            f"{info.value!r} (group {group}) failed with {type(error).__name__}: {error}"
        ) from error
    required = [expects] if isinstance(expects, str) else list(expects or ())
    missing = [attribute for attribute in required if not hasattr(loaded, attribute)]
    if missing:
        raise PluginError(
            f"{_kind(group)} {name!r} of {info.distribution} {info.version} ({info.value}, group {group}) "
            f"has no {' and no '.join(repr(m) for m in missing)}: it does not fit the contract of the group"
        )
    return loaded


def build_plugin(cls: Any, config: Mapping[str, Any], *, where: str) -> Any:
    """Return ``cls(cls.Config(**config))``, or ``cls()`` for a class without ``Config``.

    Args:
        cls: a plugin class; a nested dataclass ``Config`` types its settings.
        config: the user's keys; values are checked against the annotations (``3`` fits a float, ``"x"`` not).
        where: place for messages, e.g. ``tasks.math.rewards[0].config``.

    Raises:
        ConfigError: a key is unknown, missing or of the wrong type, or ``Config`` refuses its values.
        PluginError: ``cls`` cannot be built for another reason.
    """
    typed = build_config(cls, config, where=where)
    try:
        return cls() if typed is None else cls(typed)
    except (ConfigError, MissingExtraError, PluginError) as error:
        if str(error).startswith(where.removesuffix(".config")):
            raise
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        raise PluginError(
            f"{where}: {_label(cls)} could not be built: {type(error).__name__}: {error}"
        ) from error


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


@lru_cache(maxsize=8)
def _entry_points(path: tuple[str, ...]) -> list[tuple[PluginInfo, importlib.metadata.EntryPoint]]:
    """Return every entry point of our groups with its distribution, looking in ``path``.

    ``importlib.metadata.entry_points()`` answers with the first of two equal names and hides the second, so
    the distributions are walked here. One distribution found twice on the path (an editable install and its
    build directory) counts once, the first, as it does for imports.
    """
    found: dict[tuple[str, str, str], tuple[PluginInfo, importlib.metadata.EntryPoint]] = {}
    for distribution in importlib.metadata.distributions(path=list(path)):
        entries = [entry for entry in distribution.entry_points if entry.group in GROUPS]
        if not entries:
            continue
        owner = distribution.metadata["Name"] or "(unnamed distribution)"
        normalized = re.sub(r"[-_.]+", "-", owner).lower()
        for entry in entries:
            info = PluginInfo(
                group=entry.group,
                name=entry.name,
                value=entry.value,
                distribution=owner,
                version=distribution.version,
            )
            found.setdefault((normalized, entry.group, entry.name), (info, entry))
    return list(found.values())


def _unknown(group: str, name: str, installed: list[str]) -> str:
    close = difflib.get_close_matches(name, installed, n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    known = ", ".join(installed) if installed else "none"
    return (
        f"unknown {_kind(group)} {name!r}.{hint} Installed in group {group}: {known}. An entry point just "
        "added to a pyproject.toml is seen only after its distribution is installed again (pip install -e .)."
    )


def _kind(group: str) -> str:
    return group.removeprefix("multitask_rl.").removesuffix("s").replace("_", " ")


def _label(cls: Any) -> str:
    return f"{getattr(cls, '__module__', '?')}.{getattr(cls, '__qualname__', repr(cls))}"
