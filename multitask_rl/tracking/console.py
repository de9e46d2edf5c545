"""Console tracker: on a terminal and in a notebook a live view, elsewhere a line per step.

``tracking.console`` chooses.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import os
import re
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group
from rich.constrain import Constrain
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from multitask_rl.boundary.printable import aligned, printable, shown_path
from multitask_rl.config.run import RECORD, TrackingConfig
from multitask_rl.records import Event, TaskEvaluation
from multitask_rl.tracking.base import ALARM_KINDS, Tracker
from multitask_rl.tracking.jsonl import dump_line

_COLUMNS: Mapping[str, str] = {
    "reward": "reward_mean",
    "share": "weight",
    "rejected": "rejection_rate",
    "failing": "failure_rate",
    "kl": "kl",
}
"""Title -> the metric ``task/<name>/<metric>`` of the column."""
_RATES: Mapping[str, str] = {
    "samples/s": "samples_per_s",
    "tokens/s": "tokens_per_s",
    "rewards/s": "rewards_per_s",
}
"""Further columns where there is no terminal, which may be narrow."""
_SHARES = ("share", "rejected", "failing")
_STAGES = {"rollout": "sampling", "constraints": "constraints", "rewards": "rewards", "update": "learning"}
_BARS = "▁▂▃▄▅▆▇█"
_MOST_IN_A_LINE = 6
"""Tasks whose levels one line shows."""
_TABLE_EVERY = 10
"""Steps from one table of the tasks to the next, where there is no terminal."""
_PROGRESS_EVERY_S = 30.0
"""Between two lines on work that takes long, where there is no terminal."""
_REFRESH_S = 1.0
"""Between two drawings of the view, or more: see ``_MOST_DRAWING``."""
_MOST_DRAWING = 0.005
"""Largest share of a processor that drawing takes: on a slow one the view is drawn less often."""
_CELL = (
    "<pre style=\"font-family: Menlo, Consolas, 'DejaVu Sans Mono', monospace; line-height: 1.2; "
    'white-space: pre; overflow-x: auto">{code}</pre>'
)


class ConsoleTracker(Tracker):
    """Prints a run, in lines or as a live table, to standard output or to ``stream``."""

    def __init__(
        self, output_dir: Path, config: TrackingConfig, run_id: str | None, *, stream: TextIO | None = None
    ) -> None:
        self._stream = stream
        self._output_dir = output_dir
        self._shown = shown_path(output_dir)
        """``output_dir`` for messages, as of the working directory in which the run began."""
        self._mode = config.console
        self._live: Live | None = None
        self._drawer: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._cell: _NotebookCell | None = None
        self._handlers: dict[Any, Any] = {}
        """Handlers of the log -> their stream before the live view."""
        self._num_steps: int | None = None
        self._tasks: dict[str, _TaskView] = {}
        self._numbers: dict[str, float] = {}
        self._has_guard_stopped = False
        self._needs_script = False
        """A task has rows that the script gave as objects: no command can find them."""
        self._decisions: dict[str, str] = {}
        """Source of events -> its newest decision."""
        self._warnings: deque[str] = deque(maxlen=2)
        self._work = ""
        """What takes time now, with how much of it is done."""
        self._stopping = ""
        self._told_at = self._began = time.monotonic()
        self._step = 0
        self._first_step: int | None = None
        """Steps done when the first step of this process began."""

    def start(self, parameters: Mapping[str, Any], resume_step: int | None = None) -> None:
        """Print where the run writes; on a terminal, open the live view."""
        max_steps = parameters.get("max_steps")
        self._num_steps = max_steps if isinstance(max_steps, int) else None
        self._step = resume_step or 0
        self._needs_script = any(not task.get("dataset") for task in parameters.get("tasks", {}).values())
        resumed = f", resumed after step {resume_step}" if resume_step else ""
        self._tell(f"output in {self._shown}{resumed}")
        stream = self._stream or sys.stdout
        console = Console(file=stream)
        if self._mode == "auto" and console.is_jupyter:
            self._cell = _NotebookCell()
        elif self._mode == "auto" and stream.isatty():
            self._live = Live(
                console=console,
                # narrower by the ^C of a terminal, which would begin a line that the next drawing is off by
                get_renderable=lambda: Constrain(self._view(), console.width - 3),
                auto_refresh=False,
                transient=False,
            )
            self._live.start()
            self._is_closed.clear()
            self._drawer = threading.Thread(target=self._keep_drawing, args=[self._live], daemon=True)
            self._drawer.start()
            # the log's handlers hold the streams that the live view has replaced, and would write into it
            for handler in logging.getLogger().handlers:
                if type(handler) is logging.StreamHandler and not handler.stream.closed:
                    self._handlers[handler] = handler.setStream(sys.stderr)

    def log_progress(self, what: str, done: int, total: int) -> None:
        """Show how much of something long is done; without a terminal in a line twice a minute."""
        self._work = "" if done >= total else f"{what}: {done:,} of {total:,} responses"
        now = time.monotonic()
        if done == 0:
            self._told_at = now
        elif self._work and not self._has_view and now - self._told_at >= _PROGRESS_EVERY_S:
            self._told_at = now
            self._tell(f"  {self._work}")
        self._draw()

    def log_stopping(self, text: str) -> bool:
        """Show the text in the live view, which would draw over what is written below it."""
        self._stopping = text
        return self._live is not None

    def log_evaluation(self, evaluations: Mapping[str, TaskEvaluation], step: int) -> None:
        """Show the held-out value of each task, with half the width of its 95 % interval."""
        self._work = ""
        for name, evaluation in evaluations.items():
            view = self._tasks.setdefault(name, _TaskView())
            view.held_out.append(evaluation.primary.mean)
            view.half_width = 1.96 * evaluation.primary.error
        if self._mode == "json":
            held_out = {n: [e.primary.mean, e.primary.error, e.primary.n] for n, e in evaluations.items()}
            self._write_json(step, {"held_out": held_out})
        elif not self._has_view:
            self._tell(f"{self._title(step)}  held out: {_levels(self._tasks)}")
        self._draw()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Show a step: a line, and now and then the tasks."""
        is_step = (
            "time/step_s" in metrics or "macro/reward_mean" in metrics
        )  # not an evaluation, nor the guard
        self._numbers.update(metrics)
        if is_step:  # a task without samples has no rates
            for view in self._tasks.values():
                view.numbers = {k: v for k, v in view.numbers.items() if k not in _RATES.values()}
        for key, value in metrics.items():
            area, *rest = key.split("/", 2)
            if area == "task" and len(rest) == 2:
                self._tasks.setdefault(rest[0], _TaskView()).numbers[rest[1]] = value
        if self._mode == "json":
            self._write_json(step, {"metrics": dict(metrics)})
        if not is_step:
            return
        self._work = ""
        if self._first_step is None:
            self._first_step, self._began = step - 1, time.monotonic() - metrics.get("time/step_s", 0.0)
        self._step = step
        self._draw()
        if self._has_view or self._mode == "json":
            return
        if failing := _failing(self._tasks):
            self._tell(f"{self._title(step)}  {failing}", is_alarm=True)
        reward = metrics.get("macro/reward_mean", math.nan)
        parts = [self._title(step), f"reward {_number(reward)}"]
        shown = {"loss": "train/loss", "kl": "macro/kl"}
        parts += [f"{name} {_number(metrics[key])}" for name, key in shown.items() if key in metrics]
        if "time/step_s" in metrics:
            parts += [f"{_number(metrics['time/step_s'])} s ({_stages(metrics)})", *_rates(metrics)]
        self._tell("  ".join([*parts, *filter(None, [self._left()])]))
        if step % _TABLE_EVERY == 0 or step == self._first_step + 1:
            for line in _rows(self._tasks):
                self._tell(f"  {line}")

    def log_event(self, event: Event) -> None:
        """Write one line; on a terminal above the view, in a notebook only if something is wrong."""
        task = f" [{event.task}]" if event.task else ""
        line = f"step {event.step}  {event.source} {event.kind}{task}: {event.reason}"
        is_alarm = event.kind in ALARM_KINDS
        self._has_guard_stopped |= (event.source, event.kind) == ("guard", "stop")
        if is_alarm:
            self._warnings.append(line)
        else:
            self._decisions[event.source] = f"{event.kind}{task}: {event.reason} (step {event.step})"
        if self._mode == "json":
            told = {"source": event.source, "kind": event.kind, "task": event.task, "reason": event.reason}
            self._write_json(event.step, {"event": told})
        elif event.kind == "failed" and event.source == "run":
            pass  # the error itself follows
        elif is_alarm or self._cell is None:  # below a cell the view alone shows other decisions
            self._tell(line, is_alarm=is_alarm)
        self._draw()

    def finish(self, status: str) -> None:
        """Close the view, whose last state stays; print how the run ended and what may follow."""
        self._work, self._stopping = status, ""
        self._draw(at_once=True)
        if self._live is not None and self._drawer is not None:
            self._is_closed.set()
            self._drawer.join()
            self._live.stop()
            self._live = None
            for handler, former in self._handlers.items():
                handler.setStream(former)
        run, page = map(shlex.quote, (self._shown, os.path.join(self._shown, "report.html")))
        follows = f"multitask-rl report {run} --html {page} --open"
        # after a stop by the guard the same command would stop again; the guard's error names good weights
        if status != "finished" and not self._has_guard_stopped:
            has_any = any((self._output_dir / "checkpoints").glob("step_*"))
            where = (
                "goes on from the newest checkpoint" if has_any else "begins anew: no checkpoint was saved"
            )
            setting = f"output_dir={self._shown}"
            if not re.fullmatch(r"[\w./+-]*", self._shown):  # quoted for Hydra, too
                setting = shlex.quote(f'output_dir="{self._shown}"')
            start = f"{'the same script with' if self._needs_script else 'multitask-rl train'} {setting}"
            if not self._needs_script and not (self._output_dir / RECORD).is_file():
                start = "the same command"  # the run ended before it wrote its configuration
            follows = f"{start} {where}"
        if self._mode == "json":
            self._write_json(self._step, {"status": status})
        else:
            self._tell(f"run {status}; next: {follows}", is_alarm=True)

    @property
    def _has_view(self) -> bool:
        return self._live is not None or self._cell is not None

    def _keep_drawing(self, live: Live) -> None:
        """Draw about once a second, more rarely where that takes more than ``_MOST_DRAWING`` of the time."""
        pause_s = _REFRESH_S
        while not self._is_closed.wait(pause_s):
            began = time.thread_time()
            live.refresh()
            pause_s = max(_REFRESH_S, (time.thread_time() - began) / _MOST_DRAWING)

    def _draw(self, *, at_once: bool = False) -> None:
        """Draw the view of a notebook anew; that of a terminal draws itself."""
        if self._cell is not None:
            self._cell.show(self._view, at_once=at_once)

    def _tell(self, line: str, *, is_alarm: bool = False) -> None:
        if self._mode == "json" or (self._mode == "quiet" and not is_alarm):
            return
        if self._live is not None:
            self._live.console.print(printable(line), markup=False, highlight=False)
        else:
            print(printable(line), file=self._stream or sys.stdout, flush=True)

    def _write_json(self, step: int, data: Mapping[str, Any]) -> None:
        print(dump_line({"step": step, **data}), end="", file=self._stream or sys.stdout, flush=True)

    def _title(self, step: int) -> str:
        return f"step {step}" + (f"/{self._num_steps}" if self._num_steps else "")

    def _left(self) -> str:
        """Return the time that the rest takes at the pace so far, evaluations included."""
        if self._first_step is None or not self._num_steps or self._step <= self._first_step:
            return ""
        pace = (time.monotonic() - self._began) / (self._step - self._first_step)
        return f"{_duration(pace * max(0, self._num_steps - self._step))} left"

    def _view(self) -> Group:
        """Return the live view; it is drawn about once a second."""
        gone = _duration(time.monotonic() - self._began)
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(
            total=self._num_steps or 1, completed=min(self._step, self._num_steps or 1), width=24
        )
        head.add_row(self._title(self._step), bar, f"{gone} gone", self._left())
        work = self._stopping or self._work or "learning"
        lines: list[Any] = [head, Text(printable(work), style="bold yellow" if self._stopping else "dim")]
        if self._tasks:
            table = Table(box=None, padding=(0, 1), pad_edge=False)
            table.add_column("task", no_wrap=True, overflow="ellipsis", max_width=22)
            titles, rows = _cells(self._tasks)
            for title in titles:
                table.add_column(title, justify="left" if title == "trend" else "right", no_wrap=True)
            for name, cells in rows.items():
                is_failing = self._tasks[name].numbers.get("failure_rate", 0.0) > 0.5
                table.add_row(Text(printable(name)), *cells, style="red" if is_failing else "")
            lines.append(table)
        if "time/step_s" in self._numbers:
            speed = self._numbers.get("time/tokens_per_s", math.nan)
            step_s = self._numbers["time/step_s"]
            loss = _number(self._numbers.get("train/loss", math.nan))
            text = f"a step {_number(step_s)} s: {_stages(self._numbers)}"
            rates = ", ".join([f"{_number(speed)} tokens/s", *_rates(self._numbers)])
            lines.append(Text(f"{text}; {rates}; loss {loss}", style="dim"))
        for source, text in self._decisions.items():
            lines.append(Text(printable(f"{source}: {text}"), no_wrap=True, overflow="ellipsis"))
        for text in self._warnings:
            lines.append(Text(printable(text), style="yellow", no_wrap=True, overflow="ellipsis"))
        return Group(*lines)


class ProgressTracker(Tracker):
    """Tells on standard error, or on ``stream``, how far an evaluation is that records nothing.

    On a terminal one line that changes, elsewhere a line twice a minute.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._told_at = -math.inf

    def log_progress(self, what: str, done: int, total: int) -> None:
        """Show how many responses have ended."""
        stream, now = self._stream or sys.stderr, time.monotonic()
        is_terminal = stream.isatty()
        if done == 0:
            self._told_at = now
        text = f"  {what}: {done:,} of {total:,} responses"
        if is_terminal and done >= total:
            stream.write("\r\x1b[K")
        elif now - self._told_at >= (_REFRESH_S if is_terminal else _PROGRESS_EVERY_S):
            self._told_at = now
            stream.write(f"\r{text}\x1b[K" if is_terminal else f"{text}\n")
        stream.flush()


class _NotebookCell:
    """The view below a cell of a notebook, which every drawing replaces; it needs no widgets."""

    def __init__(self) -> None:
        self._display = importlib.import_module("IPython.display")
        self._handle: Any = None
        self._drawn_at = -math.inf

    def show(self, view: Callable[[], Group], *, at_once: bool) -> None:
        """Draw the view, unless it was drawn less than ``_REFRESH_S`` ago."""
        if not at_once and time.monotonic() - self._drawn_at < _REFRESH_S:
            return
        self._drawn_at = time.monotonic()
        page = Console(
            file=io.StringIO(), record=True, width=120, force_jupyter=False, color_system="truecolor"
        )
        page.print(view())
        html = self._display.HTML(page.export_html(inline_styles=True, code_format=_CELL))
        if self._handle is None:
            self._handle = self._display.display(html, display_id=True)
        else:
            self._handle.update(html)


@dataclass(slots=True)
class _TaskView:
    """What the console knows of a task."""

    numbers: dict[str, float] = field(default_factory=dict)
    held_out: deque[float] = field(default_factory=lambda: deque(maxlen=8))
    half_width: float = math.nan


def _cells(
    tasks: Mapping[str, _TaskView], metrics: Mapping[str, str] = _COLUMNS
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the titles, and name -> a text per title; a column that no task has is left out."""
    columns: dict[str, list[str]] = {}
    if any(view.held_out for view in tasks.values()):
        columns["held-out"] = [_level(view) for view in tasks.values()]
    if any(len(view.held_out) > 1 for view in tasks.values()):
        columns["trend"] = [_sparkline(view.held_out) for view in tasks.values()]
    for title, metric in metrics.items():
        values = [view.numbers.get(metric, math.nan) for view in tasks.values()]
        if any(value for value in values if not math.isnan(value)) or title in ("reward", "share"):
            texts = [f"{v:.0%}" if title in _SHARES and math.isfinite(v) else _number(v) for v in values]
            columns[title] = texts
    return list(columns), {name: [c[i] for c in columns.values()] for i, name in enumerate(tasks)}


def _rows(tasks: Mapping[str, _TaskView]) -> list[str]:
    titles, rows = _cells(tasks, {**_COLUMNS, **_RATES})
    return aligned([["task", *titles], *([name, *row] for name, row in rows.items())]) if rows else []


def _rates(metrics: Mapping[str, float]) -> list[str]:
    """Return samples and updates per second, where known."""
    keys = {"samples/s": "time/samples_per_s", "updates/s": "time/updates_per_s"}
    return [f"{_number(metrics[key])} {title}" for title, key in keys.items() if key in metrics]


def _level(view: _TaskView) -> str:
    if not view.held_out:
        return "-"
    return f"{_number(view.held_out[-1])} ±{_number(view.half_width)}"


def _levels(tasks: Mapping[str, _TaskView]) -> str:
    """Return the level of each task; of many tasks the mean and the ends, in their own units."""
    known = {name: view for name, view in tasks.items() if view.held_out}
    if len(known) <= _MOST_IN_A_LINE:
        return ", ".join(f"{name} {_level(view)}" for name, view in known.items())
    order = sorted(known, key=lambda name: known[name].held_out[-1])
    mean = math.fsum(view.held_out[-1] for view in known.values()) / len(known)
    ends = "; ".join(
        f"{what} {', '.join(f'{n} {_level(known[n])}' for n in names)}"
        for what, names in (("lowest", order[:2]), ("highest", order[-2:]))
    )
    return f"mean of {len(known)} tasks {_number(mean)}; {ends}"


def _sparkline(values: Iterable[float]) -> str:
    """Return a bar per value, from the lowest to the highest; equal values are all low."""
    found = [value for value in values if math.isfinite(value)]
    low, span = min(found, default=0.0), max(found, default=0.0) - min(found, default=0.0)
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1)) if span else 0] for v in found)


def _stages(metrics: Mapping[str, float]) -> str:
    """Return the shares of the step in which it waited for a stage or learned, largest first.

    So what runs beside another stage (rewards during sampling, all of it in an overlapped run) counts once.
    """
    spent = {n: metrics.get(f"waits_for/{key}", 0.0) for key, n in _STAGES.items() if key != "update"}
    spent[_STAGES["update"]] = metrics.get("utilisation/update", 0.0)
    shown = sorted(((share, name) for name, share in spent.items() if share >= 0.01), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shown)


def _failing(tasks: Mapping[str, _TaskView]) -> str:
    """Return the tasks of which more than half cannot be scored."""
    found = {n: v.numbers.get("failure_rate", 0.0) for n, v in tasks.items()}
    failing = [f"{name} {rate:.0%}" for name, rate in found.items() if rate > 0.5]
    return f"warning: responses without a reward: {', '.join(failing)}" if failing else ""


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    if value == 0 or 1e-3 <= abs(value) < 100:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1e}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
