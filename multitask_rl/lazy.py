"""Public names of a package that load on first use (PEP 562), so that importing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: dict[str, Any], homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Any]:
    """Return ``__getattr__`` and ``__dir__`` for ``globals()``; ``homes``: public name -> its module."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        package[name] = value = getattr(import_module(homes[name]), name)
        return value

    return load, lambda: sorted({*package, *homes})
