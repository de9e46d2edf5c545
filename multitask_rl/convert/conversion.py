"""What every conversion has: the options given, the keys written, and a list of what was not taken over.

An option is taken over if the written number means the same. Where no number does, the nearest is written
with a note, or the option is left out with a reason. Options that are not given count with the source's
defaults, since those are not ours.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from multitask_rl.config.checks import is_file
from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.data.readers import read_file
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.plugins import list_plugins

EXPERIMENT = "converted"
"""``+experiment=converted`` names the written configuration of the run."""


class Conversion:
    """Options of one source on their way to our keys.

    Args:
        source: name and version of the library.
        given: option -> value, as the user wrote it.
        defaults: option -> the source's default, of options that are read.
        reasons: pattern of options without a counterpart -> why.
        computed: option -> code that computes it, which is not run.
    """

    def __init__(
        self,
        source: str,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any],
        reasons: Mapping[str, str],
        *,
        computed: Mapping[str, str],
        num_rows: int | None,
    ) -> None:
        self.source = source
        self.given = dict(given)
        self._defaults = defaults
        self._reasons = reasons
        self._computed = computed
        self._num_rows = num_rows
        self.run: dict[str, Any] = {}
        """Dotted key of the run's configuration -> value."""
        self.task: dict[str, Any] = {}
        """Dotted key that every task has -> value."""
        self.tasks: dict[str, dict[str, Any]] = {}
        """Task -> its own keys."""
        self.files: dict[str, str] = {}
        """Further files to write: name -> text."""
        self.taken: list[tuple[str, str, str]] = []
        """Options, our key, and what differs ("" = nothing)."""
        self.left: dict[str, str] = {}
        """Option -> why it was not taken over."""
        self._read: set[str] = set()

    def get(self, option: str) -> Any:
        """Return the option's value: as given, else the source's default. The option counts as read.

        Raises:
            ConfigError: the default is a number, true or false, and the value is none, not even as a text.
        """
        self._read.add(option)
        value, default = self.given.get(option), self._defaults.get(option)
        if value is None or not isinstance(default, (bool, int, float)):
            return default if value is None else value
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if isinstance(default, bool):
                return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
            if not isinstance(value, bool):
                number = float(value)
                return int(number) if not isinstance(value, float) and number.is_integer() else number
        wanted = "true or false" if isinstance(default, bool) else "a number"
        raise ConfigError(f"{option}: expected {wanted}, got {value!r}")

    def put(self, key: str, value: Any, *options: str, differs: str = "") -> None:
        """Write ``key`` of the run, or of every task if it begins with ``task.``.

        ``options`` are those that the value comes from; ``differs`` says what is not the same.
        """
        if key.startswith("task."):
            self.task[key.removeprefix("task.")] = value
        else:
            self.run[key] = value
        self.note(f"{key} = {value}", *options, differs=differs)

    def carry(
        self, key: str, option: str, kind: Callable[[Any], Any] | None = None, *, differs: str = ""
    ) -> None:
        """Write ``key`` with the value of ``option``, as a ``kind`` (``float``, ``list``) if one is given."""
        value = self.get(option)
        self.put(key, value if kind is None else kind(value), option, differs=differs)

    def carry_if_set(self, key: str, option: str) -> None:
        """Write ``key`` with the value of ``option``, unless it is empty, 0 or false."""
        if self.get(option):
            self.carry(key, option)

    def put_engine(
        self, engine: str, option: str, prefix: str, parallel: str = "tensor_parallel_size"
    ) -> None:
        """Write the engine that ``option`` names: vllm with its options ``<prefix>...``, else hf."""
        if engine != "vllm":
            self.leave(option, f"{engine!r}: the engines are hf and vllm; hf is written")
            self.put("rollout.engine", "hf")
            return
        self.put("rollout.engine", "vllm", option)
        memory = "gpu_memory_utilization"
        for key, name in ((memory, memory), ("tensor_parallel_size", parallel)):
            if self.get(f"{prefix}{name}") is not None:
                self.carry(f"rollout.engine_config.{key}", f"{prefix}{name}")

    def note(self, key: str, *options: str, differs: str = "") -> None:
        """Say that ``options`` became ``key``."""
        self._read.update(options)
        given = [o for o in options if o in self.given]
        if given or differs:
            self.taken.append((", ".join(given or options), key, differs))

    def leave(self, option: str, reason: str) -> None:
        """Say why a given option is not taken over."""
        self._read.add(option)
        if option in self.given:
            self.left[option] = reason

    def need(
        self, value: str | Sequence[str] | None, what: str, instead: str, file: str, *options: str
    ) -> None:
        """Refuse a conversion that lacks a data set or a reward: no tasks file would be valid.

        The option ``instead`` of ``convert`` names one; ``options`` of the source would have named it.
        """
        if not value:
            found = {o: f"is computed: {self._computed[o]}" for o in options if o in self._computed}
            found |= {o: f"is {self.given[o]!r}" for o in options if o in self.given}
            said = "".join(f" ({option} {text})" for option, text in found.items())
            raise ConfigError(f"{file}: no {what} was found in it{said}; name it with {instead}")

    def finish(self) -> None:
        """Find a reason for each option that nothing has read."""
        for option, text in self._computed.items():
            self.left[option] = f"the script computes it ({text}); write a constant, or set our key"
        for option in self.given:
            if option not in self._read:
                found = (why for pattern, why in self._reasons.items() if re.fullmatch(pattern, option))
                self.left[option] = next(found, f"not known here as an option of {self.source}")
        noted = {option for options, _, _ in self.taken for option in options.split(", ")}
        for option in self.given:
            if option in self._read and option not in noted and option not in self.left:
                self.taken.append((option, "(nothing to write)", ""))
        if len(self.tasks) > 1:
            self.put("scheduler.policy", "static")  # the source draws all rows alike, all through the run

    def rows_of(self, datasets: Iterable[str]) -> int | None:
        """Return how many rows the data sets have: as given by the user, else counted in files."""
        return self.count_rows(datasets) if self._num_rows is None else self._num_rows

    def count_rows(self, datasets: Iterable[str]) -> int | None:
        """Return how many rows the files have together; None if one is no file that can be read."""
        total = 0
        for dataset in datasets:
            if not is_file(Path(dataset)):
                return None
            try:
                total += len(read_file(dataset))
            except DataError:
                return None
        return total or None

    def count_values(self, dataset: str, column: str) -> Counter[str]:
        """Count the rows of a file by a column's text; none if a row lacks it, or the file cannot be read."""
        try:
            rows = read_file(dataset) if is_file(Path(dataset)) else ()
            found = [row.get(column) for row in rows]
        except DataError:  # told later
            return Counter()
        known = [value for value in found if isinstance(value, str)]
        return Counter(known if len(known) == len(found) else ())

    def weights_by_rows(self, datasets: Sequence[str]) -> list[float] | None:
        """Return weights that draw the rows of all data sets alike; None if their rows are not known."""
        if len(datasets) == 1:
            return [1.0]
        counts = [self.count_rows([one]) for one in datasets]
        return [float(count) for count in counts if count] if all(counts) else None

    def put_steps(self, steps: int | None, *options: str) -> None:
        """Write ``max_steps`` from options that count passes or steps, or say that rows are not known."""
        if steps is None:
            told = "counts passes over rows whose number is not known here: give --rows N, or set max_steps"
            self._read.update(options)
            self.left[options[0]] = f"{told} (the default, {RunConfig().max_steps}, holds until then)"
        else:
            self.put("max_steps", max(1, steps), *options)

    def put_trackers(self, option: str) -> None:
        """Take over those trackers that are installed under the same name."""
        names = self.get(option)
        wanted = [names] if isinstance(names, str) else list(names or [])
        installed = {info.name for info in list_plugins("multitask_rl.trackers")}
        kept = [name for name in wanted if name in installed and name not in ("console", "jsonl")]
        missing = sorted({*wanted} - installed - {"none", "all"}) if option in self.given else []
        told = f"no tracker of the name {', '.join(missing)} is installed" if missing else ""
        self.put("tracking.trackers", ["console", "jsonl", *kept], option, differs=told)

    def configuration(self, tasks_file: str) -> dict[str, Any]:
        """Return the run's configuration as nested mappings.

        Raises:
            ConfigError: a value is out of the range that a run allows.
        """
        values = _nested({"tasks_file": tasks_file, **self.run})
        build_dataclass(RunConfig, values, Where(path=("the converted configuration",)))
        return values

    def write(self, folder: Path) -> list[Path]:
        """Write tasks, configuration, further files and the report below ``folder``; return their paths."""
        tasks = {name: _nested({**own, **self.task}) for name, own in self.tasks.items()}
        head = f"# written by `multitask-rl convert` from {self.source}; report.txt lists the options\n"
        run = self.configuration(str(folder / "tasks.yaml"))
        texts = {
            "tasks.yaml": head + _dump({"tasks": tasks}),
            f"experiment/{EXPERIMENT}.yaml": "# @package _global_\n" + head + _dump(run),
            **self.files,
            "report.txt": "\n".join(self.report()) + "\n",
        }
        written = []
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
        return written

    def report(self) -> list[str]:
        """Return the lines that say what became of every option."""
        lines = [f"Options of {self.source}", "", "Taken over, with the same meaning:"]
        lines += [f"  {options} -> {key}" for options, key, differs in self.taken if not differs]
        lines += ["", "Taken over, but not the same:"]
        lines += [f"  {o} -> {key}: {differs}" for o, key, differs in self.taken if differs] or ["  (none)"]
        lines += ["", f"Other values that are written are defaults of {self.source}.", "", "Not taken over:"]
        lines += [f"  {option}: {reason}" for option, reason in self.left.items()] or ["  (none)"]
        return lines


def ratio_or_steps(value: float, total: int | None) -> int | None:
    """Return a number of steps that is given as such, or below 1 as a share of ``total``; None = unknown."""
    if value >= 1 or value == 0:
        return int(value)
    return None if total is None else math.ceil(value * total)


def task_name(dataset: str, taken: Iterable[str] = ()) -> str:
    """Return a task's name for a data set's path or hub id, different from those ``taken``."""
    stem = Path(dataset.removeprefix("reasoning_gym:")).name.partition(".")[0]
    plain = re.sub(r"\W+", "_", stem).strip("_").lower() or "task"
    name = plain if plain[0].isalpha() else f"task_{plain}"
    known = set(taken)
    return next(n for n in [name, *(f"{name}_{i}" for i in range(2, len(known) + 3))] if n not in known)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        level = tree
        for name in above:
            level = level.setdefault(name, {})
        level[last] = value
    return tree


class _Dumper(yaml.SafeDumper):
    """Writes no YAML aliases: an edit of one task changes no other task."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _dump(values: Mapping[str, Any]) -> str:
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
