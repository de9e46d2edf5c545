"""The experience of each step, sampled up to ``rollout.max_staleness`` updates before its update.

No batch is sampled before an evaluation or a checkpoint and trained on after it. So a resumed run equals an
uninterrupted one, and a rollback finds no rollouts of the discarded weights.

Step ``t`` learns from rollouts of the weights of step ``t - lag``, or of the last evaluation or checkpoint if
that is later. So a run depends on its seed and not on the clock. With ``batch.quorum`` below 1 the clock
decides which groups are late (docs/overlap.md).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from multitask_rl.boundary.interrupts import is_interrupted
from multitask_rl.config.run import RunConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.models.actor import Actor
from multitask_rl.records import Prompt, Scored
from multitask_rl.step.flow import DataFlow
from multitask_rl.step.metrics import by_group
from multitask_rl.step.refill import Refill
from multitask_rl.step.stages import RewardBatch, SamplingStages
from multitask_rl.step.task_state import TaskState, draw_prompts
from multitask_rl.tracking.timeline import Span, Timeline, intersect, subtract


class _Stopped(BaseException):
    """Nothing needs the batch that is sampled."""


@dataclass(kw_only=True, slots=True)
class Experience:
    """The records of one step."""

    weights: dict[str, float]
    """Task weights behind the quotas."""
    quotas: dict[str, int]
    """Groups per task to learn from."""
    drawn: list[Scored] = field(default_factory=list)
    """Every scored record, with those of refills and late groups."""
    kept: list[Scored] = field(default_factory=list)
    """The records to train on."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Per task: ``staleness`` (mean, in updates), ``carried_over`` and ``dropped_stale`` (groups)."""
    shortfall: dict[str, int] = field(default_factory=dict)
    """Groups per task that the next quotas give back."""
    late: Counter[str] = field(default_factory=Counter)
    """Groups per task that became late in this step, less those of earlier steps that are late no more."""


@dataclass(slots=True)
class _Sampled:
    """Prompts whose rollouts are all sampled and handed to the rewards."""

    step: int
    """The step in which work on these prompts is recorded."""
    timeline: Timeline
    groups: set[str]
    """Ids of the groups of its prompts."""
    dropped: Counter[str]
    """Late groups of earlier batches that were given up when these prompts were sampled, by task."""
    unsampled: dict[str, str] = field(init=False)
    """Group id -> task of the groups with an episode that is still open, also of earlier batches."""
    rewards: RewardBatch = field(init=False)
    scored: Iterator[list[Scored]] = field(init=False)
    """Groups after all sampling stages: first the quorum, then late groups."""

    def note(self, stage: str, span: Span) -> None:
        self.timeline.add(stage, span, step=self.step)


@dataclass(kw_only=True, slots=True)
class _Batch:
    step: int
    experience: Experience
    carry_before: dict[str, float]
    """The scheduler's carry before the quotas of this batch."""
    carry_after: dict[str, float]
    cursors: dict[str, tuple[dict[str, Any], int]]
    """Task -> state of its stream and ``num_overlong``, before the prompts of this batch were drawn."""
    sampled: Future[_Sampled] | None = None


class ExperienceSource:
    """Makes the experience of one step after the other.

    Args:
        sampling: all stages before the advantages; ``stages`` are the built-in ones of them.
    """

    def __init__(
        self,
        config: RunConfig,
        sampling: DataFlow,
        stages: SamplingStages,
        *,
        actor: Actor,
        tasks: Mapping[str, TaskState],
        scheduler: DynamicTaskWeightScheduler,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._sampling = sampling
        self._rollout, self._constraints, self._rewards = stages
        self._actor = actor
        self._tasks = tasks
        self._scheduler = scheduler
        self._timeline = timeline
        self._refill = Refill(tasks, config.batch.refill_rounds, scheduler.informative_rate)
        self._lag = config.rollout_lag
        # Autocast's cache of cast weights is global. It is emptied when any thread leaves its outermost
        # autocast. During the learner's forward pass a weight would then be cast twice, and its gradient
        # rounded differently. So the rollout thread always counts as inside an autocast.
        self._executor = (
            ThreadPoolExecutor(1, "rollout", torch.autocast_increment_nesting) if self._lag > 0 else None
        )
        self._is_stopping = threading.Event()
        """Set while the batches under way are dropped: their sampling ends at its next decode step."""
        if self._executor is not None:
            self._rollout.between_parts = self._end_if_stopping
            self._rollout.engine.call_between_steps(self._end_if_stopping)
        self._step = 0
        """The step under way."""
        self._ahead: deque[_Batch] = deque()
        self._unscored: list[_Sampled] = []
        """Batches of earlier steps that have groups without rewards."""
        self._num_late = Counter[str]()
        """Late groups of the steps that were taken, by task."""
        self._judging: list[Span] = []
        """Spans in which the step under way waited for verdicts."""

    def next(self, step: int) -> Experience:
        """Return the experience of ``step``; begin to sample the following steps that may be sampled now.

        Call ``take`` when learning from it begins: ``rewind`` undoes its draws until then.

        Raises:
            EngineError: the engine failed.
            RewardError: a task's error budget is spent.
            DataError: no prompt of a task fits.
        """
        self._step = step
        self._judging.clear()
        self._launch(step)
        batch = self._ahead[0]
        assert batch.sampled is not None, "launched without an error"
        if not batch.sampled.done():
            began = time.monotonic()
            wait([batch.sampled])
            self._note_wait(began)
        self._fill(batch.experience, batch.sampled.result())
        if len(self._ahead) == 1:
            self._rollout.engine.sleep()
        return batch.experience

    def take(self) -> None:
        """Make final what ``next`` drew: ``rewind`` keeps it. Add the shortfall to the next quotas."""
        experience = self._ahead.popleft().experience
        self._num_late.update(experience.late)
        self._scheduler.carry_over(experience.shortfall, sum(experience.quotas.values()))

    def wait_for_sampling(self) -> None:
        """Wait until the engine is idle; after a signal, batches under way are not sampled to their end."""
        began = time.monotonic()
        if self._ahead:
            while not self._wait(0.1):
                if is_interrupted():
                    self._is_stopping.set()  # the next step does not begin, and ``rewind`` drops them
            self._note_wait(began)

    def running(self) -> list[tuple[str, Span]]:
        """Return stage and span of the rewards under way for later steps."""
        return [("rewards", span) for batch in self._in_scoring() for span in batch.rewards.spans().values()]

    def rewind(self) -> None:
        """Undo the draws of batches that were never trained on; later quotas give back late groups."""
        if not self._ahead:
            return
        undone, num_late = list(self._ahead), self._num_late.copy()
        self.clear()
        for batch in reversed(undone):  # the oldest cursor of a task counts
            carry, after = batch.carry_before, batch.carry_after
            if self._scheduler.carry != after:  # steps that were made since have changed it, too
                since = self._scheduler.carry
                carry = {n: own - after.get(n, 0.0) + carry.get(n, 0.0) for n, own in since.items()}
            self._scheduler.carry = dict(carry)
            for name, (cursor, num_overlong) in batch.cursors.items():
                task = self._tasks[name]
                task.num_overlong = num_overlong
                if task.stream is not None:
                    task.stream.undo(cursor)
        self._give_back(num_late)

    def clear(self) -> None:
        """Drop all batches under way, because their weights are discarded or the run ends."""
        self._is_stopping.set()
        try:
            self._wait()
        finally:
            self._is_stopping.clear()
        for sampled in self._in_scoring():
            sampled.rewards.drop(math.inf)
        self._rollout.drop(math.inf)
        self._ahead.clear()
        self._unscored.clear()
        self._num_late.clear()

    @contextlib.contextmanager
    def giving_back_late_groups(self) -> Iterator[None]:
        """Let later quotas give back the late groups inside the block: a checkpoint leaves them out."""
        carry = dict(self._scheduler.carry)
        self._give_back(self._num_late)
        try:
            yield
        finally:
            self._scheduler.carry = carry

    def _give_back(self, num_late: Counter[str]) -> None:
        self._scheduler.carry_over(+num_late, self._config.batch.prompts_per_step)

    def close(self) -> None:
        """End the thread and what it samples. Idempotent."""
        if self._executor is not None:
            self._is_stopping.set()
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._rollout.engine.call_between_steps(lambda: None)  # an engine that was given goes on

    # ------------------------------------------------------------------ inside

    def _end_if_stopping(self) -> None:
        if self._is_stopping.is_set():
            raise _Stopped

    def _wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all batches ahead are sampled, at most ``timeout_s``; return whether they are."""
        sampled = [batch.sampled for batch in self._ahead if batch.sampled is not None]
        return not wait(sampled, timeout_s).not_done

    def _in_scoring(self) -> list[_Sampled]:
        """Return the batches ahead that are sampled, and those of earlier steps that are not all scored."""
        futures = [b.sampled for b in self._ahead if b.sampled is not None and b.sampled.done()]
        return [*(f.result() for f in futures if f.exception() is None), *self._unscored]

    def _launch(self, step: int) -> None:
        """Begin every batch that may be begun with the weights as they are."""
        config = self._config
        first = self._ahead[-1].step + 1 if self._ahead else step
        # no batch reaches over a step after which the run is evaluated or saved
        due = [
            (step // every + 1) * every for every in (config.eval.every, config.checkpoint.every) if every > 0
        ]
        stop = min([*due, max(config.max_steps, step + 1)])
        for one in range(first, min(step + self._lag, stop - 1) + 1):
            weights, carry = self._scheduler.weights(), dict(self._scheduler.carry)
            quotas = self._scheduler.quotas(config.batch.prompts_per_step)
            batch = _Batch(
                step=one,
                experience=Experience(weights=weights, quotas=quotas),
                carry_before=carry,
                carry_after=dict(self._scheduler.carry),
                cursors={
                    name: (task.stream.state_dict(), task.num_overlong)
                    for name, task in self._tasks.items()
                    if task.stream is not None and quotas.get(name)
                },
            )
            self._ahead.append(batch)  # from here on ``rewind`` restores what is drawn
            prompts = draw_prompts(self._tasks, quotas, self._actor)
            if self._executor is None:
                sampled = self._sample_here(prompts, one)
                batch.sampled = Future()
                batch.sampled.set_result(sampled)
            else:
                batch.sampled = self._executor.submit(self._sample, prompts, one, self._oldest(one))

    def _oldest(self, step: int) -> int:
        """Return the oldest version whose responses ``step`` may learn from."""
        # every step adds 1 to the version
        return self._actor.policy_version + step - self._step - self._config.rollout.max_staleness

    def _sample(self, prompts: list[Prompt], step: int, oldest: int) -> _Sampled:
        """Pass prompts through the flow; rewards begin as responses end.

        Late episodes go on, unless they began before version ``oldest``.
        """
        own = {prompt.group_id for prompt in prompts}
        sampled = _Sampled(step, self._timeline, own, self._rollout.drop(oldest))
        try:
            sampled.scored = self._sampling.stream(prompts, note=sampled.note)
            sampled.rewards = self._rewards.begun.pop()
            sampled.rewards.counted = {p.group_id for p in prompts if p.given_ids is None}
            sampled.unsampled = self._rollout.late
            return sampled
        finally:
            for name, spans in (("rollout", self._rollout.spans), ("constraints", self._constraints.spans)):
                for span in spans:
                    self._timeline.add(name, span, step=step)
            self._judging += self._constraints.spans
            self._rollout.spans.clear()
            self._constraints.spans.clear()

    def _sample_here(self, prompts: list[Prompt], step: int) -> _Sampled:
        began = time.monotonic()
        sampled = self._sample(prompts, step, self._oldest(step))
        self._note_wait(began)
        return sampled

    def _fill(self, experience: Experience, first: _Sampled) -> None:
        """Fill in the records of the step, its metrics, and the late and missing groups of each task.

        Args:
            experience: of the step.
            first: its batch; refills are sampled here.
        """
        batches: list[_Sampled] = []
        """The step's own batch, then its refills."""
        own: set[str] = set()
        """Ids of the groups that the step has drawn."""
        arrived: list[Scored] = []
        """Records of groups that earlier steps have drawn, whose episodes ended in this one."""

        def score_next(counts: Mapping[str, int]) -> list[Scored]:
            sampled = first
            if batches:
                sampled = self._sample_here(draw_prompts(self._tasks, counts, self._actor), first.step)
            batches.append(sampled)
            own.update(sampled.groups)
            began = time.monotonic()
            task = sampled.rewards.wait()
            self._timeline.add("wait/rewards", (began, time.monotonic()), step=self._step, task=task)
            for name, span in sampled.rewards.spans().items():
                self._timeline.add("rewards", span, step=sampled.step, task=name)
            for name, span in sampled.rewards.judging_spans().items():
                self._timeline.add("constraints", span, step=sampled.step, task=name)
            scored = next(sampled.scored, [])
            arrived.extend(s for s in scored if s.rollout.group_id not in own)
            return [s for s in scored if s.rollout.group_id in own]

        def own_late() -> Counter[str]:
            late = dict(batches[-1].unsampled)
            for sampled in batches:
                late |= sampled.rewards.open_groups
            return Counter(task for name, task in late.items() if name in own)

        quotas = experience.quotas
        if self._lag == 0:
            experience.drawn, experience.kept = self._refill.collect(quotas, score_next, own_late)
        else:
            # the engine is busy with the next batches: later quotas give back the missing groups
            experience.drawn = score_next(quotas)
            experience.kept = self._refill.keep(experience.drawn, quotas)
        carried, dropped = self._carry_over(experience, arrived)
        for sampled in batches:
            dropped.update(sampled.dropped)
        experience.late = own_late()
        experience.late.subtract(carried + dropped)
        if self._config.batch.refill_rounds:
            entitled = Counter(quotas)
            entitled.subtract(experience.late)
            experience.shortfall = self._refill.shortfall(experience.kept, entitled)
        else:  # only the groups that were too late are given back
            experience.shortfall = dict(dropped)
        self._unscored += [sampled for sampled in batches if sampled.rewards.open_groups]
        if self._config.batch.quorum < 1.0:
            for name in quotas:
                counts = experience.metrics.setdefault(name, {})
                counts.update(carried_over=float(carried[name]), dropped_stale=float(dropped[name]))
            for name in dropped:
                self._tasks[name].warn_once(
                    "responses of it were dropped: their rewards or worlds took more than "
                    f"rollout.max_staleness={self._config.rollout.max_staleness} updates. Such groups are "
                    f"counted (task/{name}/dropped_stale). Raise it or batch.quorum, or make them faster"
                )
        if self._config.rollout.max_staleness > 0:
            ages: dict[str, list[int]] = {}
            for rollout in (one.rollout for one in experience.kept):
                if rollout.prompt.given_ids is None:
                    age = self._actor.policy_version - rollout.policy_version
                    ages.setdefault(rollout.task, []).append(age)
            for name, found in ages.items():
                experience.metrics.setdefault(name, {})["staleness"] = sum(found) / len(found)

    def _carry_over(self, experience: Experience, arrived: list[Scored]) -> tuple[Counter[str], Counter[str]]:
        """Add ``arrived`` and the other late groups that are scored by now; drop those that are too old.

        Returns:
            Groups added, with those in ``arrived``, and groups dropped, by task.
        """
        dropped = Counter[str]()
        for sampled in self._unscored:
            dropped.update(sampled.rewards.drop(self._oldest(self._step)))
            sampled.step = self._step
            arrived = arrived + next(sampled.scored, [])
        self._unscored = [sampled for sampled in self._unscored if sampled.rewards.open_groups]
        experience.drawn = experience.drawn + arrived
        experience.kept = experience.kept + arrived
        return Counter({task: len(groups) for task, groups in by_group(arrived).items()}), dropped

    def _note_wait(self, began: float) -> None:
        """Note that the update stood still since ``began``: for constraints or the rollout."""
        waited = [(began, time.monotonic())]
        for stage, spans in (
            ("wait/constraints", intersect(waited, self._judging)),
            ("wait/rollout", subtract(waited, self._judging)),
        ):
            for span in spans:
                self._timeline.add(stage, span, step=self._step)
