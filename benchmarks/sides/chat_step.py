"""Our whole step on a chat model: the ordinary ``Trainer``, four tasks; driven by ``chat_speed.py``."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from chat_prompts import LEARNING_RATE, MICROBATCH_TOKENS, TEMPERATURE, arguments, questions
from workload import serve

from multitask_rl.config.run import RunConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.trainer import Trainer

args = arguments(__doc__)
NUM_TASKS = 4
REWARD = """
from chat_prompts import reward


def vowels(response, **_):
    return reward(response)
"""


def config(folder: Path) -> RunConfig:
    """Write rows and reward; return the run's configuration."""
    (folder / "rewards.py").write_text(REWARD)
    (folder / "chat_prompts.py").write_text(Path(__file__).with_name("chat_prompts.py").read_text())
    tasks: dict[str, Any] = {}
    for number in range(NUM_TASKS):
        steps = [questions(step, args.prompts, args.rows) for step in range(args.steps)]
        texts = [text for own in steps for text in own[number::NUM_TASKS]]
        rows = folder / f"task{number}.jsonl"
        rows.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        tasks[f"task{number}"] = {
            "dataset": str(rows),
            "eval_dataset": str(rows),
            "rewards": [f"{folder}/rewards.py:vowels"],
        }
    is_bfloat16 = args.engine.endswith("bfloat16")
    document: dict[str, Any] = {
        "tasks": tasks,
        "output_dir": str(folder / "run"),
        "max_steps": args.steps,
        "num_threads": args.threads,
        "model": {"name_or_path": args.model, "autocast": is_bfloat16},
        "batch": {
            "prompts_per_step": args.prompts,
            "group_size": args.group,
            "tokens_per_microbatch": MICROBATCH_TOKENS,
            "refill_rounds": 0,
        },
        "rollout": {
            "max_new_tokens": args.new_tokens,
            "temperature": TEMPERATURE,
            "engine_config": {"weights": "bfloat16" if is_bfloat16 else "actor"},
        },
        "optimizer": {"learning_rate": LEARNING_RATE},
        "scheduler": {"policy": "uniform"},
        "scoring": {"num_workers": 1},
        "guard": {"enabled": False},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
        "tracking": {"trackers": ["jsonl"]},
    }
    return build_dataclass(RunConfig, document, Where("benchmark"))


def main() -> None:
    """Serve steps."""
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer.from_config(config(Path(folder)))
        trainer._open()

        def step(_: int) -> dict[str, float]:
            began, cpu = time.perf_counter(), time.process_time()
            report = trainer.train_step()
            return {
                "step_s": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu,
                "gen_s": report.seconds["rollout"],
                "new_tokens": sum(len(s.rollout.response_ids) for s in report.drawn),
            }

        serve(step)
        trainer._close("finished")


if __name__ == "__main__":
    main()
