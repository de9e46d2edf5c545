"""Cheap imports: public names of a package that load on first use (PEP 562), and heavy libraries."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def lazy_names(package: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Any]:
    """Return ``__getattr__`` and ``__dir__`` for ``globals()``; ``homes``: public name -> its module."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        with without_collector():
            package[name] = value = getattr(import_module(homes[name]), name)
        return value

    return load, lambda: sorted({*package, *homes})


def import_transformers() -> None:
    """Import what generates in transformers, without scikit-learn: a fifth of the time.

    transformers loads it with SciPy and pandas for one function, by which assisted decoding sets its
    threshold. Here that function loads it when called; nothing else changes.
    """
    if "sklearn" in sys.modules or "transformers.generation.candidate_generator" in sys.modules:
        return
    from transformers.utils import is_sklearn_available

    sys.modules["sklearn"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        is_sklearn_available.cache_clear()
        from transformers.generation import candidate_generator
    finally:
        del sys.modules["sklearn"]
        is_sklearn_available.cache_clear()

    def roc_curve(*given: Any, **named: Any) -> Any:
        return import_module("sklearn.metrics").roc_curve(*given, **named)

    candidate_generator.roc_curve = roc_curve


@contextmanager
def without_collector() -> Iterator[None]:
    """Import heavy libraries inside: nothing of them is garbage, and collecting takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
