"""A key-value cache that is written in place and loses rows by moving one row into the hole.

``transformers``' ``DynamicCache`` copies all keys and values at every token (``torch.cat``) and once more
when a row leaves; at small batches that costs more than the model. Here a layer allocates room for the whole
generation once, a token is one slice assignment, and attention reads a view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

__all__ = ["make_cache", "select_rows"]


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [B, heads, S, head width] as views into buffers that hold ``capacity`` tokens."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; return all there are."""
        if not self.is_initialized:
            # the prompt: kept as it is until ``select`` knows how many rows share it
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        rows, _, old, _ = self.keys.shape
        new = old + key_states.shape[-2]
        if self._key_buffer is None or self._value_buffer is None:
            self.select(torch.arange(rows, device=self.device))
        if self._key_buffer is None or self._value_buffer is None:
            raise AssertionError("select allocates")
        self._key_buffer[:rows, :, old:new] = key_states
        self._value_buffer[:rows, :, old:new] = value_states
        self.keys = self._key_buffer[:rows, :, :new]
        self.values = self._value_buffer[:rows, :, :new]
        return self.keys, self.values

    def select(self, rows: Tensor) -> None:
        """Make the rows ``rows`` (repeats allowed) the batch, with room to grow."""
        self._key_buffer = self._grown(self.keys, rows)
        self._value_buffer = self._grown(self.values, rows)
        width = self.keys.shape[-2]
        self.keys = self._key_buffer[:, :, :width]
        self.values = self._value_buffer[:, :, :width]

    def batch_select_indices(self, indices: Tensor) -> None:
        """As ``transformers`` calls ``select``."""
        self.select(indices)

    def move(self, sources: Tensor, holes: Tensor, remaining: int) -> None:
        """Copy the rows ``sources`` over ``holes`` and keep the first ``remaining``."""
        if len(holes):
            self.keys[holes] = self.keys[sources]
            self.values[holes] = self.values[sources]
        self.keys, self.values = self.keys[:remaining], self.values[:remaining]

    def _grown(self, states: Tensor, rows: Tensor) -> Tensor:
        _, heads, width, size = states.shape
        buffer = states.new_empty(len(rows), heads, max(self._capacity, width + 1), size)
        buffer[:, :, :width] = states[rows]
        return buffer


def make_cache(model: Any, capacity: int) -> Cache:
    """Return an empty cache for ``model`` with room for ``capacity`` tokens a row.

    Layers that keep something else than all keys and values (attention windows, recurrent states) stay as
    ``transformers`` makes them.
    """
    cache = DynamicCache(config=model.config)
    layers = getattr(cache, "layers", None)
    if layers and all(type(layer) is DynamicLayer for layer in layers):
        cache.layers = [PreallocatedLayer(capacity) for _ in layers]
    return cache


def select_rows(cache: Cache, kept: Tensor, total: int) -> Tensor:
    """Drop all rows of a batch of ``total`` but ``kept`` (ascending).

    Returns:
        The rows in their new order: preallocated layers fill holes from the end instead of copying all.
    """
    if not all(isinstance(layer, PreallocatedLayer) for layer in cache.layers):
        cache.batch_select_indices(kept)
        return kept
    remaining = len(kept)
    order = torch.arange(total, device=kept.device)
    is_kept = torch.zeros(total, dtype=torch.bool, device=kept.device)
    is_kept[kept] = True
    holes = (~is_kept[:remaining]).nonzero().squeeze(-1)
    sources = is_kept[remaining:].nonzero().squeeze(-1) + remaining
    order[holes] = sources
    for layer in cache.layers:
        layer.move(sources, holes, remaining)
    return order[:remaining]
