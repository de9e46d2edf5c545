"""What a layer asks of its attention, for implementations that can do only the ordinary kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["check_options"]

_HARMLESS = {"position_ids", "use_cache", "cache_position", "is_causal"}
"""Arguments of ``transformers``' attention interface that change nothing for causal attention."""


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Refuse ``options`` of the attention interface that would change the result.

    Raises:
        NotImplementedError: the layer wants something more: a window, capped scores, sinks, dropout.
    """
    given = {name: one for name, one in options.items() if name not in _HARMLESS}
    strange = [name for name, one in given.items() if isinstance(one, Tensor) or one]
    if strange:
        raise NotImplementedError(f"attention with {', '.join(strange)} {where}")
