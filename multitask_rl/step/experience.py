"""Batches of experience, made ahead of the update as far as ``rollout.max_staleness`` allows.

Synchronous (lag 0): prompts are drawn, sampled and scored, then learnt from; rewards begin while the engine
still generates. With lag ``L`` the batch of step ``t + L`` is sampled while the rewards of step ``t`` come in
and its update is made: step ``t`` always learns from the weights of step ``t - L``, so that a run depends on
its seed and never on the clock.

Evaluation, guard and checkpoint see a drained pipeline: no batch reaches over a step at which one of them is
due. The first step after it is on-policy again, a resumed run equals an uninterrupted one, and a rollback
finds no rollouts of the weights it takes back. The price is one step without overlap.

With ``batch.quorum`` below 1 a step goes on when that share of its groups is scored. Late groups join the
first step that finds them scored, as long as they are not older than ``rollout.max_staleness`` updates.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.models.actor import Actor
from multitask_rl.records import Prompt, Scored
from multitask_rl.step.constraint_stage import SamplingStages
from multitask_rl.step.flow import DataFlow
from multitask_rl.step.metrics import by_group
from multitask_rl.step.refill import Refill
from multitask_rl.step.reward_batch import RewardBatch
from multitask_rl.step.task_state import TaskState, draw_prompts
from multitask_rl.tracking.timeline import Span, Timeline, intersect, subtract

__all__ = ["Experience", "ExperienceSource"]


@dataclass(kw_only=True, slots=True)
class Experience:
    """What one step learns from."""

    weights: dict[str, float]
    """Task weights the quotas were made from."""
    quotas: dict[str, int]
    """Groups per task the step is meant to learn from."""
    drawn: list[Scored] = field(default_factory=list)
    """Every record that was scored for the step, refills and late groups of earlier steps included."""
    kept: list[Scored] = field(default_factory=list)
    """Those to train on."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per task: ``staleness`` (mean, in updates), ``carried_over`` and ``dropped_stale`` (groups)."""


@dataclass(kw_only=True, slots=True)
class _Batch:
    step: int
    experience: Experience
    before: dict[str, Any]
    """Cursors and the scheduler's carry before its prompts were drawn."""
    rewards: RewardBatch
    future: Future[None] | None = None
    """Done when everything is sampled and handed to the rewards; None: it was done by the caller's thread."""


class ExperienceSource:
    """Makes the experience of one step after the other.

    Args:
        config: the run.
        flow: of a step.
        stages: the built-in stages of ``flow`` up to the rewards.
        actor: renders the prompts.
        tasks: the tasks.
        scheduler: decides on quotas.
        timeline: takes the spans.
    """

    def __init__(
        self,
        config: RunConfig,
        flow: DataFlow,
        stages: SamplingStages,
        *,
        actor: Actor,
        tasks: Mapping[str, TaskState],
        scheduler: DynamicTaskWeightScheduler,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._flow = flow
        self._rollout, self._constraints, self._rewards = stages
        self._actor = actor
        self._tasks = tasks
        self._scheduler = scheduler
        self._timeline = timeline
        self._refill = Refill(tasks, config.batch.refill_rounds, scheduler.informative_rate)
        self._lag = config.rollout_lag
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rollout") if self._lag > 0 else None
        self._step = 0
        """The step under way."""
        self._ahead: deque[_Batch] = deque()
        self._late: list[RewardBatch] = []
        self._judging: list[Span] = []
        """When verdicts were waited for, in the step under way."""

    def next(self, step: int) -> Experience:
        """Return the experience of ``step``; what may be sampled meanwhile is begun.

        Raises:
            EngineError: the engine cannot go on.
            RewardError: a task's error budget is spent.
            DataError: no prompt of a task fits.
        """
        self._step = step
        self._judging.clear()
        self._launch(step)
        batch = self._ahead[0]
        experience = batch.experience
        if batch.future is not None:
            began = time.monotonic()
            wait([batch.future])
            self._note_wait(began)
            batch.future.result()
        self._fill(batch)
        self._note_staleness(experience)
        self._ahead.popleft()
        if not self._ahead:
            self._rollout.engine.sleep()
        return experience

    def wait_for_sampling(self) -> None:
        """Wait until nothing is being sampled: the engine is free, all counts are final."""
        began = time.monotonic()
        if self._ahead:
            wait([batch.future for batch in self._ahead if batch.future is not None])
            self._note_wait(began)

    def running(self) -> list[tuple[str, Span]]:
        """Return stage and span of the rewards under way for later steps."""
        batches = [*(batch.rewards for batch in self._ahead), *self._late]
        return [("rewards", span) for batch in batches for span in batch.spans().values()]

    def rewind(self) -> None:
        """Undo the draws of batches that were never trained on."""
        if not self._ahead:
            return
        before = self._ahead[0].before
        self.clear()
        self._scheduler.load_state_dict({**self._scheduler.state_dict(), "carry": before["carry"]})
        for name, (cursor, num_overlong) in before["cursors"].items():
            task = self._tasks[name]
            task.num_overlong = num_overlong
            if task.stream is not None:
                task.stream.load_state_dict(cursor)

    def clear(self) -> None:
        """Forget what is under way: the weights it was sampled from are gone."""
        wait([batch.future for batch in self._ahead if batch.future is not None])
        for rewards in (*(batch.rewards for batch in self._ahead), *self._late):
            rewards.drop(lambda _: True)
        self._ahead.clear()
        self._late.clear()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    # ------------------------------------------------------------------ inside

    def _launch(self, step: int) -> None:
        """Begin every batch that may be begun with the weights as they are."""
        first = self._ahead[-1].step + 1 if self._ahead else step
        for one in range(first, min(step + self._lag, _next_stop(self._config, step) - 1) + 1):
            # first, since it may fail: a failure after the draw would not restore the quotas
            rewards = self._rewards.begin()
            before = self._state()
            weights = self._scheduler.weights()
            batch = _Batch(
                step=one,
                experience=Experience(
                    weights=weights,
                    quotas=self._scheduler.quotas(self._config.batch.prompts_per_step, one),
                ),
                before=before,
                rewards=rewards,
            )
            self._ahead.append(batch)
            prompts = draw_prompts(self._tasks, batch.experience.quotas, self._actor)
            if self._executor is None:
                self._sample_here(prompts, batch.rewards, one)
            else:
                batch.future = self._executor.submit(self._sample, prompts, batch.rewards, one)

    def _state(self) -> dict[str, Any]:
        return {
            "carry": self._scheduler.state_dict()["carry"],
            "cursors": {
                name: (task.stream.state_dict(), task.num_overlong)
                for name, task in self._tasks.items()
                if task.stream is not None
            },
        }

    def _sample(self, prompts: list[Prompt], rewards: RewardBatch, step: int) -> None:
        """Pass prompts through the flow up to the rewards, and begin those as responses end."""
        try:
            note = partial(self._note_work, step)
            for part in self._flow.stream(prompts, before="rewards", note=note):
                rewards.add(part)
            rewards.seal()
        finally:
            for name, spans in (("rollout", self._rollout.spans), ("constraints", self._constraints.spans)):
                for span in spans:
                    self._timeline.add(name, span, step=step)
            self._judging += self._constraints.spans
            self._rollout.spans.clear()
            self._constraints.spans.clear()

    def _sample_here(self, prompts: list[Prompt], rewards: RewardBatch, step: int) -> None:
        began = time.monotonic()
        self._sample(prompts, rewards, step)
        self._note_wait(began)

    def _collect(self, rewards: RewardBatch, step: int) -> list[Scored]:
        """Return what is scored when the quorum is reached."""
        began = time.monotonic()
        task = rewards.wait(self._config.batch.quorum)
        self._timeline.add("wait/rewards", (began, time.monotonic()), step=self._step, task=task)
        for name, span in rewards.spans().items():
            self._timeline.add("rewards", span, step=step, task=name)
        return self._finish(rewards)

    def _finish(self, rewards: RewardBatch) -> list[Scored]:
        """Return the scored groups after the stages that were put between rewards and advantages."""
        flow, note = self._flow, partial(self._note_work, self._step)
        scored = rewards.take()
        if scored:
            scored = flow(scored, start=flow.after("rewards"), before="advantages", note=note)
        return scored

    def _note_work(self, step: int, stage: str, span: Span) -> None:
        self._timeline.add(stage, span, step=step)

    def _fill(self, batch: _Batch) -> None:
        """Collect what the step learns from; tell the scheduler which groups a task was short of."""
        experience, step = batch.experience, batch.step
        late: list[RewardBatch] = []
        sampled = [batch.rewards]

        def collect(counts: Mapping[str, int]) -> list[Scored]:
            if sampled:
                rewards = sampled.pop()
            else:
                rewards = self._rewards.begin()
                prompts = draw_prompts(self._tasks, counts, self._actor)
                self._sample_here(prompts, rewards, step)
            scored = self._collect(rewards, step)
            experience.drawn += scored
            late.extend([rewards] if rewards.num_open else [])
            return scored

        def num_late() -> Counter[str]:
            return sum((Counter(rewards.num_open) for rewards in late), Counter())

        quotas = experience.quotas
        if self._lag == 0:
            _, experience.kept = self._refill.collect(quotas, collect, num_late)
        else:
            # the engine is busy with the next batches: what is short is given back by later quotas alone
            experience.kept = self._refill.keep(collect(quotas), quotas)
        carried, dropped = self._carry_over(experience)
        entitled = Counter(quotas)
        entitled.update(carried + dropped)
        entitled.subtract(num_late())
        shortfall = self._refill.shortfall(experience.kept, entitled)
        self._scheduler.carry_over(shortfall, sum(quotas.values()))
        self._late += late

    def _carry_over(self, experience: Experience) -> tuple[Counter[str], Counter[str]]:
        """Add the late groups of earlier steps that are scored by now; give up those that are too old.

        Returns:
            Groups added and given up, by task.
        """
        carried, dropped = Counter[str](), Counter[str]()
        version, bound = self._actor.policy_version, self._config.rollout.max_staleness
        for rewards in self._late:
            dropped.update(rewards.drop(lambda r: version - r.policy_version > bound))
            scored = self._finish(rewards)
            carried.update({task: len(groups) for task, groups in by_group(scored).items()})
            experience.drawn += scored
            experience.kept += scored
        self._late = [rewards for rewards in self._late if rewards.num_open]
        if self._config.batch.quorum < 1.0:
            for name in experience.quotas:
                own = experience.metrics.setdefault(name, {})
                own.update(carried_over=float(carried[name]), dropped_stale=float(dropped[name]))
        return carried, dropped

    def _note_staleness(self, experience: Experience) -> None:
        if self._config.rollout.max_staleness == 0:
            return
        ages: dict[str, list[int]] = {}
        for scored in experience.kept:
            rollout = scored.rollout
            ages.setdefault(rollout.task, []).append(self._actor.policy_version - rollout.policy_version)
        for name, own in ages.items():
            experience.metrics.setdefault(name, {})["staleness"] = sum(own) / len(own)

    def _note_wait(self, began: float) -> None:
        """Note that the update stood still since ``began``: for constraints or the rollout."""
        waited = [(began, time.monotonic())]
        for stage, spans in (
            ("wait/constraints", intersect(waited, self._judging)),
            ("wait/rollout", subtract(waited, self._judging)),
        ):
            for span in spans:
                self._timeline.add(stage, span, step=self._step)


def _next_stop(config: RunConfig, step: int) -> int:
    """Return the first step after ``step`` before which something is judged or saved."""
    due = [(step // every + 1) * every for every in (config.eval.every, config.checkpoint.every) if every > 0]
    return min([*due, max(config.max_steps, step + 1)])
