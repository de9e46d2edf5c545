"""Numbers of one step, per task and over the tasks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from multitask_rl.algorithms.group import has_variance
from multitask_rl.records import NUM_EXTREMES, Direction, Scored, TaskStats, concerned_cost
from multitask_rl.statistics.definitions import REWARD
from multitask_rl.step.stages import is_trainable
from multitask_rl.step.task_state import TaskState

__all__ = ["Groups", "aggregate", "group_rewards", "task_stats"]

Groups = dict[str, list[Scored]]
"""Records by ``group_id``, in order of drawing."""


def by_group(scored: Sequence[Scored]) -> dict[str, Groups]:
    """Return task -> group id -> records, orders kept."""
    result: dict[str, Groups] = {}
    for s in scored:
        result.setdefault(s.rollout.task, {}).setdefault(s.rollout.group_id, []).append(s)
    return result


def group_rewards(task: TaskState, group: Sequence[Scored]) -> list[float]:
    """Return what the algorithm is credited for each trainable record of a group."""
    return [task.algorithm.outcome(s) for s in group if is_trainable(task, s)]


def costs_differ(task: TaskState, group: Sequence[Scored]) -> bool:
    """Whether the costs of a constraint of mode ``lagrangian`` differ within the group.

    Its multiplier does not matter: a multiplier of 0 may rise.
    """
    trainable = [s for s in group if is_trainable(task, s)]
    costs = [
        [c for s in trainable if (c := concerned_cost(s, name)) is not None] for name in task.multipliers
    ]
    return any(map(has_variance, costs))


def is_informative(task: TaskState, group: Sequence[Scored]) -> bool:
    """Whether the group gives the task's loss a gradient: by its rewards, or by costs with a multiplier.

    The gradient of a KL or entropy term does not count: every response has one.
    """
    rewards = group_rewards(task, group)
    return bool(rewards) and (task.algorithm.is_informative(rewards) or costs_differ(task, group))


def has_spread(task: TaskState, group: Sequence[Scored]) -> bool:
    """Whether the group is learnable: its rewards or costs differ, or, in a group of one, it is informative.

    With a critic or a quantile pool every group is informative, so schedulers use the spread.
    """
    rewards = group_rewards(task, group)
    if len(rewards) <= 1:
        return is_informative(task, group)
    return has_variance(rewards) or costs_differ(task, group)


def task_stats(task: TaskState, groups: Groups, metrics: Mapping[str, float]) -> TaskStats:
    """Return the statistics for the scheduler.

    Args:
        task: the task.
        groups: every group drawn in the step, before filtering.
        metrics: further numbers of the step.
    """
    everything = [s for group in groups.values() for s in group]
    found = task.metrics.describe(everything)
    task.warnings += task.metrics.unearned(everything)
    shown = [own for own in task.metrics.slot_rewards(everything).values() if own]
    credited = [group_rewards(task, group) for group in groups.values()]
    spreads = [statistics.pstdev(group) for group in credited if len(group) > 1]
    return TaskStats(
        task=task.spec.name,
        num_prompts=len(groups),
        num_informative=sum(has_spread(task, g) for g in groups.values()),
        reward_mean=found[REWARD].mean if REWARD in found else math.nan,
        reward_std=math.fsum(spreads) / len(spreads) if spreads else 0.0,
        lowest=sorted(min(own) for own in shown)[:NUM_EXTREMES],
        highest=sorted((max(own) for own in shown), reverse=True)[:NUM_EXTREMES],
        metrics={**{name: own.mean for name, own in found.items()}, **metrics},
        statistics=found,
    )


def aggregate(
    per_task: Mapping[str, Mapping[str, float]], key: str, directions: Mapping[str, Direction]
) -> dict[str, float]:
    """Return ``task/<name>/<metric>`` for all, ``macro/<metric>`` of those that every task has.

    ``worst/<key>`` is the value of ``key`` at the task that is worst in its own direction.
    """
    flat = {f"task/{t}/{name}": value for t, own in per_task.items() for name, value in own.items()}
    shared = set.intersection(*(set(own) for own in per_task.values())) if per_task else set()
    for name in sorted(shared):
        values = [own[name] for own in per_task.values() if math.isfinite(own[name])]
        if values:
            flat[f"macro/{name}"] = math.fsum(values) / len(values)
    found = {t: own[key] for t, own in per_task.items() if math.isfinite(own.get(key, math.nan))}
    if found:
        flat[f"worst/{key}"] = min(found.items(), key=lambda i: directions[i[0]].sign * i[1])[1]
    return flat
