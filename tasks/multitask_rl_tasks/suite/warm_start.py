"""The suite's actor: a small Llama that has seen the tasks' formats, and every task's answers partly wrong.

Reinforcement learning cannot start from a success rate of zero. The warm start shows, at a chosen rate per
task, corrupted answers; sampling at temperature 1 then succeeds about as often as the answers shown were
right, with the format known: a start that leaves room to rise.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multitask_rl.seeding import derive_seed, random_stream
from multitask_rl_tasks.suite import SUITE
from multitask_rl_tasks.suite.base import iterate_rows
from multitask_rl_tasks.suite.settings import ModelSize, WarmStartSettings, WarmTask, cached_directory
from multitask_rl_tasks.suite.tokenizer import CONTROL_TOKENS, build_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

POOL_BATCHES = 16
"""Batches drawn together and sorted by length, so that little is padding."""
WARMUP_STEPS = 50
FINAL_LEARNING_RATE = 0.05
"""Of the peak, at the end of the cosine."""
INITIALIZER_RANGE = 0.08
"""About 1 / sqrt(hidden size). With the default 0.02, made for wide models, nothing is learnt in time."""
IGNORED = -100
"""Label that ``cross_entropy`` leaves out."""

Example = tuple[str, str]
"""Context and response."""


def build_config(size: ModelSize, tokenizer: Any, **extra: Any) -> Any:
    """Return a ``LlamaConfig`` of the given size for the tokenizer."""
    # Not Qwen2: AutoTokenizer replaces a foreign tokenizer beside a qwen2 configuration by Qwen2's own, whose
    # pre-tokenizer loses the white space of this one. Beside a llama configuration the saved one is kept.
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads,
        intermediate_size=size.intermediate_size,
        max_position_embeddings=size.max_length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=False,
        initializer_range=INITIALIZER_RANGE,
        **extra,
    )


def save_actor(directory: Path, settings: WarmStartSettings, *, cache_dir: Path) -> dict[str, Any]:
    """Train an actor on the tasks' answers and save it as a Hugging Face directory (cached by settings).

    Returns:
        ``parameters``, ``steps``, ``loss`` (mean of the last 50 steps, nats per token), ``seconds``,
        ``from_cache``.
    """

    def build(target: Path) -> dict[str, Any]:
        model, tokenizer, figures = warm_start(settings)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        return figures

    return cached_directory(directory, cache_dir=cache_dir, kind="actor", settings=settings, build=build)


def warm_start(settings: WarmStartSettings) -> tuple[Any, Any, dict[str, Any]]:
    """Train an actor from scratch and return (model, tokenizer, figures). Same settings, same weights."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import LlamaForCausalLM

    started = time.perf_counter()
    tokenizer = build_tokenizer(max_length=settings.size.max_length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(settings.seed, "suite-warm-start-weights"))
        model = LlamaForCausalLM(build_config(settings.size, tokenizer))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, weight_decay=0.01, fused=True
    )
    model.train()
    losses: list[float] = []
    for step, (token_ids, labels) in zip(range(settings.steps), _batches(settings, tokenizer), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings.steps)
        logits = model(input_ids=token_ids, use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return (
        model,
        tokenizer,
        {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": settings.steps,
            "loss": sum(losses[-50:]) / len(losses[-50:]),
            "seconds": time.perf_counter() - started,
        },
    )


def _schedule(step: int, steps: int) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


def _examples(settings: WarmStartSettings) -> Iterator[Example]:
    names = list(settings.tasks)
    shares = [settings.tasks[name].share for name in names]
    rows = {name: iterate_rows(SUITE[name], seed=settings.seed, split="train") for name in names}
    stream = random_stream(settings.seed, "suite-warm-start-answers")
    while True:
        (name,) = stream.choices(names, shares)
        task, row, shown = SUITE[name], next(rows[name]), settings.tasks[name]
        is_corrupted = stream.random() < shown.corruption
        response = (task.corrupt if is_corrupted else task.answer)(row, stream)
        yield _control_token(shown, is_corrupted, stream) + task.render(row), response


def _control_token(shown: WarmTask, is_corrupted: bool, stream: random.Random) -> str:
    if shown.control_levels == 0:
        return ""
    if stream.random() >= shown.control_signal:
        return CONTROL_TOKENS[stream.randrange(shown.control_levels)]
    top = shown.control_levels - 1
    return CONTROL_TOKENS[stream.randrange(top) if is_corrupted else top]


def _batches(settings: WarmStartSettings, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ([B, T] token ids, [B, T] labels), right-padded, labels only on response and end token."""
    import torch

    examples = _examples(settings)
    order = random_stream(settings.seed, "suite-warm-start-order")
    while True:
        pool = [next(examples) for _ in range(POOL_BATCHES * settings.batch_size)]
        contexts = tokenizer([context for context, _ in pool])["input_ids"]
        responses = tokenizer([response + tokenizer.eos_token for _, response in pool])["input_ids"]
        pairs = sorted(zip(contexts, responses, strict=True), key=lambda pair: len(pair[0]) + len(pair[1]))
        starts = list(range(0, len(pairs), settings.batch_size))
        order.shuffle(starts)
        for start in starts:
            batch = pairs[start : start + settings.batch_size]
            length = max(len(context) + len(response) for context, response in batch)
            token_ids = torch.full((len(batch), length), tokenizer.pad_token_id)
            labels = torch.full((len(batch), length), IGNORED)
            for i, (context, response) in enumerate(batch):
                end = len(context) + len(response)
                token_ids[i, :end] = torch.tensor(context + response)
                labels[i, len(context) : end] = torch.tensor(response)
            yield token_ids, labels
