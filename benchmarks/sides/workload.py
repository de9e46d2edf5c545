"""The work every side does: actor, prompts, rewards and lengths, and how a side is driven.

A side is a process of its own. It reads one line from stdin per step, makes one step of
``PROMPTS * GROUP`` rollouts, and prints one JSON line with what it measured: so that several sides on one
machine take turns step by step, and a neighbour's load falls on all of them alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHARS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=()<>,.;:!? "
PROMPTS, GROUP = 32, 8
FIXED = {"uniform": (16, 24), "long": (256, 256)}
"""Workload of one task -> tokens of every prompt, tokens of every answer."""
KINDS = {"a": 8, "b": 16, "c": 48, "d": 160}
"""Mixed workload: kind (first character of the prompt) -> characters of the prompt."""
MIXED_NEW = 128
WORKLOADS = ["mixed", *FIXED]
POSITIONS = 1024
"""Of every actor: more than a prompt and its answer."""
MICROBATCH = {"mixed": 32, "uniform": PROMPTS * GROUP, "long": 16}
"""Rollouts in one forward and backward of the bare loop; of TRL where memory asks for it (``long``)."""


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2-architecture actor."""

    width: int
    layers: int
    heads: int
    key_value_heads: int
    inner: int
    """Width of the feed-forward blocks."""
    vocabulary: int

    @property
    def body_parameters(self) -> int:
        """Parameters of the layers' products and biases, norms left out."""
        key_value = self.width * self.key_value_heads // self.heads
        attention = 2 * self.width**2 + 2 * self.width * key_value + self.width + 2 * key_value
        return self.layers * (attention + 3 * self.width * self.inner)

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, tied with the embedding."""
        return self.width * self.vocabulary


def _small(width: int, layers: int) -> Shape:
    return Shape(width, layers, 4, 4, 4 * width, 4 + len(CHARS))


ACTORS = {
    "0.45M": _small(96, 3),
    "0.8M": _small(128, 4),
    "6.3M": _small(256, 6),
    "52M": _small(768, 6),
    "tiny": _small(32, 2),
    "0.5B": Shape(896, 24, 14, 2, 4864, 151_936),
}
"""The last one has the shape of Qwen2-0.5B."""
EOS, LEARNING_RATE = 2, 1e-4


def arguments(description: str) -> argparse.Namespace:
    """Return the arguments every side takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--engine", default="hf", help="rollout.engine; ours only")
    parser.add_argument("--executor", choices=["local", "ray"], default="local", help="ours only")
    parser.add_argument("--compile", action="store_true", help="model.compile; ours only")
    return parser.parse_args()


def make_actor(path: Path, size: str, seed: int) -> None:
    """Write a Qwen2-architecture actor with seeded random weights and a character tokenizer."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    shape = ACTORS[size]
    words = itertools.islice(itertools.chain(specials, CHARS, _words()), shape.vocabulary)
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
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
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _words() -> Iterator[str]:
    """Yield what a large vocabulary holds besides characters: in answers, never in prompts."""
    for length in itertools.count(2):
        yield from map("".join, itertools.product(CHARS, repeat=length))


def new_tokens(workload: str) -> int:
    """Return the most tokens of an answer; in all workloads but the mixed one every answer has as many."""
    return MIXED_NEW if workload == "mixed" else FIXED[workload][1]


def prompts(count: int, seed: int, workload: str) -> list[str]:
    """Return ``count`` prompts; in the mixed workload the kinds take turns."""
    rng = random.Random(seed)
    if workload != "mixed":
        return ["".join(rng.choices(CHARS, k=FIXED[workload][0])) for _ in range(count)]
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(count)]
    return [k + "".join(rng.choices(CHARS, k=KINDS[k] - 1)) for k in kinds]


def reward(prompt: str, text: str, workload: str) -> float:
    """Return the reward. Mixed: ``b`` is rare (most groups have no variance), ``c`` always varies."""
    share = sum(c.isdigit() for c in text) / max(1, len(text))
    if workload != "mixed" or prompt[0] == "c":
        return share
    return float({"a": share > 0.2, "b": text.startswith("a"), "d": "e" in text}[prompt[0]])


def answer(numbers: dict[str, float]) -> None:
    """Print what one step measured, and the most memory this process has had so far."""
    import torch

    peaks = {"peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    if torch.cuda.is_available():
        peaks["peak_cuda_mib"] = torch.cuda.max_memory_allocated() / 2**20
        torch.cuda.empty_cache()  # the other sides' steps need the device's memory
    sys.stdout.write(json.dumps({**numbers, **{k: v for k, v in peaks.items() if k not in numbers}}) + "\n")
    sys.stdout.flush()


def now() -> float:
    """Return the seconds of the clock when all that the device was given is done."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def await_turn() -> bool:
    """Block until the driver asks for a step; False when it asks for no more."""
    return bool(sys.stdin.readline().strip())


def serve(step: Callable[[int], dict[str, float]]) -> None:
    """Answer the driver's requests."""
    number = 0
    while await_turn():
        answer(step(number))
        number += 1
