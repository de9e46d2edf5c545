"""Measure training steps of a configuration: tokens/s, seconds per stage, memory.

The steps are real. Nothing is evaluated, saved or tracked, and no file remains.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.cli.train import compose_and_run
from multitask_rl.config.run import RunConfig, TrackingConfig
from multitask_rl.errors import ConfigError, check_output_file


def main(arguments: list[str]) -> int:
    """Make some steps of the configuration, print what was measured, write it as JSON if asked."""
    parser = argparse.ArgumentParser(
        prog="multitask-rl bench",
        usage="multitask-rl bench [--steps N] [--json FILE] key=value ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Keys as for train: tasks_file=tasks.yaml model.name_or_path=MODEL, or output_dir=RUN alone.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps (default: 3)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before the measurement (default: 1)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options, overrides = parser.parse_known_args(arguments)
    if options.steps < 1 or options.warm_up < 0:
        raise ConfigError("--steps must be at least 1 and --warm-up at least 0")
    if {"-m", "--multirun"} & set(overrides):
        raise ConfigError("bench measures one configuration at a time; leave --multirun out")
    check_output_file("--json", options.json)
    found: list[dict[str, Any]] = []
    compose_and_run(overrides, "bench", lambda c: found.append(measure(c, options.steps, options.warm_up)))
    for numbers in found:  # none with --cfg job
        print(_table(numbers))
        if options.json is not None:
            options.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


def measure(config: RunConfig, steps: int, warm_up: int) -> dict[str, Any]:
    """Make ``warm_up + steps`` steps of ``config`` and return numbers of the last ``steps``, for JSON.

    They are seconds per step, tokens of responses per second and memory in MiB. Output directory, trackers,
    guard and checkpoints of ``config`` are not used.
    """
    from multitask_rl.run.profiling import memory_report
    from multitask_rl.trainer import Trainer  # heavy: torch, transformers

    resume = "never" if config.checkpoint.resume == "auto" else config.checkpoint.resume
    with tempfile.TemporaryDirectory(prefix="multitask_rl_bench_") as folder:
        alone = replace(
            config,
            output_dir=folder,
            profile="",
            guard=replace(config.guard, enabled=False),
            checkpoint=replace(config.checkpoint, resume=resume),
            tracking=TrackingConfig(trackers=["jsonl"], store_rollouts=0),
        )
        with Trainer.from_config(alone) as trainer:
            reports = [trainer.train_step() for _ in range(warm_up + steps)][warm_up:]
            memory = memory_report(
                trainer.actor.model.parameters(), trainer.parts.learner.backend.optimizer_bytes
            )
            device = str(trainer.actor.device)
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[warm_up:]]
    memory.pop("memory/peak_mb", None)  # since the last step only
    if "memory/peak_mb" in rows[-1]:
        memory["gpu_peak_mb"] = max(row["memory/peak_mb"] for row in rows)
    sampled = [len(rollout.response_ids) for r in reports for rollout in r.sampled]
    trained = sum(len(s.rollout.response_ids) for r in reports for s in r.kept)
    seconds = {name: math.fsum(r.seconds.get(name, 0.0) for r in reports) for name in reports[0].seconds}
    return {
        "steps": steps,
        "device": device,
        "engine": config.rollout.engine,
        "step_s": seconds["step"] / steps,
        "samples_per_s": len(sampled) / seconds["step"],
        "tokens_per_s": sum(sampled) / seconds["step"],
        "sampling_tokens_per_s": sum(sampled) / max(seconds.get("rollout", 0.0), 1e-9),
        "training_tokens_per_s": trained / max(seconds.get("update", 0.0), 1e-9),
        "stages": _stages(rows),
        "memory": {name: round(value, 1) for name, value in memory.items()},
    }


def _stages(rows: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return for each stage its seconds of work per step, and its shares of the steps' time."""
    total = math.fsum(row["time/step_s"] for row in rows)
    stages: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        area, _, stage = name.partition("/")
        if area in ("utilisation", "waits_for"):
            share = math.fsum(row.get(name, 0.0) * row["time/step_s"] for row in rows) / total
            stages.setdefault(stage, {})[area] = share
    for stage, own in stages.items():
        own["seconds"] = math.fsum(row.get(f"time/{stage}_s", 0.0) for row in rows) / len(rows)
    return stages


def _table(numbers: Mapping[str, Any]) -> str:
    lines = [
        f"{counted(numbers['steps'], 'step')}, {numbers['engine']} on {numbers['device']}: "
        f"{numbers['step_s']:.3g} s a step, {numbers['samples_per_s']:.4g} responses/s, "
        f"{numbers['tokens_per_s']:.4g} tokens/s",
        f"sampling {numbers['sampling_tokens_per_s']:.4g} tokens/s, training "
        f"{numbers['training_tokens_per_s']:.4g} tokens/s (of responses)",
        f"{'stage':<14} {'s/step':>8} {'busy':>6} {'waited for':>10}",
    ]
    for stage, own in numbers["stages"].items():
        shares = f"{own.get('utilisation', 0.0):>6.0%} {own.get('waits_for', 0.0):>10.0%}"
        lines.append(f"{stage:<14} {own['seconds']:>8.3f} {shares}")
    memory = ", ".join(f"{name.removesuffix('_mb')} {mb:g}" for name, mb in numbers["memory"].items())
    return "\n".join([*lines, f"memory, MiB: {memory}"])
