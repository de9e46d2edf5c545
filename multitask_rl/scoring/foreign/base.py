"""What the adapters of other libraries' rewards share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import DataError, PluginError
from multitask_rl.plugins import REWARDS, locate
from multitask_rl.records import Rollout
from multitask_rl.scoring.results import failure_of
from multitask_rl.scoring.shapes import UNDECLARED, EventLoop

__all__ = ["ForeignReward", "awaited", "column"]


class ForeignReward:
    """What all of them share; the subclass that ``build_foreign`` makes carries the target."""

    traits: PluginTraits = UNDECLARED
    target: ClassVar[str] = ""
    """What follows the prefix."""
    where: ClassVar[str] = ""
    one_by_one = False
    independent = False
    is_function: ClassVar[bool] = False
    """Nothing but a function: building it loads no data or model."""

    def __init__(self) -> None:
        self._loop = EventLoop()

    def close(self) -> None:
        """Free the event loop."""
        self._loop.close()

    def _function(self) -> Callable[..., Any]:
        found = locate(self.target, REWARDS, self.where).value
        if not callable(found):
            raise PluginError(f"{self.where}: {self.target!r} is {found!r}, not a function")
        traits = getattr(found, "traits", None)
        if isinstance(traits, PluginTraits):
            self.traits = traits
        function: Callable[..., Any] = found
        return function

    def _each(self, one: Callable[[Rollout], Any], rollouts: Sequence[Rollout]) -> list[Any]:
        if len(rollouts) == 1:
            return [one(rollouts[0])]
        results: list[Any] = []
        for rollout in rollouts:
            try:
                results.append(one(rollout))
            except Exception as error:  # noqa: BLE001 - the boundary where a plugin's error becomes data
                results.append(failure_of(error, self.target))
        return results


def column(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first of the columns ``names`` that the row has.

    Raises:
        DataError: it has none of them.
    """
    for name in names:
        if name in row:
            return row[name]
    wanted = " or ".join(map(repr, names))
    raise DataError(f"the row has no column {wanted} (columns: {', '.join(map(str, row)) or 'none'})")


async def awaited(value: Any) -> Any:
    """Return what ``value`` gives; makes a coroutine of any awaitable."""
    return await value
