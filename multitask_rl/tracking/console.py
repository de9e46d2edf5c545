"""Console tracker: one line per task and one for the run; on a terminal a live table."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from multitask_rl.boundary.printable import printable
from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Event
from multitask_rl.tracking.base import Tracker

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_TASK_COLUMNS: Mapping[str, Sequence[str]] = {
    "reward": ("reward_mean",),
    "weight": ("weight",),
    "share req/sampled/trained": ("share_requested", "share_sampled", "share_trained"),
    "informative": ("informative_rate",),
    "rejected": ("rejection_rate",),
    "kl": ("kl",),
    "samples/s": ("samples_per_s",),
    "tokens/s": ("tokens_per_s",),
    "rewards/s": ("rewards_per_s",),
    "held-out": ("eval",),
}
"""Title -> the metrics ``task/<name>/<metric>`` that fill the column, joined by ``/``."""
_GLOBAL_COLUMNS: Mapping[str, Sequence[str]] = {
    "macro reward": ("macro/reward_mean",),
    "worst reward": ("worst/reward_mean",),
    "loss": ("train/loss",),
    "grad norm": ("train/grad_norm",),
    "samples/s": ("time/samples_per_s",),
    "rewards/s": ("time/rewards_per_s",),
    "tokens/s": ("time/tokens_per_s",),
    "updates/s": ("time/updates_per_s",),
    "step s": ("time/step_s",),
    "macro held-out": ("macro/eval",),
    "worst held-out": ("worst/eval",),
}


def _cells(columns: Mapping[str, Sequence[str]], metrics: Mapping[str, float]) -> dict[str, str]:
    """Return title -> text of the columns that have at least one number."""

    def text(value: float) -> str:
        if math.isnan(value):
            return "-"
        small = f"{value:.3g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
        return f"{value:.0f}" if abs(value) >= 100 else small

    shown = {title: names for title, names in columns.items() if not metrics.keys().isdisjoint(names)}
    return {t: "/".join(text(metrics.get(name, math.nan)) for name in names) for t, names in shown.items()}


class ConsoleTracker(Tracker):
    """Prints a run, in lines or as a live table, to standard output or to ``stream``."""

    def __init__(
        self, output_dir: Path, config: TrackingConfig, run_id: str | None, *, stream: TextIO | None = None
    ) -> None:
        self._stream = stream
        self._output_dir = output_dir
        self._num_steps: int | None = None
        self._live: Live | None = None
        self._shown_run: dict[str, str] = {}
        self._shown_tasks: dict[str, dict[str, str]] = {}

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Print where the run writes; on a terminal, open the live table."""
        max_steps = parameters.get("max_steps")
        self._num_steps = max_steps if isinstance(max_steps, int) else None
        resumed = "" if resume_step is None else f", resumed after step {resume_step}"
        self._write(f"output in {self._output_dir}{resumed}")
        stream = self._stream or sys.stdout
        if stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=stream), auto_refresh=False, vertical_overflow="visible")
            self._live.start()

    def _write(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(printable(line), markup=False, highlight=False)
        else:
            print(printable(line), file=self._stream or sys.stdout, flush=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the step: a line for the run, one per task."""
        by_task: dict[str, dict[str, float]] = {}
        for key, value in metrics.items():
            area, *rest = key.split("/", 2)
            if area == "task" and len(rest) == 2:
                by_task.setdefault(rest[0], {})[rest[1]] = value
        tasks = {name: _cells(_TASK_COLUMNS, values) for name, values in by_task.items()}
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
        width = max(map(len, tasks), default=0)
        rows = [(title, run), *((f"  {n:<{width}}", cells) for n, cells in tasks.items() if cells)]
        for head, cells in rows:
            self._write("  ".join([head, *(f"{name} {text}" for name, text in cells.items())]))

    def log_event(self, event: Event) -> None:
        """Write one line, above the live table."""
        task = f" [{event.task}]" if event.task else ""
        self._write(f"step {event.step}  {event.source} {event.kind}{task}: {event.reason}")

    def finish(self, status: str) -> None:
        """Close the table, whose last state stays, and print how the run ended."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._write(f"run {status}")


def _table(title: str, run: Mapping[str, str], tasks: Mapping[str, Mapping[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    present = [title for title in _TASK_COLUMNS if any(title in row for row in tasks.values())]
    table = Table(title=title, caption="  ".join(f"{name} {text}" for name, text in run.items()))
    table.add_column("task")
    for head in present:
        table.add_column(head, justify="right")
    for name, row in tasks.items():
        table.add_row(Text(name), *(row.get(head, "-") for head in present))
    return table
