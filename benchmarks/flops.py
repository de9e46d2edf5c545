"""Floating-point operations that a step needs at least, and what devices can do.

Counted as in PaLM (arXiv:2204.02311, appendix B): 2 per parameter and token for a forward, 4 more for a
backward, and attention's ``4 * width`` per layer, token and token attended to, here only those before it.
A group's prompt counts once, the output head on answers only, groups without variance like all others: the
same number for every side, so that a side is not credited for work that another one avoids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workload import Shape

PEAKS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L4": 121}
"""Part of a device's name -> dense bfloat16 TFLOP/s of its data sheet; the first that fits."""


def step_flops(
    shape: Shape, prompts: int, group: int, prompt_tokens: float, new_tokens: float
) -> tuple[float, float]:
    """Return the operations of sampling (a forward) and of learning (forward and backward) in one step.

    Args:
        shape: of the actor.
        prompts: of the step.
        group: rollouts per prompt.
        prompt_tokens: of a prompt, the mean.
        new_tokens: of a rollout, the mean.
    """
    answers = prompts * group * new_tokens
    products = shape.body_parameters * (prompts * prompt_tokens + answers) + shape.head_parameters * answers
    attended = prompts * prompt_tokens * (prompt_tokens + 1) / 2 + answers * (
        prompt_tokens + (new_tokens + 1) / 2
    )
    forward = 2.0 * products + 4.0 * shape.layers * shape.width * attended
    return forward, 3.0 * forward


def peak_flops(given_tflops: float | None, device: str | None) -> float | None:
    """Return the device's peak in FLOP/s: as given, else of the data sheet; None if it is not known."""
    if given_tflops is None:
        known = (peak for name, peak in PEAKS.items() if device and name in device)
        given_tflops = next(known, None)
    return None if given_tflops is None else given_tflops * 1e12
