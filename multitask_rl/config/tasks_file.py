"""The tasks file: from YAML to checked ``TaskSpec``, before any model or data loads.

    tasks:
      math:                                 # or a list of {name: math, ...}
        type: grpo
        dataset: data/math.jsonl
        rewards: [math_answer]              # a name, or {plugin, weight, config}

``reward_model`` and ``reward_config`` are a short form of one reward; constraints have the same.
Paths are looked up beside the tasks file first, then in the working directory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
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
from multitask_rl.config.schema.build import build_dataclass, check_keys, setting_fields
from multitask_rl.config.schema.located_yaml import OVERRIDE, Where, load_yaml
from multitask_rl.config.schema.ranges import suggest, unknown_name
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec, short_name
from multitask_rl.errors import (
    LOCATORS,
    ConfigError,
    MissingExtraError,
    MultitaskRLError,
    PluginError,
    raise_all,
)
from multitask_rl.plugins import TASKS, build_plugin, load_plugin

S = TypeVar("S", RewardSpec, ConstraintSpec)
_Entry = tuple[dict[str, Any], Where]
"""A task's keys as the file gives them, and their place."""

SHORT_FORMS = {
    "reward_model": ("reward_config", "rewards"),
    "constraint_model": ("constraint_config", "constraints"),
}
"""Short form -> the key of its configuration, and the list that the two keys stand for."""
_ANSWER_IN_TAGS = "{question}\n\nGive the final answer between <answer> and </answer>."
_TASK_KEYS = {
    *(field.name for field in setting_fields(TaskSpec, skip=["name"])),
    *(key for short, (config, _) in SHORT_FORMS.items() for key in (short, config)),
}
_ENVIRONMENT_KEYS = (
    "environment_config",
    "max_turns",
    "max_tool_calls",
    "turn_timeout_s",
    "max_response_tokens",
)
_DEFINING = ("dataset", "type", "environment", "rewards", "reward_model", "constraints", "constraint_model")
_NEW_TASK = f"a new task has one of the keys {', '.join(_DEFINING)}"


def load_tasks(path: str | Path, overrides: Mapping[str, Any] | None = None) -> dict[str, TaskSpec]:
    """Read, merge and check a tasks file.

    Args:
        path: the YAML file.
        overrides: task name -> keys of the file to replace (``{"math": {"weight": 2}}``); mappings merge,
            an empty one replaces. A name that the file lacks defines a new task.

    Raises:
        ConfigError: names file, line, key path, the offending value and what is allowed; ``others`` are the
            first errors of further tasks.
    """
    document, root = load_yaml(path)
    entries = _entries(document, root)
    merged = dict(entries)
    for name, given in (overrides or {}).items():
        if not isinstance(given, Mapping):
            raise ConfigError(f"override: tasks.{name}: expected a mapping of the task's keys, got {given!r}")
        raw, where = entries.get(name, ({}, root.at("tasks", name)))
        if name not in entries:
            if not set(_DEFINING) & set(given):
                raise ConfigError(
                    f"override: tasks.{name}: {unknown_name('task', name, entries)}; {_NEW_TASK}"
                )
            where = Where("", where.path, {where.path: OVERRIDE})
        merged[name] = (_deep_merge(raw, given, where), where)
    return _build(merged, root)


def parse_tasks(document: Any, where: Where | str = "tasks") -> dict[str, TaskSpec]:
    """Check a tasks document that is already plain values (``{"tasks": ...}``); see ``load_tasks``."""
    place = Where(where) if isinstance(where, str) else where
    return _build(_entries(document, place), place)


def need_datasets(specs: Mapping[str, TaskSpec]) -> None:
    """Raise a ``ConfigError`` for a task without a data set."""
    for name, spec in specs.items():
        if not spec.dataset:
            raise ConfigError(
                f"{spec.where}.dataset: task {name!r} has no data set; give a path, a Hugging Face id, "
                "plugin:<task> or reasoning_gym:<generator>, or pass a dataloader in Python. Rows that a "
                "script gave as objects are not recorded: start that script again"
            )


def fill_weights(names: Sequence[str], given: Mapping[str, float]) -> dict[str, float]:
    """Return weights that sum to 1; a missing one is the mean of those given.

    Raises:
        ConfigError: a weight of an unknown task, one that is negative or not finite, or all are 0.

    >>> fill_weights(["a", "b"], {"a": 2.0})
    {'a': 0.5, 'b': 0.5}
    """
    for name, weight in given.items():
        if name not in names:
            raise ConfigError(f"a weight names an {unknown_name('task', name, names)}")
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"the weight of {name!r} must be a finite number >= 0, got {weight!r}")
    mean = sum(given.values()) / len(given) if given else 1.0
    filled = {name: float(given.get(name, mean)) for name in names}
    total = sum(filled.values())
    if total <= 0:
        raise ConfigError(f"the weights of {', '.join(names)} are all 0; at least one must be > 0")
    return {name: weight / total for name, weight in filled.items()}


def _entries(document: Any, where: Where) -> dict[str, _Entry]:
    """Return the raw mapping and the place of every task, from a list or a mapping."""
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
    entries: dict[str, _Entry] = {}
    items: Iterable[tuple[Any, Any]] = tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks)
    for name, raw in items:
        here = where.at(name)
        if isinstance(tasks, list):
            if not isinstance(raw, Mapping):
                raise ConfigError(f"{here}: expected a mapping with the key 'name', got {raw!r}")
            name = raw.get("name")
            if not isinstance(name, str):
                raise ConfigError(f"{here}: every task of a list needs a 'name' (text), got {name!r}")
            raw = {k: v for k, v in raw.items() if k != "name"}
        if name in entries:
            first = entries[name][1]
            raise ConfigError(f"{here}: task {name!r} is defined twice (first: {first.source}); rename one")
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{here}: expected a mapping of the task's keys, got {raw!r}")
        entries[name] = (dict(raw), here)
    return entries


def _deep_merge(base: Mapping[str, Any], given: Mapping[str, Any], where: Where) -> dict[str, Any]:
    result = dict(base)
    for key, value in given.items():
        here, old = where.at(key), result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value:
            result[key] = _deep_merge(old, value, here)
        else:
            result[key] = value
            for path in [path for path in here.lines if path[: len(here.path)] == here.path]:
                del here.lines[path]
            here.lines[here.path] = OVERRIDE
    return result


def _build(entries: Mapping[str, _Entry], where: Where) -> dict[str, TaskSpec]:
    specs, errors = dict[str, TaskSpec](), list[MultitaskRLError]()
    defined = [name for name, (raw, _) in entries.items() if set(_DEFINING) & set(raw)]
    for name, entry in entries.items():
        if entry[1].line:
            for place in (
                str(entry[1]),
                f"{entry[1].source}: tasks.{name}",
            ):  # a list of tasks names them in both ways
                LOCATORS[place] = entry[1].source_of
        try:
            if name not in defined and suggest(name, defined):
                raise ConfigError(f"{entry[1]}: {unknown_name('task', name, defined)}; {_NEW_TASK}")
            specs[name] = _task(name, *entry)
            check_task(specs[name], entry[1])
        except MultitaskRLError as error:
            errors.append(error)
    raise_all(errors)
    check_tasks(specs, where)
    return specs


def _task(name: str, raw: Mapping[str, Any], where: Where) -> TaskSpec:
    values = _with_plugin_settings(raw, where)
    check_keys(values, _TASK_KEYS, where)
    for short, (config_key, list_key) in SHORT_FORMS.items():
        plugin, config = values.pop(short, None), values.pop(config_key, None)
        if plugin is None:
            if config is not None:
                raise ConfigError(f"{where.at(config_key)}: {config_key!r} needs {short!r} beside it")
            continue
        if list_key in values:
            raise ConfigError(
                f"{where.at(short)}: {short!r} is the short form of {list_key!r}; give one of them"
            )
        values[list_key] = [{"plugin": plugin, "config": {} if config is None else config}]
        item = where.at(list_key, 0)
        where.lines[item.path] = where.at(short).line
        config_path = where.at(config_key).path
        for path, line in list(where.lines.items()):
            if path[: len(config_path)] == config_path:
                where.lines[item.at("config", *path[len(config_path) :]).path] = line
    plugin_lists = {key: values.pop(key, []) for key in ("rewards", "constraints")}
    spec = build_dataclass(TaskSpec, {**values, "name": name}, where)
    spec.rewards = _plugins(RewardSpec, plugin_lists["rewards"], where.at("rewards"), spec)
    spec.constraints = _plugins(ConstraintSpec, plugin_lists["constraints"], where.at("constraints"), spec)
    spec.environment = _resolve_plugin(spec.environment, where)
    if spec.environment and not spec.rewards:
        spec.rewards = [RewardSpec(plugin="environment", name="environment")]
    usual = asdict(TaskSpec(name=name))  # a run's record has every key
    given = [key for key in _ENVIRONMENT_KEYS if key in values and values[key] != usual[key]]
    if given and not spec.environment:
        raise ConfigError(f"{where.at(given[0])}: {given[0]!r} needs 'environment' beside it")
    if not spec.environment and any(reward.plugin == "environment" for reward in spec.rewards):
        raise ConfigError(
            f"{where.at('rewards')}: the reward 'environment' is what the task's environment gives; set the "
            f"task's key 'environment', or name another reward"
        )
    spec.sampling_keys = tuple(values.get("sampling") or ())
    spec.source = where.source
    spec.type = _resolve_plugin(spec.type, where)
    spec.dataset, spec.eval_dataset = (_resolve_data(d, where) for d in (spec.dataset, spec.eval_dataset))
    if spec.teacher and where.file:
        beside = (Path(where.file).parent / Path(spec.teacher).expanduser()).resolve()
        spec.teacher = str(beside) if beside.is_dir() else spec.teacher
    return spec


def _with_plugin_settings(raw: Mapping[str, Any], where: Where) -> dict[str, Any]:
    """Add the defaults that come with the data set: settings of a task plugin, verifier of a generator."""
    dataset, config = raw.get("dataset"), raw.get("dataset_config")
    if not isinstance(dataset, str) or not dataset.startswith(("plugin:", GENERATOR_PREFIX)):
        return dict(raw)
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{where.at('dataset_config')}: expected a mapping, got {config!r}")
    has_rewards = not {"rewards", "reward_model"}.isdisjoint(raw)
    if dataset.startswith(GENERATOR_PREFIX):
        if has_rewards:
            return dict(raw)
        own = {k: v for k, v in (config or {}).items() if k not in ("size", "seed")}
        rewards = [{"plugin": dataset, "config": {"dataset": own}}]
        return {"prompt": _ANSWER_IN_TAGS, **raw, "rewards": rewards}
    name = _resolve_plugin(dataset.removeprefix("plugin:"), where)
    check_entry_point(where.at("dataset"), TASKS, name)
    try:
        plugin = load_plugin(TASKS, name, expects=["settings", "rows"])
    except (MissingExtraError, PluginError) as error:
        raise type(error)(f"{where.at('dataset')}: {error}") from error
    task = build_plugin(plugin, config or {}, where=f"{where}.dataset_config")
    given = {long for short, (_, long) in SHORT_FORMS.items() if short in raw}
    settings = {k: v for k, v in task.settings().items() if k not in given}
    if has_rewards:
        # the plugin's primary metric may be one of its own rewards, which the file replaces
        listed = raw.get("rewards")
        items = [*(listed if isinstance(listed, list) else []), raw.get("reward_model", "")]
        mappings = (item if isinstance(item, Mapping) else {"plugin": item} for item in items)
        names = {str(m.get("name") or short_name(str(m.get("plugin") or ""))) for m in mappings}
        if str(settings.get("primary_metric", "")).partition("/")[0] not in names:
            settings.pop("primary_metric", None)
    return {**settings, **raw}


def _plugins(cls: type[S], items: Any, where: Where, task: TaskSpec) -> list[S]:
    """Build the rewards or constraints of ``task``: names, files beside the tasks file, devices."""
    if not isinstance(items, list):
        raise ConfigError(f"{where}: expected a list of plugins, got {items!r}")
    specs: list[S] = []
    for index, item in enumerate(items):
        here = where.at(index)
        if not isinstance(item, (str, Mapping)):
            raise ConfigError(f"{here}: expected a plugin's name or a mapping with 'plugin', got {item!r}")
        spec = build_dataclass(cls, {"plugin": item} if isinstance(item, str) else item, here)
        if any(other.name == spec.name for other in specs):
            raise ConfigError(f"{here}: the name {spec.name!r} is taken; give this one another 'name'")
        spec.plugin = _resolve_plugin(spec.plugin, where)
        spec.device = spec.device or str(spec.config.get("device", "")) or task.device
        specs.append(spec)
    return specs


def _beside(text: str, where: Where) -> str:
    """Return the path of the file beside the tasks file if there is one, else ``text``."""
    if not text or not where.file or ":" in text:
        return text
    path = (Path(where.file).parent / Path(text).expanduser()).resolve()
    return str(path) if is_file(path) else text


def _resolve_data(dataset: str, where: Where) -> str:
    if dataset.startswith("plugin:"):
        return f"plugin:{_resolve_plugin(dataset.removeprefix('plugin:'), where)}"
    return _beside(dataset, where)


def _resolve_plugin(plugin: str, where: Where) -> str:
    prefix, _, rest = plugin.partition(":")
    if prefix in FUNCTION_PREFIXES:
        return f"{prefix}:{_resolve_plugin(rest, where)}"
    if prefix == "openenv" and "://" not in rest and where.file:
        directory = Path(where.file).parent / Path(rest).expanduser()
        return f"{prefix}:{directory.resolve()}" if directory.is_dir() else plugin
    place, colon, name = plugin.rpartition(":")
    return f"{_beside(place, where)}{colon}{name}" if place.endswith(".py") else plugin
