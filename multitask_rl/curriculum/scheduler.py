"""DynamicTaskWeightScheduler: the task weights of a run, and the prompts per step that follow from them.

statistics -> policy (a plugin) -> gate (holds unlearnable tasks) -> guard's factors -> floors -> quotas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where
from multitask_rl.config.schema.ranges import Fraction, Settings, suggest, unknown_name
from multitask_rl.curriculum.base import SchedulerPolicy
from multitask_rl.curriculum.quotas import apportion, normalise, raise_to_floors
from multitask_rl.curriculum.signal import REWARD_SCORE
from multitask_rl.errors import ConfigError
from multitask_rl.plugins import SCHEDULERS, check_config_extends, class_id, load_plugin
from multitask_rl.records import Event, TaskStats, rename_tasks
from multitask_rl.seeding import derive_seed

_DEFAULT_MIN_WEIGHT = 0.1
_MAX_DEFAULT_FLOORS = 0.2
"""Largest sum of default floors: the policy distributes at least 1 - 0.2 of the step."""
_MIN_REPORTED_CHANGE = 0.05
_STEPS_BETWEEN_REPORTS = 10

_MIN_INFORMATIVE = 0.02
_RELEASE_INFORMATIVE = 0.05
"""Informative share above which a held task is released; above ``_MIN_INFORMATIVE``, so that a task does not
flip between held and released."""
_STEPS = 200
_LEARNT = 0.9
"""Part of the target above which groups without variance mean "solved", not "hopeless"."""


@dataclass(kw_only=True, slots=True)
class SchedulerConfig(Settings):
    """The scheduler of task weights."""

    policy: str = "deficit_learnability"
    """Entry point of ``multitask_rl.schedulers``."""
    min_weight: Fraction | None = None
    """Floor of every task's share; None = 0.1, or 0.2 / number of tasks where that is smaller."""
    metric_key: str = REWARD_SCORE
    """What the policy watches: ``reward_score`` (training reward) or a metric of the step's task stats. The
    level of a task is the metric's place in its declared range, or in [0, 1] if it declares none."""
    policy_config: dict[str, Any] = field(default_factory=dict)
    """Further keys of the policy's ``Config``, such as ``patience`` of the policy ``patience``."""


_DEFAULTS = SchedulerConfig()


class DynamicTaskWeightScheduler:
    """Decides the shares of a step: ``bind`` first, ``quotas`` before sampling, ``update`` after scoring.

    Args:
        initial_weights: weight per task, >= 0, normalised; a missing task gets the mean of the given weights.
            A task with weight 0 and no ``min_share`` is not trained. None = equal weights.
        metric_key, min_weight: see ``SchedulerConfig``.
        patience: same as ``patience`` in ``policy_config``. An event warns if the policy does not use it.
        policy: entry point of ``multitask_rl.schedulers``, or a ``SchedulerPolicy`` class; ``policy_config``
            holds further keys of its ``Config``.

    Raises:
        ConfigError: an unknown key or a value out of range.
        PluginError: no such policy, or one that cannot be loaded.
    """

    _make_policy: Callable[[], SchedulerPolicy]
    _gate: UnlearnableGate
    _floors: dict[str, float]
    _factors: dict[str, float]
    carry: dict[str, float]
    """Prompts that earlier steps owe each task; below 0 = it got more than its share."""
    _shares: dict[str, float] | None
    """The present weights; None = to be computed."""
    _tie_break: dict[str, int]
    _calibrated_at: int
    _reported: dict[str, float]
    _reported_at: int
    _has_warned_missing: bool
    _bound_events: list[Event]
    _pending: list[Event]

    def __init__(
        self,
        initial_weights: Mapping[str, float] | None = None,
        metric_key: str = _DEFAULTS.metric_key,
        patience: int | None = None,
        min_weight: float | None = _DEFAULTS.min_weight,
        policy: str | type[SchedulerPolicy] = _DEFAULTS.policy,
        **policy_config: Any,
    ) -> None:
        given = initial_weights or {}
        for task, weight in given.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0.0 <= weight < math.inf:
                raise ConfigError(f"weight of task {task!r} must be a finite number >= 0, got {weight!r}")
        self.initial_weights = {task: float(weight) for task, weight in given.items()}
        self.min_weight = SchedulerConfig(min_weight=min_weight).min_weight
        self.policy_class: type[SchedulerPolicy] = (
            load_plugin(SCHEDULERS, policy, expects=("Config", "update", "weights"), where="scheduler.policy")
            if isinstance(policy, str)
            else policy
        )
        self.policy_name = policy if isinstance(policy, str) else policy.__name__
        check_config_extends(self.policy_class, "scheduler.policy")
        knows_patience = "patience" in {f.name for f in dataclasses.fields(self.policy_class.Config)}
        if patience is not None and knows_patience:
            policy_config.setdefault("patience", patience)
        self._unused_patience = None if knows_patience else patience
        where = Where(path=("scheduler", "policy_config"))
        config = build_dataclass(self.policy_class.Config, policy_config, where)
        self.policy_config = dataclasses.replace(config, metric_key=metric_key)
        self._bound: SchedulerPolicy | None = None
        self._shares = None
        self.tasks: tuple[str, ...] = ()

    @property
    def _policy(self) -> SchedulerPolicy:
        if self._bound is None:
            raise RuntimeError("DynamicTaskWeightScheduler.bind(tasks, ...) must be called first")
        return self._bound

    def bind(
        self,
        tasks: Sequence[str],
        *,
        targets: Mapping[str, float] | None = None,
        min_shares: Mapping[str, float | None] | None = None,
        reward_ranges: Mapping[str, tuple[float, float]] | None = None,
        seed: int = 0,
    ) -> None:
        """Set the trained tasks and reset the state, before the first step.

        The first ``update`` reports the initial weights.

        Args:
            tasks: their names.
            targets: level in [0, 1] at which a task counts as learnt; missing = 1.
            min_shares: floor of a task's share; missing or None = ``min_weight``.
            reward_ranges: declared ``(low, high)`` of a task's reward; else it is estimated, with an event.
            seed: the run's seed; it only breaks ties between equal remainders.

        Raises:
            ConfigError: unknown or duplicate task, no task with a weight, floors that add up to more than 1.
        """
        self.tasks = tuple(tasks)
        if not tasks or len(set(tasks)) != len(tasks):
            raise ConfigError(f"the scheduler needs at least one task and no name twice, got {list(tasks)!r}")
        given = self.initial_weights
        for name in given:
            if name not in tasks:
                raise ConfigError(f"initial_weights: {unknown_name('task', name, tasks)}")
        mean = math.fsum(given.values()) / len(given) if given else 1.0
        weights = {task: given.get(task, mean) for task in tasks}
        if math.fsum(weights.values()) > 0.0:
            weights = normalise(weights)
        own_floors = {task: share for task, share in (min_shares or {}).items() if share is not None}
        active = [task for task in tasks if weights[task] > 0.0 or own_floors.get(task, 0.0) > 0.0]
        if not active:
            raise ConfigError("every task has weight 0; give at least one task a weight above 0")
        floor = self.min_weight
        if floor is None:
            floor = min(_DEFAULT_MIN_WEIGHT, _MAX_DEFAULT_FLOORS / len(active))
        self._floors = {task: own_floors.get(task, floor) for task in active}
        if (total := math.fsum(self._floors.values())) > 1.0 + 1e-9:
            raise ConfigError(
                f"the floors of {len(active)} tasks add up to {total:g}, more than the whole step: lower "
                f"scheduler.min_weight (now {floor:g}, at most {1.0 / len(active):g} here) or the tasks' "
                f"min_share ({own_floors or 'none given'})"
            )
        # a task of weight 0 with a min_share still needs a prior above 0
        prior = {task: weights[task] or self._floors[task] for task in active}
        self._make_policy = partial(
            self.policy_class, self.policy_config, active, prior, targets or {}, reward_ranges
        )
        self._bound = self._make_policy()
        self._gate = UnlearnableGate(active)
        self._factors, self.carry, self._shares = {}, {}, None
        self._calibrated_at, self._reported_at = -1, -_STEPS_BETWEEN_REPORTS
        self._has_warned_missing = False
        self._tie_break = {task: derive_seed(seed, "quota", task) for task in tasks}
        self._reported = shares = self.weights()
        filled = [task for task in tasks if given and task not in given]
        reason = f"initial shares {_listed(shares)} by policy {self.policy_name}"
        if filled:
            reason += f"; no weight given for {', '.join(filled)}: each gets the mean of the given weights"
        data: dict[str, Any] = {"given": dict(given), "filled": filled, "to": shares, "floors": self._floors}
        events = [_event("weights", reason, data=data)]
        if self._unused_patience is not None:
            reason = (
                f"patience={self._unused_patience} has no effect: the policy {self.policy_name} does not "
                "wait for plateaus; leave it out, or set policy to patience"
            )
            events.append(_event("warn", reason))
        unknown = [task for task in active if task not in self._bound.ranges]
        if self._bound.adaptive and self.policy_config.metric_key == REWARD_SCORE and unknown:
            reason = (
                f"the rewards of {', '.join(unknown)} declare no range: the scheduler estimates the scale of "
                "their levels from observed rewards. If you know the range of a reward (a reward "
                "model's logit has none), give 'range: [LOW, HIGH]' in the tasks file, or declare low and "
                "high in the plugin: then levels of different tasks are comparable from the start"
            )
            events.append(_event("warn", reason, data={"tasks": unknown}))
        self._bound_events, self._pending = events, list(events)

    def update(self, stats: Mapping[str, TaskStats], step: int) -> list[Event]:
        """Update from the statistics, by task, of ``step`` and return events."""
        self._policy.update(stats, step)
        self._shares = None
        events, self._pending = self._pending, []
        key = self.policy_config.metric_key
        seen = [set(own.metrics) for own in stats.values() if own.num_prompts > 0]
        is_missing = key != REWARD_SCORE and bool(seen) and not any(key in metrics for metrics in seen)
        if is_missing and not self._has_warned_missing:
            self._has_warned_missing = True
            known = sorted(set().union(*seen))
            reason = (
                f"scheduler.metric_key {key!r} is not among the step's metrics{suggest(key, known)}: weights "
                f"do not move until it appears (known: reward_score, {', '.join(known) or 'no other'})"
            )
            events.append(_event("warn", reason, data={"known": known}))
        events += self._gate.update(self._policy, stats, step)
        if step - self._reported_at < _STEPS_BETWEEN_REPORTS:
            return [dataclasses.replace(event, step=step) for event in events]
        new, old = self.weights(), self._reported
        changes = {task: abs(share - old.get(task, 0.0)) for task, share in new.items()}
        task = max(changes, key=lambda t: (changes[t], t))
        if changes[task] >= _MIN_REPORTED_CHANGE:
            self._reported, self._reported_at = new, step
            reasons = self._policy.reasons()
            change = f"share of {task} {old.get(task, 0.0):.3f} -> {new[task]:.3f}"
            data = {"from": dict(old), "to": new, "reasons": reasons, "policy": self.policy_name}
            reason = reasons.get(task, "not trained")
            if held := [f"{other} x {factor:g}" for other, factor in self._factors.items() if factor != 1.0]:
                reason = f"the guard scales the shares ({', '.join(held)}); {reason}"
            events.append(_event("reweight", f"{change}: {reason}", task, data))
        return [dataclasses.replace(event, step=step) for event in events]

    def calibrate(
        self, held_out: Mapping[str, float], step: int, errors: Mapping[str, float] | None = None
    ) -> None:
        """Correct the levels by held-out mean rewards and their errors; the same step again has no effect."""
        if step > self._calibrated_at:
            self._calibrated_at = step
            self._policy.calibrate(held_out, errors or {})
            self._shares = None

    def weights(self) -> dict[str, float]:
        """Return the share of every bound task, sum 1; 0 for a task that is not trained."""
        if self._shares is None:
            self._shares = self._decide()
        return dict(self._shares)

    def _decide(self) -> dict[str, float]:
        policy = self._policy
        shares = policy.weights()
        floors = dict(self._floors)
        if len(self._gate.held) == len(policy.tasks):  # no task could use the freed shares
            shares = dict(policy.prior)
        elif policy.adaptive:
            for task in self._gate.held:
                shares[task] = 0.0
                floors[task] = max(floors[task], self._gate.probe_share)
        shares = raise_to_floors(normalise(shares), floors)
        if self._factors:
            scaled = {task: share * self._factors.get(task, 1.0) for task, share in shares.items()}
            if not any(scaled.values()):  # the tasks that are not frozen had no share
                scaled = {task: policy.prior[task] * self._factors.get(task, 1.0) for task in shares}
            kept = {task: floors[task] for task, share in scaled.items() if share > 0.0}
            shares = raise_to_floors(normalise(scaled), kept)
        return {task: shares.get(task, 0.0) for task in self.tasks}

    @property
    def active(self) -> tuple[str, ...]:
        """The tasks that may get prompts: they have a weight, or a floor of their own. After ``bind``."""
        return self._policy.tasks

    def set_factors(self, factors: Mapping[str, float]) -> None:
        """Multiply the policy's shares by the guard's factors (missing = 1) in place of earlier factors.

        0 freezes a task: it gets no prompts, even with a floor. Factors that freeze every task are ignored.
        """
        known = {task: max(0.0, factors[task]) for task in self._policy.tasks if task in factors}
        is_frozen = len(known) == len(self._policy.tasks) and not any(known.values())
        self._factors = {} if is_frozen else known
        self._shares = None

    def quotas(self, num_prompts: int) -> dict[str, int]:
        """Return how many of ``num_prompts`` prompts each task gets in the next step; advances the state."""
        counts, self.carry = apportion(self.weights(), num_prompts, self.carry, self._tie_break)
        return counts

    def carry_over(self, shortfall: Mapping[str, int], num_prompts: int) -> None:
        """Add the groups that each task is short of to its later quotas, at the expense of the other tasks.

        ``shortfall`` counts groups of the quota without a gradient that refill could not replace. Without the
        carry the task would get less training than its weight says. A task carries at most its quota of one
        step of ``num_prompts``.
        """
        if not shortfall:
            return
        shares = self.weights()
        owed = {
            task: min(float(short), max(0.0, shares[task] * num_prompts - self.carry.get(task, 0.0)))
            for task, short in shortfall.items()
        }
        total = math.fsum(owed.values())
        for task, share in shares.items():
            if share > 0.0:
                self.carry[task] = self.carry.get(task, 0.0) + owed.get(task, 0.0) - share * total

    def compares_gradients(self, step: int) -> bool:
        """Whether the learner compares the gradients of the tasks at ``step``."""
        every = self.policy_config.gradients_every
        return every > 0 and step % every == 0 and len(self.tasks) > 1

    def informative_rate(self, task: str) -> float:
        """Return the smoothed share of the task's informative groups; 1 before any was seen."""
        return self._policy.traces[task].informative if task in self._policy.tasks else 1.0

    def metrics(self, tasks: Collection[str] | None = None) -> dict[str, float]:
        """Return level, informative share and gate of ``tasks`` (None = all) that were seen so far.

        Names are ``task/<name>/...``.
        """
        values, traces = {}, self._policy.traces
        for task in traces if tasks is None else tasks:
            if task in traces and (trace := traces[task]).steps:
                values[f"task/{task}/level"] = trace.level
                values[f"task/{task}/informative"] = trace.informative
                values[f"task/{task}/held"] = float(task in self._gate.held)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "policy": class_id(self.policy_class),
            "metric_key": self.policy_config.metric_key,
            "policy_state": self._policy.state_dict(),
            "gate": self._gate.state_dict(),
            "carry": dict(self.carry),
            "factors": dict(self._factors),
            "calibrated_at": self._calibrated_at,
            "reported": dict(self._reported),
            "reported_at": self._reported_at,
            "said": [
                event.reason
                for event in self._bound_events
                if not any(own.reason.startswith(event.reason) for own in self._pending)
            ],
            "has_warned_missing": self._has_warned_missing,
        }

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> None:
        """Restore ``state_dict`` after ``bind``; ``renamed`` maps old task names to new ones.

        A new task starts fresh. With another policy or ``metric_key`` all statistics start fresh, and
        the next ``update`` warns; gate, carry and the guard's factors are restored.
        """
        # events that the run has already reported
        self._pending = [event for event in self._pending if event.reason not in state["said"]]
        pairs = {
            "scheduler policy": (state["policy"], class_id(self.policy_class)),
            "scheduler.metric_key": (state["metric_key"], self.policy_config.metric_key),
        }
        other = [(what, before, now) for what, (before, now) in pairs.items() if before != now]
        if other:  # a rollback past the change undoes what the policy has seen since
            self._bound = self._make_policy()
        else:
            self._policy.load_state_dict(state["policy_state"], renamed or {})
            self._has_warned_missing |= state.get("has_warned_missing", False)
        for what, before, now in other:
            reason = f"the checkpoint's {what} was {before}, this run's is {now}: it starts without history"
            self._pending.append(_event("warn", reason))
        self._gate.load_state_dict(state["gate"], renamed)
        self.carry = rename_tasks(state["carry"], renamed, self.tasks)
        self._factors, self._shares = rename_tasks(state["factors"], renamed, self.tasks), None
        self._calibrated_at = state["calibrated_at"]
        self._reported = shares = self.weights()
        # weights or tasks have changed, or no step was made yet
        if first := next((event for event in self._pending if event.kind == "weights"), None):
            if shares != first.data["to"]:
                reason = f"{first.reason}; with the evidence so far {_listed(shares)}"
                told = replace(first, reason=reason, data={**first.data, "to": shares})
                self._pending[self._pending.index(first)] = told
        else:
            self._reported |= rename_tasks(state["reported"], renamed, self.tasks)
        self._reported_at = state["reported_at"]


class UnlearnableGate:
    """Holds a task that RL cannot learn at its floor.

    If a task is never solved, all rollouts of a group fail alike and every advantage is 0; a policy that
    favours the worst task would give it the whole budget.

    - Held: the smoothed share of groups with a gradient is below 2 % for 200 steps in a row in which the task
      had prompts. Its floor is at least ``probe_share``.
    - Released: that share is above 5 %.
    - A task at 90 % of its target or more is solved: it is never held, and released if it is.

    If all tasks are held, the shares are the prior. A policy that is not adaptive keeps its shares.

    A task whose rewards were one number in 200 such steps, all below 90 % of its target, is told where its
    groups have a gradient by something else. It is not held.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._dead_steps = dict.fromkeys(tasks, 0)
        self._same: dict[str, tuple[float, int]] = {}
        """The one number that all rewards of a task were in its last steps, and how many steps."""
        self.held: set[str] = set()
        """Tasks held at their floor."""
        self.probe_share = min(_MIN_INFORMATIVE, 0.4 / len(tasks))
        """Least share of a held task: enough to notice that it has become learnable."""

    def update(self, policy: SchedulerPolicy, stats: Mapping[str, TaskStats], step: int) -> list[Event]:
        """Count the step and return an alarm or a release for each task that changes state."""
        events = []
        for task in policy.tasks:
            if task not in stats or stats[task].num_prompts <= 0:
                continue
            informative, level = policy.traces[task].informative, policy.traces[task].level
            is_learnt = level >= _LEARNT * policy.targets[task]
            if self._count_same(stats[task], is_learnt=is_learnt) == _STEPS:
                reason = (
                    f"every reward of {task} has been {self._same[task][0]:g} for {_STEPS} steps, at level "
                    f"{level:.2f}: the task learns nothing from it, only from other parts of its loss "
                    "(costs, length, critic, teacher). Check its reward, or make the task easier."
                )
                events.append(_event("warn", reason, task, {"level": level}))
            is_dead = informative < _MIN_INFORMATIVE and not is_learnt
            self._dead_steps[task] = self._dead_steps[task] + 1 if is_dead else 0
            if task not in self.held and self._dead_steps[task] >= _STEPS:
                self.held.add(task)
                effect = "held at its floor"
                if not policy.adaptive:
                    effect = "its weight is kept, the policy does not adapt"
                reason = (
                    f"{task} looks unlearnable: under {_MIN_INFORMATIVE:.0%} of its groups gave a gradient "
                    f"for {_STEPS} steps at level {level:.2f}; {effect}. Warm-start it by supervised "
                    "learning, make it easier, or check its reward."
                )
            elif task in self.held and (informative > _RELEASE_INFORMATIVE or is_learnt):
                self.held.remove(task)
                reason = f"{task} gives a gradient again in {informative:.0%} of its groups: released"
            else:
                continue
            kind, data = "alarm" if is_dead else "release", {"informative": informative, "level": level}
            events.append(
                Event(step=step, source="scheduler", kind=kind, reason=reason, task=task, data=data)
            )
        return events

    def _count_same(self, stats: TaskStats, *, is_learnt: bool) -> int:
        """Return in how many steps in a row all rewards were one number; 0 for a step that does not count."""
        if not stats.lowest or not stats.num_informative:
            return 0
        value, steps = self._same.get(stats.task, (stats.lowest[0], 0))
        is_same = stats.lowest[0] == stats.highest[0] == value and not is_learnt
        self._same[stats.task] = (value, steps + 1) if is_same else (stats.highest[0], 0)
        return self._same[stats.task][1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        same = {task: list(own) for task, own in self._same.items()}
        return {"dead_steps": dict(self._dead_steps), "held": sorted(self.held), "same": same}

    def load_state_dict(self, state: Mapping[str, Any], renamed: Mapping[str, str] | None) -> None:
        """Restore ``state_dict``; unknown tasks are dropped, missing ones start fresh."""
        self._dead_steps = dict.fromkeys(self._dead_steps, 0)
        self._dead_steps |= rename_tasks(state["dead_steps"], renamed, self._dead_steps)
        self.held = set(rename_tasks(dict.fromkeys(state["held"]), renamed, self._dead_steps))
        same = rename_tasks(state.get("same", {}), renamed, self._dead_steps)
        self._same = {task: (value, steps) for task, (value, steps) in same.items()}


def _listed(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{task} {share:.3f}" for task, share in shares.items())


def _event(kind: str, reason: str, task: str = "", data: Mapping[str, Any] | None = None) -> Event:
    return Event(step=0, source="scheduler", kind=kind, reason=reason, task=task, data=data or {})
