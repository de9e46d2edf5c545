"""Algorithm ``dr_grpo``."""

from __future__ import annotations

from dataclasses import dataclass

from multitask_rl.algorithms.grpo import GRPO, GRPOConfig


class DrGRPO(GRPO):
    """Dr.GRPO: GRPO without its two biases.

    Advantages ``r - mean r`` of the group, summed over tokens and divided by a constant.

    GRPO's division by the group's deviation weighs prompts by difficulty; its division by the response's
    length favours short right and long wrong answers. Dr.GRPO omits both. The constant is samples times
    ``max_new_tokens``: a task with short answers and a large limit takes small steps beside token-mean tasks
    (raise its ``loss_weight``).

    Source: "Understanding R1-Zero-Like Training" (arXiv:2503.20783) sec. 3.2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GRPOConfig):
        """Settings of ``DrGRPO`` and its variants ``RLOO`` and ``OPO``."""

        clip_high: float = 0.2
        normalisation: str = "none"
        aggregation: str = "constant"
