"""The reward pool: scores rollouts of all tasks, each plugin in a lane of its own.

A plugin lives in killable worker processes, or in the trainer's process if it declares ``isolate=False``.
Tasks that name the same plugin with the same configuration share one lane, and one copy of its model.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.plugins import absolute_reference
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
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.grader import PluginPlan
from multitask_rl.scoring.items import Limiter
from multitask_rl.scoring.lane import Lane
from multitask_rl.scoring.process import PluginOutput
from multitask_rl.scoring.results import Result
from multitask_rl.scoring.round import TICK_S, Pending, Round, TaskPlugin
from multitask_rl.scoring.runners import LocalRunner, ProcessRunner
from multitask_rl.scoring.stats import ErrorBudget, TaskCounts, of_plugins
from multitask_rl.seeding import derive_seed

T = TypeVar("T")
Verdicts = dict[str, Verdict | Failure]
"""Results of the constraints of one rollout, by constraint name."""


class RewardPool:
    """Scores rollouts and judges their constraints; usable from several threads.

    Args:
        specs: tasks by name.
        config: workers, limits, retries, error budget.
        seed: the run's seed, for plugins that draw (``Config.seed``).
        devices: role -> device; ``reward.<task>`` and ``constraint.<task>`` place model-backed plugins.
    """

    def __init__(
        self, specs: Mapping[str, TaskSpec], config: ScoringConfig, *, seed: int, devices: Mapping[str, str]
    ) -> None:
        self._specs, self._config, self._seed, self._devices = specs, config, seed, devices
        self._lanes: dict[bytes, Lane] = {}
        self._rewards: dict[str, list[TaskPlugin]] = {name: [] for name in specs}
        self._constraints: dict[str, list[TaskPlugin]] = {name: [] for name in specs}
        self._lock = threading.Lock()
        self._is_started = False
        self._closing = threading.Event()
        self._cache: OrderedDict[bytes, Result] = OrderedDict()
        self._counts: dict[str, TaskCounts] = {name: TaskCounts() for name in specs}
        self._budgets = {
            name: {what: ErrorBudget(name, config.max_failure_rate, what) for what in ("scored", "judged")}
            for name in specs
        }
        """By task, of rewards and of constraints: a response that is rejected is judged and never scored."""

    def start(self) -> None:
        """Find, check and build every plugin, start workers; an unusable one raises as ``find_plugin``."""
        plans: list[tuple[TaskSpec, RewardSpec | ConstraintSpec, PluginPlan]] = []
        for task in self._specs.values():
            for specs in (task.rewards, task.judged):
                for index, spec in enumerate(cast(list[RewardSpec | ConstraintSpec], specs)):
                    plan = plan_plugin(task, spec, index, seed=self._seed, devices=self._devices)
                    plans.append((task, spec, plan))
        try:
            limiter = Limiter(self._config.max_concurrency)
            # Processes first: they start while models are loaded in this one.
            for plan in sorted({p.key: p for _, _, p in plans}.values(), key=lambda p: not p.isolate):
                self._lanes[plan.key] = start_lane(plan, config=self._config, limiter=limiter)
            for lane in self._lanes.values():
                lane.wait_ready()
            threading.Thread(target=self._tick, name="reward-pool", daemon=True).start()
            for task, spec, plan in plans:
                own = self._rewards if isinstance(spec, RewardSpec) else self._constraints
                own[task.name].append(_task_plugin(task, spec, plan, self._lanes[plan.key]))
            self._is_started = True
        except BaseException:
            self.close()
            raise

    def reward_traits(self) -> dict[str, dict[str, PluginTraits]]:
        """Return the traits of the rewards, by task and reward name."""
        return {
            task: {plugin.name: plugin.lane.facts.traits for plugin in plugins}
            for task, plugins in self._rewards.items()
        }

    def begin_scoring(self) -> Pending[Scored]:
        """Return an open round of rewards, to which rollouts are added as they end; results as ``score``."""
        return self._round(self._rewards, self._scored)

    def begin_judging(self) -> Pending[Verdicts]:
        """Return an open round of constraints; results as ``judge``."""
        return self._round(self._constraints, self._verdicts)

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

        ``only``, for partial responses: the names of the constraints to ask about each (None = all). Their
        failures count in no error budget: the whole response is judged later.

        Raises:
            RewardError: a task's error budget is spent.
        """
        return _all_at_once(self._round(self._constraints, self._verdicts, only), rollouts)

    def explain(self, rollouts: Sequence[Rollout]) -> list[dict[str, str]]:
        """Return per rollout the explanations of its violations, by name, of constraints that give one."""
        found: list[dict[str, str]] = [{} for _ in rollouts]
        asked: dict[Lane, list[tuple[int, str, Verdict]]] = {}
        for index, rollout in enumerate(rollouts):
            for plugin in self._constraints[rollout.task]:
                verdict = rollout.verdicts.get(plugin.name)
                if isinstance(verdict, Verdict) and verdict.violated:
                    asked.setdefault(plugin.lane, []).append((index, plugin.name, verdict))
        for lane, own in asked.items():
            judged = [
                rollouts[index].answers()[verdict.turn - 1] if verdict.turn else rollouts[index]
                for index, _, verdict in own
            ]
            texts = lane.explain(judged, [verdict for *_, verdict in own])
            for (index, name, _), text in zip(own, texts, strict=True):
                if text:
                    found[index][name] = text
        return found

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return per task the numbers of ``TaskCounts.metrics`` since the last call."""
        return {name: own.metrics() for name, own in self.take_counts().items() if own.results}

    def take_counts(self) -> dict[str, TaskCounts]:
        """Return the counts by task since the last call."""
        with self._lock:
            counts, self._counts = self._counts, {name: TaskCounts() for name in self._counts}
        return counts

    def health_events(self, step: int) -> list[Event]:
        """Return the warnings since the last call: error budgets half spent, plugins given a rest."""
        budgets = [budget for own in self._budgets.values() for budget in own.values()]
        events = [event for budget in budgets for event in budget.events(step)]
        for lane in self._lanes.values():
            opened, lane.breaker.opened = lane.breaker.opened, []
            events += [Event(step=step, source="rewards", kind="circuit_open", reason=r) for r in opened]
        return events

    def state_dict(self) -> dict[str, Any]:
        """Return the error budgets, JSON-able; the cache is not kept: it would only save time."""
        return {task: {k: own.state_dict() for k, own in by.items()} for task, by in self._budgets.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``; tasks it does not know start fresh."""
        for task, budgets in self._budgets.items():
            for what in budgets.keys() & state.get(task, {}).keys():
                budgets[what].load_state_dict(state[task][what])

    def close(self) -> None:
        """Stop all workers and threads; open items fail. Idempotent."""
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
        self,
        plugins: Mapping[str, list[TaskPlugin]],
        collect: Callable[[Round[T], Sequence[int]], list[T]],
        only: Sequence[Collection[str]] | None = None,
    ) -> Round[T]:
        if not self._is_started:  # without plugins every reward would be 0 and every response allowed
            raise RuntimeError("the reward pool was asked before it was started; call start() first")
        return Round(plugins, self._cache, self._lock, collect, only)

    def _scored(self, asking: Round[Any], indices: Sequence[int]) -> list[Scored]:
        with self._lock:
            scored = [self._combine(rollout, own) for rollout, own in self._answers(asking, indices)]
            for record in scored:
                if of_plugins(record):
                    self._budgets[record.rollout.task]["scored"].add(record.rollout, record.failure)
            for task in {record.rollout.task for record in scored}:
                self._budgets[task]["scored"].check()
        return scored

    def _verdicts(self, asking: Round[Any], indices: Sequence[int]) -> list[Verdicts]:
        verdicts: list[Verdicts] = []
        with self._lock:
            answers = self._answers(asking, indices)
            for rollout, results in answers:
                own = {name: r for name, r in results.items() if isinstance(r, (Verdict, Failure))}
                verdicts.append(own)
                if own and asking.only is None:  # else a part of a response, which is judged again
                    failure = next((r for r in own.values() if isinstance(r, Failure)), None)
                    self._budgets[rollout.task]["judged"].add(rollout, failure)
            for task in {rollout.task for rollout, _ in answers}:
                self._budgets[task]["judged"].check()
        return verdicts

    def _answers(self, asking: Round[Any], indices: Sequence[int]) -> list[tuple[Rollout, dict[str, Result]]]:
        """Return rollouts with their results by name; count them. The lock is held."""
        asking.remember()
        is_whole = asking.only is None  # else a part of a response, which is judged again
        answers: list[tuple[Rollout, dict[str, Result]]] = []
        for index in indices:
            rollout = asking.rollouts[index]
            counts = self._counts[rollout.task]
            own: dict[str, Result] = {}
            for plugin, result in asking.hits[index]:
                own[plugin.name] = result
                counts.hits += 1
            for plugin, item in asking.asked[index]:
                assert item.result is not None, item.label
                own[plugin.name] = item.result
                if item.counted:  # an equal rollout asked for it
                    counts.hits += 1
                else:
                    counts.seconds[plugin.name] += item.seconds
                item.counted = True
                counts.overruns += item.has_overrun and is_whole
            counts.results += len(own)
            if is_whole:
                prompt = rollout.prompt
                counts.responses.add((prompt.prompt_id, prompt.draw, rollout.sample, rollout.attempt))
                counts.failures.update(r.kind for r in own.values() if isinstance(r, Failure))
            answers.append((rollout, own))
        return answers

    def _tick(self) -> None:
        while not self._closing.wait(TICK_S):
            for lane in self._lanes.values():
                lane.tick()

    def _combine(self, rollout: Rollout, results: dict[str, Result]) -> Scored:
        if rollout.failure is not None:
            return Scored(rollout=rollout, reward=None, failure=rollout.failure)
        breakdown: dict[str, RewardResult] = {n: r for n, r in results.items() if not isinstance(r, Verdict)}
        terms: list[tuple[float, float]] = []
        failure = None
        weighted = [plugin for plugin in self._rewards[rollout.task] if plugin.weight]
        for plugin in weighted:
            result = breakdown[plugin.name]
            if isinstance(result, Failure):
                failure = failure or result
            terms.append((plugin.weight, result.value if isinstance(result, Score) else math.nan))
        applicable = [weight * value for weight, value in terms if not math.isnan(value)]
        if weighted and not applicable and failure is None:
            names = ", ".join(plugin.name for plugin in weighted)
            message = f"none of the task's rewards applies to the sample: {names} returned None"
            failure = Failure(kind=FailureKind.data, message=message, source=rollout.task)
        reward = math.fsum(applicable) if failure is None else None
        return Scored(rollout=rollout, reward=reward, breakdown=breakdown, terms=terms, failure=failure)


def _all_at_once(pending: Pending[T], rollouts: Sequence[Rollout]) -> list[T]:
    pending.add(rollouts)
    pending.seal()
    pending.wait()
    return pending.results(range(len(rollouts)))


def _task_plugin(
    task: TaskSpec, spec: RewardSpec | ConstraintSpec, plan: PluginPlan, lane: Lane
) -> TaskPlugin:
    """Return the plugin of one task; ``ConfigError`` if weight or ``overrun`` does not fit its traits."""
    name, weight, traits = spec.name, spec.weight, lane.facts.traits
    if isinstance(spec, ConstraintSpec):
        verdict = Verdict(cost=1.0, violated=True, reason="the response exceeds the limits of its check")
        return TaskPlugin(name, weight, plan.key, lane, verdict)
    if not traits.higher_is_better:
        if weight < 0:
            raise ConfigError(
                f"tasks.{task.name}.rewards: {name!r} declares that lower values are better and is "
                f"subtracted already; its weight {weight:g} would reward high values. Make it positive."
            )
        weight = -weight
    value = spec.overrun
    if value is None:
        is_higher_better = traits.higher_is_better and weight >= 0
        worst = traits.low if is_higher_better else traits.high
        value = worst if math.isfinite(worst) else 0.0 if is_higher_better else None
    elif not traits.low <= value <= traits.high:
        raise ConfigError(
            f"{plan.where}.overrun: {value:g} is outside the range that {name!r} declares, "
            f"[{traits.low:g}, {traits.high:g}]"
        )
    overrun = None if value is None else Score(value=value, components={OVERRUN: 1.0})
    return TaskPlugin(name, weight, plan.key, lane, overrun)


def plan_plugin(
    task: TaskSpec, spec: RewardSpec | ConstraintSpec, index: int, *, seed: int, devices: Mapping[str, str]
) -> PluginPlan:
    """Find the plugin of ``spec``, number ``index`` of its kind; check its shape and configuration.

    A ``Config`` with a field ``device`` or ``seed`` gets the run's, unless the tasks file gives it. Raises as
    ``find_plugin`` and ``PluginSource.check``.
    """
    kind = "reward" if isinstance(spec, RewardSpec) else "constraint"
    where = f"{task.where}.{kind}s[{index}]"
    reference = absolute_reference(spec.plugin)
    source = find_plugin(kind, reference, where)
    config = dict(spec.config)
    if source.takes("device"):
        device = spec.device or devices.get(f"{kind}.{task.name}") or devices.get(f"reward.{task.name}", "")
        if device:
            config.setdefault("device", device)
    elif spec.device:
        why = "runs on the CPU; its Config has no field 'device'"
        raise ConfigError(f"{where}.device: {spec.plugin!r} {why}")
    if source.takes("seed"):
        config.setdefault("seed", derive_seed(seed, "reward", spec.plugin))
    source.check(config)
    own_range = spec.range if isinstance(spec, RewardSpec) else None
    if own_range is not None and not source.traits.low <= own_range[0] < own_range[1] <= source.traits.high:
        raise ConfigError(
            f"{where}.range: [{own_range[0]:g}, {own_range[1]:g}] is not within the range that "
            f"{spec.plugin!r} declares, [{source.traits.low:g}, {source.traits.high:g}]; leave 'range' out"
        )
    identity = json.dumps(
        [kind, reference, source.located.version, config, own_range], sort_keys=True, default=repr
    )
    return PluginPlan(
        kind=kind,
        reference=reference,
        config=config,
        source=spec.name,
        where=where,
        key=hashlib.blake2b(identity.encode(), digest_size=16).digest(),
        isolate=source.isolates(config),
        range=own_range,
        seed=derive_seed(seed, kind, spec.plugin, "global generators"),
    )


def start_lane(plan: PluginPlan, *, config: ScoringConfig, limiter: Limiter) -> Lane:
    """Return the lane of ``plan``, its first runner started but maybe not up; else ``MultitaskRLError``."""
    lane = Lane(plan.source, num_workers=config.num_workers, retries=config.retries, limiter=limiter)
    if plan.isolate:
        limited, output = replace(plan, memory_mb=config.worker_memory_mb), PluginOutput(plan.source)
        lane.make_runner = lambda: ProcessRunner(lane, limited, output)
        lane.start(lane.make_runner())
    else:
        lane.start(LocalRunner(lane, plan))
    return lane
