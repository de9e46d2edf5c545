"""The observed range of a task's rewards, used where none is declared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from multitask_rl.records import NUM_EXTREMES

__all__ = ["ShownRange"]


@dataclass(kw_only=True, slots=True)
class ShownRange:
    """Range whose ends ``NUM_EXTREMES`` groups have reached, so that one outlier does not set the scale."""

    lowest: list[float] = field(default_factory=list)
    """The ``NUM_EXTREMES`` smallest of the groups' lowest rewards, ascending."""
    highest: list[float] = field(default_factory=list)
    """The ``NUM_EXTREMES`` largest of the groups' highest rewards, descending."""

    def widen(self, lowest: Iterable[float], highest: Iterable[float]) -> None:
        """Add the lowest and the highest reward of each further group."""
        self.lowest = sorted([*self.lowest, *lowest])[:NUM_EXTREMES]
        self.highest = sorted([*self.highest, *highest], reverse=True)[:NUM_EXTREMES]

    @property
    def ends(self) -> tuple[float, float] | None:
        """Return ``low < high``; None until enough groups have shown different rewards."""
        if self.lowest and self.lowest[-1] < self.highest[-1]:
            return self.lowest[-1], self.highest[-1]
        return None
