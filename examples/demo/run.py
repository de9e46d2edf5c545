"""The demo (``make demo``): one tiny actor, four tasks, four algorithms, on the CPU.

Prepares models and data (``prepare.py``), trains with the settings of ``configs/experiment/demo.yaml``
through the same trainer as ``multitask-rl train``, and compares every task's held-out metric before and
after. Every number it prints and writes to ``summary.json`` was measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Before torch loads: threads beyond one slow a model of this size, and nothing may ask a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from prepare import Prepared, prepare

from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import GuardStop, MultitaskRLError
from multitask_rl.records import Direction, Event, TaskEvaluation
from multitask_rl.statistics.intervals import compare_means
from multitask_rl.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "experiment" / "demo.yaml"
NUM_WEIGHT_ROWS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code of the command line (0 done, 3 stopped by the guard)."""
    options = _parse(arguments)
    began = time.perf_counter()
    try:
        prepared = prepare(
            options.directory / "prepared", options.seed, options.directory / "cache", options.effort
        )
        _print_prepared(prepared, time.perf_counter() - began)
        trainer, exit_code = _train(_configuration(options, prepared))
    except MultitaskRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    summary = _summarise(trainer, options.seed, time.perf_counter() - began)
    _print_results(trainer, summary)
    target = options.directory / "summary.json"
    target.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    _print_next_steps(options.directory, trainer, target)
    return exit_code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="of data, rollouts and training (default 0)")
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/demo"), help="output (default runs/demo)"
    )
    parser.add_argument(
        "--max-steps", type=int, default=0, help="training steps (default: the configuration's)"
    )
    parser.add_argument(
        "--effort", type=_share, default=1.0, help="share of the preparation's training: quicker and worse"
    )
    return parser.parse_args(arguments)


def _share(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not in [0.05, 1]")
    return value


def _configuration(options: argparse.Namespace, prepared: Prepared) -> RunConfig:
    document, where = load_yaml(CONFIG)
    config: RunConfig = build_dataclass(RunConfig, document, where)
    directory = options.directory.resolve()
    return replace(
        config,
        tasks_file=str(prepared.tasks_file),
        model=replace(config.model, name_or_path=str(prepared.actor)),
        output_dir=str(directory / "run"),
        seed=options.seed,
        max_steps=options.max_steps or config.max_steps,
        tracking=replace(config.tracking, uri=f"sqlite:///{directory / 'mlflow.db'}"),
    )


def _train(config: RunConfig) -> tuple[Trainer, int]:
    """Train from the start; a stop by the guard is a result, not a crash."""
    shutil.rmtree(config.output_dir, ignore_errors=True)
    trainer = Trainer.from_config(config)
    print(trainer.plan.describe(), flush=True)
    try:
        trainer.train()
    except GuardStop as stop:
        print(f"stopped by the guard: {stop}", file=sys.stderr)
        return trainer, stop.exit_code
    return trainer, 0


def _summarise(trainer: Trainer, seed: int, wall_s: float) -> dict[str, Any]:
    first, last = trainer.history[0][1], trainer.history[-1][1]
    return {
        "tasks": {name: {"before": _figures(first[name]), "after": _figures(last[name])} for name in last},
        "wall_s": wall_s,
        "guard_events": [asdict(event) for event in _guard_events(trainer)],
        "seed": seed,
    }


def _figures(evaluation: TaskEvaluation) -> dict[str, float]:
    low, high = evaluation.primary.interval
    return {"mean": evaluation.primary.mean, "low": low, "high": high, "n": evaluation.primary.n}


def _guard_events(trainer: Trainer) -> list[Event]:
    return [event for event in trainer.events if event.source == "guard"]


def _print_prepared(prepared: Prepared, seconds: float) -> None:
    print(f"prepared in {seconds:.0f} s: {prepared.directory}")
    for name, figures in prepared.figures.items():
        shown = ", ".join(
            f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in figures.items()
        )
        print(f"  {name.replace('_', ' ')}: {shown}")


def _print_results(trainer: Trainer, summary: Mapping[str, Any]) -> None:
    first, last = trainer.history[0][1], trainer.history[-1][1]
    print(
        f"\nheld-out prompts, before and after {trainer.step} steps (mean [95 % interval], paired difference)"
    )
    width = max(map(len, last))
    for name, evaluation in last.items():
        before, after = summary["tasks"][name]["before"], summary["tasks"][name]["after"]
        change = compare_means(first[name].values, evaluation.values, paired=True)
        print(
            f"  {name:<{width}}  {evaluation.metric:<20} {_interval(before)} -> {_interval(after)}"
            f"  n {after['n']}  {change.delta:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
            f" {change.verdict(evaluation.primary.direction is not Direction.lower)}"
        )
        for metric in _secondary(evaluation):
            print(
                f"  {'':<{width}}  {metric:<20} {first[name].metrics[metric].mean:.3f} -> "
                f"{evaluation.metrics[metric].mean:.3f}"
            )
    _print_weights(Path(trainer.config.output_dir) / "metrics.jsonl", list(last))
    events = _guard_events(trainer)
    print(f"\nguard events: {len(events) or 'none'}")
    for event in events:
        print(f"  step {event.step} {event.kind} {event.task}: {event.reason}")


def _interval(figures: Mapping[str, float]) -> str:
    return f"{figures['mean']:.3f} [{figures['low']:.3f}, {figures['high']:.3f}]"


def _secondary(evaluation: TaskEvaluation) -> list[str]:
    """Names of the further held-out means worth a line: other rewards, violations."""
    return [
        name
        for name in evaluation.metrics
        if name.endswith("violation_rate")
        or (name.startswith("reward/") and name != f"reward/{evaluation.metric}")
    ]


def _print_weights(metrics_file: Path, tasks: Sequence[str]) -> None:
    """Print the scheduler's weights at a few steps of the run."""
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


def _print_next_steps(directory: Path, trainer: Trainer, summary: Path) -> None:
    python = Path(sys.executable)
    print(f"\nsummary: {summary}\nrun: {trainer.config.output_dir}")
    print(f"MLflow: {python.with_name('mlflow')} ui --backend-store-uri {trainer.config.tracking.uri}")
    print(f"report: {python.with_name('multitask-rl')} report {directory / 'run'}")


if __name__ == "__main__":
    sys.exit(main())
