"""The speed of sampling after reward models of the trainer's process have scored, relative to before.

    python benchmarks/local_models.py --model runs/smollm2/cache/SmolLM2-135M-Instruct --json results.json

With ``isolate=False`` a reward model scores in the trainer's process, in a thread that ends with the call. If
the thread lived on, so would its helper threads of OpenMP. If there are more helpers than cores, they sleep
after each operation instead of spinning. Rates are answer tokens a second, the best of ``--repeats``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sides.chat_prompts import TEMPERATURE, questions
from speed import machine

from multitask_rl.config.run import ModelConfig, RolloutConfig, ScoringConfig
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.models.actor import load_actor
from multitask_rl.records import Rollout, SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.scoring.shapes import with_traits
from multitask_rl.testing.builders import make_rollout

NUM_MODELS = 2


@with_traits(isolate=False)
def multiplies(responses: Sequence[str], number: int = 0) -> list[float]:
    """Compute with torch as a small model does; each ``number`` is a model of its own."""
    x = torch.ones(256, 576)
    for _ in range(64):
        x = torch.nn.functional.silu(x @ torch.ones(576, 576))
    return [1.0] * len(responses)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return rates before and after the models scored, and their ratio."""
    torch.set_num_threads(args.threads)
    actor = load_actor(ModelConfig(name_or_path=args.model), "cpu")
    engine = HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=Path(tempfile.gettempdir()))
    sampling = SamplingParams(max_new_tokens=args.new_tokens, temperature=TEMPERATURE)
    chats = [[{"role": "user", "content": text}] for text in questions(0, args.prompts)]
    requests = [
        GenerationRequest(
            prompt_ids=actor.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=True
            )["input_ids"],
            sampling=sampling,
            seeds=[1000 * number + sample for sample in range(args.group)],
        )
        for number, chat in enumerate(chats)
    ]

    def rate() -> float:
        began = time.perf_counter()
        ended = engine.generate(requests)
        spent = time.perf_counter() - began
        return sum(len(own.response_ids) for samples in ended for own in samples) / spent

    plugin = f"{__file__}:multiplies"
    rewards = [RewardSpec(plugin=plugin, name=f"m{n}", config={"number": n}) for n in range(NUM_MODELS)]
    task = TaskSpec(name="t", rewards=rewards)
    rollouts: list[Rollout] = [make_rollout("text", task="t", sample=sample) for sample in range(8)]
    rate()  # the first call builds what later ones keep
    with RewardPool({"t": task}, ScoringConfig(), seed=0, devices={}) as pool:
        before = max(rate() for _ in range(args.repeats))
        pool.score(rollouts)
        after = max(rate() for _ in range(args.repeats))
    return {
        "what": "answer tokens a second, before and after models of this process have scored",
        "settings": {
            key: getattr(args, key) for key in ("threads", "prompts", "group", "new_tokens", "repeats")
        },
        "model": Path(args.model).name,
        "tokens_per_s": {"before": round(before, 1), "after": round(after, 1)},
        "after / before": round(after / before, 3),
        "machine": machine(),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="runs/smollm2/cache/SmolLM2-135M-Instruct", help="directory")
    for name, value in (("threads", 2), ("prompts", 8), ("group", 4), ("new-tokens", 32), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    text = json.dumps(measure(args), indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
