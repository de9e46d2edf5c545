"""A stream of prompts over data that is read while it is used (``streaming: true`` of ``datasets``)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from multitask_rl.data.readers import BLOCK, Row, StreamedRows
from multitask_rl.data.rows import fingerprint
from multitask_rl.data.stream import PromptStream
from multitask_rl.errors import CheckpointError, DataError
from multitask_rl.seeding import random_stream

logger = logging.getLogger(__name__)


class StreamedPrompts(PromptStream):
    """Gives the rows of streamed data, forever: blocks of ``BLOCK`` rows in order, each shuffled.

    The order in a block depends on seed, task, epoch and the block's number; the order of the data's files on
    the epoch. ``state_dict`` names the block by the data set's own state, by the number of rows before it and
    by a hash of its rows: a resumed run goes on at the same row, and notices other rows.
    """

    def __init__(self, rows: StreamedRows, *, task: str, seed: int) -> None:
        super().__init__(rows, task=task, seed=seed)
        self._source = rows
        self._epoch = self._number = self._at = 0
        self._block: list[Row] = []
        """Rows of block ``_number``, in the order they are given; ``_at`` of them were."""
        self._begin: dict[str, Any] = {}
        """Where the block begins; empty = before the first."""
        self._reader: tuple[Any, Iterator[Row]] | None = None
        self._position = 0
        """Rows read in this epoch, with those that are left out."""

    @property
    def epoch(self) -> int:
        """Number of the pass over the rows that the next row belongs to, from 0."""
        return self._epoch

    def next(self, n: int) -> list[tuple[int, Row]]:
        """Return the next ``n`` rows, each with its draw number.

        Raises:
            DataError: the data cannot be read on, or holds no row of the task.
        """
        if self._begin and not self._block:
            self._seek()
        rows = []
        for _ in range(n):
            if self._at >= len(self._block):
                self._read_on()
            rows.append((self._draw, self._block[self._at]))
            self._at += 1
            self._draw += 1
        return rows

    def _read_on(self) -> None:
        """Read the next block; at the end of the data the first of the next epoch."""
        for _ in range(2):
            if self._reader is None:
                self._reader, self._position, self._number = self._source.open(self._epoch), 0, -1
            self._begin = self._place(self._reader[0])
            if rows := self._read(self._reader[1]):
                self._number, self._at = self._number + 1, 0
                self._shuffle(rows)
                return
            self._reader = None
            self._epoch += 1
        raise DataError(
            f"task {self._task!r}: the streamed data has no row of this task; check its column ``task``, or "
            "give other data"
        )

    def _place(self, data: Any) -> dict[str, Any]:
        state = data.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError):  # rows before the block are then read and left out
            state = None
        return {"state": state, "position": self._position}

    def _read(self, rows: Iterator[Row]) -> list[Row]:
        """Return the next rows of the task, at most ``BLOCK``; fewer at the end of the data."""
        block: list[Row] = []
        for row in rows:
            self._position += 1
            if self._source.keeps(row):
                block.append(row)
                if len(block) == BLOCK:
                    break
        return block

    def _shuffle(self, rows: list[Row]) -> None:
        self._begin["rows"] = fingerprint(rows)
        seed, task = self._shuffled_by
        random_stream(seed, "data", task, self._epoch, self._number).shuffle(rows)
        self._block = rows

    def _seek(self) -> None:
        """Read the block that ``load_state_dict`` named."""
        state, position, known = self._begin["state"], self._begin["position"], self._begin["rows"]
        for tried in [state, None] if state is not None else [None]:
            self._reader = self._source.open(self._epoch, tried)
            if tried is None:
                # a shuffle of the data set's own comes out the same from its beginning only
                for _ in islice(self._reader[1], position):
                    pass
            self._position = position
            rows = self._read(self._reader[1])
            if fingerprint(rows) == known:
                break
        else:
            logger.warning(
                "data set of task %r changed since the checkpoint: row %d of epoch %d and those after it are "
                "others; it goes on there",
                *(self._task, position, self._epoch),
            )
        self._shuffle(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, JSON-able."""
        block = {"number": self._number, "at": self._at, "begin": dict(self._begin)}
        return {**super().state_dict(), "first_epoch": self._epoch, "first_draw": self._draw, "block": block}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; raises ``CheckpointError`` if it is not one of a stream."""
        before = (self._epoch, self._begin.get("position"), self._begin.get("rows"))
        super().load_state_dict(state)
        self._epoch = self._first_epoch
        block = state.get("block")
        if self._first_epoch != state["first_epoch"] or block is None:  # other data: from its beginning
            self._begin, self._block, self._reader, self._at = {}, [], None, 0
            return
        try:
            self._number, self._at, begin = int(block["number"]), int(block["at"]), dict(block["begin"])
            after = (self._epoch, begin.get("position"), begin.get("rows"))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the data cursor of task {self._task!r} is unreadable: {error!r}"
            ) from error
        if before != after:
            self._begin, self._block, self._reader = begin, [], None
