"""Base of the suite's tasks: rows drawn so that training and held-out prompts never mix."""

from __future__ import annotations

import hashlib
import json
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from multitask_rl.errors import DataError
from multitask_rl.seeding import random_stream

Row = dict[str, Any]
"""JSON-able; always ``task`` and ``prompt``, further columns by task."""

Split = Literal["train", "heldout"]

HELD_OUT_BUCKETS = 51
"""Of 256: one prompt in five is held out."""

MAX_FRUITLESS_DRAWS = 3000
"""Draws in a row without a new prompt after which a task counts as exhausted: no endless loop."""


class SuiteTask(ABC):
    """A family of prompts with known good answers. Stateless; all randomness comes in as a stream."""

    name: ClassVar[str]
    max_new_tokens: ClassVar[int]
    """Longest useful response with its end token, plus slack."""
    template: ClassVar[str] = "{prompt}"
    """Over the columns of a row: what the actor reads (``prompt`` of a task in a tasks file)."""

    def render(self, row: Mapping[str, Any]) -> str:
        """Return the text of a row that the actor reads."""
        return self.template.format(**row)

    @abstractmethod
    def sample(self, stream: random.Random) -> Row:
        """Draw one row."""

    @abstractmethod
    def answer(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return a good response (the only one, where the task has only one)."""

    @abstractmethod
    def corrupt(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return a bad response in the right format: what a warm start mixes in."""


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: by hash of its text, the same in every run."""
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] < HELD_OUT_BUCKETS


def iterate_rows(task: SuiteTask, *, seed: int, split: Split) -> Iterator[Row]:
    """Yield the rows of a split without end, prompts repeating as they are drawn."""
    index = 0
    while True:
        row = task.sample(random_stream(seed, "suite", task.name, index))
        index += 1
        if is_held_out(row["prompt"]) == (split == "heldout"):
            yield row


def build_rows(task: SuiteTask, *, seed: int, split: Split, num_rows: int) -> list[Row]:
    """Return ``num_rows`` rows of a split with different prompts.

    Raises:
        DataError: the split has fewer different prompts than asked for.
    """
    rows: dict[str, Row] = {}
    fruitless = 0
    for row in iterate_rows(task, seed=seed, split=split):
        if len(rows) == num_rows:
            break
        if fruitless == MAX_FRUITLESS_DRAWS:
            raise DataError(
                f"task {task.name!r} of the suite has no {num_rows} different prompts in its {split} split: "
                f"{len(rows)} found, none new in {fruitless} draws; ask for fewer rows"
            )
        fruitless = fruitless + 1 if row["prompt"] in rows else 0
        rows.setdefault(row["prompt"], row)
    return list(rows.values())


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows as JSON lines and return the path; a run that reads a former file goes on reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    os.replace(aside, path)
    return path
