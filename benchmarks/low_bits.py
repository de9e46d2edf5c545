"""What weights of fewer bits would gain and cost when sampling from a pretrained chat model on a CPU.

    python benchmarks/low_bits.py --model runs/smollm2/cache/SmolLM2-135M-Instruct --json results.json

*Gain*: the rate of the products of a decode step, by rows: float32, bfloat16, and int8 (weights with a scale
per output channel, inputs with a scale per row). *Cost*: the mean KL(sampled distribution, actor's) per token
over the answers below, at temperature 0.7. ``smoothed`` moves the range of input channels into the weights
(SmoothQuant, arXiv:2211.10438, alpha 0.6), measured on other texts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speed import machine
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

ANSWERS = (
    "Rain falls softly on the roof of the old lighthouse, and the keeper writes in his diary.",
    "The sea is salty because rivers carry minerals from rocks. Over time, water evaporates.",
    '{"name": "Anna", "age": 34}',
    "I'm sorry, but I can't help with that.",
)
OTHER = ("Paris is the capital of France.", "3 + 5 = 8.", "Yes, I can do that. First, take a bowl.")
TEMPERATURE, ZERO = 0.7, 128
Convert = Callable[[nn.Linear], Callable[[Tensor], Tensor]]


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers in [-127, 127] and the scale of each row."""
    scales = values.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (values / scales).round(), scales


def rounded(values: Tensor) -> Tensor:
    """Return ``values`` as int8 with a scale per row would hold them."""
    whole, scales = quantise(values)
    return whole * scales


def int8(linear: nn.Linear, width: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """Return the product in int8; ``width``: largest input of each channel, for smoothing."""
    weight = linear.weight.detach()
    scale = torch.ones(weight.shape[1])
    if width is not None:
        scale = width.clamp(min=1e-5) ** 0.6 / weight.abs().amax(0).clamp(min=1e-5) ** 0.4
    kept = rounded(weight * scale)
    return lambda x: nn.functional.linear(rounded(x / scale), kept)


def bfloat16(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return the product in bfloat16."""
    weight = linear.weight.detach().bfloat16()
    return lambda x: nn.functional.linear(x.bfloat16(), weight).float()


def divergence(model: Any, texts: list[Tensor], parts: dict[str, nn.Linear], convert: Convert) -> float:
    """Return the mean KL per token of the model with ``parts`` converted against the model as it is."""
    exact = logprobs(model, texts)
    for linear in parts.values():
        setattr(linear, "forward", convert(linear))  # noqa: B010 - mypy refuses the assignment
    found = logprobs(model, texts)
    for linear in parts.values():
        del linear.forward
    return float((found.exp() * (found - exact)).sum(-1).mean())


@torch.no_grad()
def logprobs(model: Any, texts: list[Tensor]) -> Tensor:
    """Return [tokens, vocabulary]."""
    return torch.cat([(model(ids).logits[0] / TEMPERATURE).log_softmax(-1) for ids in texts])


def rates(rows: int, out: int, inner: int, seconds: float = 0.3) -> dict[str, float]:
    """Return GFLOP/s of a product [rows, inner] x [inner, out] by type, conversions of inputs included."""
    weight, x = torch.randn(out, inner) / inner**0.5, torch.randn(rows, inner)
    whole, scales = quantise(weight)
    half = weight.bfloat16()
    packed = torch.ops.onednn.qlinear_prepack(whole.to(torch.int8), None)
    zeros, flat = torch.zeros(out, dtype=torch.int64), scales.flatten()

    def product() -> Tensor:
        numbers, own = quantise(x)
        result: Tensor = torch.ops.onednn.qlinear_pointwise(
            *((numbers + ZERO).to(torch.uint8), 1.0, ZERO, packed, flat, zeros, None),
            *(1.0, 0, torch.float32, "none", [], ""),
        )
        return result.mul_(own)

    calls: dict[str, Callable[[], Tensor]] = {
        "float32": lambda: nn.functional.linear(x, weight),
        "bfloat16": lambda: nn.functional.linear(x.bfloat16(), half).float(),
        "int8": product,
    }
    found: dict[str, float] = {}
    with torch.inference_mode():
        for name, call in calls.items():
            call()
            began, number = time.process_time(), 0
            while time.process_time() - began < seconds:
                call()
                number += 1
            spent = (time.process_time() - began) / number
            found[name] = round(2e-9 * rows * out * inner / spent)
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="runs/smollm2/cache/SmolLM2-135M-Instruct", help="directory")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def tokens(answers: tuple[str, ...]) -> list[Tensor]:
        chats = [
            [{"role": "user", "content": "Say something."}, {"role": "assistant", "content": text}]
            for text in answers
        ]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        return [tokenizer(t, add_special_tokens=False, return_tensors="pt").input_ids for t in texts]

    texts = tokens(ANSWERS)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    widths: dict[nn.Module, Tensor] = {}

    def watch(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        most = given[0].abs().flatten(0, -2).amax(0)
        widths[module] = torch.maximum(widths.get(module, most), most)

    hooks = [m.register_forward_pre_hook(watch) for m in linears.values()]
    logprobs(model, tokens(OTHER))
    for hook in hooks:
        hook.remove()
    robust = {n: m for n, m in linears.items() if not n.endswith(("v_proj", "down_proj", "lm_head"))}

    def smoothed(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
        return int8(linear, widths[linear])

    cells = {
        "bfloat16": (linears, bfloat16),
        "int8": (linears, int8),
        "int8, smoothed": (linears, smoothed),
        "int8, smoothed, without v_proj, down_proj and lm_head": (robust, smoothed),
    }
    result = {
        "model": Path(args.model).name,
        "kl_per_token": {n: round(divergence(model, texts, *cell), 5) for n, cell in cells.items()},
        "gflops": {
            f"{rows} rows": {
                f"{inner} x {out}": rates(rows, out, inner)
                for inner, out in {(m.in_features, m.out_features) for m in linears.values()}
            }
            for rows in args.rows
        },
        "machine": machine(),
    }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
