"""The constraint stage: it has rollouts judged, and sampled again where a constraint refuses them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from multitask_rl.executor.scorer import RunScorer
from multitask_rl.models.actor import Actor
from multitask_rl.records import Failure, Rollout, Verdict
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.scoring.pending import Pending, Span
from multitask_rl.step.flow import StreamingStage
from multitask_rl.step.stages import RewardStage, RolloutStage
from multitask_rl.step.task_state import TaskState

__all__ = ["ConstraintStage", "SamplingStages", "sampling_stages"]


@dataclass(slots=True)
class _Round:
    """All attempts with one number."""

    judging: Pending[dict[str, Verdict | Failure]]
    rollouts: list[Rollout] = field(default_factory=list)
    undecided: dict[int, None] = field(default_factory=dict)
    """Indices of rollouts without a known result, in order."""
    followed: set[int] = field(default_factory=set)
    """Indices of rollouts whose next attempt is under way."""
    num_asked: int = 0


class ConstraintStage(StreamingStage):
    """Asks each task's constraints; if one of mode ``reject`` refuses, the slot is sampled again.

    Refused responses stay in the stream, marked ``rejected``: algorithms may learn from them, and leaving
    them out would bias the estimate (see ``algorithms/constrained_decoding.py``).
    """

    name = "constraints"
    consumes = Rollout
    produces = Rollout

    def __init__(self, scorer: RunScorer, rollout: RolloutStage, tasks: Mapping[str, TaskState]) -> None:
        self._scorer = scorer
        self._rollout = rollout
        self._tasks = tasks
        self.spans: list[Span] = []
        """When the stage waited for verdicts, since the caller last cleared it."""

    def order(self, record: Rollout) -> Any:
        """Return the place of a rollout in its batch, attempts of one slot side by side."""
        return record.order

    def stream(self, parts: Iterable[list[Rollout]]) -> Iterator[list[Rollout]]:
        """Yield rollouts without constraints as they come, the others when all of an attempt are judged.

        If the engine admits requests while it works (``RolloutStage.join``), a refused slot is sampled again
        at once; else after the batch. Seeds make both ways give the same rollouts and the same batches.
        """
        rounds: list[_Round] = []
        for part in parts:
            free = [r for r in part if not self._tasks[r.task].spec.judged]
            if free:
                yield free
            own = [r for r in part if self._tasks[r.task].spec.judged]
            self._take(rounds, own + self._rollout.take_joined())
        number = 0
        while number < len(rounds):
            judged = self._judge(rounds[number])
            yield [rollout for _, rollout in judged]
            following = [self._next_attempt(r) for i, r in judged if i not in rounds[number].followed]
            again = [slot for slot in following if slot is not None]
            for part in self._rollout.sample(again) if again else []:
                self._take(rounds, part)
            number += 1

    def _take(self, rounds: list[_Round], rollouts: Sequence[Rollout]) -> None:
        """Have rollouts judged; if the engine admits more, sample those known to be refused again."""
        for rollout in rollouts:
            if rollout.attempt == len(rounds):
                rounds.append(_Round(self._scorer.begin_judging()))
            current = rounds[rollout.attempt]
            current.undecided[len(current.rollouts)] = None
            current.rollouts.append(rollout)
        for current in rounds:
            if new := current.rollouts[current.num_asked :]:
                current.judging.add(new)
                current.num_asked = len(current.rollouts)
        if not self._rollout.can_join:
            return
        again = []
        for current in rounds:
            for index in list(current.undecided):
                known = current.judging.known(index)
                if known is not None:
                    del current.undecided[index]
                    slot = self._next_attempt(self._with_verdicts(current.rollouts[index], known))
                    if slot is not None:
                        current.followed.add(index)
                        again.append(slot)
        if again:
            self._rollout.join(again)

    def _judge(self, current: _Round) -> list[tuple[int, Rollout]]:
        """Close a round; return index and rollout with verdicts, in order."""
        began = time.monotonic()
        order = sorted(range(len(current.rollouts)), key=lambda index: current.rollouts[index].order)
        current.judging.seal(order)
        current.judging.wait()
        self.spans.append((began, time.monotonic()))
        results = current.judging.results(order)
        return [
            (index, self._with_verdicts(current.rollouts[index], verdicts))
            for index, verdicts in zip(order, results, strict=True)
        ]

    def _with_verdicts(self, rollout: Rollout, judged_whole: Mapping[str, Verdict | Failure]) -> Rollout:
        # the verdict that ended a response stands, even if a random judge now gives another
        verdicts = {**judged_whole, **rollout.verdicts}
        rejecting = {c.name or c.plugin for c in self._tasks[rollout.task].spec.judged if c.mode == "reject"}
        failed = next((v for v in verdicts.values() if isinstance(v, Failure)), None)
        refused = any(
            isinstance(v, Verdict) and v.violated for name, v in verdicts.items() if name in rejecting
        )
        return replace(rollout, verdicts=verdicts, rejected=refused, failure=rollout.failure or failed)

    def _next_attempt(self, rollout: Rollout) -> Rollout | None:
        """Return the empty slot after a refused attempt; None if no attempt is left, or it would be equal.

        The attempts after a greedy response are sampled as in training.
        """
        if not rollout.rejected:
            return None
        task = self._tasks[rollout.task]
        most = max(c.max_attempts for c in task.spec.constraints if c.mode == "reject")
        sampling = rollout.sampling if rollout.sampling.temperature > 0 else task.sampling
        if rollout.attempt + 1 >= most or sampling.temperature == 0:
            return None
        return Rollout(
            prompt=rollout.prompt, sample=rollout.sample, attempt=rollout.attempt + 1, sampling=sampling
        )


SamplingStages = tuple[RolloutStage, ConstraintStage, RewardStage]
"""The built-in stages up to the rewards."""


def sampling_stages(
    actor: Actor,
    engine: RolloutEngine,
    scorer: RunScorer,
    tasks: Mapping[str, TaskState],
    *,
    seed: int,
    purpose: str = "rollout",
    group_size: int | None = None,
    temperature: float | None = None,
    quorum: float = 1.0,
) -> SamplingStages:
    """Return ``rollout -> constraints -> rewards`` for a step or, with another ``purpose``, an evaluation.

    ``RolloutStage`` and ``RewardBatch`` define the settings.
    """
    rollout = RolloutStage(
        engine,
        tasks,
        lambda ids: str(actor.tokenizer.decode(ids, skip_special_tokens=True)),
        seed=seed,
        scorer=scorer,
        purpose=purpose,
        group_size=group_size,
        temperature=temperature,
    )
    return rollout, ConstraintStage(scorer, rollout, tasks), RewardStage(scorer, tasks, quorum)
