"""The Python front door to data: ``get_dataloader``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multitask_rl.config.schema.build import suggest
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import fill_weights
from multitask_rl.data.objects import rows_of
from multitask_rl.data.readers import Rows
from multitask_rl.data.rows import evaluation_rows, group_rows, load_rows, split_rows
from multitask_rl.errors import ConfigError, DataError


@dataclass(kw_only=True, slots=True)
class TaskDataLoader:
    """Rows of several tasks with their initial weights; what ``Trainer(dataloader=...)`` takes."""

    splits: dict[str, dict[str, Rows]]
    """Task -> split -> rows; the split "" holds rows that name none."""
    weights: dict[str, float]
    """Task -> initial probability; they sum to 1."""
    batch_size: int = 8
    """Prompts of all tasks together per step."""
    split: str = "train"
    """Split to train on."""
    given_weights: dict[str, float] = field(default_factory=dict)
    """The weights as they were given, for the log."""

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks there are rows of."""
        return list(self.splits)

    def load(self, spec: TaskSpec, split: str) -> Rows:
        """Return the rows of ``spec``, from here or, for a task not held here, from its own data set.

        Args:
            spec: the task.
            split: ``train`` or ``eval``, as in ``load_rows``.

        Raises:
            DataError: neither here nor in the tasks file, or no rows of the split.
        """
        if spec.name not in self.splits:
            if spec.dataset:
                return load_rows(spec, split)
            raise DataError(
                f"task {spec.name!r} has no data: neither the dataloader (tasks: {', '.join(self.tasks)}) "
                f"nor the tasks file gives any{suggest(spec.name, self.tasks)}"
            )
        if split == "eval" and spec.eval_dataset:
            return load_rows(spec, split)
        if split not in ("train", "eval"):
            raise ConfigError(f"TaskDataLoader.load: split must be 'train' or 'eval', got {split!r}")
        if split == "eval" and spec.evaluation_only:
            return evaluation_rows(spec, self.splits[spec.name])
        wanted = self.split if self.split != "train" else spec.split
        train, held_out = split_rows(spec, self.splits[spec.name], train_split=wanted)
        return train if split == "train" else held_out

    def check_tasks(self, names: list[str]) -> None:
        """Refuse rows of a task that the tasks file does not have.

        Raises:
            DataError: names the tag, a close match and the known tasks.
        """
        for tag, splits in self.splits.items():
            if tag not in names:
                count = sum(len(rows) for rows in splits.values())
                raise DataError(
                    f"{count} rows of the data set carry task: {tag!r}, which is no task of this run"
                    f"{suggest(tag, names)} (tasks: {', '.join(names)}); add the task or leave the rows out"
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
            f"{count} rows of {source} have no 'task'; every row of a multi-task data set names its task "
            f"(tasks found: {', '.join(t for t in splits if t) or 'none'})"
        )
    weights = fill_weights(list(splits), dict(task_weights or {}))
    return TaskDataLoader(
        splits=splits,
        weights=weights,
        batch_size=batch_size,
        split=split,
        given_weights=dict(task_weights or {}),
    )
