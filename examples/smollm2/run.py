"""The example on a real chat model (``make real``): SmolLM2-135M-Instruct, five tasks, two CPU cores.

Prepares model, judges and data (``prepare.py``), reads the splits ``test`` once, shows the model answers
(``configs/experiment/smollm2_warm_start.yaml``), trains it on the five tasks (``smollm2.yaml`` beside it)
through the same trainer as ``multitask-rl train``, and reads the splits once more. Every number it prints and
writes to ``summary.json`` was measured in this run.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Before torch loads: the judges' processes have one thread each, this one those of the configuration.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import DATA_VARIABLE, Prepared, data_directory, prepare
from results import (
    Evaluations,
    Trained,
    effort,
    print_next_steps,
    print_prepared,
    print_run,
    print_table,
    summarise,
)

from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import GuardStop, MultitaskRLError
from multitask_rl.models.actor import multiplies_bfloat16
from multitask_rl.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENTS = REPOSITORY / "configs" / "experiment"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example and return the exit code of the command line (0 done, 3 stopped by the guard)."""
    options = _parse(arguments)
    began = time.perf_counter()
    seconds: dict[str, float] = {}
    peaks: dict[str, float] = {}
    """GiB of this process at their highest so far, at the end of each part."""

    def mark(part: str) -> None:
        seconds[part] = time.perf_counter() - began - sum(seconds.values())
        peaks[part] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        gc.collect()  # before the next model is loaded

    try:
        prepared = prepare(
            options.directory / "prepared",
            options.seed,
            options.directory / "cache",
            model=options.model,
            data=options.data,
            effort=options.effort,
        )
        mark("prepare")
        print_prepared(prepared.directory, prepared.figures, seconds["prepare"])
        for task, reason in prepared.left_out.items():
            print(f"  left out: {task}: {reason}")
        config = _configuration(options, prepared)
        before = _evaluate_tests(config, prepared, options.test_prompts)
        mark("test_before")
        if prepared.warm_start.is_file() and options.warm_start_steps != 0:
            shown, weights, _ = _train(_warm_start(options, config, prepared))
            print_table("warm start, held-out answers", shown.history[0][1], shown.history[-1][1])
            config = replace(config, model=replace(config.model, name_or_path=str(weights)))
            mark("warm_start")
        run, weights, exit_code = _train(config)
        mark("train")
        after = _evaluate_tests(
            replace(config, model=replace(config.model, name_or_path=str(weights))),
            prepared,
            options.test_prompts,
        )
        mark("test_after")
    except MultitaskRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    summary = summarise(
        run,
        before,
        after,
        wall_s=sum(seconds.values()),
        seconds=seconds,
        peak_gib=peaks,
        seed=options.seed,
    )
    first, last = run.history[0][1], run.history[-1][1]
    print_table(f"validation prompts, which the guard reads, before and after {run.step} steps", first, last)
    print_table(f"test prompts, read only here, before and after {run.step} steps", before, after)
    print_run(run)
    target = options.directory / "summary.json"
    target.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    parts = ", ".join(f"{part.replace('_', ' ')} {value / 60:.1f}" for part, value in seconds.items())
    print(f"\nminutes: {parts}; at most {max(peaks.values()):.1f} GiB")
    print_next_steps(options.directory, run, target)
    return exit_code


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of generated rows, rollouts and training (default 0)"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/smollm2"), help="output (default runs/smollm2)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=data_directory(),
        help=f"directory of the data sets of README.md (default: ${DATA_VARIABLE}, else the hub)",
    )
    parser.add_argument(
        "--model", type=Path, help="directory of a chat model (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument(
        "--max-steps", type=int, default=0, help="training steps (default: the configuration's)"
    )
    parser.add_argument(
        "--warm-start-steps",
        type=int,
        help="of the warm start (default: the configuration's; 0 = no warm start)",
    )
    parser.add_argument("--prompts-per-step", type=int, default=0, help="(default: the configuration's)")
    parser.add_argument("--eval-prompts", type=int, default=0, help="validation prompts of a task")
    parser.add_argument("--test-prompts", type=int, default=256, help="test prompts of a task (default 256)")
    parser.add_argument("--threads", type=int, default=0, help="of torch (default: the configuration's)")
    parser.add_argument(
        "--effort", type=effort, default=1.0, help="share of the judges' training: quicker and worse"
    )
    return parser.parse_args(arguments)


def _read(experiment: str) -> RunConfig:
    document, where = load_yaml(EXPERIMENTS / f"{experiment}.yaml")
    config: RunConfig = build_dataclass(RunConfig, document, where)
    return config


def _configuration(options: argparse.Namespace, prepared: Prepared) -> RunConfig:
    config = _read("smollm2")
    directory = options.directory.resolve()
    is_fast = multiplies_bfloat16("cpu")
    print(f"products in {'bfloat16' if is_fast else 'float32'}: what this CPU has instructions for")
    return replace(
        config,
        tasks_file=str(prepared.tasks_file),
        model=replace(config.model, name_or_path=str(prepared.actor), autocast=is_fast),
        rollout=replace(config.rollout, engine_config={"weights": "bfloat16" if is_fast else "actor"}),
        batch=replace(
            config.batch, prompts_per_step=options.prompts_per_step or config.batch.prompts_per_step
        ),
        eval=replace(config.eval, num_prompts=options.eval_prompts or config.eval.num_prompts),
        output_dir=str(directory / "run"),
        seed=options.seed,
        num_threads=options.threads or config.num_threads,
        max_steps=options.max_steps or config.max_steps,
    )


def _warm_start(options: argparse.Namespace, config: RunConfig, prepared: Prepared) -> RunConfig:
    """Return the configuration of the warm start before the run of ``config``."""
    own = _read("smollm2_warm_start")
    return replace(
        own,
        tasks_file=str(prepared.warm_start),
        model=config.model,
        eval=replace(own.eval, num_prompts=config.eval.num_prompts),
        output_dir=str(Path(config.output_dir).with_name("warm_start")),
        seed=config.seed,
        num_threads=config.num_threads,
        max_steps=options.warm_start_steps or own.max_steps,
    )


def _evaluate_tests(config: RunConfig, prepared: Prepared, num_prompts: int) -> Evaluations:
    """Return evaluations of the configured weights on the splits ``test``; nothing is selected by them."""
    config = replace(
        config,
        tasks=dict(prepared.tests),
        guard=replace(config.guard, enabled=False),
        eval=replace(config.eval, num_prompts=num_prompts),
        output_dir=f"{config.output_dir}-test",
        tracking=replace(config.tracking, trackers=[]),
    )
    with contextlib.closing(Trainer.from_config(config)) as trainer:
        return trainer.evaluate()


def _train(config: RunConfig) -> tuple[Trained, Path, int]:
    """Train from the start; return what is told of it, its last weights and the exit code.

    A stop by the guard is a result, not a crash. The trainer is not kept: it holds 16 bytes a parameter.
    """
    shutil.rmtree(config.output_dir, ignore_errors=True)
    trainer = Trainer.from_config(config)
    print(trainer.plan.describe(), flush=True)
    exit_code = 0
    try:
        trainer.train()
    except GuardStop as stop:
        print(f"stopped by the guard: {stop}", file=sys.stderr)
        exit_code = stop.exit_code
    saved = trainer.parts.store.checkpoints
    return Trained.by(trainer), saved.path(max(saved.entries)) / "actor", exit_code


if __name__ == "__main__":
    sys.exit(main())
