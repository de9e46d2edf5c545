"""Objects given from Python where a tasks file has names: reward functions, data sets, whole task mappings.

A callable becomes a reference that worker processes, Ray actors and a resumed run can load; rows become a
``TaskDataLoader``.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from multitask_rl.config.run import RunConfig
from multitask_rl.config.tasks_file import SHORT_FORMS
from multitask_rl.data import TaskDataLoader, get_dataloader, rows_of
from multitask_rl.errors import ConfigError, PluginError, path_errors
from multitask_rl.scoring.shapes import FOREIGN_PARAMETERS, foreign_parameter

_LOADER = '''"""Written by multitask_rl: {name!r} was given from Python as an object."""

import pickle
from pathlib import Path

{name} = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def name_objects(
    config: RunConfig, tasks: str | Path | Mapping[str, Any] | Sequence[Any] | None, data: Any
) -> tuple[RunConfig, TaskDataLoader | None]:
    """Return the run with names in place of objects, and the rows that were given as objects.

    Args:
        config: the run; ``tasks`` in it may hold objects.
        tasks: a tasks file, or tasks in its forms; None = those of ``config``. A reward or constraint may be
            a function, a class or an instance; ``dataset`` and ``eval_dataset`` may be a list of rows, a
            ``datasets.Dataset`` or, for ``dataset``, a ``datasets.DatasetDict``.
        data: a ``TaskDataLoader``, or what ``get_dataloader`` takes; None = the tasks name their data.

    Raises:
        ConfigError: a task is no mapping, or held-out rows stand alone.
        DataError: a data set of another type, or without rows.
        PluginError: a plugin that cannot be pickled.
    """
    if isinstance(tasks, (str, Path)):
        config = replace(config, tasks_file=str(tasks))
    elif tasks is not None:
        config = replace(config, tasks_file="", tasks=_by_name(tasks))
    loader = data if data is None or isinstance(data, TaskDataLoader) else get_dataloader(data)
    directory = Path(config.output_dir) / "plugins"
    plain: dict[str, Any] = {}
    splits: dict[str, dict[str, Any]] = {}
    for name, given in config.tasks.items():
        if not isinstance(given, Mapping):
            raise ConfigError(f"tasks.{name}: expected a mapping of the task's keys, got {given!r}")
        task = dict(given)
        for model_key, (_, list_key) in SHORT_FORMS.items():
            if model_key in task:
                task[model_key] = _plain_plugin(task[model_key], directory)
            if callable(task.get(list_key)):
                task[list_key] = [task[list_key]]
            if isinstance(task.get(list_key), (list, tuple)):
                task[list_key] = _plain_plugins(task[list_key], directory)
        if not isinstance(task.get("dataset", ""), (str, Path)):
            splits[name] = rows_of(task.pop("dataset"), f"tasks.{name}.dataset")
        if not isinstance(task.get("eval_dataset", ""), (str, Path)):
            held_out = rows_of(task.pop("eval_dataset"), f"tasks.{name}.eval_dataset")
            if name not in splits:
                raise ConfigError(
                    f"tasks.{name}.eval_dataset: rows as an object need a 'dataset' of rows too"
                )
            if len(held_out) > 1:
                raise ConfigError(
                    f"tasks.{name}.eval_dataset: it has splits {', '.join(held_out)}; give the rows of one"
                )
            splits[name]["validation"] = [row for rows in held_out.values() for row in rows]
            task["eval_split"] = "validation"
        plain[name] = {key: str(v) if isinstance(v, Path) else v for key, v in task.items()}
    if splits and loader is None:
        loader = TaskDataLoader(splits=splits, batch_size=0)
    elif splits and loader is not None:
        loader = replace(loader, splits={**loader.splits, **splits})
    return replace(config, tasks=plain), loader


def _by_name(tasks: Any) -> dict[str, Any]:
    """Return tasks as a mapping, from the forms that a tasks file has."""
    if isinstance(tasks, Mapping) and set(tasks) == {"tasks"}:
        tasks = tasks["tasks"]
    if isinstance(tasks, Sequence) and not isinstance(tasks, str):
        unnamed = [i for i, t in enumerate(tasks) if not (isinstance(t, Mapping) and "name" in t)]
        if unnamed:
            raise ConfigError(f"tasks[{unnamed[0]}]: every task of a list is a mapping with a 'name'")
        tasks = {task["name"]: {k: v for k, v in task.items() if k != "name"} for task in tasks}
    if not isinstance(tasks, Mapping):
        raise ConfigError(f"tasks: expected a mapping name -> task or a list of tasks, got {tasks!r}")
    return dict(tasks)


def _plain_plugins(items: Sequence[Any], directory: Path) -> list[Any]:
    """Return ``items`` with names in place of objects; objects of one name are numbered."""
    plain: list[Any] = []
    names: list[str] = []
    for item in items:
        plain.append(_plain_plugin(item, directory))
        if isinstance(plain[-1], str):
            names.append(plain[-1].rpartition(":")[2])
            if (number := names.count(names[-1])) > 1 and not isinstance(item, str):
                plain[-1] = {"plugin": plain[-1], "name": f"{names[-1]}_{number}"}
    return plain


def _plain_plugin(item: Any, directory: Path) -> Any:
    """Return an entry of ``rewards`` or ``constraints`` with a name in place of an object."""
    if isinstance(item, Mapping):
        plugin = item.get("plugin", "")
        return item if isinstance(plugin, str) else {**item, "plugin": plugin_reference(plugin, directory)}
    return item if isinstance(item, str) else plugin_reference(item, directory)


def plugin_reference(value: Any, directory: Path) -> str:
    """Return how a tasks file names ``value``: a reward or constraint function, class or instance.

    A function with the parameters of TRL or verl gets the prefix under which it is called as there.

    What an imported module holds is named ``module:name``. What was defined in a script, a notebook or a
    function is pickled by value (``cloudpickle``) into ``directory``, beside a file that loads it, so that
    worker processes, Ray actors and later commands on the run find it.

    Raises:
        PluginError: ``value`` has no method of a plugin and cannot be called, or cannot be pickled.
    """
    if not (callable(value) or hasattr(value, "score") or hasattr(value, "judge")):
        raise PluginError(
            f"a reward or constraint is a name, a function, a class or an object with 'score' or 'judge', "
            f"got {value!r}"
        )
    module = sys.modules.get(getattr(value, "__module__", ""))
    name = getattr(value, "__qualname__", "")
    # a script, run by itself or by runpy, cannot be imported by a worker
    is_script = module is None or module.__name__ == "__main__" or module.__spec__ is None
    found: Any = None if is_script else module
    for part in name.split("."):
        found = getattr(found, part, None)
    prefix = _foreign_prefix(value)
    if found is value:
        return f"{prefix}{value.__module__}:{name}"
    label = getattr(value, "__name__", "") or type(value).__name__
    if not label.isidentifier():
        label = "reward"  # <lambda>
    try:
        with contextlib.ExitStack() as undo:
            if module is not None and is_script:
                cloudpickle.register_pickle_by_value(module)
                undo.callback(cloudpickle.unregister_pickle_by_value, module)
            content, digest = cloudpickle.dumps(value), _digest(value)
    except Exception as error:
        raise PluginError(
            f"{label!r} cannot be sent to a worker process: pickling it failed with {type(error).__name__}: "
            f"{error}. Define it in a module of its own, or build what it holds inside it"
        ) from error
    # named by content: a resumed run with another function does not change what the run used before
    with path_errors("output_dir", directory, "another with output_dir=PATH"):
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{label}_{digest}.py"
        if not file.exists():  # workers of another run may read it
            file.with_suffix(".pkl").write_bytes(content)
            file.write_text(_LOADER.format(name=label), encoding="utf-8")
    return f"{prefix}{file.resolve()}:{label}"


def _foreign_prefix(value: Any) -> str:
    if isinstance(value, type) or not callable(value):
        return ""
    try:
        return FOREIGN_PARAMETERS.get(foreign_parameter(inspect.signature(value).parameters), "")
    except (TypeError, ValueError):  # no signature to read; the reward itself says so
        return ""


_OF_PLACE = ("__firstlineno__", "__static_attributes__")


class _DigestPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a value to the same bytes in every process, which ``cloudpickle`` does not.

    Left out: where code stands, and the random number of a class. The items of sets are sorted.
    """

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for code, sets and texts; None for other values."""
        # else one object used twice and two equal ones would differ
        if isinstance(value, (str, bytes)):
            data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
            return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())
        if isinstance(value, CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            # since Python 3.13 the body of a class holds its line
            line = value.co_firstlineno if "__firstlineno__" in value.co_names else None
            consts = [None if type(own) is int and own == line else own for own in value.co_consts]
            return value.co_code, *names, *counts, consts
        if isinstance(value, (set, frozenset)):
            return type(value).__name__, sorted(_digest(item) for item in value)
        return None

    def reducer_override(self, value: Any) -> Any:
        """Return the parts of a class without its random number and, since Python 3.13, its line."""
        parts = super().reducer_override(value)
        if isinstance(value, type) and isinstance(parts, tuple) and len(parts) > 2:  # not a type of Python
            kept = tuple(part for part in parts[1] if not isinstance(part, str) or part == value.__name__)
            attributes, slots = parts[2]
            attributes = {key: own for key, own in attributes.items() if key not in _OF_PLACE}
            return parts[0], kept, (attributes, slots), *parts[3:]
        return parts


def _digest(value: Any) -> str:
    """Return a hash of what ``value`` does, the same in every process."""
    file = io.BytesIO()
    _DigestPickler(file).dump(value)
    return hashlib.blake2b(file.getvalue(), digest_size=4).hexdigest()
