"""What the examples print and write of a run: tables before and after, scheduler weights, guard events."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from multitask_rl.config.run import RunConfig
from multitask_rl.records import Direction, Event, TaskEvaluation
from multitask_rl.statistics.intervals import Difference, compare_means, holm
from multitask_rl.trainer import Trainer

__all__ = [
    "Evaluations",
    "Trained",
    "print_next_steps",
    "print_prepared",
    "print_run",
    "print_table",
    "summarise",
]

Evaluations = Mapping[str, TaskEvaluation]
"""By task."""
NUM_WEIGHT_ROWS = 8


class Trained(NamedTuple):
    """What is told of a run after it; unlike the trainer it holds no weights."""

    config: RunConfig
    tasks: Sequence[str]
    """The trained ones."""
    step: int
    history: Sequence[tuple[int, Evaluations]]
    events: Sequence[Event]

    @classmethod
    def by(cls, trainer: Trainer) -> Trained:
        """Return what ``trainer`` did."""
        return cls(trainer.config, trainer.plan.trained, trainer.step, trainer.history, trainer.events)


def effort(text: str) -> float:
    """Return the value of ``--effort``, in [0.05, 1]."""
    value = float(text)
    if not 0.05 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in [0.05, 1]")
    return value


def summarise(run: Trained, before: Evaluations, after: Evaluations, **further: Any) -> dict[str, Any]:
    """Return the content of ``summary.json``; ``further`` are values of its own keys."""
    return {
        "tasks": {
            name: {
                "before": _figures(before[name]),
                "after": _figures(after[name]),
                "difference": [change.delta, change.low, change.high],
                "verdict": verdict,
            }
            for name, (change, verdict) in _changes(before, after).items()
        },
        **further,
        "guard_events": [asdict(event) for event in _guard_events(run)],
    }


def _changes(before: Evaluations, after: Evaluations) -> dict[str, tuple[Difference, str]]:
    """Return per task the paired difference of its primary metric, and the verdict corrected by Holm."""
    found = {n: compare_means(before[n].values, own.values, paired=True) for n, own in after.items()}
    corrected = holm([change.p_value for change in found.values()])
    return {
        name: (change, change.verdict(after[name].primary.direction is not Direction.lower, p_value))
        for (name, change), p_value in zip(found.items(), corrected, strict=True)
    }


def _figures(evaluation: TaskEvaluation) -> dict[str, float]:
    low, high = evaluation.primary.interval
    return {"mean": evaluation.primary.mean, "low": low, "high": high, "n": evaluation.primary.n}


def _guard_events(run: Trained) -> list[Event]:
    return [event for event in run.events if event.source == "guard"]


def print_prepared(directory: Path, figures: Mapping[str, Mapping[str, Any]], seconds: float) -> None:
    """Print what was prepared and measured meanwhile, by model."""
    print(f"prepared in {seconds:.0f} s: {directory}")
    for name, own in figures.items():
        shown = ", ".join(
            f"{key.replace('_', ' ')} {value:{'.0f' if key == 'seconds' else '.3g'}}"
            if isinstance(value, float)
            else f"{key} {value}"
            for key, value in own.items()
        )
        print(f"  {name.replace('_', ' ')}: {shown}")


def print_table(title: str, before: Evaluations, after: Evaluations) -> None:
    """Print per task the primary metric and further ones, before and after, with their paired difference.

    A verdict is corrected for the number of tasks (Holm).
    """
    print(f"\n{title} (mean [95 % interval], paired difference, verdict corrected for {len(after)} tasks)")
    width, changes = max(map(len, after)), _changes(before, after)
    for name, evaluation in after.items():
        first = before[name]
        change, verdict = changes[name]
        print(
            f"  {name:<{width}}  {evaluation.metric:<20} {_interval(first)} -> {_interval(evaluation)}"
            f"  n {evaluation.primary.n}  {change.delta:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
            f" {verdict}"
        )
        for metric in _secondary(evaluation):
            print(
                f"  {'':<{width}}  {metric:<20} {first.metrics[metric].mean:.3f} -> "
                f"{evaluation.metrics[metric].mean:.3f}"
            )


def _interval(evaluation: TaskEvaluation) -> str:
    figures = _figures(evaluation)
    return f"{figures['mean']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]"


def _secondary(evaluation: TaskEvaluation) -> list[str]:
    """Names of the further held-out means worth a line: other rewards, violations."""
    return [
        name
        for name in evaluation.metrics
        if name.endswith("violation_rate")
        or (name.startswith("reward/") and name != f"reward/{evaluation.metric}")
    ]


def print_run(run: Trained) -> None:
    """Print the scheduler's weights at a few steps of the run, and the guard's events."""
    _print_weights(Path(run.config.output_dir) / "metrics.jsonl", run.tasks)
    events = _guard_events(run)
    print(f"\nguard events: {len(events) or 'none'}")
    for event in events:
        print(f"  step {event.step} {event.kind} {event.task}: {event.reason}")


def _print_weights(metrics_file: Path, tasks: Sequence[str]) -> None:
    rows = []
    for line in metrics_file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        numbers = record.get("metrics", record)
        if f"task/{tasks[0]}/weight" in numbers:
            rows.append((record["step"], [numbers[f"task/{name}/weight"] for name in tasks]))
    chosen = sorted({round(i * (len(rows) - 1) / (NUM_WEIGHT_ROWS - 1)) for i in range(NUM_WEIGHT_ROWS)})
    print("\nweights of the scheduler\n  step  " + "  ".join(f"{name:>12}" for name in tasks))
    for i in chosen if rows else ():
        step, weights = rows[i]
        print(f"  {step:>4}  " + "  ".join(f"{weight:>12.3f}" for weight in weights))


def print_next_steps(directory: Path, run: Trained, summary: Path) -> None:
    """Print where the results are, and the commands that show them."""
    python = Path(sys.executable)
    print(f"\nsummary: {summary}\nrun: {run.config.output_dir}")
    store = run.config.tracking.uri or f"sqlite:///{Path(run.config.output_dir).parent / 'mlflow.db'}"
    print(f"MLflow: {python.with_name('mlflow')} ui --backend-store-uri {store}")
    page = f"--html {directory / 'report.html'} --open"
    print(f"report: {python.with_name('multitask-rl')} report {directory / 'run'} {page}")
