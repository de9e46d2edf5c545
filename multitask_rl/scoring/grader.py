"""A built plugin behind its checks: one typed result per rollout, whatever the plugin does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multitask_rl.contracts import PluginTraits
from multitask_rl.records import (
    NOT_APPLICABLE,
    Failure,
    FailureKind,
    NotApplicable,
    RewardResult,
    Rollout,
    Score,
    Verdict,
)
from multitask_rl.scoring.results import failure_of, to_result, to_verdict
from multitask_rl.scoring.shapes import UNDECLARED

__all__ = ["Grader", "Result", "decode", "encode"]

Result = RewardResult | Verdict


class Grader:
    """Calls one reward or constraint.

    Args:
        kind: ``reward`` or ``constraint``.
        plugin: the built plugin.
        source: its name in failures.
    """

    def __init__(self, kind: str, plugin: Any, source: str) -> None:
        self.source = source
        self.traits: PluginTraits = getattr(plugin, "traits", UNDECLARED)
        self.one_by_one = bool(getattr(plugin, "one_by_one", False))
        """The plugin looks at each response alone: nothing is gained by larger calls."""
        self.text_only = bool(getattr(plugin, "text_only", False))
        """It reads no token ids."""
        self.waits = bool(getattr(plugin, "is_async", False))
        """Its calls wait for others rather than compute."""
        self.independent = (
            self.traits.independent
            or self.traits.deterministic
            or self.one_by_one
            or bool(getattr(plugin, "independent", False))
        )
        """A result does not depend on the batch it was computed in."""
        self._plugin = plugin
        self._is_reward = kind == "reward"
        self._call = plugin.score if self._is_reward else plugin.judge

    def warm_up(self) -> None:
        """Run the plugin's own ``warm_up()`` if it has one (load a model, ping an endpoint)."""
        warm_up = getattr(self._plugin, "warm_up", None)
        if warm_up is not None:
            warm_up()

    def close(self) -> None:
        """Run the plugin's own ``close()`` if it has one."""
        close = getattr(self._plugin, "close", None)
        if close is not None:
            close()

    def grade(self, rollouts: Sequence[Rollout]) -> list[Result]:
        """Return one result per rollout, in order; never raises what the plugin raised."""
        if not self.traits.needs:
            return self._grade(rollouts)
        missing = [self._missing(rollout) for rollout in rollouts]
        graded = iter(self._grade([r for r, m in zip(rollouts, missing, strict=True) if m is None]))
        return [next(graded) if m is None else m for m in missing]

    def _grade(self, rollouts: Sequence[Rollout]) -> list[Result]:
        if not rollouts:
            return []
        try:
            raw = list(self._call(rollouts))
        except BaseException as error:  # noqa: BLE001 - the boundary where an error becomes data
            failure = failure_of(error, self.source)
            if len(rollouts) > 1 and failure.kind is not FailureKind.infra:
                if self.independent:  # one bad sample must not cost its batch mates their score
                    half = len(rollouts) // 2
                    return [*self._grade(rollouts[:half]), *self._grade(rollouts[half:])]
                message = f"{failure.message} (so its whole batch fails: independent=True is not declared)"
                failure = replace(failure, message=message)
            return [failure] * len(rollouts)
        if len(raw) != len(rollouts):
            message = f"returned {len(raw)} results for {len(rollouts)} rollouts"
            return [Failure(kind=FailureKind.grader, message=message, source=self.source)] * len(rollouts)
        if self._is_reward:
            return [to_result(value, self.traits, self.source) for value in raw]
        return [to_verdict(value, self.source) for value in raw]

    def _missing(self, rollout: Rollout) -> Failure | None:
        absent = [name for name in self.traits.needs if name not in rollout.row]
        if not absent:
            return None
        return Failure(
            kind=FailureKind.data,
            message=f"the row has no column {' and no '.join(map(repr, absent))} "
            f"(columns: {', '.join(map(str, rollout.row)) or 'none'})",
            source=self.source,
        )


def encode(result: Result) -> tuple[Any, ...]:
    """Return ``result`` as a tuple of plain values (a frozen slots dataclass pickles ten times slower)."""
    if isinstance(result, Score):
        return ("s", result.value, dict(result.components)) if result.components else ("s", result.value)
    if isinstance(result, NotApplicable):
        return ("n",)
    if isinstance(result, Verdict):
        return ("v", result.cost, result.violated, result.reason, result.applicable)
    return ("f", result.kind.value, result.message, result.source)


def decode(parts: tuple[Any, ...]) -> Result:
    """Return what ``encode`` was given."""
    tag = parts[0]
    if tag == "s":
        return Score(value=parts[1], components=parts[2]) if len(parts) > 2 else Score(value=parts[1])
    if tag == "n":
        return NOT_APPLICABLE
    if tag == "v":
        return Verdict(cost=parts[1], violated=parts[2], reason=parts[3], applicable=parts[4])
    return Failure(kind=FailureKind(parts[1]), message=parts[2], source=parts[3])
