"""What tracking takes of a run: its share of steps of one second, and the disk that MLflow's database takes.

    python benchmarks/tracking_cost.py --tasks 4 --steps 1000 [--json FILE]    # 20 minutes, most of it asleep

A made-up run tells its trackers what a run tells them: in each step 40 metrics a task and 55 of the run with
the numbers of the machine, the progress of its 64 responses, 8 stored responses of 256 tokens a task; an
evaluation of 64 prompts and an event every 10 steps. For the rest of the second the process sleeps, so all
processor time is that of tracking, its threads included. Figures are shares of that second:

- ``records``: with ``jsonl`` alone; ``with_mlflow``: with MLflow (a SQLite file) as well; ``in_the_run`` is
  the part of it in the run's own thread;
- ``live_view``: the live view on a terminal of 120 columns.

MLflow gets all points of the first 50 steps, then fewer and fewer: ``with_mlflow`` is the mean of a run of
``--steps`` steps, ``with_mlflow_at_first`` that of its first 60. Other programs on the machine make all
figures larger, as they empty the caches of the processor. Exit code 1 if the mean is more than 2 %, or the
live view takes more than 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import pty
import random
import struct
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from multitask_rl.config.run import TrackingConfig
from multitask_rl.records import Direction, Event, Score, Scored, Statistic, TaskEvaluation, TokenRecord
from multitask_rl.run.profiling import SystemUse
from multitask_rl.testing import make_rollout
from multitask_rl.tracking.base import Tracker, Trackers
from multitask_rl.tracking.console import ConsoleTracker
from multitask_rl.tracking.mlflow import MLflowTracker

MOST_TRACKING, MOST_VIEW = 0.02, 0.01
STEP_S, AT_FIRST = 1.0, 60
RESPONSES, STORED, TOKENS = 64, 8, 256
OF_A_TASK = ["reward_mean", "weight", "rejection_rate", "failure_rate"]
OF_A_TASK += [f"metric_{i:02d}" for i in range(36)]
OF_THE_RUN = [f"time/{stage}_s" for stage in ("step", "rollout", "rewards", "update")]
OF_THE_RUN += ["train/loss", "macro/reward_mean", "macro/kl", *(f"train/metric_{i:02d}" for i in range(44))]
COMMAND = "python benchmarks/tracking_cost.py --tasks {0.tasks} --steps {0.steps} --size-steps {0.size_steps}"


def main() -> int:
    """Print the figures; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size-steps", type=int, default=1000, help="of the run whose database is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tasks = [f"task_{index}" for index in range(options.tasks)]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for figure, names, steps in (
            ("records", ["jsonl"], AT_FIRST),
            ("with_mlflow_at_first", ["jsonl", "mlflow"], AT_FIRST),
            ("with_mlflow", ["jsonl", "mlflow"], options.steps),
        ):
            trackers = Trackers(directory / figure, TrackingConfig(trackers=names), None)
            figures[figure], figures["in_the_run"] = follow(trackers, tasks, steps)
        with terminal() as stream:
            view = ConsoleTracker(directory, TrackingConfig(), None, stream=stream)
            figures["live_view"], _ = follow(view, tasks, AT_FIRST)
        size = database_size(directory / "size" / "run", tasks, options.size_steps)
    shares = {name: round(share, 4) for name, share in figures.items()}
    metrics = len(OF_A_TASK) * len(tasks) + len(OF_THE_RUN)
    document = {
        "command": COMMAND.format(options),
        "figures": {**shares, "metrics": metrics, "mlflow_mb": round(size / 1e6, 1)},
    }
    print(json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(figures["with_mlflow"] > MOST_TRACKING or figures["live_view"] > MOST_VIEW)


def follow(tracker: Tracker | Trackers, tasks: Sequence[str], steps: int) -> tuple[float, float]:
    """Return the share of the steps' time that goes to ``tracker``, and the part of it in this thread."""
    machine, stored = SystemUse(), stored_responses(tasks)
    tracker.start({"max_steps": steps, "tasks": {task: {"type": "grpo"} for task in tasks}})
    tracker.log_metrics(metrics_of(tasks), 0)
    time.sleep(STEP_S)  # what a first call imports
    own, began = 0.0, time.process_time()
    for step in range(1, steps + 1):
        metrics, ends = metrics_of(tasks), time.perf_counter() + STEP_S
        step_began = time.thread_time()
        for done in range(RESPONSES + 1):
            tracker.log_progress("sampling", done, RESPONSES)
        tracker.log_metrics({**metrics, **machine.numbers()}, step)
        tracker.log_rollouts(stored, step)
        if step % 10 == 0:
            tracker.log_evaluation({task: evaluation(task, step) for task in tasks}, step)
            tracker.log_event(Event(step=step, source="scheduler", kind="weights", reason="levels moved"))
        own += time.thread_time() - step_began
        time.sleep(max(0.0, ends - time.perf_counter()))
    tracker.finish("finished")
    return (time.process_time() - began) / (steps * STEP_S), own / (steps * STEP_S)


def metrics_of(tasks: Sequence[str]) -> dict[str, float]:
    """Return the metrics of a step."""
    names = [f"task/{task}/{name}" for task in tasks for name in OF_A_TASK] + OF_THE_RUN
    return {name: random.random() for name in names}


def stored_responses(tasks: Sequence[str]) -> list[Scored]:
    """Return what a run stores of a step."""
    words = [f" word{index}" for index in range(TOKENS)]
    tokens = TokenRecord(texts=words, logprobs=[-0.123] * TOKENS, advantages=[0.456] * TOKENS)
    return [
        Scored(
            rollout=make_rollout("".join(words)[:TOKENS], task=task, draw=index),
            reward=random.random(),
            breakdown={"exact": Score(value=random.random())},
            tokens=tokens,
        )
        for task in tasks
        for index in range(STORED)
    ]


def evaluation(task: str, step: int) -> TaskEvaluation:
    """Return a held-out evaluation of 64 prompts."""
    values = [random.random() for _ in range(64)]
    primary = Statistic(mean=0.5, n=64, error=0.04, values=values, direction=Direction.higher)
    return TaskEvaluation(task=task, metric="reward", primary=primary, step=step, policy_version=step)


@contextlib.contextmanager
def terminal() -> Iterator[TextIO]:
    """Give a stream to a terminal of 120 columns that something reads."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    os.environ["TERM"] = "xterm-256color"

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while os.read(ours, 65536):
                pass

    threading.Thread(target=read, daemon=True).start()
    with os.fdopen(theirs, "w") as stream:
        yield stream


def database_size(run: Path, tasks: Sequence[str], steps: int) -> int:
    """Return the bytes of MLflow's database after ``steps`` steps."""
    tracker = MLflowTracker(run, TrackingConfig(), None)
    tracker.start({})
    for step in range(1, steps + 1):
        tracker.log_metrics(metrics_of(tasks), step)
        time.sleep(0.05)  # so that all are written
    tracker.finish("finished")
    return (run.parent / "mlflow.db").stat().st_size


if __name__ == "__main__":
    sys.exit(main())
