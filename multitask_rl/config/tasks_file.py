"""The tasks file: from YAML to checked ``TaskSpec``, before any model or data loads.

    tasks:
      math:                                 # or a list of {name: math, ...}
        type: grpo
        dataset: data/math.jsonl
        rewards: [math_answer]              # a name, or {plugin, weight, config}

``reward_model``/``reward_config`` and ``constraint_model``/``constraint_config`` are short forms of a list of
one.
Paths are looked up beside the tasks file first, then in the working directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from multitask_rl.config.checks import (
    FUNCTION_PREFIXES,
    GENERATOR_PREFIX,
    check_entry_point,
    check_task,
    check_tasks,
    is_file,
)
from multitask_rl.config.schema.build import build_dataclass, check_keys, setting_fields, suggest
from multitask_rl.config.schema.located_yaml import OVERRIDE, Where, load_yaml
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.plugins import TASKS, build_plugin, load_plugin

__all__ = ["SHORT_FORMS", "fill_weights", "load_tasks", "parse_tasks", "validate_tasks"]

S = TypeVar("S", RewardSpec, ConstraintSpec)

SHORT_FORMS = {
    "reward_model": ("reward_config", "rewards"),
    "constraint_model": ("constraint_config", "constraints"),
}
"""Short form -> its configuration, and the list that the two stand for."""
_ANSWER_IN_TAGS = "{question}\n\nGive the final answer between <answer> and </answer>."
_TASK_KEYS = {field.name for field in setting_fields(TaskSpec, skip=["name"])} | SHORT_FORMS.keys()
_TASK_KEYS |= {config for config, _ in SHORT_FORMS.values()}
_DEFINING = {"type", "dataset", "rewards", "reward_model", "constraints", "constraint_model"}


def load_tasks(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, TaskSpec]:
    """Read, merge and check a tasks file.

    Args:
        path: the YAML file; empty = every task comes from ``overrides``.
        overrides: task name -> keys that replace or add to the file's (``{"math": {"weight": 2}}``); mappings
            merge, everything else replaces. A name the file lacks defines a new task.

    Returns:
        The tasks by name, in the file's order.

    Raises:
        ConfigError: names file, line, key path, the offending value and what is allowed.
    """
    if str(path):
        document, where = load_yaml(path)
        entries = _entries(document, where)
    else:
        where, entries = Where("configuration"), {}
    return _build(_merge_overrides(entries, overrides or {}, where), where)


def parse_tasks(document: Any, where: Where | str = "tasks") -> dict[str, TaskSpec]:
    """Check a tasks document that is already plain values (``{"tasks": ...}``); see ``load_tasks``."""
    place = Where(where) if isinstance(where, str) else where
    return _build(_entries(document, place), place)


def validate_tasks(specs: Mapping[str, TaskSpec], *, need_data: bool) -> None:
    """Check tasks that were built in Python, or once more before a run.

    Args:
        specs: tasks by name.
        need_data: a task without a data set is an error (a run is about to start).

    Raises:
        ConfigError: what a task holds cannot be run.
    """
    for spec in specs.values():
        check_task(spec, Where(spec.source, ("tasks", spec.name)), need_data=need_data)
    check_tasks(specs, Where(next((s.source.rsplit(":", 1)[0] for s in specs.values()), "")))


def fill_weights(names: Sequence[str], given: Mapping[str, float | None]) -> dict[str, float]:
    """Return weights that sum to 1; a missing one is the mean of those given.

    Raises:
        ConfigError: a weight that is negative, not finite or of an unknown task, or a sum of 0.

    >>> fill_weights(["a", "b"], {"a": 2.0})
    {'a': 0.5, 'b': 0.5}
    """
    for name, weight in given.items():
        if name not in names:
            raise ConfigError(
                f"weight of an unknown task {name!r}{suggest(name, names)} (tasks: {', '.join(names)})"
            )
        if weight is not None and not 0 <= weight < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a finite number >= 0, got {weight!r}")
    known = [w for w in given.values() if w is not None]
    mean = sum(known) / len(known) if known else 1.0
    filled = {name: mean if (w := given.get(name)) is None else float(w) for name in names}
    total = sum(filled.values())
    if total <= 0:
        raise ConfigError(f"the weights of {', '.join(names)} are all 0; at least one must be > 0")
    return {name: weight / total for name, weight in filled.items()}


def _entries(document: Any, where: Where) -> dict[str, tuple[dict[str, Any], Where]]:
    """Return the raw mapping and the place of every task, whichever form the file has."""
    if document is None:
        raise ConfigError(f"{where.file}: the file is empty; expected a key 'tasks' that holds the tasks")
    if not isinstance(document, Mapping):
        raise ConfigError(f"{where}: expected a mapping with the key 'tasks', got {type(document).__name__}")
    check_keys(document, ["tasks"], where)
    tasks, where = document.get("tasks"), where.at("tasks")
    if tasks in ({}, []):
        raise ConfigError(
            f"{where}: holds no task; expected a list of tasks or a mapping, "
            "e.g. `name: {dataset: rows.jsonl, rewards: [exact_match]}`"
        )
    if not isinstance(tasks, (Mapping, list)):
        raise ConfigError(f"{where}: expected a list of tasks or a mapping name: task, got {tasks!r}")
    named = _named_items(tasks, where) if isinstance(tasks, list) else tasks.items()
    entries: dict[str, tuple[dict[str, Any], Where]] = {}
    for index, (name, raw) in enumerate(named):
        here = where.at(index if isinstance(tasks, list) else name)
        if name in entries:
            first = entries[name][1]
            raise ConfigError(f"{here}: task {name!r} is defined twice (first: {first.source}); rename one")
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{here}: expected a mapping of the task's keys, got {raw!r}")
        entries[name] = (dict(raw), here)
    return entries


def _named_items(tasks: list[Any], where: Where) -> list[tuple[str, Any]]:
    items = []
    for index, raw in enumerate(tasks):
        here = where.at(index)
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{here}: expected a mapping with the key 'name', got {raw!r}")
        name = raw.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{here}: every task of a list needs a 'name' (text), got {name!r}")
        items.append((name, {key: value for key, value in raw.items() if key != "name"}))
    return items


def _merge_overrides(
    entries: dict[str, tuple[dict[str, Any], Where]], overrides: Mapping[str, Any], root: Where
) -> dict[str, tuple[dict[str, Any], Where]]:
    merged = dict(entries)
    for name, given in overrides.items():
        if not isinstance(given, Mapping):
            raise ConfigError(f"override: tasks.{name}: expected a mapping of the task's keys, got {given!r}")
        raw, where = entries.get(name, ({}, root.at("tasks", name)))
        if name not in entries:
            if entries and not _DEFINING & set(given):
                raise ConfigError(
                    f"override: tasks.{name}: unknown task {name!r}{suggest(name, entries)} "
                    f"(tasks: {', '.join(entries)}); a new task needs at least rewards or constraints"
                )
            where = Where("", where.path, {where.path: OVERRIDE})
        merged[name] = (_deep_merge(raw, given, where), where)
    return merged


def _deep_merge(base: Mapping[str, Any], given: Mapping[str, Any], where: Where) -> dict[str, Any]:
    result = dict(base)
    for key, value in given.items():
        here, old = where.at(key), result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = _deep_merge(old, value, here)
        else:
            result[key] = value
            _mark(here, OVERRIDE)
    return result


def _mark(where: Where, line: int) -> None:
    """Note the line of a key that is not in the file under this path."""
    if isinstance(where.lines, dict):
        where.lines[where.path] = line


def _build(entries: Mapping[str, tuple[dict[str, Any], Where]], where: Where) -> dict[str, TaskSpec]:
    if not entries:
        raise ConfigError(f"{where.file}: no tasks; give a tasks file (tasks_file=...) or tasks.<name>")
    specs = {
        name: _task(name, _with_plugin_settings(raw, here), here) for name, (raw, here) in entries.items()
    }
    for name, spec in specs.items():
        check_task(spec, entries[name][1], need_data=False)
    check_tasks(specs, where)
    return specs


def _task(name: str, raw: Mapping[str, Any], where: Where) -> TaskSpec:
    check_keys(raw, _TASK_KEYS, where)
    values = _expand_short_forms(raw, where)
    plugin_lists = {key: values.pop(key, []) for key in ("rewards", "constraints")}
    spec = build_dataclass(TaskSpec, {**values, "name": name}, where)
    spec.rewards = _plugins(RewardSpec, plugin_lists["rewards"], where.at("rewards"))
    spec.constraints = _plugins(ConstraintSpec, plugin_lists["constraints"], where.at("constraints"))
    plugins: list[RewardSpec | ConstraintSpec] = [*spec.rewards, *spec.constraints]
    for plugin in plugins:
        plugin.plugin = _resolve_plugin(plugin.plugin, where)
        plugin.device = plugin.device or str(plugin.config.get("device", "")) or spec.device
    spec.sampling_keys = tuple(values.get("sampling") or ())
    spec.source = where.source
    spec.dataset = _beside(spec.dataset, where)
    spec.eval_dataset = _beside(spec.eval_dataset, where)
    return spec


def _with_plugin_settings(raw: Mapping[str, Any], where: Where) -> Mapping[str, Any]:
    """Put the task plugin's own settings under the keys the file gives."""
    dataset = raw.get("dataset")
    if isinstance(dataset, str) and dataset.startswith(GENERATOR_PREFIX):
        return _with_verifier(raw, dataset, where)
    if not isinstance(dataset, str) or not dataset.startswith("plugin:"):
        return raw
    name = dataset.removeprefix("plugin:")
    check_entry_point(where.at("dataset"), TASKS, name)
    config = _dataset_config(raw, where)
    task = build_plugin(load_plugin(TASKS, name, expects=["settings", "rows"]), config, where=str(where))
    given = {long for short, (_, long) in SHORT_FORMS.items() if short in raw}
    settings = {k: v for k, v in task.settings().items() if k not in given}
    if {"rewards", "reward_model"} & set(raw):
        # the plugin's primary metric is one of its own rewards, which the file has replaced
        names = {_name_of(item) for item in [*_listed(raw.get("rewards")), raw.get("reward_model", "")]}
        if str(settings.get("primary_metric", "")).partition("/")[0] not in names:
            settings.pop("primary_metric", None)
    return {**settings, **raw}


def _listed(items: Any) -> list[Any]:
    return items if isinstance(items, list) else []


def _name_of(item: Any) -> str:
    """Return the name in logs of an entry of ``rewards``; empty for one that is malformed."""
    given = item if isinstance(item, Mapping) else {"plugin": item}
    return str(given.get("name") or _short_name(str(given.get("plugin") or "")))


def _dataset_config(raw: Mapping[str, Any], where: Where) -> Mapping[str, Any]:
    config = raw.get("dataset_config")
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{where.at('dataset_config')}: expected a mapping, got {config!r}")
    return config or {}


def _with_verifier(raw: Mapping[str, Any], dataset: str, where: Where) -> Mapping[str, Any]:
    """Let a generator's own verifier judge, where the task names no reward, and say where it looks."""
    values = dict(raw)
    if not {"rewards", "reward_model"} & set(raw):
        config = _dataset_config(raw, where)
        own = {k: v for k, v in config.items() if k not in ("size", "seed")}
        values["rewards"] = [{"plugin": dataset, "config": {"dataset": own}}]
        values.setdefault("prompt", _ANSWER_IN_TAGS)
    return values


def _expand_short_forms(raw: Mapping[str, Any], where: Where) -> dict[str, Any]:
    values = dict(raw)
    for model_key, (config_key, list_key) in SHORT_FORMS.items():
        model, config = values.pop(model_key, None), values.pop(config_key, None)
        if model is None:
            if config is not None:
                raise ConfigError(f"{where.at(config_key)}: {config_key!r} needs {model_key!r} beside it")
            continue
        if list_key in values:
            raise ConfigError(
                f"{where.at(model_key)}: {model_key!r} is the short form of {list_key!r}; give one of them"
            )
        values[list_key] = [{"plugin": model, "config": {} if config is None else config}]
        item = where.at(list_key, 0)
        _mark(item, where.at(model_key).line)
        _mark(item.at("config"), where.at(config_key).line)
    return values


def _plugins(cls: type[S], items: Any, where: Where) -> list[S]:
    if not isinstance(items, list):
        raise ConfigError(f"{where}: expected a list of plugins, got {items!r}")
    specs: list[S] = []
    for index, item in enumerate(items):
        here = where.at(index)
        if not isinstance(item, (str, Mapping)):
            raise ConfigError(f"{here}: expected a plugin's name or a mapping with 'plugin', got {item!r}")
        spec = build_dataclass(cls, {"plugin": item} if isinstance(item, str) else item, here)
        spec.name = spec.name or _short_name(spec.plugin) or "grammar"
        if any(other.name == spec.name for other in specs):
            raise ConfigError(f"{here}: the name {spec.name!r} is taken; give this one another 'name'")
        specs.append(spec)
    return specs


def _short_name(plugin: str) -> str:
    """Name in logs: of ``a.b:f`` it is ``f``, of ``evaluate:bleu`` it is ``bleu``."""
    return plugin.rsplit(":", 1)[-1].rsplit("/", 1)[-1].replace(".", "_")


def _beside(text: str, where: Where) -> str:
    """Return the file beside the tasks file if there is one, else ``text`` (path, hub id, ``plugin:``)."""
    if not text or not where.file or ":" in text:
        return text
    path = (Path(where.file).parent / Path(text).expanduser()).resolve()
    return str(path) if is_file(path) else text


def _resolve_plugin(plugin: str, where: Where) -> str:
    prefix, _, rest = plugin.partition(":")
    if prefix in FUNCTION_PREFIXES:
        return f"{prefix}:{_resolve_plugin(rest, where)}"
    place, colon, name = plugin.rpartition(":")
    return f"{_beside(place, where)}{colon}{name}" if place.endswith(".py") else plugin
