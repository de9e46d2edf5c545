"""Interfaces for authors of rewards, constraints and tasks.

A reward may also be a function of one response, a batch function or an async function; ``scoring.adapt``
turns each into a ``Reward``. This module imports no heavy library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from multitask_rl.records import Failure, RewardResult, Rollout, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginTraits:
    """Declared properties of a plugin; the reward pool enforces them."""

    low: float = float("-inf")
    """Smallest allowed value; a smaller one is a ``grader`` failure."""
    high: float = float("inf")
    """Largest allowed value; a larger one is a ``grader`` failure."""
    deterministic: bool = True
    """A rollout has the same result in every batch: results may be cached."""
    independent: bool = False
    """A rollout's result does not depend on its batch, so a call may be split or repeated in parts: if one
    rollout raises or hangs, the others keep their scores. True for every ``deterministic`` plugin and for
    functions of one response. Otherwise the batch fails as a whole."""
    needs: tuple[str, ...] = ()
    """Columns of the row that it reads; a missing column is a ``data`` failure."""
    isolate: bool = True
    """True: run in a killable worker process. False: run in the trainer's process (models on a device). If it
    depends on the configuration, the class also has a class method ``isolates(config)``."""
    timeout_s: float = 30.0
    """Longest delay of a step by one response, in seconds. The check of a response, all tries together, is
    ended after 90 % of it; a batch gets this time per rollout."""
    batch_size: int = 64
    """Most rollouts in one call."""
    higher_is_better: bool = True
    """Direction of the value."""
    whole_episodes: bool = False
    """A constraint that judges an episode of many turns as a whole; others judge it answer by answer."""
    counterpart: str = ""
    """Name of the plugin that measures the side effect of this one (``over_refusal`` for a refusal
    constraint). A task with this plugin but without its counterpart gets a warning. Empty = none."""


@runtime_checkable
class Reward(Protocol):
    """Scores rollouts of one task.

    A class may nest a dataclass ``Config``, whose fields are its keys in the tasks file:
    ``RewardClass(RewardClass.Config(**config))``.
    """

    traits: ClassVar[PluginTraits]

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult | float | None]:
        """Return one result per rollout, in order. ``None`` means not applicable."""


@runtime_checkable
class Constraint(Protocol):
    """Judges whether rollouts respect a limit. Built from its ``Config`` like a reward.

    Optional method ``explain(rollouts, verdicts) -> list[str]``: a text per violation, to be recorded behind
    the verdict's reason ("" = none). A run calls it after a step, for the violations that it stores, and only
    if the class declares ``isolate=False``: an isolated plugin says all in ``judge``. Another thread may call
    ``judge`` meanwhile. If ``explain`` raises or passes ``timeout_s``, only the texts are missing.
    """

    traits: ClassVar[PluginTraits]

    def judge(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict | Failure | float | None]:
        """Return one verdict per rollout, in order; a bare number is a cost in [0, 1].

        ``None`` means that the constraint does not apply to the sample. With ``stream_every`` some rollouts
        are partial responses (``finish_reason`` is ``flagged``).
        """


@runtime_checkable
class Task(Protocol):
    """Data and default settings of a task, used as ``dataset: plugin:<name>``. Built like a reward.

    Import and construction must be cheap: both happen when the tasks file is read.
    """

    def settings(self) -> Mapping[str, Any]:
        """Return defaults for keys of the tasks file (``prompt``, ``rewards``...)."""

    def rows(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of ``split`` (``train``, ``test``, ...); empty if it has no such split."""
