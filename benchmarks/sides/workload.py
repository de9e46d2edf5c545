"""The work every side does: actor, prompts, rewards and lengths, and how a side is driven.

A side is a process of its own. It reads one line from stdin per step, makes one step of
``PROMPTS * GROUP`` rollouts, and prints one JSON line with what it measured: so that several sides on one
machine take turns step by step, and a neighbour's load falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path

CHARS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=()<>,.;:!? "
PROMPTS, GROUP = 32, 8
UNIFORM_PROMPT, UNIFORM_NEW = 16, 24
KINDS = {"a": 8, "b": 16, "c": 48, "d": 160}
"""Mixed workload: kind (first character of the prompt) -> characters of the prompt."""
MIXED_NEW = 128
ACTORS = {"0.45M": (96, 3, 4), "0.8M": (128, 4, 4), "6.3M": (256, 6, 4), "tiny": (32, 2, 4)}
"""Name -> hidden width, layers, heads."""
EOS, LEARNING_RATE = 2, 1e-4


def arguments(description: str) -> argparse.Namespace:
    """Return the arguments every side takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=["mixed", "uniform"], default="mixed")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="model.compile; ours only")
    return parser.parse_args()


def make_actor(path: Path, size: str, seed: int) -> None:
    """Write a Qwen2-architecture actor with seeded random weights and a character tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    backend = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate([*specials, *CHARS])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )
    hidden, layers, heads = ACTORS[size]
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(specials) + len(CHARS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def prompts(count: int, seed: int, workload: str) -> list[str]:
    """Return ``count`` prompts; in the mixed workload the kinds take turns."""
    rng = random.Random(seed)
    if workload == "uniform":
        return ["".join(rng.choices(CHARS, k=UNIFORM_PROMPT)) for _ in range(count)]
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(count)]
    return [k + "".join(rng.choices(CHARS, k=KINDS[k] - 1)) for k in kinds]


def reward(prompt: str, text: str, workload: str) -> float:
    """Return the reward. Mixed: ``b`` is rare (most groups have no variance), ``c`` always varies."""
    share = sum(c.isdigit() for c in text) / max(1, len(text))
    if workload == "uniform" or prompt[0] == "c":
        return share
    return float({"a": share > 0.2, "b": text.startswith("a"), "d": "e" in text}[prompt[0]])


def answer(numbers: dict[str, float]) -> None:
    """Print what one step measured, and the most memory this process has had so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(json.dumps({**numbers, "peak_rss_mib": peak}) + "\n")
    sys.stdout.flush()


def await_turn() -> bool:
    """Block until the driver asks for a step; False when it asks for no more."""
    return bool(sys.stdin.readline().strip())


def serve(step: Callable[[int], dict[str, float]]) -> None:
    """Answer the driver's requests."""
    number = 0
    while await_turn():
        answer(step(number))
        number += 1
