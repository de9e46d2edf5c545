"""What lossless speculation from a group's siblings could gain in sampling with a chat model.

    python benchmarks/speculation.py --rows extraction.jsonl math.jsonl --json results.json

Each row of a file has a ``prompt``. The model samples a group of responses to each prompt, in two epochs.
Then the responses are decoded again on paper. A draft is what followed the last tokens of a row when they
last stood in a sibling's tokens so far, or in the epoch before. A draft token is accepted if it is the token
that the row has there: with the row's own random numbers this keeps the distribution exactly. A pass costs
what the model's linear layers take for its tokens, measured here. Attention, the search for drafts and the
bookkeeping count as nothing: the gain is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import machine
from torch import nn
from transformers import AutoTokenizer

from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.models.actor import Actor, load_actor
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.hf import HFEngine

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens of the passes that are timed; others are interpolated."""
DRAFTS = (2, 4, 8)
"""Most tokens of a draft."""
SUFFIX = 2
"""Tokens of a row that must have stood before."""

Response = tuple[int, ...]


def sample(
    actor: Actor, prompts: Sequence[list[int]], group: int, tokens: int, epoch: int
) -> list[list[Response]]:
    """Return the responses of each prompt's group."""
    engine = HFEngine.build(actor, RolloutConfig(), seed=epoch, output_dir=Path(tempfile.mkdtemp()))
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.7)
    requests = [
        GenerationRequest(
            prompt_ids=ids,
            sampling=sampling,
            seeds=[(epoch * len(prompts) + i) * group + j for j in range(group)],
        )
        for i, ids in enumerate(prompts)
    ]
    return [[tuple(g.response_ids) for g in found] for found in engine.generate(requests)]


def pass_seconds(model: nn.Module) -> Callable[[int], float]:
    """Return the seconds of all linear layers for a number of tokens, by processor time."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    found = []
    with torch.no_grad():
        for size in SIZES:
            given = {width: torch.randn(size, width) for width in {layer.in_features for layer in layers}}
            times = []
            for _ in range(4):
                began = time.process_time()
                for layer in layers:
                    layer(given[layer.in_features])
                times.append(time.process_time() - began)
            found.append(min(times))
    return lambda tokens: float(np.interp(tokens, SIZES, found))


def draft(own: Response, others: Sequence[Response], most: int) -> Response:
    """Return at most ``most`` tokens that followed the last ``SUFFIX`` tokens of ``own`` in ``others``."""
    suffix = own[-SUFFIX:]
    if len(suffix) < SUFFIX:
        return ()
    for other in others:
        for place in range(len(other) - SUFFIX, -1, -1):
            if other[place : place + SUFFIX] == suffix and place + SUFFIX < len(other):
                return other[place + SUFFIX : place + SUFFIX + most]
    return ()


def decode(
    groups: Sequence[Sequence[Response]],
    before: Sequence[Sequence[Response]],
    most: int,
    cost: Callable[[int], float],
) -> tuple[float, float, float]:
    """Return seconds, and numbers of drafted and of accepted tokens, of decoding all groups in one batch."""
    done = [[0] * len(group) for group in groups]
    seconds = drafted = accepted = 0.0
    while True:
        tokens, steps = 0, []
        for number, group in enumerate(groups):
            for i, response in enumerate(group):
                own = response[: done[number][i]]
                if len(own) == len(response):
                    continue
                siblings = [r[: done[number][j]] for j, r in enumerate(group) if j != i]
                guess = draft(own, [own, *siblings, *before[number]], most) if most else ()
                right = 0
                for guessed, true in zip(guess, response[len(own) :], strict=False):
                    if guessed != true:
                        break
                    right += 1
                tokens += 1 + len(guess)
                drafted += len(guess)
                accepted += right
                steps.append((number, i, min(len(response), len(own) + right + 1)))
        if not steps:
            return seconds, drafted, accepted
        seconds += cost(tokens)
        for number, i, length in steps:
            done[number][i] = length


def main() -> None:
    """Sample, decode on paper, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="runs/smollm2/cache/SmolLM2-135M-Instruct", help="directory")
    parser.add_argument("--rows", nargs="+", type=Path, required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--prompts", type=int, default=8, help="of each file")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    actor = load_actor(ModelConfig(name_or_path=args.model, dtype="float32"), "cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    cost = pass_seconds(actor.model)
    result: dict[str, Any] = {
        "settings": {k: str(v) for k, v in vars(args).items() if k in ("prompts", "group", "new_tokens")},
        "milliseconds of a pass": {size: round(cost(size) * 1e3, 1) for size in SIZES},
        "files": {},
    }
    for file in args.rows:
        lines = file.read_text(encoding="utf-8").splitlines()[: args.prompts]
        ids = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True
            )["input_ids"]
            for line in lines
        ]
        epochs = [sample(actor, ids, args.group, args.new_tokens, epoch) for epoch in range(2)]
        lengths = [len(response) for group in epochs[1] for response in group]
        found: dict[str, Any] = {"tokens of a response": round(statistics.mean(lengths), 1)}
        for batch in sorted({1, len(ids)}):
            for name, known in (("siblings", [()] * len(ids)), ("siblings and epoch before", epochs[0])):
                for most in DRAFTS:
                    plain = drawn = spent = drafted = accepted = 0.0
                    for first in range(0, len(ids), batch):
                        groups, past = epochs[1][first : first + batch], known[first : first + batch]
                        plain += decode(groups, past, 0, cost)[0]
                        drawn, d, a = decode(groups, past, most, cost)
                        spent, drafted, accepted = spent + drawn, drafted + d, accepted + a
                    found[f"{batch * args.group} rows, {name}, drafts of {most}"] = {
                        "at most times as fast": round(plain / spent, 3),
                        "accepted": round(accepted / max(1.0, drafted), 3),
                        "tokens that came by drafts": round(accepted / sum(lengths), 3),
                    }
        result["files"][file.stem] = found
    text = json.dumps({**result, "machine": machine()}, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
