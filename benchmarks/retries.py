"""Refused samples that join the batch vLLM is decoding, against a call per attempt.

    python benchmarks/retries.py --hidden 256 --layers 6 --json benchmarks/results/retries.json

64 samples of natural length (mean 50 tokens, at most 128), half of them refused, three attempts at most: what
a constraint of mode ``reject`` asks for when judging costs nothing. Both ways give the same samples. Decode
steps do not depend on the machine; seconds and processor seconds are medians of turns taken one after the
other.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

Slot = tuple[int, int]
"""Sample and attempt."""


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        engine = start(Path(folder), args)
        try:
            summary = measure(engine, args.turns)
        finally:
            engine.close()
    actor = {"hidden": args.hidden, "layers": args.layers, "threads": args.threads}
    text = json.dumps({**actor, **summary, "load": os.getloadavg()[0]}, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def start(folder: Path, args: argparse.Namespace) -> Any:
    """Return an engine on a model of random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from multitask_rl.rollout.vllm.engine import VLLMEngine
    from vllm_builders import small_tokenizer

    torch.set_num_threads(args.threads)
    config = Qwen2Config(
        vocab_size=len(small_tokenizer()),
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=args.hidden // 32,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return VLLMEngine(folder, config={"kv_cache_memory_bytes": 64 * 2**20}, seed=0)


def measure(engine: Any, turns: int) -> dict[str, Any]:
    """Return steps, seconds and processor seconds of both ways."""
    inner = engine._llm.llm_engine
    step, num_steps = inner.step, 0

    def counted() -> Any:
        nonlocal num_steps
        num_steps += 1
        return step()

    inner.step = counted
    ways: dict[str, Callable[[Any], dict[Slot, list[int]]]] = {"calls": one_call_each, "joined": joined}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    steps, samples = {}, {}
    for _ in range(turns + 1):
        for name, way in ways.items():
            num_steps, began, cpu = 0, time.monotonic(), time.process_time()
            samples[name] = way(engine)
            took[name].append((time.monotonic() - began, time.process_time() - cpu))
            steps[name] = num_steps
    assert samples["calls"] == samples["joined"]
    seconds = {name: statistics.median(wall for wall, _ in own[1:]) for name, own in took.items()}
    cpu_seconds = {name: statistics.median(cpu for _, cpu in own[1:]) for name, own in took.items()}
    return {
        "samples": len(samples["calls"]),
        "steps": steps,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "cpu_seconds": {name: round(value, 3) for name, value in cpu_seconds.items()},
        "ratios": {
            "steps": round(steps["calls"] / steps["joined"], 2),
            "seconds": round(seconds["calls"] / seconds["joined"], 2),
            "cpu_seconds": round(cpu_seconds["calls"] / cpu_seconds["joined"], 2),
        },
    }


def one_call_each(engine: Any) -> dict[Slot, list[int]]:
    """Sample all, then what was refused, then what was refused again."""
    slots: list[Slot] = [(sample, 0) for sample in range(64)]
    found: dict[Slot, list[int]] = {}
    while slots:
        groups = engine.generate([request(slot) for slot in slots])
        found.update({slot: group[0].response_ids for slot, group in zip(slots, groups, strict=True)})
        slots = [(sample, attempt + 1) for sample, attempt in slots if is_refused((sample, attempt))]
    return found


def joined(engine: Any) -> dict[Slot, list[int]]:
    """Sample what is refused beside the rest."""
    slots: list[Slot] = [(sample, 0) for sample in range(64)]
    found: dict[Slot, list[int]] = {}
    for part in engine.generate_stream([request(slot) for slot in slots]):
        ended = [slots[index] for index, _, _ in part]
        found.update({slots[index]: generation.response_ids for index, _, generation in part})
        again = [(sample, attempt + 1) for sample, attempt in ended if is_refused((sample, attempt))]
        slots += again
        engine.admit([request(slot) for slot in again])
    return found


def request(slot: Slot) -> GenerationRequest:
    """Return what the engine is asked for a slot."""
    sample, attempt = slot
    length = min(128, max(4, int(random.Random(10 * sample + attempt).expovariate(1 / 50))))
    prompt = [3 + (7 * sample + i) % 40 for i in range(24)]
    sampling = SamplingParams(max_new_tokens=length)
    return GenerationRequest(prompt_ids=prompt, sampling=sampling, seeds=[10 * sample + attempt])


def is_refused(slot: Slot) -> bool:
    """Whether the judge wants another attempt."""
    sample, attempt = slot
    return attempt < 2 and random.Random(1000 + 10 * sample + attempt).random() < 0.5


if __name__ == "__main__":
    main()
