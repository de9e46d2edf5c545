"""Base of the bundled tasks: reads rows from a hub, a file or a directory into one format and checks them.

A task reads its data where ``dataset_config.source`` points: a Hugging Face id (the default of each task),
one file whose rows carry a column ``split``, or a directory with the file names the task knows. Rows in the
hub's own columns are translated by ``translate``; rows that hold the task's columns already pass as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from multitask_rl.config.schema.ranges import Natural, Settings
from multitask_rl.data.readers import read_dataset_dict, read_file
from multitask_rl.errors import DataError

Row = dict[str, Any]
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")


@dataclass(kw_only=True, slots=True)
class SourceConfig(Settings):
    """Keys of ``dataset_config`` that every bundled task has."""

    source: str = ""
    """Hugging Face id, file (.jsonl, .jsonl.gz, .json, .parquet) or directory."""
    limit: Natural = 0
    """Rows per split at most, the first ones; 0 = all."""


class SourcedTask(ABC):
    """A task whose rows come from files or a hub. Building it reads nothing."""

    licence: ClassVar[str]
    """Of the data, as far as known; the user is responsible for the use."""
    columns: ClassVar[tuple[str, ...]] = ("prompt", "reference")
    """Columns of every row after translation."""
    files: ClassVar[tuple[str, ...]] = ()
    """Names of its files in a source directory."""
    hub_config: ClassVar[str] = ""
    """Configuration of the hub's data set, where it has several."""
    hub_splits: ClassVar[Mapping[str, str]] = {"train": "train", "test": "test"}
    """Our split -> the hub's."""
    evaluation_splits: ClassVar[tuple[str, ...]] = ("test",)
    """Splits that are benchmarks: never trained on."""
    evaluation_only: ClassVar[bool] = False
    """The whole task is a benchmark."""

    @dataclass(kw_only=True, slots=True)
    class Config(SourceConfig):
        """Keys of ``dataset_config``."""

    def __init__(self, config: Any) -> None:
        self.config: SourceConfig = config

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return defaults for keys of the tasks file."""

    @abstractmethod
    def translate(self, row: Mapping[str, Any], index: int) -> Row | None:
        """Return a hub's row in this task's columns; None leaves it out."""

    def gold(self, row: Mapping[str, Any]) -> str | None:
        """Return a response that earns the full reward, None where the data has no solution."""
        reference = row.get("reference")
        return None if reference is None else str(reference)

    def rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of ``split``; empty where the source has none.

        Raises:
            DataError: training rows of a task that is evaluated only, missing data, a row without the
                task's columns.
        """
        if self.evaluation_only and split not in self.evaluation_splits:
            raise DataError(
                f"task plugin {self.name!r} is a benchmark and has no rows to train on (asked for split "
                f"{split!r}; it has {', '.join(self.evaluation_splits)}). Keep `evaluation_only: true`, and "
                "train on another data set"
            )
        rows: list[Row] = []
        for row in self._translated(split):
            rows.append(row)
            if self.config.limit and len(rows) == self.config.limit:
                break
        return rows

    def _translated(self, split: str) -> Iterator[Row]:
        for index, raw in enumerate(self._raw(split)):
            is_ours = all(raw.get(column) is not None for column in self.columns)
            row = self.adopt(raw) if is_ours else self.translate(raw, index)
            if row is None:
                continue
            row = {"id": f"{self.name}-{split}-{index}", **row, "split": split}
            missing = [column for column in self.columns if row.get(column) in (None, "", [])]
            if missing:
                raise DataError(
                    f"task plugin {self.name!r}: row {row['id']!r} of {self.config.source!r} lacks "
                    f"{', '.join(missing)} (its columns: {', '.join(map(str, raw))})"
                )
            yield row

    def adopt(self, row: Mapping[str, Any]) -> Row | None:
        """Return the task's row for a file's row with the task's own columns; None leaves it out."""
        return dict(row)

    def _raw(self, split: str) -> Iterator[Mapping[str, Any]]:
        source = Path(self.config.source).expanduser()
        if source.is_dir():
            found = [source / name for name in self.files if (source / name).is_file()]
            if not found:
                raise DataError(
                    f"task plugin {self.name!r}: the directory {str(source)!r} holds none of "
                    f"{', '.join(self.files) or 'its files (it knows no file names)'}"
                )
            for path in found:
                yield from _of_split(read_file(path), split, self._default_split)
        elif (
            source.is_file()
            or self.config.source.startswith(("/", ".", "~"))
            or source.name.endswith(_SUFFIXES)
        ):
            yield from _of_split(read_file(source), split, self._default_split)
        else:
            keywords = {"name": self.hub_config} if self.hub_config else {}
            yield from read_dataset_dict(self.config.source, keywords).get(self.hub_splits.get(split, ""), ())

    @property
    def _default_split(self) -> str:
        """Split of a file's rows that name none."""
        return self.evaluation_splits[0] if self.evaluation_only else "train"


def _of_split(rows: Sequence[Mapping[str, Any]], split: str, default: str) -> Iterator[Mapping[str, Any]]:
    return (row for row in rows if (row.get("split") or default) == split)


def plugin_entry(plugin: str, weight: float = 1.0, **config: Any) -> dict[str, Any]:
    """Return an item of ``rewards`` as a tasks file writes it."""
    return {"plugin": plugin, "weight": weight, "config": config}
