"""One conversion: the options of a source become our keys, or are listed with the reason why not.

A source (``trl.py``, ``verl.py``, ``roll.py``, ``openrlhf.py``) ends with its ``Source``: how files are read,
its defaults, its table, and reasons for options without a counterpart. ``convert`` works through the table
from top to bottom. A ``Row`` writes one key from one option; a function writes what needs more than one.

An option is taken over if the written value means the same. Where no value does, the nearest is written
with a note, or the option is left out with a reason. Options that are not given count with the source's
defaults, since those are not ours. Texts that several sources use, or that depend on values: ``messages.py``.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from multitask_rl.config.checks import is_file
from multitask_rl.config.run import RunConfig, dotted
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where, parse_yaml
from multitask_rl.convert import messages as say
from multitask_rl.data.readers import read_file
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.plugins import list_plugins

EXPERIMENT = "converted"
"""``+experiment=converted`` names the written configuration of the run."""
_KINDS = {bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
_KINDS[str] = "a text"


@dataclass(kw_only=True)
class Rows:
    """A data set that a script loads; "" where it is not found."""

    dataset: str = ""
    split: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``load_dataset`` that choose its rows."""
    calls: list[str] = field(default_factory=list)
    """Methods that change the rows after loading."""
    parts: list[Rows] = field(default_factory=list)
    """The data sets of a mixture, which has no ``dataset`` of its own."""
    weights: list[float] = field(default_factory=list)
    """How often each part is drawn, if not by its number of rows."""


@dataclass(kw_only=True)
class Reading:
    """What the file of a source gives; the fields after ``told`` are found for TRL only."""

    options: dict[str, Any] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)
    """Option -> code that computes it, which is not run."""
    told: dict[str, str] = field(default_factory=dict)
    """Name of something that may not be what it seems -> what is told of it."""
    model: str = ""
    rows: Rows = field(default_factory=Rows)
    eval_rows: Rows = field(default_factory=Rows)
    rewards: list[str] = field(default_factory=list)
    """References of the plugins, or ``model:<id>`` for a reward model."""
    rewards_file: str = ""
    """Text of a module that holds the rewards that the script defines, with what they need of it."""


@dataclass(frozen=True)
class Row:
    """A line of a table: our ``key`` has the value of ``option``, as a ``kind`` if one is given."""

    key: str
    option: str
    kind: Callable[[Any], Any] | None = None
    differs: str = ""
    if_set: bool = False
    """Whether an empty value, 0 or false is not written."""

    def __call__(self, c: Conversion) -> None:
        """Write the key."""
        if c.get(self.option) or not self.if_set:
            c.carry(self.key, self.option, self.kind, differs=self.differs)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A library whose configurations are converted."""

    name: str
    """Its name and version; the first word stands for ``{there}`` in messages."""
    read: Callable[[Path], Reading]
    defaults: str
    """YAML of the options that are read: their defaults in the source, or a kind (``<number>``) for none."""
    counts: Sequence[str]
    """Options that are at least 1."""
    table: Sequence[Callable[[Conversion], None]]
    reasons: str
    """Lines ``pattern: why not``; an indented line continues the one above."""


@dataclass(kw_only=True)
class Conversion:
    """Options of one source on their way to our keys; the first arguments are those of ``convert``."""

    source: Source
    file: Path
    dataset: str
    reward: str
    num_rows: int | None
    processes: int
    found: Reading = field(init=False)
    given: dict[str, Any] = field(init=False)
    """Option -> value, as the user wrote it."""
    defaults: dict[str, Any] = field(init=False)
    run: dict[str, Any] = field(default_factory=dict)
    """Dotted key of the run's configuration -> value."""
    task: dict[str, Any] = field(default_factory=dict)
    """Dotted key that every task has -> value."""
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task -> its own keys."""
    files: dict[str, str] = field(default_factory=dict)
    """Further files to write: name -> text."""
    taken: list[tuple[str, str, str]] = field(default_factory=list)
    """Options, our key, and what differs ("" = nothing)."""
    left: dict[str, str] = field(default_factory=dict)
    """Option -> why it was not taken over."""
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.found = self.source.read(self.file)
        self.given, self.defaults = dict(self.found.options), flat(self.source.defaults)

    def get(self, option: str) -> Any:
        """Return the option's value: as given, else the source's default. The option counts as read.

        Raises:
            ConfigError: the value is not of the default's kind. A number, true or false may be a text.
        """
        self._read.add(option)
        value, default = self.given.get(option), self.defaults.get(option)
        kind: Any = type(default)
        if isinstance(default, type):
            kind, default = default, None
        elif kind is list:  # a text may stand for a list of one
            kind = None
        if value is None or kind not in _KINDS or (kind in (list, dict) and isinstance(value, kind)):
            return default if value is None else value
        if kind is str and not isinstance(value, (list, dict)):  # YAML reads some texts as other types
            return value
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            if kind is bool:
                return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
            if kind in (int, float) and not isinstance(value, bool):
                number = float(value)
                if not math.isfinite(number):
                    raise ValueError("no option has a default that is not finite")
                return int(number) if not isinstance(value, float) and number.is_integer() else number
        raise ConfigError(f"{option}: expected {_KINDS[kind]}, got {value!r}")

    def texts(self, option: str) -> list[str]:
        """Return a text or a list of texts as a list."""
        value = self.get(option)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, str) for one in listed):
            raise ConfigError(f"{option}: expected a text or a list of texts, got {value!r}")
        return listed

    def put(self, key: str, value: Any, *options: str, differs: str = "", **values: Any) -> None:
        """Write a key of the run, of every task (``task.``) or of every task's algorithm (``algorithm.``).

        ``options`` are those that the value comes from; ``differs`` and ``values`` are those of ``note``.
        """
        key = re.sub(r"^algorithm\.", "task.algorithm_config.", key)
        where = self.task if key.startswith("task.") else self.run
        where[key.removeprefix("task.")] = value
        self.note(f"{key} = {value}", *options, differs=differs, **values)

    def carry(
        self, key: str, option: str, kind: Callable[[Any], Any] | None = None, *, differs: str = ""
    ) -> None:
        """Write ``key`` with the value of ``option``, as a ``kind`` (``float``, ``list``) if one is given."""
        value = self.get(option)
        try:
            written = value if kind is None else kind(value)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{option}: {value!r} is no value that is known here") from None
        self.put(key, written, option, differs=differs)

    def put_if_set(self, key: str, *options: str) -> None:
        """Write ``key`` with the first value among ``options`` that is not empty, 0 or false."""
        if value := next(filter(None, map(self.get, options)), None):
            self.put(key, value, *options)

    def note(self, key: str, *options: str, differs: str = "", exact: bool = False, **values: Any) -> None:
        """Say that ``options`` became ``key``; ``differs`` (unless ``exact``) says what is not the same."""
        self._read.update(options)
        given, differs = [o for o in options if o in self.given], "" if exact else differs
        if given or differs:
            self.taken.append((", ".join(given or options), key, self._text(differs, values)))

    def leave(self, option: str, reason: str, /, **values: Any) -> None:
        """Say why a given option is not taken over."""
        self._read.add(option)
        if option in self.given:
            self.left[option] = self._text(reason, values)

    def _text(self, message: str, values: Mapping[str, Any]) -> str:
        return message.format(there=re.split(r"\W", self.source.name)[0], **values) if message else ""

    def need(
        self, value: str | Sequence[Any] | None, what: str, *options: str, instead: str = "--reward"
    ) -> None:
        """Refuse a conversion without a ``value`` (a data set, a reward): no tasks file would be valid.

        Args:
            value: empty or None = the source has none.
            what: its name in the message.
            options: options of the source that give it; the message quotes them.
            instead: option of ``convert``, or key of the source, that the message asks for.
        """
        if not value:
            computed = self.found.computed
            found = {o: f"is computed: {computed[o]}" for o in options if o in computed}
            found |= {o: f"is {self.given[o]!r}" for o in options if o in self.given}
            said = "".join(f" ({option} {text})" for option, text in found.items())
            raise ConfigError(f"{self.file}: no {what} was found in it{said}; name it with {instead}")

    def finish(self) -> None:
        """Find a reason for each option that nothing has read."""
        self.put("guard.enabled", False)  # no source has one
        for option, text in self.found.computed.items():
            self.left[option] = f"the script computes it ({text}); write a constant, or set our key"
        lines = re.sub(r"\n +", " ", self.source.reasons.strip()).splitlines()
        reasons = [(pattern.replace(" ", ""), why) for pattern, _, why in (x.partition(": ") for x in lines)]
        for option in self.given:
            if option not in self._read:
                found = (why for pattern, why in reasons if re.fullmatch(pattern, option))
                self.left[option] = next(found, f"not known here as an option of {self.source.name}")
        noted = {option for options, _, _ in self.taken for option in options.split(", ")}
        for option in self.given:
            if option in self._read and option not in noted and option not in self.left:
                self.taken.append((option, "(nothing to write)", ""))
        if len(self.tasks) > 1:
            self.put("scheduler.policy", "static")  # the source draws all rows alike, all through the run
        self.left |= self.found.told

    # keys that the sources write alike

    def put_critic(self, gamma: str, lam: str, clip: str, rate: str, *paths: str) -> None:
        """Write what type ppo has besides the clipped loss."""
        self.carry("algorithm.gamma", gamma, float)
        self.carry("algorithm.gae_lambda", lam, float)
        self.put("algorithm.value_clip", float(self.get(clip) or 0.0), clip, differs=say.SCALED_VALUES)
        self.put("critic.trunk", "separate")
        self.carry("critic.learning_rate", rate, float)
        self.put_if_set("critic.name_or_path", *paths)

    def put_engine(
        self, engine: str, option: str, prefix: str, parallel: str = "tensor_parallel_size"
    ) -> None:
        """Write the engine that ``option`` names: vllm with its options ``<prefix>...``, else hf."""
        if engine != "vllm":
            self.leave(option, say.ENGINE, engine=engine)
            self.put("rollout.engine", "hf")
            return
        self.put("rollout.engine", "vllm", option)
        memory = "gpu_memory_utilization"
        for key, name in ((memory, memory), ("tensor_parallel_size", parallel)):
            if (value := self.get(f"{prefix}{name}")) is not None:
                self.put(f"rollout.engine_config.{key}", value, f"{prefix}{name}")

    def put_steps(self, steps: int | None, *options: str) -> None:
        """Write ``steps``, at least 1, as ``max_steps``; ``options`` are those that they were computed from.

        If ``steps`` is None, as the number of rows is not known, the first of ``options`` is left out with
        this reason.
        """
        if steps is None:
            self._read.update(options)
            self.left[options[0]] = say.PASSES.format(default=RunConfig().max_steps)
        else:
            self.put("max_steps", max(1, steps), *options)

    def put_trackers(self, option: str) -> None:
        """Take over those trackers that are installed under the same name."""
        wanted = self.texts(option)
        installed = {info.name for info in list_plugins("multitask_rl.trackers")}
        kept = [name for name in wanted if name in installed and name not in ("console", "jsonl")]
        missing = ", ".join(sorted({*wanted} - installed - {"none", "all"})) if option in self.given else ""
        told = say.NO_TRACKER if missing else ""
        self.put("tracking.trackers", ["console", "jsonl", *kept], option, differs=told, names=missing)

    # rows of local files

    def rows_of(self, datasets: Iterable[str]) -> int | None:
        """Return how many rows the data sets have: as given by the user, else counted in files."""
        return self.count_rows(datasets) if self.num_rows is None else self.num_rows

    def count_rows(self, datasets: Iterable[str]) -> int | None:
        """Return how many rows the files have together; None if one is no file that can be read."""
        paths = [Path(one) for one in datasets]
        try:
            return sum(len(read_file(path)) for path in paths) if all(map(is_file, paths)) else None
        except DataError:
            return None

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

    # results

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
        head = f"# written by `multitask-rl convert` from {self.source.name}; report.txt lists the options\n"
        run = self.configuration(str(folder / "tasks.yaml"))
        texts = {
            "tasks.yaml": head + _dump({"tasks": tasks}),
            f"experiment/{EXPERIMENT}.yaml": "# @package _global_\n" + head + _dump(run),
            **self.files,
            "report.txt": "\n".join(self.report()) + "\n",
        }
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return [folder / name for name in texts]

    def report(self) -> list[str]:
        """Return the lines that say what became of every option."""
        name = self.source.name
        lines = [f"Options of {name}", "", "Taken over, with the same meaning:"]
        lines += [f"  {options} -> {key}" for options, key, differs in self.taken if not differs]
        lines += ["", "Taken over, but not the same:"]
        lines += [f"  {o} -> {key}: {differs}" for o, key, differs in self.taken if differs] or ["  (none)"]
        lines += ["", f"Other values that are written are defaults of {name}.", "", "Not taken over:"]
        lines += [f"  {option}: {reason}" for option, reason in self.left.items()] or ["  (none)"]
        return lines


def convert(
    source: Source,
    file: Path,
    *,
    dataset: str = "",
    reward: str = "",
    num_rows: int | None = None,
    processes: int = 1,
) -> Conversion:
    """Convert a file of ``source``: a script, or a file of options.

    ``dataset`` and ``reward`` (a reference of a plugin) stand in place of those that are found; ``num_rows``
    is the size of a data set that cannot be counted. TRL counts batches per device: a launch has several
    ``processes``.

    Raises:
        ConfigError: the file cannot be read, names no data set or reward, or has a value of another kind.
    """
    c = Conversion(
        source=source, file=file, dataset=dataset, reward=reward, num_rows=num_rows, processes=processes
    )
    for option in source.counts:
        if (number := c.get(option)) is not None and number < 1:
            raise ConfigError(f"{option}: expected at least 1, got {number}")
    for step in source.table:
        step(c)
    c.finish()
    return c


def flat(text: str) -> dict[str, Any]:
    """Return the values of a YAML text by dotted keys; ``<number>``, ``<text>``... are types."""
    types = {"<number>": float, "<list>": list, "<mapping>": dict, "<text>": str}
    found = dotted(parse_yaml(text, "a table of options")[0])
    return {key: types.get(value, value) if isinstance(value, str) else value for key, value in found}


def at_least_0(value: float) -> float:
    """Return a number of steps, 0 for -1 (never)."""
    return max(0, value)


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
