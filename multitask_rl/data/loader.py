"""Data given from Python: rows as a path, a list or a data set of ``datasets``; ``get_dataloader``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.config.checks import is_data_path
from multitask_rl.config.schema.ranges import suggest
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import fill_weights
from multitask_rl.data.readers import Rows, read_dataset_dict, read_file, rows_of_table
from multitask_rl.data.rows import group_rows, load_both
from multitask_rl.errors import ConfigError, DataError


@dataclass(kw_only=True, slots=True)
class TaskDataLoader:
    """Rows of several tasks, and weights of tasks; what ``Trainer(dataloader=...)`` takes."""

    splits: dict[str, dict[str, Rows]]
    """Task -> split -> rows; the split "" holds rows that name none."""
    batch_size: int = 8
    """Prompts of all tasks together per step."""
    split: str = "train"
    """Split to train on."""
    weights: dict[str, float] = field(default_factory=dict)
    """Task -> initial weight, in place of those of the tasks file; a missing one is the mean of those given.
    Empty: the tasks file's count."""

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks there are rows of."""
        return list(self.splits)

    def load_both(self, spec: TaskSpec) -> tuple[Rows, Rows]:
        """Return training and held-out rows of ``spec``, from here or from the data set that it names.

        Errors: see ``load_rows``.
        """
        return load_both(spec, *self._source(spec))

    def _source(self, spec: TaskSpec) -> tuple[dict[str, Rows] | None, str]:
        if spec.name not in self.splits and not spec.dataset:
            raise DataError(
                f"task {spec.name!r} has no data: neither the dataloader (tasks: {', '.join(self.tasks)}) "
                f"nor the tasks file gives any{suggest(spec.name, self.tasks)}"
            )
        wanted = self.split if self.split != "train" and spec.name in self.splits else spec.split
        return self.splits.get(spec.name), wanted

    def check_tasks(self, names: list[str]) -> None:
        """Raise a ``DataError`` if there are rows of a task that is not one of ``names``."""
        for tag, splits in self.splits.items():
            if tag not in names:
                count = sum(len(rows) for rows in splits.values())
                raise DataError(
                    f"the data set has {counted(count, 'row')} with task: {tag!r}, which is no task of this "
                    f"run{suggest(tag, names)} (tasks: {', '.join(names)}); add the task or leave the "
                    "rows out"
                )


def get_dataloader(
    dataset_path: Any,
    task_weights: Mapping[str, float] | None = None,
    batch_size: int = 8,
    split: str = "train",
) -> TaskDataLoader:
    """Open a multi-task data set: rows with ``task``, ``prompt`` and what the task's rewards read.

    Args:
        dataset_path: .jsonl, .jsonl.gz, .json, .parquet or a Hugging Face id; or the rows themselves: a list
            of mappings, a ``datasets.Dataset`` or ``DatasetDict``.
        task_weights: initial weight per task; a missing one is the mean of those given; all are normalised.
        batch_size: prompts of all tasks together per step.
        split: split to train on, where rows have a ``split`` column.

    Raises:
        DataError: missing, empty or malformed data, or rows without ``task``.
        ConfigError: a weight that is negative, not finite, of a task without rows, or all weights 0.
    """
    if batch_size < 1:
        raise ConfigError(f"get_dataloader: batch_size must be >= 1, got {batch_size!r}")
    splits = group_rows(rows_of(dataset_path, "get_dataloader"))
    if "" in splits:
        count = sum(len(rows) for rows in splits[""].values())
        source = repr(str(dataset_path)) if isinstance(dataset_path, (str, Path)) else "the data set"
        raise DataError(
            f"{source} has {counted(count, 'row')} without 'task'; every row of a multi-task data set names "
            f"its task (tasks found: {', '.join(t for t in splits if t) or 'none'})"
        )
    given = dict(task_weights or {})
    fill_weights(list(splits), given)  # refuses what cannot be weights
    return TaskDataLoader(splits=splits, weights=given, batch_size=batch_size, split=split)


def rows_of(data: Any, where: str) -> dict[str, Rows]:
    """Return the rows of ``data`` by split; the split "" holds rows that name none.

    Args:
        data: a path or Hugging Face id, a list of mappings (rows) or of texts (prompts), a
            ``datasets.Dataset`` or ``IterableDataset``, a ``DatasetDict`` or ``IterableDatasetDict``, or a
            mapping split -> one of them. Rows are not copied.
        where: place for messages.

    Raises:
        DataError: another type, no rows, or a row that is neither a mapping nor a text.
    """
    if isinstance(data, (str, Path)):
        splits = {"": read_file(data)} if is_data_path(str(data)) else read_dataset_dict(str(data), {})
    elif isinstance(data, Mapping) and "prompt" in data:
        raise DataError(
            f"{where}: a mapping of columns ({', '.join(map(str, data))}), and a mapping is read as split -> "
            "rows; give datasets.Dataset.from_dict(data)"
        )
    elif isinstance(data, Mapping):
        splits = {str(name): rows for name, part in data.items() for rows in rows_of(part, where).values()}
    else:
        if isinstance(data, bytes) or not isinstance(data, Iterable):
            raise DataError(
                f"{where}: expected a path, a list of rows, a data set of datasets (Dataset, DatasetDict, "
                f"IterableDataset, IterableDatasetDict), or a mapping split -> one of them, got "
                f"{type(data).__name__}"
            )
        if not isinstance(data, Sized) and not hasattr(data, "load_state_dict"):
            raise DataError(
                f"{where}: a {type(data).__name__} can be read once only, and a run reads its rows again; "
                "give a list of them, or datasets.IterableDataset.from_generator(FUNCTION)"
            )
        if hasattr(data, "with_format"):  # of datasets; it slices by column
            splits = {_split_of(data): rows_of_table(data, where)}
        elif not isinstance(data, Sequence):
            raise DataError(
                f"{where}: got {type(data).__name__}; give a list of its rows: list(data), or of a DataFrame "
                "data.to_dict('records')"
            )
        else:
            splits = {"": [{"prompt": row} if isinstance(row, str) else row for row in data]}
            wrong = [i for i, row in enumerate(splits[""]) if not isinstance(row, Mapping)]
            if wrong:
                raise DataError(
                    f"{where}[{wrong[0]}]: expected a row (a mapping) or a prompt (a text); a conversation "
                    "is a row with a list of messages: {'prompt': [{'role': 'user', 'content': ...}]}"
                )
    if not any(len(rows) for rows in splits.values()):
        raise DataError(f"{where}: no rows; a run needs at least one")
    return splits


def _split_of(data: Any) -> str:
    """Return the split that a data set of ``datasets`` is a part of; "" if it is of several or none."""
    parts = {part.partition("[")[0] for part in str(data.split or "").split("+")}
    return parts.pop() if len(parts) == 1 else ""
