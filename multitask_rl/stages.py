"""The built-in nodes of the flow: prompts -> rollout -> constraints -> rewards -> advantages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from multitask_rl.flow import Stage, in_order
from multitask_rl.records import Failure, Prompt, Rollout, Scored, TrainSample, Verdict
from multitask_rl.reward_batch import RewardBatch
from multitask_rl.rollout.base import Generation, GenerationRequest, RolloutEngine, stream
from multitask_rl.scoring.pending import Pending, Span
from multitask_rl.seeding import derive_seed
from multitask_rl.streaming import Judging, StreamJudge
from multitask_rl.task_run import TaskRun
from multitask_rl.training.credit import CreditAssigner, CreditedSample

__all__ = ["AdvantageStage", "ConstraintStage", "RewardStage", "RolloutStage", "Scorer"]


class Scorer(Judging, Protocol):
    """What the stages need of the reward pool."""

    def begin_scoring(self) -> Pending[Scored]:
        """Return an open round of rewards: one record per rollout added."""
        ...

    def begin_judging(self) -> Pending[dict[str, Verdict | Failure]]:
        """Return an open round of constraints: verdicts by constraint name per rollout added."""
        ...


class RolloutStage(Stage):
    """Samples a group per prompt; streaming constraints may end a response (``streaming.py``)."""

    name = "rollout"
    consumes = Prompt
    produces = Rollout

    def __init__(
        self,
        engine: RolloutEngine,
        runs: Mapping[str, TaskRun],
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
        self._runs = runs
        self._decode = decode
        self._seed = seed
        self._scorer = scorer
        self._purpose = purpose
        self._group_size = group_size
        self._temperature = temperature
        self.spans: list[Span] = []
        """When the engine was at work, since the caller last cleared it."""

    def process(self, items: list[Prompt]) -> list[Rollout]:
        """Return ``group_size`` rollouts per prompt, in order."""
        return self.sample(self._slots(items))

    def stream(self, parts: Iterable[list[Prompt]]) -> Iterator[list[Rollout]]:
        """Yield rollouts as the engine ends them."""
        for ended in self._run(self._slots(in_order(parts))):
            yield [rollout for _, rollout in ended]

    def sample(self, slots: Sequence[Rollout]) -> list[Rollout]:
        """Fill empty rollouts (prompt, sample, attempt, sampling) with what the engine generates."""
        found = {index: rollout for ended in self._run(slots) for index, rollout in ended}
        return [found[index] for index in range(len(slots))]

    def _run(self, slots: Sequence[Rollout]) -> Iterator[list[tuple[int, Rollout]]]:
        """Yield index of the slot and filled rollout as they end."""
        requests: list[GenerationRequest] = []
        owners: list[list[int]] = []
        seeds: list[int] = []
        judge = StreamJudge(self._scorer, self._text) if self._scorer is not None else None
        for index, slot in enumerate(slots):
            seed = derive_seed(
                self._seed, self._purpose, slot.task, slot.prompt.draw, slot.sample, slot.attempt
            )
            seeds.append(seed)
            watch = judge.watch(seed, slot, self._runs[slot.task].spec) if judge is not None else None
            previous = requests[-1] if requests else None
            if previous is not None and previous.prompt_ids is slot.prompt.prompt_ids:
                requests[-1] = replace(previous, seeds=[*previous.seeds, seed])
                owners[-1].append(index)
            else:
                requests.append(
                    GenerationRequest(
                        prompt_ids=slot.prompt.prompt_ids, sampling=slot.sampling, seeds=[seed], watch=watch
                    )
                )
                owners.append([index])
        found = judge.verdicts if judge is not None else {}
        began = time.monotonic()
        try:
            for ended in stream(self.engine, requests):
                places = [(owners[i][j], generation) for i, j, generation in ended]
                yield [(k, self._fill(slots[k], g, found.get(seeds[k], {}))) for k, g in places]
        finally:
            self.spans.append((began, time.monotonic()))

    def _slots(self, prompts: list[Prompt]) -> list[Rollout]:
        for position, prompt in enumerate(prompts):
            prompt.position = position
        return [self._slot(p, i) for p in prompts for i in range(self._size(p))]

    def _size(self, prompt: Prompt) -> int:
        return self._group_size or self._runs[prompt.task].group_size

    def _slot(self, prompt: Prompt, sample: int) -> Rollout:
        sampling = self._runs[prompt.task].sampling
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


class ConstraintStage(Stage):
    """Asks each task's constraints; where one of mode ``reject`` refuses, the slot is sampled again.

    Refused responses stay in the stream, marked ``rejected``: algorithms may learn from them, and leaving
    them out silently would bias the estimate (see ``algorithms/constrained_decoding.py``).
    """

    name = "constraints"
    consumes = Rollout
    produces = Rollout

    def __init__(self, scorer: Scorer, rollout: RolloutStage, runs: Mapping[str, TaskRun]) -> None:
        self._scorer = scorer
        self._rollout = rollout
        self._runs = runs
        self.spans: list[Span] = []
        """When verdicts were waited for, since the caller last cleared it."""

    def process(self, items: list[Rollout]) -> list[Rollout]:
        """Return the rollouts with verdicts, attempts of one slot side by side."""
        attempts: dict[tuple[str, int], list[Rollout]] = {}
        for rollout in (r for part in self.stream([items]) for r in part):
            attempts.setdefault((rollout.group_id, rollout.sample), []).append(rollout)
        return [a for r in items for a in attempts[(r.group_id, r.sample)]]

    def stream(self, parts: Iterable[list[Rollout]]) -> Iterator[list[Rollout]]:
        """Yield rollouts without constraints as they come, the others when they are judged.

        Slots are sampled again together, after the batch: the engine is busy before, and one call is faster
        than many.
        """
        judging = self._scorer.begin_judging()
        pending: list[Rollout] = []
        for part in parts:
            own = [r for r in part if self._runs[r.task].spec.judged]
            if len(own) < len(part):
                yield [r for r in part if not self._runs[r.task].spec.judged]
            if own:
                judging.add(own)
                pending += own
        while pending:
            judged = self._judge(judging, pending)
            yield judged
            following = [self._next_attempt(r) for r in judged if r.rejected]
            again = [slot for slot in following if slot is not None]
            pending = self._rollout.sample(again) if again else []
            if pending:
                judging = self._scorer.begin_judging()
                judging.add(pending)

    def _judge(
        self, judging: Pending[dict[str, Verdict | Failure]], rollouts: list[Rollout]
    ) -> list[Rollout]:
        """Return ``rollouts``, all that ``judging`` was asked about, with their verdicts and in order."""
        began = time.monotonic()
        order = sorted(range(len(rollouts)), key=lambda index: rollouts[index].order)
        judging.seal(order)
        judging.wait()
        self.spans.append((began, time.monotonic()))
        judged = []
        for index, judged_whole in zip(order, judging.results(order), strict=True):
            rollout = rollouts[index]
            # what ended a response stands, though a judge that draws might now think better of it
            verdicts = {**judged_whole, **rollout.verdicts}
            rejecting = {
                c.name or c.plugin for c in self._runs[rollout.task].spec.judged if c.mode == "reject"
            }
            failed = next((v for v in verdicts.values() if isinstance(v, Failure)), None)
            refused = any(
                isinstance(v, Verdict) and v.violated for name, v in verdicts.items() if name in rejecting
            )
            judged.append(
                replace(rollout, verdicts=verdicts, rejected=refused, failure=rollout.failure or failed)
            )
        return judged

    def _next_attempt(self, rollout: Rollout) -> Rollout | None:
        """Return the empty slot of the next attempt; None if they ran out, or it would be the same again.

        A greedy response would repeat itself: the attempts after it are sampled as in training.
        """
        run = self._runs[rollout.task]
        most = max(c.max_attempts for c in run.spec.constraints if c.mode == "reject")
        sampling = rollout.sampling if rollout.sampling.temperature > 0 else run.sampling
        if rollout.attempt + 1 >= most or sampling.temperature == 0:
            return None
        return Rollout(
            prompt=rollout.prompt, sample=rollout.sample, attempt=rollout.attempt + 1, sampling=sampling
        )


class RewardStage(Stage):
    """Scores the rollouts; constraints of mode ``penalty`` and ``lagrangian`` enter here as costs.

    A task that has constraints and no reward is rewarded with ``1 - cost``.
    """

    name = "rewards"
    consumes = Rollout
    produces = Scored

    def __init__(self, scorer: Scorer, runs: Mapping[str, TaskRun]) -> None:
        self._scorer = scorer
        self._runs = runs

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
        constraints = self._runs[scored.rollout.task].spec.judged
        if not constraints:
            return scored
        costs: dict[str, list[float]] = {}
        penalty = 0.0
        for constraint in constraints:
            if constraint.mode == "penalty" and not constraint.weight:  # only measured
                continue
            own = costs.setdefault(constraint.mode, [])
            verdict = scored.rollout.verdicts.get(constraint.name or constraint.plugin)
            if isinstance(verdict, Verdict) and verdict.applicable:
                own.append(verdict.cost)
                penalty += constraint.weight * verdict.cost if constraint.mode == "penalty" else 0.0
        chosen = next((costs[mode] for mode in ("lagrangian", "penalty", "reject") if mode in costs), [])
        cost = max(chosen, default=0.0)
        reward = scored.reward
        if reward is not None:
            # a task of constraints alone still has something to learn: to satisfy them
            reward = reward - penalty if self._runs[scored.rollout.task].spec.rewards else 1.0 - cost
        return replace(scored, reward=reward, cost=cost, concerned=bool(chosen))


class AdvantageStage(Stage):
    """Turns scored rollouts into training samples with a credit per token."""

    name = "advantages"
    consumes = Scored
    produces = CreditedSample

    def __init__(self, credit: CreditAssigner, runs: Mapping[str, TaskRun]) -> None:
        self._credit = credit
        self._runs = runs
        self.metrics: dict[str, dict[str, float]] = {}
        """Per task, of the last call."""

    def process(self, items: list[Scored]) -> list[CreditedSample]:
        """Leave failures out, let each task's algorithm select and credit its own."""
        by_task: dict[str, list[Scored]] = {name: [] for name in self._runs}
        for scored in items:
            if is_trainable(self._runs[scored.rollout.task], scored):
                by_task[scored.rollout.task].append(scored)
        samples: list[TrainSample] = []
        for name, own in by_task.items():
            samples.extend(self._runs[name].algorithm.select(own))
        credited, self.metrics = self._credit.credit(samples)
        return credited


def is_trainable(run: TaskRun, scored: Scored) -> bool:
    """Whether the algorithm may learn from the record: not failed, and if refused it learns from those."""
    if scored.failure is not None or scored.rollout.failure is not None:
        return False
    return run.algorithm.trains_rejected if scored.rollout.rejected else scored.reward is not None
