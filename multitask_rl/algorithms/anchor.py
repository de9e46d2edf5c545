"""Algorithm ``anchor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from multitask_rl.algorithms.base import Algorithm, AlgorithmConfig
from multitask_rl.config.schema.ranges import Count


class Anchor(Algorithm):
    """An anchor: prompts or texts that no task trains on, evaluated to see what training changes beside them.

    Trains nothing: ``step/texts.py`` measures ``loss`` and ``kl`` of the task in every evaluation.

    Forgetting follows the KL from the initial to the present policy: Shenfeld et al., "RL's Razor"
    (arXiv:2509.04259).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AlgorithmConfig):
        """Settings of ``Anchor``; the others have no effect."""

        kl: bool = True
        """Whether the KL to the initial weights is measured; the run then keeps a copy of them."""
        max_tokens: Count = 512
        """Longest given text; the rest of a longer one is left out."""

    trains: ClassVar[bool] = False
    config: Config


def measures_kl(algorithm: Algorithm) -> bool:
    """Whether ``algorithm`` is an anchor that needs the initial weights."""
    return isinstance(algorithm, Anchor) and algorithm.config.kl
