"""Turns of episodes that continue from the keys and values of the turns before, against turns that do not.

    python benchmarks/turns.py --what reuse --engine hf --json benchmarks/results/turns_reuse_hf.json
    python benchmarks/turns.py --what reuse --engine vllm --json benchmarks/results/turns_reuse_vllm.json

Groups of conversations over ``--turns`` turns: a prompt of ``--prompt`` tokens, answers of at most
``--answer``, replies of the world of ``--reply`` tokens. The engine samples all conversations once with and
once without reuse in turn, ``--rounds`` times after one round that is not counted. ``computed`` are the
prompt tokens that the engine computed (hf: a prompt that siblings share counts once); ``seconds`` those of
the engine. Both must sample the same tokens. Without reuse hf keeps nothing, and vLLM drops its prefix cache
before every turn but the first, so that siblings share their prompt in both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "sides"))

from workload import EOS, make_actor

from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine


def converse(engine: Any, args: argparse.Namespace, drop: Any) -> tuple[list[list[int]], dict[str, float]]:
    """Return the answers of all turns, and what they took."""
    stream = random.Random(args.seed)
    size = engine_vocabulary(engine)

    def some(number: int) -> list[int]:
        return [stream.randrange(4, size) for _ in range(number)]

    number = args.groups * args.group
    contexts = [
        prompt for prompt in (some(args.prompt) for _ in range(args.groups)) for _ in range(args.group)
    ]
    answers: list[list[int]] = []
    took = {"seconds": 0.0, "prompt_tokens": 0, "cached": 0}
    for turn in range(args.turns):
        if turn:
            drop()
        requests = [
            GenerationRequest(
                prompt_ids=context,
                sampling=SamplingParams(max_new_tokens=args.answer),
                seeds=[1000 * turn + i],
                conversations=[i + 1],
            )
            for i, context in enumerate(contexts)
        ]
        began = time.perf_counter()
        found = [group[0].response_ids for group in engine.generate(requests)]
        took["seconds"] += time.perf_counter() - began
        took["prompt_tokens"] += engine.num_prompt_tokens
        took["cached"] += engine.num_cached_tokens
        contexts = [[*contexts[i], *found[i], *some(args.reply)] for i in range(number)]
        answers += found
    engine.retain(())
    return answers, {
        "seconds": took["seconds"],
        "computed": took["prompt_tokens"] - took["cached"],
        "prompt_tokens": took["prompt_tokens"],
    }


def engine_vocabulary(engine: Any) -> int:
    """Return the size of the engine's vocabulary."""
    return int(engine.model.config.vocab_size) if isinstance(engine, HFEngine) else engine.vocab_size


def build(args: argparse.Namespace, model: Path) -> dict[str, tuple[Any, Any]]:
    """Return both sides: the engine, and what drops the keys and values of the turns before."""

    def nothing() -> None:
        pass

    if args.engine == "hf":
        from transformers import AutoModelForCausalLM

        actor = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        engines = [
            HFEngine(actor, eos_token_ids=[EOS], pad_token_id=0, kept_tokens=tokens) for tokens in (2**20, 0)
        ]
        return {"with": (engines[0], nothing), "without": (engines[1], nothing)}
    from safetensors.torch import load_file

    from multitask_rl.rollout.vllm.engine import VLLMEngine

    engine: Any = VLLMEngine(
        model,
        config={"max_num_seqs": 256, "kv_cache_memory_bytes": 2**30},
        seed=0,
        eos_token_ids=[EOS],
    )
    engine.vocab_size = int(json.loads((model / "config.json").read_text())["vocab_size"])
    weights = load_file(model / "model.safetensors")
    return {"with": (engine, nothing), "without": (engine, lambda: engine.update_weights(weights, 0))}


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        make_actor(Path(folder) / "actor", args.actor, args.seed)
        sides = build(args, Path(folder) / "actor")
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        sampled: dict[str, list[list[int]]] = {}
        for number in range(args.rounds + 1):
            for name in list(sides) if number % 2 else reversed(list(sides)):
                engine, drop = sides[name]
                sides["without"][1]()
                sampled[name], took = converse(engine, args, drop)
                if number:
                    rounds[name].append(took)
        if args.engine == "vllm":
            sides["with"][0].close()
    pairs = list(zip(sampled["with"], sampled["without"], strict=True))
    found = {
        name: {
            "computed": own[0]["computed"],
            "prompt_tokens": own[0]["prompt_tokens"],
            "hit_rate": round(1 - own[0]["computed"] / own[0]["prompt_tokens"], 3),
            "seconds": round(statistics.median(one["seconds"] for one in own), 3),
        }
        for name, own in rounds.items()
    }
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(rounds["with"], rounds["without"], strict=True)]
    result = {
        **{k: v for k, v in vars(args).items() if k != "json"},
        **found,
        "computed_ratio": round(found["without"]["computed"] / found["with"]["computed"], 2),
        "seconds_ratio": round(statistics.median(ratios), 2),
        "same_answers": sum(a == b for a, b in pairs) / len(pairs),
        "cores": os.cpu_count(),
    }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["reuse"], default="reuse")
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--actor", default="6.3M", help="of sides/workload.py")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--reply", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
