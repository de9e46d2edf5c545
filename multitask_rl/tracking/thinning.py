"""Which points of a long curve are kept where every point costs space."""

from __future__ import annotations

__all__ = ["Thinning"]

_RESOLUTION = 100
"""Points of a metric lie at least this part of the steps made so far apart."""


class Thinning:
    """Keeps a point if no other is too near before it; it depends on the points before alone."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def keeps(self, name: str, step: int) -> bool:
        """Whether the point of ``name`` at ``step`` is kept; steps before the last one count as repeated.

        >>> thinning = Thinning()
        >>> sum(thinning.keeps("loss", step) for step in range(1, 100_001))
        789
        """
        last = self._last.get(name)
        if last is not None and last < step < last + step // _RESOLUTION:
            return False
        self._last[name] = step
        return True
