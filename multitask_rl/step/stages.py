"""Nodes of the flow: prompts -> rollout -> constraints (``constraint_stage.py``) -> rewards -> advantages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from multitask_rl.constraints.streaming import Judging, StreamJudge
from multitask_rl.records import Failure, Prompt, Rollout, Scored, TrainSample, Verdict
from multitask_rl.rollout.base import Generation, GenerationRequest, RolloutEngine
from multitask_rl.scoring.pending import Pending, Span
from multitask_rl.seeding import derive_seed
from multitask_rl.step.flow import Stage, in_order
from multitask_rl.step.reward_batch import RewardBatch
from multitask_rl.step.task_state import TaskState
from multitask_rl.training.backend import CreditedSample
from multitask_rl.training.credit import CreditAssigner

__all__ = ["AdvantageStage", "RewardStage", "RolloutStage", "Scorer"]


class Scorer(Judging, Protocol):
    """What the stages need of the reward pool."""

    def begin_scoring(self) -> Pending[Scored]:
        """Return an open round of rewards: one record per rollout added."""
        ...

    def begin_judging(self) -> Pending[dict[str, Verdict | Failure]]:
        """Return an open round of constraints: verdicts by constraint name per rollout added."""
        ...

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return task -> metric -> value since the last call."""
        ...


@dataclass(slots=True)
class _Call:
    """What the engine was asked for since it began; positions are those of ``slots``."""

    judge: StreamJudge | None
    slots: list[Rollout] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    owners: list[list[int]] = field(default_factory=list)
    """By request: whose its samples are."""

    def verdicts(self, position: int) -> Mapping[str, Verdict | Failure]:
        """Return what ended the response, if a streaming constraint did."""
        return {} if self.judge is None else self.judge.verdicts.get(self.seeds[position], {})


class RolloutStage(Stage):
    """Samples a group per prompt; streaming constraints may end a response (``constraints/streaming.py``)."""

    name = "rollout"
    consumes = Prompt
    produces = Rollout

    def __init__(
        self,
        engine: RolloutEngine,
        tasks: Mapping[str, TaskState],
        decode: Callable[[Sequence[int]], str],
        *,
        seed: int,
        scorer: Judging | None = None,
        purpose: str = "rollout",
        group_size: int | None = None,
        temperature: float | None = None,
    ) -> None:
        """Without ``scorer`` no response is looked at; ``purpose`` names the streams, the rest override."""
        self.engine = engine
        self._tasks = tasks
        self._decode = decode
        self._seed = seed
        self._scorer = scorer
        self._purpose = purpose
        self._group_size = group_size
        self._temperature = temperature
        self._call: _Call | None = None
        self._joined: list[Rollout] = []
        self.spans: list[Span] = []
        """When the engine was at work, since the caller last cleared it."""

    def process(self, items: list[Prompt]) -> list[Rollout]:
        """Return ``group_size`` rollouts per prompt, in order."""
        return sorted(in_order(self.stream([items])), key=lambda rollout: rollout.order)

    def stream(self, parts: Iterable[list[Prompt]]) -> Iterator[list[Rollout]]:
        """Yield rollouts as the engine ends them; those that joined later wait for ``take_joined``."""
        slots = self._slots(in_order(parts))
        for ended in self._run(slots):
            self._joined += [rollout for k, rollout in ended if k >= len(slots)]
            yield [rollout for k, rollout in ended if k < len(slots)]

    def sample(self, slots: Sequence[Rollout]) -> Iterator[list[Rollout]]:
        """Fill empty rollouts (prompt, sample, attempt, sampling), and those that join, as they end."""
        for ended in self._run(slots):
            yield [rollout for _, rollout in ended]

    @property
    def can_join(self) -> bool:
        """Whether the engine is at work and takes more beside it."""
        return self._call is not None and self.engine.can_admit

    def join(self, slots: Sequence[Rollout]) -> None:
        """Have the engine fill empty rollouts beside what it is at; only while ``can_join``."""
        assert self._call is not None, "the engine is not at work"
        self.engine.admit(self._requests(self._call, slots))

    def take_joined(self) -> list[Rollout]:
        """Return the rollouts that joined a ``stream`` and have ended since the last call."""
        joined, self._joined = self._joined, []
        return joined

    def _run(self, slots: Sequence[Rollout]) -> Iterator[list[tuple[int, Rollout]]]:
        """Yield index of the slot and filled rollout as they end."""
        call = _Call(StreamJudge(self._scorer, self._text) if self._scorer is not None else None)
        requests = self._requests(call, slots)
        self._call = call
        began = time.monotonic()
        try:
            for ended in self.engine.generate_stream(requests):
                places = [(call.owners[i][j], generation) for i, j, generation in ended]
                yield [(k, self._fill(call.slots[k], g, call.verdicts(k))) for k, g in places]
        finally:
            self._call = None
            self.spans.append((began, time.monotonic()))

    def _requests(self, call: _Call, slots: Sequence[Rollout]) -> list[GenerationRequest]:
        """Note the slots in ``call``; return what the engine is asked for them, a request per group."""
        requests: list[GenerationRequest] = []
        for slot in slots:
            seed = derive_seed(
                self._seed, self._purpose, slot.task, slot.prompt.draw, slot.sample, slot.attempt
            )
            watch = None
            if call.judge is not None:
                watch = call.judge.watch(seed, slot, self._tasks[slot.task].spec)
            previous = requests[-1] if requests else None
            if previous is not None and previous.prompt_ids is slot.prompt.prompt_ids:
                requests[-1] = replace(previous, seeds=[*previous.seeds, seed])
                call.owners[-1].append(len(call.slots))
            else:
                requests.append(
                    GenerationRequest(
                        prompt_ids=slot.prompt.prompt_ids, sampling=slot.sampling, seeds=[seed], watch=watch
                    )
                )
                call.owners.append([len(call.slots)])
            call.slots.append(slot)
            call.seeds.append(seed)
        return requests

    def _slots(self, prompts: list[Prompt]) -> list[Rollout]:
        for position, prompt in enumerate(prompts):
            prompt.position = position
        return [self._slot(p, i) for p in prompts for i in range(self._size(p))]

    def _size(self, prompt: Prompt) -> int:
        return self._group_size or self._tasks[prompt.task].group_size

    def _slot(self, prompt: Prompt, sample: int) -> Rollout:
        sampling = self._tasks[prompt.task].sampling
        if self._temperature is not None:
            sampling = replace(sampling, temperature=self._temperature)
        return Rollout(prompt=prompt, sample=sample, sampling=sampling)

    def _text(self, slot: Rollout, response_ids: Sequence[int]) -> str:
        text = self._decode(response_ids)
        for stop in slot.sampling.stop:
            text = text.partition(stop)[0]
        return text

    def _fill(
        self, slot: Rollout, generation: Generation, verdicts: Mapping[str, Verdict | Failure]
    ) -> Rollout:
        return replace(
            slot,
            response_ids=generation.response_ids,
            rollout_logprobs=generation.rollout_logprobs,
            finish_reason=generation.finish_reason,
            response=self._text(slot, generation.response_ids),
            policy_version=self.engine.policy_version,
            verdicts=dict(verdicts),
        )


class RewardStage(Stage):
    """Scores the rollouts; constraints of mode ``penalty`` and ``lagrangian`` enter here as costs.

    A task that has constraints and no reward is rewarded with ``1 - cost``.
    """

    name = "rewards"
    consumes = Rollout
    produces = Scored

    def __init__(self, scorer: Scorer, tasks: Mapping[str, TaskState]) -> None:
        self._scorer = scorer
        self._tasks = tasks

    def process(self, items: list[Rollout]) -> list[Scored]:
        """Return one record per rollout; refused ones are not scored, what they earn is the algorithm's."""
        batch = self.begin()
        batch.add(items)
        batch.seal()
        batch.wait()
        return batch.take()

    def stream(self, parts: Iterable[list[Rollout]]) -> Iterator[list[Scored]]:
        """Begin to score what comes at once; yield everything together."""
        batch = self.begin()
        for part in parts:
            batch.add(part)
        batch.seal()
        batch.wait()
        yield batch.take()

    def begin(self) -> RewardBatch:
        """Return an empty batch to add rollouts to."""
        return RewardBatch(self._scorer.begin_scoring(), self._with_costs)

    def _with_costs(self, scored: Scored) -> Scored:
        spec = self._tasks[scored.rollout.task].spec
        if not spec.judged:
            return scored
        costs: dict[str, list[float]] = {}
        penalties: list[tuple[float, float]] = []
        for constraint in spec.judged:
            if constraint.mode == "penalty" and not constraint.weight:  # only measured
                continue
            own = costs.setdefault(constraint.mode, [])
            verdict = scored.rollout.verdicts.get(constraint.name or constraint.plugin)
            cost = verdict.cost if isinstance(verdict, Verdict) and verdict.applicable else math.nan
            if not math.isnan(cost):
                own.append(cost)
            if constraint.mode == "penalty":
                penalties.append((-constraint.weight, cost))
        chosen = next((costs[mode] for mode in ("lagrangian", "penalty", "reject") if mode in costs), [])
        cost = max(chosen, default=0.0)
        scored = replace(scored, cost=cost, concerned=bool(chosen))
        if scored.reward is None:
            return scored
        if not spec.rewards:
            # a task of constraints alone still has something to learn: to satisfy them
            return replace(scored, reward=1.0 - cost)
        penalty = math.fsum(weight * value for weight, value in penalties if not math.isnan(value))
        return replace(scored, reward=scored.reward + penalty, terms=[*scored.terms, *penalties])


class AdvantageStage(Stage):
    """Turns scored rollouts into training samples with a credit per token."""

    name = "advantages"
    consumes = Scored
    produces = CreditedSample

    def __init__(self, credit: CreditAssigner, tasks: Mapping[str, TaskState]) -> None:
        self._credit = credit
        self._tasks = tasks
        self.metrics: dict[str, dict[str, float]] = {}
        """Per task, of the last call."""

    def process(self, items: list[Scored]) -> list[CreditedSample]:
        """Leave failures out, let each task's algorithm select and credit its own."""
        by_task: dict[str, list[Scored]] = {name: [] for name in self._tasks}
        for scored in items:
            if is_trainable(self._tasks[scored.rollout.task], scored):
                by_task[scored.rollout.task].append(scored)
        samples: list[TrainSample] = []
        for name, own in by_task.items():
            samples.extend(self._tasks[name].algorithm.select(own))
        credited, self.metrics = self._credit.credit(samples)
        return credited


def is_trainable(task: TaskState, scored: Scored) -> bool:
    """Whether the algorithm may learn from the record: not failed, and if refused it learns from those."""
    if scored.failure is not None or scored.rollout.failure is not None:
        return False
    return task.algorithm.trains_rejected if scored.rollout.rejected else scored.reward is not None
