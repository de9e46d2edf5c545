"""A built plugin behind its checks: one typed result per rollout, whatever the plugin does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import MultitaskRLError, PluginError, described
from multitask_rl.records import Failure, FailureKind, Rollout, Verdict
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.results import Result, failed, failure_of, no_column, to_result, to_verdict
from multitask_rl.scoring.shapes import UNDECLARED


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginFacts:
    """Properties of a built plugin that its lane and its worker need."""

    traits: PluginTraits = field(default_factory=PluginTraits)
    one_by_one: bool = False
    """It scores each response alone: nothing is gained by larger calls."""
    text_only: bool = False
    """It reads no token ids."""
    waits: bool = False
    """It is async: its calls wait for others, so more rollouts in a call hardly take longer."""
    independent: bool = False
    """A result does not depend on its batch: rollouts may be sent alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginPlan:
    """A plugin with one configuration on one device, found and checked but not built."""

    kind: str
    """``reward`` or ``constraint``."""
    reference: str
    config: Mapping[str, Any]
    source: str
    """Name of the plugin in failures."""
    where: str
    """Place of the plugin in the tasks file, for messages."""
    key: bytes
    """Digest of plugin, version and configuration: equal plans share a lane and cached results."""
    isolate: bool
    """It runs in worker processes."""
    range: Sequence[float] | None = None
    """Smallest and largest value of a reward, as the tasks file gives them; None = as the plugin declares."""
    seed: int = 0
    """Seed of the random numbers that the plugin draws in worker processes."""
    memory_mb: int = 0
    """MiB that scoring may add to the memory of a worker; 0 = no limit."""

    def build(self) -> Grader:
        """Return the plugin behind its checks, warmed up; ``MultitaskRLError`` where that fails."""
        plugin = find_plugin(self.kind, self.reference, self.where).build(self.config)
        grader = Grader(self.kind, plugin, self.source, self.range)
        try:
            grader.warm_up()
        except Exception as error:
            kind = type(error) if isinstance(error, MultitaskRLError) else PluginError
            raise kind(self.failed(error)) from error
        return grader

    def failed(self, error: BaseException) -> str:
        """Return the message for an ``error`` of the plugin before its first call."""
        what = f"{self.where}: {self.kind} {self.reference!r} failed its warm-up"
        return f"{what}: {described(error)}"


class Grader:
    """Calls the reward or constraint ``plugin``; ``source`` is its name in failures.

    ``range``: smallest and largest value of a reward; None = as the plugin declares.
    """

    def __init__(self, kind: str, plugin: Any, source: str, range: Sequence[float] | None = None) -> None:
        self.traits: PluginTraits = getattr(plugin, "traits", UNDECLARED)
        if range is not None:
            low, high = max(range[0], self.traits.low), min(range[1], self.traits.high)
            self.traits = replace(self.traits, low=low, high=high)
        one_by_one = bool(getattr(plugin, "one_by_one", False))
        independent = self.traits.independent or self.traits.deterministic or one_by_one
        self.source = source
        self.facts = PluginFacts(
            traits=self.traits,
            one_by_one=one_by_one,
            text_only=bool(getattr(plugin, "text_only", False)),
            waits=bool(getattr(plugin, "is_async", False)),
            independent=independent or bool(getattr(plugin, "independent", False)),
        )
        self._plugin = plugin
        self._is_reward = kind == "reward"
        optional = ("warm_up", "close", "explain")
        self._optional = {name: own for name in optional if (own := getattr(plugin, name, None)) is not None}
        self.explains = "explain" in self._optional

    def warm_up(self) -> None:
        """Run the plugin's own ``warm_up()``, if it has one."""
        if "warm_up" in self._optional:
            self._optional["warm_up"]()

    def close(self) -> None:
        """Run the plugin's own ``close()``, if it has one."""
        if "close" in self._optional:
            self._optional["close"]()

    def grade(self, rollouts: Sequence[Rollout]) -> list[Result]:
        """Return one result per rollout, in order; an error of the plugin becomes a failure.

        A constraint judges an episode answer by answer; the worst verdict is the episode's.
        """
        if self._is_reward or self.traits.whole_episodes or not any(len(r.turns) > 1 for r in rollouts):
            return self._grade_all(rollouts)
        answers = [r.answers() if len(r.turns) > 1 else [r] for r in rollouts]
        graded = iter(self._grade_all([answer for own in answers for answer in own]))
        return [_worst([next(graded) for _ in own]) if len(own) > 1 else next(graded) for own in answers]

    def _grade_all(self, rollouts: Sequence[Rollout]) -> list[Result]:
        needs = self.traits.needs
        if all(name in rollout.row for rollout in rollouts for name in needs):
            return self._grade(rollouts)
        lacks = [[repr(name) for name in needs if name not in rollout.row] for rollout in rollouts]
        graded = iter(self._grade([r for r, names in zip(rollouts, lacks, strict=True) if not names]))
        return [
            failed(no_column(" and no ".join(names), r.row), self.source, FailureKind.data)
            if names
            else next(graded)
            for r, names in zip(rollouts, lacks, strict=True)
        ]

    def explain(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> list[str] | Failure:
        """Return a text per violation, "" for none; a failure if the plugin's own ``explain`` fails."""
        if not self.explains:
            return [""] * len(rollouts)
        try:
            texts = [str(text or "") for text in self._optional["explain"](rollouts, verdicts)]
        except BaseException as error:  # noqa: BLE001 - the boundary where an error becomes data
            return failure_of(error, self.source)
        if len(texts) != len(rollouts):
            return failed(f"returned {len(texts)} explanations for {len(rollouts)} violations", self.source)
        return texts

    def _grade(self, rollouts: Sequence[Rollout]) -> list[Result]:
        if not rollouts:
            return []
        try:
            plugin = self._plugin
            given = plugin.score(rollouts) if self._is_reward else plugin.judge(rollouts)
            if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
                method = "score" if self._is_reward else "judge"
                raise TypeError(f"{method}(rollouts) returns a list, it returned {type(given).__name__}")
            raw = list(given)
        except BaseException as error:  # noqa: BLE001 - the boundary where an error becomes data
            failure = failure_of(error, self.source)
            if len(rollouts) > 1 and failure.kind is not FailureKind.infra:
                if self.facts.independent:  # one bad sample must not cost the others their score
                    half = len(rollouts) // 2
                    return [*self._grade(rollouts[:half]), *self._grade(rollouts[half:])]
                message = f"{failure.message} (so its whole batch fails: independent=True is not declared)"
                failure = replace(failure, message=message)
            return [failure] * len(rollouts)
        if len(raw) != len(rollouts):
            failure = failed(
                f"returned {counted(len(raw), 'result')} for {counted(len(rollouts), 'rollout')}", self.source
            )
            return [failure] * len(rollouts)
        if self._is_reward:
            return [to_result(value, self.traits, self.source) for value in raw]
        return [to_verdict(value, self.source) for value in raw]


def _worst(results: Sequence[Result]) -> Result:
    """Return the worst result of an episode's answers: a failure, else a violation, else the highest cost."""
    worst = results[0]
    for number, result in enumerate(results, 1):
        if isinstance(result, Failure):
            return result
        assert isinstance(result, Verdict)
        assert isinstance(worst, Verdict)
        if number == 1 or result.badness > worst.badness:
            worst = result.of_turn(number)
    return worst
