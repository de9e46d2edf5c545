"""How strong the isolation is: ``namespaces`` > ``bwrap`` > ``landlock``; never weaker without being told."""

from __future__ import annotations

from multitask_rl.errors import SandboxError

__all__ = ["LEVELS", "choose_level"]

LEVELS = ("namespaces", "bwrap", "landlock")
"""Strongest first."""


def choose_level(level: str | None, minimum_level: str) -> str:
    """Return the level to use.

    Raises:
        SandboxError: an unknown level.
    """
    for name in (level, minimum_level):
        if name is not None and name not in LEVELS:
            raise SandboxError(
                f"unknown isolation level {name!r}; levels, strongest first: {', '.join(LEVELS)}"
            )
    return level or "namespaces"
