"""What overlap and many tasks bring: rewards that take their time, four tasks in one run, growing steps.

    python benchmarks/pipeline.py --part rewards --json benchmarks/results/pipeline_rewards.json
    python benchmarks/pipeline.py --part tasks   --json benchmarks/results/pipeline_tasks.json
    python benchmarks/pipeline.py --part growth  --json benchmarks/results/pipeline_growth.json

``rewards``: samples/s and busy shares with asynchronous rewards that wait 0, 0.1, 1 and 10 s, synchronous
(``max_staleness: 0``) and overlapped. ``tasks``: four tasks in one run against the four one after another,
with the same rollouts. ``growth``: seconds per step as tasks go from 1 to 16 at equal rollouts, and as
rollouts go from 64 to 4096.

All runs of a part live in this process and take turns, a block of steps each, so that other load on the
machine falls on all alike; with vLLM, of which a process has one engine, they follow each other. A block
begins and ends with nothing under way, as between two checkpoints: one step in each has no overlap. Figures
are medians over the measured blocks; ratios are medians of the ratios turn by turn.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from speed import SIDES, machine
from workload import ACTORS, KINDS, LEARNING_RATE, make_actor, prompts

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
    TrackingConfig,
)
from multitask_rl.tracking.timeline import summarise
from multitask_rl.trainer import Trainer

REWARDS = """
import asyncio
from multitask_rl.scoring.shapes import with_traits
from workload import reward


@with_traits(batch_size=4096, timeout_s=120, deterministic=False)
async def delayed(prompt, response, delay=0.0):
    if delay:
        await asyncio.sleep(delay)
    return reward(prompt, response, "mixed" if prompt[0] in "abcd" else "uniform")
"""
GROUP = 8
FREE_S = 0.0
FINE_TURNS = 16
"""Turns of one step, for each turn of the command line, in which runs of 1 to 16 tasks are compared."""


@dataclass
class Run:
    """A trainer and what its blocks took."""

    name: str
    trainer: Trainer
    folder: Path
    rollouts: int
    """Per step."""
    blocks: list[float] = field(default_factory=list)
    """Seconds of each measured block."""

    def block(self, steps: int) -> float:
        """Make ``steps`` steps; return the seconds they took."""
        began = time.perf_counter()
        for _ in range(steps):
            self.trainer.train_step()
        return time.perf_counter() - began

    def figures(self, steps: int) -> dict[str, Any]:
        """Return rates and shares over the measured blocks."""
        seconds = statistics.median(self.blocks)
        lines = [json.loads(x) for x in (self.folder / "run" / "timeline.jsonl").read_text().splitlines()]
        stages = summarise(line for line in lines if line["step"] > steps)
        return {
            "samples_per_s": _round(self.rollouts * steps / seconds),
            "step_s": _round(seconds / steps),
            "busy": {n: _round(s["busy"]) for n, s in stages.items() if "/" not in n},
            "update_waited_for": {n: _round(s["waited"]) for n, s in stages.items() if s["waited"]},
        }


def _round(value: float) -> float:
    return float(f"{value:.4g}")


def build(folder: Path, model: Path, tasks: dict[str, str], args: argparse.Namespace, **how: Any) -> Run:
    """Return a run.

    Args:
        folder: of its own.
        model: the actor's directory.
        tasks: name -> kind of prompts (``a`` to ``d``, or ``u``).
        args: the command line.
        how: ``name``, ``prompts`` per step, ``delay`` of the rewards in seconds, ``staleness``,
            ``learning_rate``, ``same_length`` of all responses.
    """
    folder.mkdir(parents=True)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "workload.py").write_text((SIDES / "workload.py").read_text())
    specs = {}
    for name, kind in tasks.items():
        workload = "uniform" if kind == "u" else "mixed"
        texts = [t for t in prompts(4096, args.seed, workload) if kind in ("u", t[0])]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        reward = {"plugin": "rewards.py:delayed", "config": {"delay": how["delay"]}}
        data = {"dataset": f"{name}.jsonl", "eval_dataset": f"{name}.jsonl"}
        specs[name] = {**data, "rewards": [reward]}
    (folder / "tasks.yaml").write_text(json.dumps({"tasks": specs}))
    config = RunConfig(
        tasks_file=str(folder / "tasks.yaml"),
        output_dir=str(folder / "run"),
        seed=args.seed,
        num_threads=args.threads,
        max_steps=1_000_000,
        model=ModelConfig(name_or_path=str(model), dtype="float32", autocast=args.dtype == "bfloat16"),
        rollout=RolloutConfig(
            engine=args.engine,
            # a small part of the device for each: the runs of a part share it
            engine_config={} if args.engine == "hf" else {"dtype": args.dtype, "gpu_memory_utilization": 0.1},
            max_new_tokens=args.max_new_tokens,
            max_staleness=how["staleness"],
        ),
        batch=BatchConfig(prompts_per_step=how["prompts"], group_size=GROUP, refill_rounds=0),
        optimizer=OptimizerConfig(learning_rate=how.get("learning_rate", LEARNING_RATE)),
        scheduler=SchedulerConfig(policy="uniform"),
        guard=GuardConfig(enabled=False),
        eval=EvalConfig(every=0, num_prompts=1),
        checkpoint=CheckpointConfig(every=args.block),  # where the pipeline drains; nothing is saved here
        tracking=TrackingConfig(trackers=["jsonl"], store_rollouts=0),
    )
    trainer = Trainer.from_config(config)
    if how.get("same_length"):
        trainer.actor.eos_token_ids = ()
    return Run(how["name"], trainer, folder, how["prompts"] * GROUP)


def take_turns(runs: list[Run], steps: int, turns: int) -> None:
    """Warm up with one block of ``steps`` each, then let every run make a block in each turn."""
    for turn in range(1 + turns):
        for run in runs if turn % 2 else reversed(runs):
            seconds = run.block(steps)
            if turn:
                run.blocks.append(seconds)
    for run in runs:
        run.trainer._close("finished")


def play(makes: Sequence[Callable[[], Run]], args: argparse.Namespace) -> list[Run]:
    """Return the runs after their blocks. A process has one vLLM engine, so its runs follow each other."""
    if args.engine == "hf":
        take_turns(runs := [make() for make in makes], args.block, args.turns)
        return runs
    runs = []
    for make in makes:
        runs.append(make())
        take_turns(runs[-1:], args.block, args.turns)
    return runs


def ratio(numerator: list[list[float]], denominator: list[float]) -> float:
    """Return the median over the turns of (sum of the runs' seconds) / (the run's seconds)."""
    turns = zip(zip(*numerator, strict=True), denominator, strict=True)
    return _round(statistics.median(sum(several) / one for several, one in turns))


def measure_rewards(folder: Path, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Sync against overlapped, for each delay."""
    tasks = {kind: kind for kind in KINDS}
    result: dict[str, Any] = {}
    for delay in args.delays:
        runs = play([
            partial(
                build, folder / f"{delay:g}-{s}", model, tasks, args,
                name=f"max_staleness {s}", prompts=args.prompts, delay=delay, staleness=s,
            )
            for s in args.staleness
        ], args)  # fmt: skip
        result[f"{delay:g} s"] = {
            **{run.name: run.figures(args.block) for run in runs},
            "ratios": {run.name: ratio([runs[0].blocks], run.blocks) for run in runs[1:]},
        }
        _say(f"rewards of {delay:g} s", result[f"{delay:g} s"])
    return result


def measure_tasks(folder: Path, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Four tasks in one run against one run of each, for each delay."""
    result: dict[str, Any] = {}
    for delay in args.delays:
        how = {"delay": delay, "staleness": args.staleness[-1]}
        tasks = {kind: kind for kind in KINDS}
        root = folder / f"{delay:g}"
        together = build(root / "all", model, tasks, args, name="together", prompts=args.prompts, **how)
        share = args.prompts // len(tasks)
        alone = [
            build(root / f"{k}-{s}", model, {k: k}, args, name=k, prompts=share, delay=delay, staleness=s)
            for s in dict.fromkeys((0, how["staleness"]))
            for k in tasks
        ]
        take_turns([together, *alone], args.block, args.turns)
        one_by_one = [r.blocks for r in alone[: len(tasks)]]
        overlapped = [r.blocks for r in alone[-len(tasks) :]]
        result[f"{delay:g} s"] = {
            "together": together.figures(args.block),
            "ratios": {
                "one after another": ratio(one_by_one, together.blocks),
                "one after another, each overlapped": ratio(overlapped, together.blocks),
            },
        }
        _say(f"rewards of {delay:g} s", result[f"{delay:g} s"])
    return result


def measure_growth(folder: Path, model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step by tasks at equal rollouts, and by rollouts."""
    # the same work in every step: one policy in all runs, and responses that never end early
    how = {"delay": FREE_S, "staleness": 0, "learning_rate": 1e-12, "same_length": True}
    counts = [n for n in (1, 2, 4, 8, 16) if n <= args.prompts]
    by_tasks = [
        build(
            folder / f"tasks-{n}", model, {f"t{i}": "u" for i in range(n)}, args,
            name=str(n), prompts=args.prompts, **how,
        )
        for n in counts
    ]  # fmt: skip
    # a few per cent are to be told apart on a machine that others use: many short turns
    take_turns(by_tasks, 1, FINE_TURNS * args.turns)
    first = by_tasks[0].blocks
    result: dict[str, Any] = {
        "tasks": {r.name: _round(statistics.median(r.blocks)) for r in by_tasks},
        "tasks_ratios": {r.name: ratio([r.blocks], first) for r in by_tasks[1:]},
    }
    _say("seconds per step by tasks", result["tasks"])
    sizes = [n for n in (64, 256, 1024, 4096) if n <= args.most_rollouts]
    by_rollouts = [
        build(
            folder / f"rollouts-{n}", model, {f"t{i}": "u" for i in range(4)}, args,
            name=str(n), prompts=n // GROUP, **how,
        )
        for n in sizes
    ]  # fmt: skip
    take_turns(by_rollouts, args.block, args.turns)
    result["rollouts"] = {r.name: _round(statistics.median(r.blocks) / args.block) for r in by_rollouts}
    result["microseconds_per_rollout"] = {
        r.name: _round(1e6 * statistics.median(r.blocks) / args.block / r.rollouts) for r in by_rollouts
    }
    _say("seconds per step by rollouts", result["rollouts"])
    return result


def _say(what: str, figures: Any) -> None:
    sys.stderr.write(f"{what}: {json.dumps(figures)}\n")


PARTS = {"rewards": measure_rewards, "tasks": measure_tasks, "growth": measure_growth}


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--actor", choices=list(ACTORS), default="0.45M")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="by autocast")
    parser.add_argument("--engine", default="hf", help="rollout.engine")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 1.0, 10.0], help="seconds")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1], help="compared in this order")
    parser.add_argument("--prompts", type=int, default=16, help="per step, 8 rollouts each")
    parser.add_argument("--most-rollouts", type=int, default=4096)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--block", type=int, default=8, help="steps between two drained pipelines")
    parser.add_argument("--turns", type=int, default=5, help="measured blocks of each run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "actor"
        make_actor(model, args.actor, args.seed)
        settings = {k: v for k, v in vars(args).items() if k not in ("json", "most_rollouts")}
        result = {"settings": settings, "figures": PARTS[args.part](Path(folder), model, args)}
    result["machine"] = machine(args.device)
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)


if __name__ == "__main__":
    main()
