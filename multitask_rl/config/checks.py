"""What a tasks file may say, beyond keys and types; checked before anything heavy is imported."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.config.grammar import GRAMMAR_KEYS, check_grammar
from multitask_rl.config.schema.build import suggest
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.task import ConstraintSpec, MultiplierSpec, TaskSpec
from multitask_rl.config.template import parse_template
from multitask_rl.errors import ConfigError, MissingExtraError, path_errors
from multitask_rl.plugins import PLUGIN_FORMS, list_plugins

__all__ = [
    "DATA_SUFFIXES",
    "FOREIGN_PREFIXES",
    "FUNCTION_PREFIXES",
    "GENERATOR_PREFIX",
    "NAME_PATTERN",
    "RESERVED_NAMES",
    "check_entry_point",
    "check_task",
    "check_tasks",
    "is_data_path",
    "is_file",
]

RESERVED_NAMES = ("all", "macro", "worst", "global")
DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
FOREIGN_PREFIXES = ("trl", "verl", "verifiers", "reasoning_gym", "evaluate")
"""Reward functions of other libraries; ``scoring.adapt`` reads what follows the prefix."""
FUNCTION_PREFIXES = ("trl", "verl")
"""Those that a function follows, named like one of ours."""
GENERATOR_PREFIX = "reasoning_gym:"
"""Data sets that a program makes, with their own verifier."""

NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
"""Of the name of a task."""
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def is_data_path(dataset: str) -> bool:
    """Whether ``dataset`` names a file rather than a hub id or a plugin."""
    return dataset.endswith(DATA_SUFFIXES) or dataset.startswith(("/", "./", "../", "~"))


def is_file(path: Path) -> bool:
    """Whether ``path`` is a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except OSError:  # too long
        return False


def check_tasks(specs: Mapping[str, TaskSpec], where: Where) -> None:
    """Check what concerns all tasks together.

    Raises:
        ConfigError: no task to train, all weights zero, floors that add up to more than 1, a former name
            that is in use.
    """
    trained = [s for s in specs.values() if not s.evaluation_only]
    if not trained:
        raise ConfigError(f"{where.file or 'tasks'}: every task is evaluation_only; nothing would be trained")
    if max(s.weight for s in trained) <= 0:
        raise ConfigError(
            f"{where.file or 'tasks'}: the weights of {', '.join(s.name for s in trained)} are all 0; "
            f"give at least one task a weight > 0, or leave them out for equal weights"
        )
    floors = sum(s.min_share or 0.0 for s in trained)
    if floors > 1:
        raise ConfigError(f"{where.file or 'tasks'}: the min_share of all tasks add up to {floors:g} > 1")
    _check_former_names(specs, where)


def check_task(spec: TaskSpec, where: Where, *, need_data: bool) -> None:
    """Check one task.

    Raises:
        ConfigError: says where, what and what is allowed.
    """
    _check_name(spec.name, where)
    _check_temperature(spec, where.at("sampling", "temperature"))
    check_entry_point(where.at("type"), "multitask_rl.algorithms", spec.type)
    for index, reward in enumerate(spec.rewards):
        _check_plugin(where.at("rewards", index), "multitask_rl.rewards", reward.plugin)
    for index, constraint in enumerate(spec.constraints):
        _check_constraint(where.at("constraints", index), constraint)
    _check_number_of_grammars(spec, where.at("constraints"))
    if not spec.rewards and not spec.judged and not spec.dataset.startswith("plugin:"):
        raise ConfigError(
            f"{where}: the task has neither rewards nor constraints that judge, so nothing could be learnt; "
            f"add 'rewards: [<name>]' (`multitask-rl plugins list` shows what is installed)"
        )
    try:
        parse_template(spec.prompt)
    except ConfigError as error:
        raise ConfigError(f"{where.at('prompt')}: {error}") from error
    _check_primary_metric(spec, where.at("primary_metric"))
    for key in ("dataset", "eval_dataset"):
        _check_dataset(where.at(key), getattr(spec, key))
    if need_data and not spec.dataset:
        raise ConfigError(
            f"{where.at('dataset')}: task {spec.name!r} has no data set; give a path, a Hugging Face id, "
            f"plugin:<task> or reasoning_gym:<generator>, or pass a dataloader in Python"
        )


def _check_former_names(specs: Mapping[str, TaskSpec], where: Where) -> None:
    heirs: dict[str, str] = {name: name for name in specs}
    for spec in specs.values():
        old = spec.renamed_from
        if old and heirs.setdefault(old, spec.name) != spec.name:
            raise ConfigError(
                f"{where.file or 'tasks'}: tasks.{spec.name}.renamed_from: a checkpoint's state of {old!r} "
                f"goes to task {heirs[old]!r}; leave 'renamed_from' out (a checkpoint written under the new "
                "name needs it no more), or give one of the tasks another name"
            )


def _check_name(name: str, where: Where) -> None:
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"{where}: the task name {name!r} is reserved for aggregates; rename it "
            f"(reserved: {', '.join(RESERVED_NAMES)})"
        )
    if not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"{where}: the task name {name!r} is not allowed: letters, digits, '_' and '-', at most 64, "
            f"the first a letter or digit (it becomes part of metric names and command-line keys)"
        )


def _check_temperature(spec: TaskSpec, where: Where) -> None:
    """Refuse to learn from greedy responses: a group would be one response, of no distribution."""
    temperature = spec.sampling.temperature if spec.sampling is not None else 1.0
    if temperature == 0.0 and not spec.evaluation_only:
        raise ConfigError(
            f"{where}: must be > 0 for a task that is trained, got {temperature!r}; for greedy evaluation "
            "set eval.temperature=0, or make the task evaluation_only"
        )


def _check_constraint(where: Where, constraint: ConstraintSpec) -> None:
    if constraint.mode == "grammar":
        _check_grammar_alone(where, constraint)
        check_grammar(constraint.config, where.at("config"))
        return
    if not constraint.plugin:
        raise ConfigError(f"{where}: key 'plugin' is missing; only mode grammar has none")
    _check_plugin(where, "multitask_rl.constraints", constraint.plugin)
    if constraint.mode == "lagrangian" and constraint.limit is None:
        raise ConfigError(
            f"{where.at('limit')}: mode lagrangian keeps the mean cost at a limit; give one in [0, 1]"
        )
    if constraint.mode != "lagrangian" and constraint.multiplier != MultiplierSpec():
        raise ConfigError(
            f"{where.at('multiplier')}: mode {constraint.mode!r} has no multiplier; leave it out, or set "
            "mode: lagrangian"
        )


def _check_grammar_alone(where: Where, constraint: ConstraintSpec) -> None:
    """Refuse keys of constraints that judge: a grammar would leave them without effect."""
    default = ConstraintSpec()
    for key in ("plugin", "limit", "weight", "max_attempts", "stream_every", "multiplier"):
        if getattr(constraint, key) != getattr(default, key):
            raise ConfigError(
                f"{where.at(key)}: a constraint of mode grammar has no {key}, got "
                f"{getattr(constraint, key)!r}: it judges no response, it decides what can be sampled; give "
                f"the grammar in config: one of {', '.join(GRAMMAR_KEYS)}"
            )


def _check_number_of_grammars(spec: TaskSpec, where: Where) -> None:
    grammars = [index for index, c in enumerate(spec.constraints) if c.mode == "grammar"]
    if len(grammars) > 1:
        raise ConfigError(
            f"{where.at(grammars[1])}: a second grammar; a task has one: join them in one regex "
            "('first|second') or in one schema ('anyOf'), or make it two tasks"
        )


def _check_primary_metric(spec: TaskSpec, where: Where) -> None:
    known = ["reward", *(r.name or r.plugin for r in spec.rewards)]
    if spec.primary_metric.split("/", 1)[0] not in known:
        raise ConfigError(
            f"{where}: primary_metric {spec.primary_metric!r} is none of the task's rewards"
            f"{suggest(spec.primary_metric, known)} (allowed: {', '.join(known)}, or <reward>/<component>)"
        )


def _check_plugin(where: Where, group: str, plugin: str) -> None:
    """Check that a reward or constraint can be found, without importing it."""
    prefix, _, rest = plugin.partition(":")
    if not rest:
        check_entry_point(where, group, plugin)
    elif prefix in FUNCTION_PREFIXES:
        if ":" not in rest and rest not in {p.name for p in list_plugins(group)}:
            raise ConfigError(
                f"{where}: {plugin!r} names no file, module or installed plugin; expected "
                f"'{prefix}:file.py:function' or '{prefix}:package.module:function'"
            )
        _check_plugin(where, group, rest)
    elif prefix not in FOREIGN_PREFIXES:
        _check_function(where, plugin)


def check_entry_point(where: Where, group: str, name: str) -> None:
    """Refuse a name that no entry point of ``group`` has.

    Raises:
        ConfigError: names a close match and what is installed.
    """
    names = sorted({plugin.name for plugin in list_plugins(group)})
    if name not in names and ":" not in name:  # module:object and file.py:object are told of when loaded
        kind = group.rpartition(".")[2].removesuffix("s")
        raise ConfigError(
            f"{where}: unknown {kind} {name!r}{suggest(name, names)} "
            f"(installed: {', '.join(names) or 'none'}); "
            "a plugin added since the last install appears after `pip install -e .`"
        )


def _check_function(where: Where, target: str) -> None:
    """Check ``file.py:name`` by parsing the file, ``package.module:name`` by finding the package."""
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        with path_errors(f"{where}: the plugin file", place, PLUGIN_FORMS):
            text = Path(place).expanduser().read_text(encoding="utf-8")
        try:
            tree = parse_python(text)
        except SyntaxError as error:
            raise ConfigError(f"{where}: cannot read {place!r} of {target!r}: {error}") from error
        names = _top_level_names(tree)
        if name not in names:
            raise ConfigError(
                f"{where}: {place!r} has no {name!r}{suggest(name, names)} (it has: {', '.join(names)})"
            )
        return
    if not place or importlib.util.find_spec(place.split(".")[0]) is None:
        raise ConfigError(
            f"{where}: {target!r} is not found: no module {place!r}; expected an entry-point name, "
            f"module:function, file.py:function, or one of the prefixes {', '.join(FOREIGN_PREFIXES)}"
        )


def _top_level_names(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(a.asname or a.name).split(".")[0] for a in node.names]
    return names


def _check_dataset(where: Where, dataset: str) -> None:
    if not dataset:
        return
    if dataset.startswith("plugin:"):
        check_entry_point(where, "multitask_rl.tasks", dataset.removeprefix("plugin:"))
    elif dataset.startswith(GENERATOR_PREFIX):
        if not _is_installed("reasoning_gym"):
            raise MissingExtraError(
                f"{where}: {dataset!r} needs the package reasoning-gym: "
                "pip install 'multitask-rl[reasoning-gym]'"
            )
    elif is_data_path(dataset):
        beside = f"in {str(Path(where.file).parent)!r} or " if where.line > 0 else ""
        allowed = f"a file {beside}in the working directory whose name ends in {', '.join(DATA_SUFFIXES)}"
        with path_errors(f"{where}: the data set", dataset, allowed):
            Path(dataset).expanduser().open("rb").close()
        if not dataset.endswith(DATA_SUFFIXES):
            raise ConfigError(f"{where}: {dataset!r} must end in one of {', '.join(DATA_SUFFIXES)}")
    elif not _HUB_ID.fullmatch(dataset):
        raise ConfigError(
            f"{where}: {dataset!r} is neither a path ({', '.join(DATA_SUFFIXES)}), a Hugging Face id "
            f"(owner/name), plugin:<task> nor reasoning_gym:<generator>"
        )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # blocked: sys.modules holds None
        return False
