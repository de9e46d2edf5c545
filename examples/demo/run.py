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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Before torch loads: threads beyond one slow a model of this size, and nothing may ask a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from prepare import Prepared, prepare
from results import Trained, effort, print_next_steps, print_prepared, print_run, print_table, summarise

from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import GuardStop, MultitaskRLError
from multitask_rl.trainer import Trainer

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "experiment" / "demo.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code of the command line (0 done, 3 stopped by the guard)."""
    options = _parse(arguments)
    began = time.perf_counter()
    try:
        print("preparing models and data: about two minutes, a second the next time", flush=True)
        prepared = prepare(
            options.directory / "prepared", options.seed, options.directory / "cache", options.effort
        )
        print_prepared(prepared.directory, prepared.figures, time.perf_counter() - began)
        run, exit_code = _train(_configuration(options, prepared))
    except MultitaskRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    before, after = run.history[0][1], run.history[-1][1]
    summary = summarise(run, before, after, wall_s=time.perf_counter() - began, seed=options.seed)
    print_table(f"held-out prompts, before and after {run.step} steps", before, after)
    print_run(run)
    target = options.directory / "summary.json"
    target.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print_next_steps(options.directory, run, target)
    print("a second run, and both compared in a browser: README.md, Start")
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
        "--eval-prompts", type=int, default=0, help="held-out prompts per task (default: the configuration's)"
    )
    parser.add_argument(
        "--effort", type=effort, default=1.0, help="share of the preparation's training: quicker and worse"
    )
    return parser.parse_args(arguments)


def _configuration(options: argparse.Namespace, prepared: Prepared) -> RunConfig:
    document, where = load_yaml(CONFIG)
    config: RunConfig = build_dataclass(RunConfig, document, where)
    here, directory = Path.cwd(), options.directory.resolve()

    def shown(path: Path) -> str:
        """As the configuration's file names it, so that runs of both compare as equal."""
        return str(path.relative_to(here) if path.is_relative_to(here) else path)

    return replace(
        config,
        tasks_file=shown(prepared.tasks_file),
        model=replace(config.model, name_or_path=shown(prepared.actor)),
        output_dir=shown(directory / "run"),
        tracking=replace(config.tracking, uri=f"sqlite:///{shown(directory / 'mlflow.db')}"),
        seed=options.seed,
        max_steps=options.max_steps or config.max_steps,
        eval=replace(config.eval, num_prompts=options.eval_prompts or config.eval.num_prompts),
    )


def _train(config: RunConfig) -> tuple[Trained, int]:
    """Train from the start; a stop by the guard is a result, not a crash."""
    shutil.rmtree(config.output_dir, ignore_errors=True)
    trainer = Trainer.from_config(config)
    print(trainer.plan.describe(), flush=True)
    try:
        trainer.train()
    except GuardStop as stop:
        print(f"stopped by the guard: {stop}", file=sys.stderr)
        return Trained.by(trainer), stop.exit_code
    return Trained.by(trainer), 0


if __name__ == "__main__":
    sys.exit(main())
