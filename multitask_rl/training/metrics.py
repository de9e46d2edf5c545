"""Token-weighted means over micro-batches, per task."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["TokenMeans"]


class TokenMeans:
    """Collects per-token numbers and returns their means (and the maximum of ``mismatch``)."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._mismatch_max: dict[str, float] = {}
        self._padding = 0.0
        self._cells = 0

    def add(self, task: str, metrics: Mapping[str, Tensor]) -> None:
        """Add the [N] tensors of one micro-batch."""
        sums, counts = self._sums.setdefault(task, {}), self._counts.setdefault(task, {})
        for name, value in metrics.items():
            if value.numel():
                sums[name] = sums.get(name, 0.0) + float(value.sum())
                counts[name] = counts.get(name, 0) + value.numel()
        gap = metrics.get("mismatch")
        if gap is not None and gap.numel():
            self._mismatch_max[task] = max(self._mismatch_max.get(task, 0.0), float(gap.max()))

    def add_padding(self, share: float, cells: int) -> None:
        """Add the padding share of micro-batches of ``cells`` tokens."""
        self._padding += share * cells
        self._cells += cells

    def merge(self, other: TokenMeans) -> None:
        """Add what ``other`` collected, here or on another rank."""
        for task, theirs in other._sums.items():
            sums, counts = self._sums.setdefault(task, {}), self._counts.setdefault(task, {})
            for name, total in theirs.items():
                sums[name] = sums.get(name, 0.0) + total
                counts[name] = counts.get(name, 0) + other._counts[task][name]
        for task, value in other._mismatch_max.items():
            self._mismatch_max[task] = max(self._mismatch_max.get(task, 0.0), value)
        self._padding += other._padding
        self._cells += other._cells

    @property
    def padding(self) -> float:
        """Share of computed tokens that were padding."""
        return self._padding / self._cells if self._cells else 0.0

    def by_task(self) -> dict[str, dict[str, float]]:
        """Return the means."""
        result = {
            task: {name: total / self._counts[task][name] for name, total in sums.items()}
            for task, sums in self._sums.items()
        }
        for task, value in self._mismatch_max.items():
            result[task]["mismatch_max"] = value
        return result
