"""What the run's configuration asks of a value; a number that is not finite is in no range."""

from __future__ import annotations

import math

from multitask_rl.errors import ConfigError

__all__ = ["at_least", "one_of", "within"]


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Refuse a choice that there is not.

    Raises:
        ConfigError: names the choices.
    """
    if value not in allowed:
        raise ConfigError(f"{key} is {value!r}; allowed: {', '.join(allowed)}")


def at_least(key: str, value: float, low: float, *, strict: bool = False) -> None:
    """Refuse a number below ``low``; with ``strict`` also ``low`` itself.

    Raises:
        ConfigError: names the bound.
    """
    if not math.isfinite(value) or not (value > low if strict else value >= low):
        raise ConfigError(f"{key} must be {'>' if strict else '>='} {low:g}, got {value!r}")


def within(key: str, value: float, interval: str) -> None:
    """Refuse a number outside ``interval``, which is written as ``[0, 1)``.

    Raises:
        ConfigError: names the interval.
    """
    low, high = map(float, interval[1:-1].split(","))
    is_inside = low <= value <= high and (value > low or interval[0] == "[")
    if not is_inside or (value == high and interval[-1] == ")"):
        raise ConfigError(f"{key} must be in {interval}, got {value!r}")
