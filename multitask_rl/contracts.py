"""What authors implement: rewards and constraints.

A reward may also be a plain function of one response, a batch function or an async function;
``scoring.adapt`` turns each into this shape. Everything here imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from multitask_rl.records import Failure, RewardResult, Rollout, Verdict

__all__ = ["Constraint", "PluginTraits", "Reward", "Task"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginTraits:
    """What a plugin declares of itself; the pool holds it to it."""

    low: float = float("-inf")
    """Smallest value it may return; below is a ``grader`` failure."""
    high: float = float("inf")
    """Largest value it may return."""
    deterministic: bool = True
    """Same rollout, same result, whatever its batch: may be cached."""
    independent: bool = False
    """A rollout's result does not depend on its batch, so a call may be cut or repeated in parts: where one
    raises or hangs, the others keep their scores. Holds of all that is ``deterministic`` and of functions of
    one response; another batch fails as a whole."""
    needs: tuple[str, ...] = ()
    """Columns of the row it reads; a missing one is a ``data`` failure."""
    isolate: bool = True
    """Run in a killable worker process. False: in the trainer's process (models on a device). A class where
    that depends on its configuration has a class method ``isolates(config)`` besides (of the keys given)."""
    timeout_s: float = 30.0
    """Seconds by which one response may delay its step. Its check is ended after nine tenths of them, all its
    tries together; a batch gets them once per rollout."""
    batch_size: int = 64
    """How many rollouts one call receives at most."""
    higher_is_better: bool = True
    """Direction of the value."""
    device: str = "cpu"
    """Where it computes: ``cpu``, ``cuda``, or ``any``."""
    counterpart: str = ""
    """Name of the plugin that shows what obeying this one too eagerly costs (``over_refusal``); a task that
    has this one alone is warned about. Empty = needs none."""


@runtime_checkable
class Reward(Protocol):
    """Scores rollouts of one task.

    A class may nest a ``Config`` dataclass: its fields are the keys allowed in the tasks file;
    the instance is built as ``RewardClass(RewardClass.Config(**config))``.
    """

    traits: ClassVar[PluginTraits]

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult | float | None]:
        """Return one result per rollout, in order. ``None`` means not applicable."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """Judges whether rollouts respect a limit. Built from its ``Config`` like a reward."""

    traits: ClassVar[PluginTraits]

    def judge(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict | Failure | float | None]:
        """Return one verdict per rollout, in order; a bare number is a cost in [0, 1].

        ``None`` means that the constraint does not concern the sample. With ``stream_every`` the rollouts are
        partial responses too (``finish_reason`` is ``flagged``).
        """
        ...


@runtime_checkable
class Task(Protocol):
    """Data of a task and what goes with it: ``dataset: plugin:<name>``. Built like a reward.

    Importing and building it must be cheap: both happen when the tasks file is read.
    """

    def settings(self) -> Mapping[str, Any]:
        """Return keys of the tasks file (``prompt``, ``rewards``...) that hold where the file gives none."""
        ...

    def rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of ``split`` (``train``, ``test``, ...); empty where it has none."""
        ...
