"""Console tracker: one line per task and one for the run, live on a terminal, plain in a log.

It shows the metrics that the run logs (names in ``tracking.base``) and omits missing ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from multitask_rl.boundary.printable import printable
from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Event, Scored

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

__all__ = ["ConsoleTracker"]


class _Column(NamedTuple):
    """A column: its title and the metrics that fill it, joined by ``/``."""

    title: str
    metrics: tuple[str, ...]


_TASK_COLUMNS = (
    _Column("reward", ("reward_mean",)),
    _Column("weight", ("weight",)),
    _Column("share req/sampled/trained", ("share_requested", "share_sampled", "share_trained")),
    _Column("informative", ("informative_rate",)),
    _Column("rejected", ("rejection_rate",)),
    _Column("samples/s", ("samples_per_s",)),
    _Column("held-out", ("eval",)),
)
_GLOBAL_COLUMNS = (
    _Column("macro reward", ("macro/reward_mean",)),
    _Column("worst reward", ("worst/reward_mean",)),
    _Column("loss", ("train/loss",)),
    _Column("grad norm", ("train/grad_norm",)),
    _Column("samples/s", ("time/samples_per_s",)),
    _Column("rewards/s", ("time/rewards_per_s",)),
    _Column("tokens/s", ("time/tokens_per_s",)),
    _Column("step s", ("time/step_s",)),
    _Column("macro held-out", ("macro/eval",)),
    _Column("worst held-out", ("worst/eval",)),
)


def _format(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1e}"


def _cells(columns: Sequence[_Column], metrics: Mapping[str, float]) -> dict[str, str]:
    """Return title -> text of the columns for which at least one number is there."""
    return {
        column.title: "/".join(_format(metrics.get(name)) for name in column.metrics)
        for column in columns
        if any(name in metrics for name in column.metrics)
    }


def _split_by_task(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return task -> metric -> value; the task's name is what stands between the first and second slash."""
    tasks: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        area, _, rest = key.partition("/")
        task, _, metric = rest.partition("/")
        if area == "task" and metric:
            tasks.setdefault(task, {})[metric] = value
    return tasks


class ConsoleTracker:
    """Writes to standard output, or to ``stream``."""

    def __init__(
        self, output_dir: Path, config: TrackingConfig, run_id: str | None, *, stream: TextIO | None = None
    ) -> None:
        self.run_id: str | None = None
        self._stream = stream
        self._output_dir = output_dir
        self._num_steps: int | None = None
        self._live: Live | None = None
        self._shown_run: dict[str, str] = {}
        self._shown_tasks: dict[str, dict[str, str]] = {}

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Say where the run writes and, on a terminal, open the live table."""
        max_steps = parameters.get("max_steps")
        self._num_steps = max_steps if isinstance(max_steps, int) else None
        self._write(
            f"output in {self._output_dir}"
            + ("" if resume_step is None else f", resumed after step {resume_step}")
        )
        stream = self._stream or sys.stdout
        if stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=stream), auto_refresh=False, vertical_overflow="visible")
            self._live.start()

    def _write(self, line: str) -> None:
        line = printable(line)
        if self._live is not None:
            self._live.console.print(line, markup=False, highlight=False)
            return
        stream = self._stream or sys.stdout
        stream.write(line + "\n")
        stream.flush()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the step: a line for the run, one per task."""
        tasks = {name: _cells(_TASK_COLUMNS, values) for name, values in _split_by_task(metrics).items()}
        run = _cells(_GLOBAL_COLUMNS, metrics)
        title = f"step {step}" + (f"/{self._num_steps}" if self._num_steps else "")
        if not run and not any(tasks.values()):
            return
        if self._live is not None:
            # an evaluation has other columns than a step: the table keeps the last of each
            self._shown_run.update(run)
            for name, cells in tasks.items():
                self._shown_tasks.setdefault(name, {}).update(cells)
            self._live.update(_table(title, self._shown_run, self._shown_tasks), refresh=True)
            return
        self._write("  ".join([title, *(f"{name} {text}" for name, text in run.items())]))
        width = max(map(len, tasks), default=0)
        for name, cells in tasks.items():
            if cells:
                self._write(
                    "  ".join([f"  {name:<{width}}", *(f"{head} {text}" for head, text in cells.items())])
                )

    def log_event(self, event: Event) -> None:
        """Write one line, above the live table."""
        task = f" [{event.task}]" if event.task else ""
        self._write(f"step {event.step}  {event.source} {event.kind}{task}: {event.reason}")

    def log_rollouts(self, scored: Sequence[Scored], step: int) -> None:
        """Show nothing."""

    def finish(self, status: str) -> None:
        """Leave the last table standing and say how the run ended."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._write(f"run {status}")


def _table(title: str, run: Mapping[str, str], tasks: Mapping[str, Mapping[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    present = [column.title for column in _TASK_COLUMNS if any(column.title in row for row in tasks.values())]
    table = Table(title=title, caption="  ".join(f"{name} {text}" for name, text in run.items()))
    table.add_column("task")
    for head in present:
        table.add_column(head, justify="right")
    for name, row in tasks.items():
        table.add_row(Text(name), *(row.get(head, "-") for head in present))
    return table
