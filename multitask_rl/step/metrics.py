"""The report of a step: its records, statistics for the controllers, numbers for the trackers."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from multitask_rl.algorithms.group import has_variance
from multitask_rl.executor.scorer import RunScorer
from multitask_rl.records import (
    NUM_EXTREMES,
    Direction,
    Event,
    Rollout,
    Scored,
    TaskStats,
    Verdict,
    concerned_cost,
)
from multitask_rl.statistics.definitions import REWARD
from multitask_rl.step.stages import is_trainable
from multitask_rl.step.task_state import TaskState

Groups = dict[str, list[Scored]]
"""Records by ``group_id``, in order of drawing."""


def by_group(scored: Sequence[Scored]) -> dict[str, Groups]:
    """Return task -> group id -> records, orders kept."""
    result: dict[str, Groups] = {}
    for s in scored:
        result.setdefault(s.rollout.task, {}).setdefault(s.rollout.group_id, []).append(s)
    return result


def group_rewards(task: TaskState, group: Sequence[Scored]) -> list[float]:
    """Return the reward (``Algorithm.outcome``) of each trainable record of a group, if it has one."""
    trainable = (s for s in group if is_trainable(task, s))
    return [task.algorithm.outcome(s) for s in trainable if s.reward is not None or s.rollout.rejected]


def costs_differ(task: TaskState, group: Sequence[Scored]) -> bool:
    """Whether the costs of a constraint whose multiplier is above 0 differ within the group."""
    trainable = [s for s in group if is_trainable(task, s)]
    costs = [
        [c for s in trainable if (c := concerned_cost(s, name)) is not None]
        for name, multiplier in task.multipliers.items()
        if multiplier.value > 0
    ]
    return any(map(has_variance, costs))


def is_informative(task: TaskState, group: Sequence[Scored]) -> bool:
    """Whether the group gives the loss a gradient: by its rewards, or costs that have a multiplier.

    The gradient of a KL or entropy term does not count: every response has one.
    """
    outcomes = [task.algorithm.outcome(s) for s in group if is_trainable(task, s)]
    return bool(outcomes) and (task.algorithm.is_informative(outcomes) or costs_differ(task, group))


def has_spread(task: TaskState, group: Sequence[Scored]) -> bool:
    """Whether the group is learnable: its rewards, or costs that have a multiplier above 0, differ.

    A group with at most one reward, or of a task that needs no reward, is learnable if it is informative.
    With a critic or a replay buffer every group is informative, so schedulers use this instead.
    """
    rewards = group_rewards(task, group)
    if len(rewards) <= 1 or not task.algorithm.needs_reward:  # a teacher or an answer has something to say
        return is_informative(task, group)
    return has_variance(rewards) or costs_differ(task, group)


def _headroom(rewards: Sequence[float]) -> float:
    best, number = max(rewards), len(rewards)
    return max(0.0, best - (math.fsum(rewards) - best) / (number - 1))  # equal rewards: the sum is rounded


def task_stats(task: TaskState, groups: Groups, metrics: Mapping[str, float]) -> TaskStats:
    """Return the statistics for the scheduler.

    Args:
        task: the task.
        groups: every group drawn in the step, before filtering.
        metrics: further numbers of the step.
    """
    if not groups:
        return TaskStats(
            task=task.spec.name,
            num_prompts=0,
            num_informative=0,
            reward_mean=math.nan,
            reward_std=math.nan,
            metrics=metrics,
        )
    everything = [s for group in groups.values() for s in group]
    found = task.metrics.describe(everything)
    task.warnings += task.metrics.unearned(everything)
    shown = [own for own in task.metrics.slot_rewards(everything).values() if own]
    credited = [group_rewards(task, group) for group in groups.values()]
    several = [group for group in credited if len(group) > 1]
    # a teacher needs no best response of a group to follow
    headrooms = [_headroom(group) for group in several] if task.algorithm.needs_reward else []
    return TaskStats(
        task=task.spec.name,
        num_prompts=len(groups),
        num_informative=sum(has_spread(task, g) for g in groups.values()),
        num_trainable=sum(any(is_trainable(task, s) for s in g) for g in groups.values()),
        reward_mean=found[REWARD].mean if REWARD in found else math.nan,
        reward_std=statistics.fmean(map(statistics.pstdev, several)) if several else math.nan,
        headroom=statistics.fmean(headrooms) if headrooms else math.nan,
        lowest=sorted(min(own) for own in shown)[:NUM_EXTREMES],
        highest=sorted((max(own) for own in shown), reverse=True)[:NUM_EXTREMES],
        reward_range=task.metrics.range_of(everything),
        metrics={**{name: own.mean for name, own in found.items()}, **metrics},
        statistics=found,
    )


def aggregate(
    per_task: Mapping[str, Mapping[str, float]],
    key: str,
    directions: Mapping[str, Direction],
    among: Collection[str] = (),
) -> dict[str, float]:
    """Return ``task/<name>/<metric>``, and summaries over tasks; NaN values are left out of these.

    - ``macro/<metric>``, for metrics that every task has: the mean over all tasks.
    - ``worst/<key>``: ``key`` of the worst task, by ``directions``.

    For ``key`` both are over the tasks ``among``, if any are given.
    """
    flat = {f"task/{t}/{name}": value for t, own in per_task.items() for name, value in own.items()}
    shared = set.intersection(*(set(own) for own in per_task.values())) if per_task else set()
    for name in sorted(shared):
        tasks = among if name == key and among else per_task
        values = [per_task[t][name] for t in tasks if math.isfinite(per_task[t][name])]
        if values:
            flat[f"macro/{name}"] = math.fsum(values) / len(values)
    chosen = {t: own.get(key, math.nan) for t, own in per_task.items() if not among or t in among}
    found = {t: value for t, value in chosen.items() if math.isfinite(value)}
    if found:
        flat[f"worst/{key}"] = min(found.items(), key=lambda i: directions[i[0]].sign * i[1])[1]
    return flat


@dataclass(kw_only=True, slots=True)
class StepReport:
    """What one training step did."""

    step: int
    quotas: Mapping[str, int]
    """Prompts asked for, by task."""
    drawn: Sequence[Scored] = field(repr=False)
    """Every record of the step, refills included."""
    kept: Sequence[Scored] = field(repr=False)
    """The records that were trained on."""
    train: dict[str, float] = field(default_factory=dict)
    """Numbers of the update: ``grad_norm``, ``learning_rate``, ``padding_share``..."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock by stage, ``update`` and ``step`` among them."""

    @property
    def sampled(self) -> list[Rollout]:
        """The rollouts drawn, without the given answers of type ``sft``."""
        return [s.rollout for s in self.drawn if s.rollout.prompt.given_ids is None]

    def shares(self, tasks: Collection[str]) -> dict[str, float]:
        """Return each task's share of the loss, in proportion to its quota.

        A task without a quota in this step has only late groups of earlier steps: their number counts.
        """
        kept = by_group(self.kept)
        parts = {name: self.quotas.get(name) or len(kept.get(name, ())) for name in tasks}
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items() if total}


def observe_groups(report: StepReport, tasks: Mapping[str, TaskState]) -> list[Event]:
    """Give each task's stream the rewards of its groups; return the events of its difficulty pools."""
    events: list[Event] = []
    for name, groups in by_group(report.drawn).items():
        stream, task = tasks[name].stream, tasks[name]
        if stream is not None and task.spec.curriculum.by:  # other streams do not listen
            draws = {key: group[0].rollout.prompt.draw for key, group in groups.items()}
            earned = {draws[key]: group_rewards(task, group) for key, group in groups.items()}
            slots = task.metrics.slot_rewards([s for group in groups.values() for s in group])
            served = {draws[key]: values for key, values in slots.items()}
            events += stream.observe(earned, report.step, served)
    return events


def collect_stats(
    report: StepReport,
    tasks: Mapping[str, TaskState],
    weights: Mapping[str, float],
    sources: Sequence[Mapping[str, Mapping[str, float]]],
) -> dict[str, TaskStats]:
    """Return the step's statistics of every task that has a weight.

    ``sources``, the per-task numbers of the stages, are merged in their order.
    """
    drawn, kept = by_group(report.drawn), by_group(report.kept)
    trained = {n: sum(is_informative(tasks[n], g) for g in own.values()) for n, own in kept.items()}
    num_asked, num_trained = sum(report.quotas.values()), sum(trained.values())
    num_drawn = sum(len(own) for own in drawn.values())
    stats = {}
    for name, weight in weights.items():
        own = drawn.get(name, {})
        metrics: dict[str, float] = {}
        for source in sources:
            metrics.update(source.get(name, {}))
        stream = tasks[name].stream
        metrics.update(stream.metrics() if stream is not None and own else {})
        metrics.update(
            weight=weight,
            share_requested=report.quotas.get(name, 0) / max(1, num_asked),
            share_sampled=len(own) / max(1, num_drawn),
            share_trained=trained.get(name, 0) / max(1, num_trained),
            overlong_prompts=float(tasks[name].num_overlong),
            kl_coefficient=tasks[name].kl.coefficient,
            **{f"multiplier/{c}": m.value for c, m in tasks[name].multipliers.items()},
        )
        stats[name] = task_stats(tasks[name], own, metrics)
        if stream is not None and own:
            stats[name] = replace(stats[name], shift=stream.shift())
    return stats


_ALL_TASKS = 100
"""Most tasks of which every step logs numbers, sampled or not."""


def logged(stats: dict[str, TaskStats]) -> dict[str, TaskStats]:
    """Return the statistics to log: of all tasks or, in a run of more than 100, of those with samples."""
    if len(stats) <= _ALL_TASKS:
        return stats
    return {name: own for name, own in stats.items() if own.num_prompts}


_NO_RATE = 1e-3
"""Seconds below which a rate says nothing."""


def step_numbers(report: StepReport, stats: Mapping[str, TaskStats]) -> dict[str, float]:
    """Return every number of the step by its name in the logs."""
    seconds = report.seconds["step"]
    counts, tokens = Counter[str](), Counter[str]()
    for scored in report.drawn:
        counts[scored.rollout.task] += 1
        tokens[scored.rollout.task] += len(scored.rollout.response_ids)
    worked = {n: sum(v for k, v in s.metrics.items() if k.startswith("reward_s/")) for n, s in stats.items()}
    per_task = {
        name: {
            **s.metrics,
            "reward_mean": s.reward_mean,
            "reward_std": s.reward_std,
            **({"headroom": s.headroom} if math.isfinite(s.headroom) else {}),
            "informative_rate": s.num_informative / s.num_prompts if s.num_prompts else math.nan,
            "samples_per_s": counts[name] / seconds,
            "tokens_per_s": tokens[name] / seconds,
            # a shorter time is no rate
            **({"rewards_per_s": counts[name] / worked[name]} if worked[name] > _NO_RATE else {}),
        }
        for name, s in stats.items()
    }
    numbers = aggregate(per_task, "reward_mean", dict.fromkeys(stats, Direction.higher))
    numbers.update({f"train/{k}": v for k, v in report.train.items()})
    numbers.update({f"time/{k}_s": v for k, v in report.seconds.items()})
    lengths = [len(rollout.response_ids) for rollout in report.sampled]
    numbers["time/samples_per_s"] = len(lengths) / seconds
    numbers["time/tokens_per_s"] = sum(lengths) / seconds
    if (waited := report.seconds.get("rewards", 0.0)) > _NO_RATE:
        numbers["time/rewards_per_s"] = len(lengths) / waited
    if "updates" in report.train:
        numbers["time/updates_per_s"] = report.train["updates"] / seconds
    longest = max(lengths, default=0)
    if longest and (sampling := report.seconds.get("rollout", 0.0)) > _NO_RATE:
        numbers["time/token_latency_s"] = sampling / longest
    return numbers


def some_of_each(scored: Sequence[Scored], number: int) -> list[Scored]:
    """Return the first ``number`` records of each task; all for a negative number."""
    if number < 0:
        return list(scored)
    taken: Counter[str] = Counter()
    result = []
    for s in scored:
        taken[s.rollout.task] += 1
        if taken[s.rollout.task] <= number:
            result.append(s)
    return result


def explained(scored: Sequence[Scored], scorer: RunScorer) -> list[Scored]:
    """Return the records with explanations of their violations appended to the verdicts' reasons."""
    violations = [
        s for s in scored if any(isinstance(v, Verdict) and v.violated for v in s.rollout.verdicts.values())
    ]
    found = scorer.explain([s.rollout for s in violations]) if violations else []
    texts = {id(s): own for s, own in zip(violations, found, strict=True) if own}
    result = []
    for s in scored:
        verdicts = dict(s.rollout.verdicts)
        for name, text in texts.get(id(s), {}).items():
            verdict = verdicts[name]
            if isinstance(verdict, Verdict):
                verdicts[name] = replace(verdict, reason=f"{verdict.reason}: {text}".removeprefix(": "))
        result.append(replace(s, rollout=replace(s.rollout, verdicts=verdicts)) if id(s) in texts else s)
    return result
