"""Isolation levels: ``namespaces`` > ``bwrap`` > ``landlock``; a weaker level needs explicit permission."""

from __future__ import annotations

from multitask_rl.errors import SandboxError

__all__ = ["LEVELS", "acceptable_levels"]

LEVELS = ("namespaces", "bwrap", "landlock")
"""Strongest first."""


def acceptable_levels(level: str | None, minimum_level: str) -> list[str]:
    """Return the levels that may be used, strongest first.

    Args:
        level: the one level to use; None = the strongest that works.
        minimum_level: the weakest that will do when ``level`` is None.

    Raises:
        SandboxError: an unknown level.
    """
    for name in (level, minimum_level):
        if name is not None and name not in LEVELS:
            raise SandboxError(
                f"unknown isolation level {name!r}; levels, strongest first: {', '.join(LEVELS)}"
            )
    return [level] if level is not None else list(LEVELS[: LEVELS.index(minimum_level) + 1])
