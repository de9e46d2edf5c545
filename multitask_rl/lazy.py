"""Cheap imports: public names of a package that load on first use (PEP 562), and heavy libraries."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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


@contextmanager
def without_collector() -> Iterator[None]:
    """Turn Python's garbage collector off inside: imports and long records leave no garbage to look for."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_generation() -> None:
    """Import ``transformers``' generation, which every causal model needs, without scikit-learn.

    Generation uses scikit-learn, where it is installed, for one option of assisted decoding only, and its
    import takes a quarter of the time in which a process is ready to compute.
    """
    from transformers import utils

    is_installed = utils.is_sklearn_available
    utils.is_sklearn_available = lambda: False
    try:
        with suppress(ImportError):  # another version may have another place for it
            import_module("transformers.generation.candidate_generator")
    finally:
        utils.is_sklearn_available = is_installed
