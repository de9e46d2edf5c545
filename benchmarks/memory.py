"""Peak memory of learning from one long sample, with and without what keeps it small.

    python benchmarks/memory.py --json benchmarks/results/memory.json

One forward and backward over a sample of as many response tokens, by ``training/forward.py``: with all logits
at once, in slices of ``SLICE_CELLS`` of them, and with layers computed again in the backward pass besides
(``model.gradient_checkpointing``). Counted is what the process has more than before, at its highest, from
``/proc`` (Linux); freed tensors are made to go back to the system at once. Weights and their gradients are
there before and are not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from speed import machine
from transformers import Qwen2Config, Qwen2ForCausalLM

from multitask_rl.models.actor import checkpoint_layers
from multitask_rl.records import SamplingParams
from multitask_rl.training import forward
from multitask_rl.training.microbatch import build_microbatches

ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"
MODES = {
    "all logits at once": (2**62, 2**62, False),
    "slices": (forward.SLICE_CELLS, forward.BLOCK_CELLS, False),
    "slices and gradient checkpointing": (forward.SLICE_CELLS, forward.BLOCK_CELLS, True),
}
"""Name -> logits that exist at once, those that an operation reads at once, layers computed again."""


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    if ALLOCATOR not in os.environ:  # read by the C library when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, ALLOCATOR: "262144"})
    torch.set_num_threads(args.threads)
    model = build_model(args)
    learn(model, min(args.tokens))  # libraries and gradients take their own share once
    peaks: dict[str, dict[str, float]] = {}
    for name, (cells, block, is_checkpointed) in MODES.items():
        forward.SLICE_CELLS, forward.BLOCK_CELLS = cells, block
        if is_checkpointed:
            checkpoint_layers(model)
            model.train()
        peaks[name] = {str(n): peak_mib(model, n) for n in sorted(args.tokens)}
        sys.stderr.write(f"{name}: {json.dumps(peaks[name])}\n")
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    result = {"settings": settings, "peaks_mib": peaks, "machine": machine()}
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)


def build_model(args: argparse.Namespace) -> Qwen2ForCausalLM:
    """Return a model with random weights and a context for the longest sample."""
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=args.vocabulary,
            hidden_size=args.width,
            intermediate_size=4 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max(args.tokens) + 1,
            tie_word_embeddings=True,
        )
    )


def learn(model: Any, tokens: int) -> None:
    """Compute the log-probabilities of a sample of ``tokens`` response tokens and their gradient."""
    response = [(7 * i) % model.config.vocab_size for i in range(tokens)]
    (batch,) = build_microbatches([[1]], [response], max_tokens=tokens + 1, layout="bucketed", pad_token_id=0)
    out = forward.forward_tokens(model, batch, [SamplingParams()])
    torch.autograd.backward(out.logprobs.sum())


def peak_mib(model: Any, tokens: int) -> float:
    """Return the MiB that ``learn`` takes at its highest."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest is now what is
    before = _highest()
    learn(model, tokens)
    return round((_highest() - before) / 1024, 1)


def _highest() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
