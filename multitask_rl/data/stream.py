"""An endless, deterministic stream of rows: every epoch in a new order, every draw numbered."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from multitask_rl.data.readers import Row, Rows
from multitask_rl.data.rows import fingerprint
from multitask_rl.errors import CheckpointError, DataError
from multitask_rl.records import Event
from multitask_rl.seeding import random_stream

logger = logging.getLogger(__name__)


class PromptStream:
    """Gives the rows of one task, forever.

    The order of epoch ``e`` is a shuffle by the stream ``(seed, "data", task, e)``: it depends on nothing
    else, so a cursor is enough to continue. It carries seed and name: a task that is renamed, or goes on with
    another seed, keeps its order. ``draw`` counts all rows ever given and never goes back; it seeds the
    rollouts.

    If the data set changed between two runs, ``load_state_dict`` starts the next epoch on the new rows, keeps
    counting draws, and logs a warning. Empty ``rows`` are a ``DataError``. ``seed`` is the run's.
    """

    def __init__(self, rows: Rows, *, task: str, seed: int) -> None:
        if not len(rows):
            raise DataError(f"task {task!r} has an empty data set; a stream needs at least one row")
        self._rows = rows
        self._task = task
        self._seed = seed
        self._shuffled_by = (seed, task)
        self._fingerprint = fingerprint(rows)
        self._draw = 0
        self._first_draw = 0
        self._first_epoch = 0
        self._shuffled: tuple[int, list[int]] = (-1, [])

    @property
    def draw(self) -> int:
        """Number of rows given or skipped so far."""
        return self._draw

    @property
    def num_rows(self) -> int:
        """Number of different rows."""
        return len(self._rows)

    @property
    def epoch(self) -> int:
        """Number of the pass over the rows that the next row belongs to, from 0."""
        return self._first_epoch + (self._draw - self._first_draw) // len(self._rows)

    def next(self, n: int) -> list[tuple[int, Row]]:
        """Return the next ``n`` rows, each with its draw number."""
        rows = []
        for _ in range(n):
            if self._shuffled[0] != self.epoch:
                order = list(range(len(self._rows)))
                seed, task = self._shuffled_by
                random_stream(seed, "data", task, self.epoch).shuffle(order)
                self._shuffled = (self.epoch, order)
            index = self._shuffled[1][(self._draw - self._first_draw) % len(self._rows)]
            rows.append((self._draw, self._rows[index]))
            self._draw += 1
        return rows

    def skip_to(self, later: Mapping[str, Any]) -> None:
        """Continue after the rows given until ``later``, a later ``state_dict``; estimates of rows stay."""
        self.load_state_dict(later)

    def observe(
        self,
        groups: Mapping[int, Sequence[float]],
        step: int,
        served: Mapping[int, Sequence[float]] | None = None,
    ) -> list[Event]:
        """Observe the rewards of a step's groups, by draw number; no effect in this class."""
        return []

    def shift(self) -> float:
        """Return the mean reward of uniformly drawn prompts minus the step's: 0, draws are uniform."""
        return 0.0

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step about the stream itself; none here."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, JSON-able."""
        return {
            "draw": self._draw,
            "first_draw": self._first_draw,
            "first_epoch": self._first_epoch,
            "length": len(self._rows),
            "fingerprint": self._fingerprint,
            "shuffled_by": list(self._shuffled_by),
        }

    def undo(self, earlier: Mapping[str, Any]) -> None:
        """Go back to ``earlier``, a ``state_dict``: the rows given since will be given again."""
        self.load_state_dict(earlier)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; raises ``CheckpointError`` if it is not one of this class."""
        try:
            draw, first_draw = int(state["draw"]), int(state["first_draw"])
            first_epoch, length = int(state["first_epoch"]), int(state["length"])
            known = str(state["fingerprint"])
            seed, task = state["shuffled_by"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the data cursor of task {self._task!r} is unreadable: {error!r}"
            ) from error
        self._draw, self._first_draw, self._first_epoch = draw, first_draw, first_epoch
        self._shuffled = (-1, [])
        if (length, known) == (len(self._rows), self._fingerprint):
            self._shuffled_by = (int(seed), str(task))
            return
        self._first_epoch += (draw - first_draw) // max(length, 1) + 1
        self._first_draw = draw
        logger.warning(
            "data set of task %r changed since the checkpoint (%d rows then, %d now): a new epoch starts",
            *(self._task, length, len(self._rows)),
        )
