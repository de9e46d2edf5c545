"""Memory of a training step on a pretrained chat model, by part of the step.

    python benchmarks/chat_memory.py --model runs/smollm2/cache/SmolLM2-135M-Instruct --json FILE

One step of a real run on two generated tasks of ``examples/smollm2``: instructions and extraction, without
padding to a length. ``float32`` has no reference model, ``float32-kl`` has one, ``float32-int8`` keeps
AdamW's moments in one byte a number (``optimizer.moments``), ``bfloat16`` samples and learns in bfloat16 with
a copy of the weights to sample from. Each is a process of its own. Figures are GiB of its resident memory,
libraries included, at its highest in each part; a thread looks twenty times a second. In a first step AdamW
has no moments until it moves the weights: ``--steps 2`` measures the steps after it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "smollm2"))

MODES = ("float32", "float32-kl", "float32-int8", "bfloat16")
PARTS = ("rollout", "update", "step")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="runs/smollm2/cache/SmolLM2-135M-Instruct", help="directory")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8, help="responses to each")
    parser.add_argument("--new-tokens", type=int, default=64, help="at most, of a response")
    parser.add_argument("--microbatch", type=int, default=1024, help="tokens of one pass of the learner")
    parser.add_argument("--steps", type=int, default=1, help="the figures are of the last one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args, args.only)))
        return
    found = {}
    for mode in args.modes:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", mode]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[mode] = json.loads(done.stdout.splitlines()[-1])
    settings = {"prompts": args.prompts, "group": args.group, "new-tokens": args.new_tokens}
    settings |= {"microbatch": args.microbatch, "steps": args.steps}
    text = json.dumps({"settings": {**settings, "model": Path(args.model).name}, "gib": found}, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")


def measure(args: argparse.Namespace, mode: str) -> dict[str, float]:
    """Train one step; return GiB by part."""
    from multitask_rl.config.run import RunConfig
    from multitask_rl.config.schema.build import build_dataclass
    from multitask_rl.config.schema.located_yaml import Where
    from multitask_rl.trainer import Trainer
    from multitask_rl_tasks.suite import write_rows

    made: Any = importlib.import_module("generators")
    is_bfloat16 = mode == "bfloat16"
    found = {"libraries": resident()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = {"instructions": made.instruction_rows, "extraction": made.extraction_rows}
        rewards = {"instructions": "ifeval", "extraction": "json_schema"}
        tasks: dict[str, Any] = {
            task: {
                "type": "grpo",
                "dataset": str(write_rows(directory / f"{task}.jsonl", make(0, "train", 200))),
                "rewards": [rewards[task]],
                **({"kl": {"coefficient": 0.05}} if mode == "float32-kl" else {}),
            }
            for task, make in rows.items()
        }
        document = {
            "tasks": tasks,
            "output_dir": str(directory / "run"),
            "max_steps": args.steps,
            "num_threads": 1,
            "model": {"name_or_path": str(Path(args.model).resolve()), "autocast": is_bfloat16},
            "batch": {
                "prompts_per_step": args.prompts,
                "group_size": args.group,
                "tokens_per_microbatch": args.microbatch,
                "refill_rounds": 0,
            },
            "rollout": {
                "max_new_tokens": args.new_tokens,
                "temperature": 0.7,
                "engine_config": {"weights": "bfloat16" if is_bfloat16 else "actor"},
            },
            "optimizer": {
                "learning_rate": 2e-5,
                "moments": "int8" if mode == "float32-int8" else "float32",
            },
            "eval": {"every": 0},
            "guard": {"enabled": False},
            "tracking": {"trackers": ["jsonl"]},
        }
        seen: list[tuple[float, float]] = []
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(0.05):
                seen.append((time.time(), resident()))

        with Trainer.from_config(build_dataclass(RunConfig, document, Where("chat_memory"))) as trainer:
            found["models"] = resident()
            threading.Thread(target=watch, daemon=True).start()
            for _ in range(args.steps):
                trainer.train_step()
            is_done.set()
            spans = (directory / "run" / "timeline.jsonl").read_text(encoding="utf-8").splitlines()
        ended, by_part = seen[-1][0], {}
        for span in map(json.loads, spans):
            if span["stage"] in PARTS:
                by_part[span["stage"]] = (span["start"], span["end"])
        shift = ended - by_part["step"][1]  # the step is the last to end
        for part in PARTS:
            start, end = by_part[part]
            found[part] = max(own for at, own in seen if start <= at - shift <= end)
    return {part: round(gib, 2) for part, gib in found.items()}


def resident() -> float:
    """Return GiB of resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
