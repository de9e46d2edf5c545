"""The range that rewards have shown, where none is declared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from multitask_rl.records import NUM_EXTREMES

__all__ = ["ShownRange"]


@dataclass(kw_only=True, slots=True)
class ShownRange:
    """Ends that several groups have reached, so that an outlier or two do not set the scale; all is state."""

    lowest: list[float] = field(default_factory=list)
    """The smallest rewards of a group, of ``NUM_EXTREMES`` groups, ascending."""
    highest: list[float] = field(default_factory=list)
    """The largest, descending."""

    def widen(self, lowest: Iterable[float], highest: Iterable[float]) -> None:
        """Add the smallest and the largest rewards of further groups."""
        self.lowest = sorted([*self.lowest, *lowest])[:NUM_EXTREMES]
        self.highest = sorted([*self.highest, *highest], reverse=True)[:NUM_EXTREMES]

    @property
    def ends(self) -> tuple[float, float] | None:
        """Return ``low < high``; None before several groups have shown two rewards."""
        if self.lowest and self.lowest[-1] < self.highest[-1]:
            return self.lowest[-1], self.highest[-1]
        return None
