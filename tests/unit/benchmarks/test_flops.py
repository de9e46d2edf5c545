"""The operations that shares of a device's peak are counted with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "sides")]

from flops import peak_flops, step_flops  # noqa: E402
from workload import ACTORS, FIXED, KINDS, MIXED_NEW, POSITIONS, Shape  # noqa: E402


def test_the_operations_of_a_step_by_hand() -> None:
    shape = Shape(width=2, layers=3, heads=1, key_value_heads=1, inner=4, vocabulary=5)
    body, head = 3 * (2 * 4 + 2 * 4 + 2 + 4 + 3 * 2 * 4), 2 * 5
    assert (shape.body_parameters, shape.head_parameters) == (body, head)
    # one prompt of 2 tokens, 2 answers of 3: 2 + 6 tokens in the layers, 6 in the head
    # attended to: 1 + 2 by the prompt, 3 + 4 + 5 by each answer; 4 * width per layer and token attended to
    forward = 2 * (8 * body + 6 * head) + 4 * 2 * 3 * (3 + 2 * 12)
    assert step_flops(shape, 1, 2, 2, 3) == (forward, 3 * forward)


def test_the_shape_of_the_large_actor_is_that_of_the_model() -> None:
    shape = ACTORS["0.5B"]
    with torch.device("meta"):
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=shape.vocabulary,
                hidden_size=shape.width,
                intermediate_size=shape.inner,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.key_value_heads,
                tie_word_embeddings=True,
            )
        )
    counted = sum(p.numel() for name, p in model.named_parameters() if "norm" not in name)
    assert shape.body_parameters + shape.head_parameters == counted
    assert counted == pytest.approx(494e6, rel=0.001)


def test_the_peak_is_that_given_or_that_of_the_data_sheet() -> None:
    assert peak_flops(None, "NVIDIA H100 80GB HBM3, 550.54, 81559 MiB") == 989e12
    assert peak_flops(None, "NVIDIA H100 PCIe, 550.54, 81559 MiB") == 756e12
    assert peak_flops(2.0, "NVIDIA H100 80GB HBM3") == 2e12
    assert peak_flops(None, "NVIDIA T4") is None
    assert peak_flops(None, None) is None


def test_every_workload_fits_into_the_actors_positions() -> None:
    lengths = [*FIXED.values(), (max(KINDS.values()), MIXED_NEW)]
    assert all(prompt + new < POSITIONS for prompt, new in lengths)
