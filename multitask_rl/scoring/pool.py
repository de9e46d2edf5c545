"""The reward pool: scores rollouts of all tasks at once, every plugin in a lane of its own.

A plugin lives in killable worker processes, or in the trainer's process if it declares ``isolate=False``.
Tasks that name the same plugin with the same configuration share one lane, and one copy of its model.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.records import (
    OVERRUN,
    Event,
    Failure,
    FailureKind,
    RewardResult,
    Rollout,
    Score,
    Scored,
    Verdict,
)
from multitask_rl.scoring.cache import ResultCache
from multitask_rl.scoring.grader import Result
from multitask_rl.scoring.items import Limiter
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.pending import TICK_S, Answering, Pending
from multitask_rl.scoring.round import Judge, Round
from multitask_rl.scoring.stats import ErrorBudget, TaskCounts
from multitask_rl.scoring.wiring import LanePlan, plan_lane, start_lane

__all__ = ["RewardPool"]

T = TypeVar("T")
Verdicts = dict[str, Verdict | Failure]
"""Results of the constraints of one rollout, by constraint name."""


class RewardPool:
    """Scores and judges; usable from several threads.

    Args:
        specs: tasks by name.
        config: workers, limits, retries, error budget.
        seed: the run's seed, for plugins that draw (``Config.seed``).
        devices: role -> device; ``reward.<task>`` and ``constraint.<task>`` place model-backed plugins.
    """

    def __init__(
        self,
        specs: Mapping[str, TaskSpec],
        config: ScoringConfig,
        *,
        seed: int,
        devices: Mapping[str, str],
    ) -> None:
        self._specs = specs
        self._config = config
        self._seed = seed
        self._devices = devices
        self._lanes: dict[bytes, Lane] = {}
        self._rewards: dict[str, list[Judge]] = {name: [] for name in specs}
        self._constraints: dict[str, list[Judge]] = {name: [] for name in specs}
        self._lock = threading.Lock()
        self._is_started = False
        self._closing = threading.Event()
        self._cache = ResultCache()
        self._counts: dict[str, TaskCounts] = {name: TaskCounts() for name in specs}
        self._budgets = {name: ErrorBudget(name, config.max_failure_rate) for name in specs}

    def start(self) -> None:
        """Find, check and build every plugin, start the workers, warm up.

        Raises:
            PluginError, ConfigError, MissingExtraError: the first plugin that cannot be used; nothing is left
                running.
        """
        plans: list[tuple[TaskSpec, RewardSpec | ConstraintSpec, LanePlan]] = []
        for task in self._specs.values():
            _check_names(task)
            for specs in (task.rewards, task.judged):
                for index, spec in enumerate(cast(list[RewardSpec | ConstraintSpec], specs)):
                    plan = plan_lane(task, spec, index, seed=self._seed, devices=self._devices)
                    plans.append((task, spec, plan))
        try:
            self._start_lanes({plan.key: plan for _, _, plan in plans})
            for task, spec, plan in plans:
                lane = self._lanes[plan.key]
                weight = _signed_weight(task, spec, lane)
                overrun = _overrun(spec, lane, plan.task.where)
                judge = Judge(spec.name or spec.plugin, weight, plan.key, lane, overrun)
                own = self._rewards if isinstance(spec, RewardSpec) else self._constraints
                own[task.name].append(judge)
            self._is_started = True
        except BaseException:
            self.close()
            raise

    def _start_lanes(self, plans: Mapping[bytes, LanePlan]) -> None:
        limiter = Limiter(self._config.max_concurrency)
        # Processes first: they start while models are loaded in this one.
        for plan in sorted(plans.values(), key=lambda p: not p.isolate):
            self._lanes[plan.key] = start_lane(
                plan,
                config=self._config,
                limiter=limiter,
            )
        for lane in self._lanes.values():
            lane.wait_ready()
        threading.Thread(target=self._tick, name="reward-pool", daemon=True).start()

    def reward_traits(self) -> dict[str, dict[str, PluginTraits]]:
        """Return the traits of the rewards, by task and reward name."""
        return {
            task: {judge.name: judge.lane.traits for judge in judges}
            for task, judges in self._rewards.items()
        }

    def begin_scoring(self) -> Pending[Scored]:
        """Return an open round of rewards: rollouts are added as they end, see ``score`` for the results."""
        return Answering(self._round(self._rewards), self._lock, self._scored)

    def begin_judging(self) -> Pending[Verdicts]:
        """Return an open round of constraints, see ``judge`` for the results."""
        return Answering(self._round(self._constraints), self._lock, self._verdicts)

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """Return one record per rollout, in order.

        ``reward`` is the sum of ``weight * value`` over the rewards that apply, with the sign turned for a
        reward whose lower values are better; a weight of 0 only measures. A failure of a weighted reward, or
        no reward that applies, makes it None. A rollout the engine could not produce passes through.

        Raises:
            RewardError: a task's error budget is spent.
        """
        return _all_at_once(self.begin_scoring(), rollouts)

    def judge(
        self, rollouts: Sequence[Rollout], only: Sequence[Collection[str]] | None = None
    ) -> list[Verdicts]:
        """Return the constraint results of each rollout, by constraint name, in order.

        Args:
            rollouts: whole responses, or partial ones.
            only: names of the constraints to ask about each rollout: a look at partial responses, whose
                failures count in no error budget (the whole response is judged later); None = all.

        Raises:
            RewardError: a task's error budget is spent.
        """
        if only is None:
            return _all_at_once(self.begin_judging(), rollouts)
        looks = partial(self._verdicts, is_look=True)
        return _all_at_once(Answering(self._round(self._constraints, only), self._lock, looks), rollouts)

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return per task what was counted since the last call (see ``TaskCounts.metrics``)."""
        with self._lock:
            counts, self._counts = self._counts, {name: TaskCounts() for name in self._counts}
        return {name: own.metrics() for name, own in counts.items() if own.results}

    def health_events(self, step: int) -> list[Event]:
        """Return the warnings since the last call: error budgets half spent, plugins given a rest."""
        events = [event for budget in self._budgets.values() for event in budget.events(step)]
        for lane in self._lanes.values():
            opened, lane.breaker.opened = lane.breaker.opened, []
            events += [Event(step=step, source="rewards", kind="circuit_open", reason=r) for r in opened]
        return events

    def state_dict(self) -> dict[str, Any]:
        """Return the error budgets by task, JSON-able; the cache is not kept: it would only save time."""
        return {name: budget.state_dict() for name, budget in self._budgets.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; tasks it does not know start fresh."""
        for name, budget in self._budgets.items():
            if name in state:
                budget.load_state_dict(state[name])

    def close(self) -> None:
        """Stop every worker and thread; what is being scored fails. Idempotent."""
        self._closing.set()
        for lane in self._lanes.values():
            lane.close()

    def __enter__(self) -> RewardPool:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ------------------------------------------------------------------ inside

    def _round(
        self, judges: Mapping[str, list[Judge]], only: Sequence[Collection[str]] | None = None
    ) -> Round:
        if not self._is_started:  # without plugins every reward would be 0 and every response allowed
            raise RuntimeError("the reward pool was asked before it was started; call start() first")
        return Round(judges, self._cache, only)

    def _scored(self, asking: Round, indices: Sequence[int]) -> list[Scored]:
        with self._lock:
            rollouts = [asking.rollouts[i] for i in indices]
            answers = self._answers(asking, indices)
            scored = [self._combine(r, own) for r, own in zip(rollouts, answers, strict=True)]
            for record in scored:
                if record.rollout.failure is None:
                    self._budgets[record.rollout.task].add(record.failure)
            self._check_budgets(rollouts)
        return scored

    def _verdicts(self, asking: Round, indices: Sequence[int], *, is_look: bool = False) -> list[Verdicts]:
        verdicts: list[Verdicts] = []
        with self._lock:
            rollouts = [asking.rollouts[i] for i in indices]
            for rollout, results in zip(rollouts, self._answers(asking, indices), strict=True):
                own = {name: r for name, r in results.items() if isinstance(r, (Verdict, Failure))}
                verdicts.append(own)
                failure = next((r for r in own.values() if isinstance(r, Failure)), None)
                # successes are counted once, when the rollout is scored
                if failure is not None and not is_look:
                    self._budgets[rollout.task].add(failure)
            self._check_budgets(rollouts)
        return verdicts

    def _check_budgets(self, rollouts: Sequence[Rollout]) -> None:
        for task in {rollout.task for rollout in rollouts}:
            self._budgets[task].check()

    def _answers(self, asking: Round, indices: Sequence[int]) -> list[dict[str, Result]]:
        """Return the results of ``indices`` by name; count them. The lock is held."""
        asking.remember()
        answers: list[dict[str, Result]] = []
        for index in indices:
            counts = self._counts[asking.rollouts[index].task]
            own: dict[str, Result] = {}
            for judge, result in asking.hits[index]:
                own[judge.name] = result
                counts.hits += 1
            for judge, item in asking.asked[index]:
                assert item.result is not None, item.label
                own[judge.name] = item.result
                if item.counted:  # an equal rollout asked for it
                    counts.hits += 1
                else:
                    counts.seconds[judge.name] += item.seconds
                    counts.overruns += item.has_overrun
                item.counted = True
            counts.add(own.values())
            answers.append(own)
        return answers

    def _tick(self) -> None:
        """Hedge and grow the lanes, whoever waits for them."""
        while not self._closing.wait(TICK_S):
            for lane in self._lanes.values():
                lane.tick()

    def _combine(self, rollout: Rollout, results: dict[str, Result]) -> Scored:
        if rollout.failure is not None:
            return Scored(rollout=rollout, reward=None, failure=rollout.failure)
        breakdown: dict[str, RewardResult] = {n: r for n, r in results.items() if not isinstance(r, Verdict)}
        terms: list[tuple[float, float]] = []
        failure = None
        weighted = [judge for judge in self._rewards[rollout.task] if judge.weight]
        for judge in weighted:
            result = breakdown[judge.name]
            if isinstance(result, Failure):
                failure = failure or result
            terms.append((judge.weight, result.value if isinstance(result, Score) else math.nan))
        applicable = [weight * value for weight, value in terms if not math.isnan(value)]
        if weighted and not applicable and failure is None:
            names = ", ".join(judge.name for judge in weighted)
            failure = Failure(
                kind=FailureKind.data,
                message=f"none of the task's rewards applies to the sample ({names})",
                source=rollout.task,
            )
        reward = math.fsum(applicable) if failure is None else None
        return Scored(rollout=rollout, reward=reward, breakdown=breakdown, terms=terms, failure=failure)


def _all_at_once(pending: Pending[T], rollouts: Sequence[Rollout]) -> list[T]:
    pending.add(rollouts)
    pending.seal()
    pending.wait()
    return pending.results(range(len(rollouts)))


def _check_names(task: TaskSpec) -> None:
    for kind, specs in (("rewards", task.rewards), ("constraints", task.constraints)):
        names = Counter(spec.name or spec.plugin for spec in specs)
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ConfigError(
                f"{task.source + ': ' if task.source else ''}tasks.{task.name}.{kind}: {twice[0]!r} is there "
                "twice; give each a 'name' of its own"
            )


def _overrun(spec: RewardSpec | ConstraintSpec, lane: Lane, where: str) -> RewardResult | Verdict | None:
    """Return the result of a response that passes the plugin's limits; None = a failure.

    Raises:
        ConfigError: the tasks file's ``overrun`` is outside the declared range.
    """
    if isinstance(spec, ConstraintSpec):
        return Verdict(cost=1.0, violated=True, reason="the response passes the limits of its check")
    traits = lane.traits
    value = spec.overrun
    if value is None:
        worst = traits.low if traits.higher_is_better else traits.high
        value = worst if math.isfinite(worst) else 0.0 if traits.higher_is_better else None
    elif not traits.low <= value <= traits.high:
        raise ConfigError(
            f"{where}.overrun: {value:g} is outside the range that {spec.name or spec.plugin!r} declares, "
            f"[{traits.low:g}, {traits.high:g}]"
        )
    return None if value is None else Score(value=value, components={OVERRUN: 1.0})


def _signed_weight(task: TaskSpec, spec: RewardSpec | ConstraintSpec, lane: Lane) -> float:
    """Return the factor of a reward's value in the sum: its weight, negative where lower is better."""
    if lane.traits.higher_is_better or not isinstance(spec, RewardSpec):
        return spec.weight
    if spec.weight < 0:
        raise ConfigError(
            f"tasks.{task.name}.rewards: {spec.name or spec.plugin!r} declares that lower values are better "
            f"and is subtracted already; its weight {spec.weight:g} would reward high values. Make it "
            "positive."
        )
    return -spec.weight
