"""The report of a step: statistics for the controllers, numbers for the trackers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from multitask_rl.records import Direction, Event, Scored, TaskStats
from multitask_rl.step.metrics import aggregate, by_group, group_rewards, is_informative, task_stats
from multitask_rl.step.task_state import TaskState

__all__ = ["StepReport", "collect_stats", "observe_groups", "some_of_each", "step_numbers"]


@dataclass(kw_only=True, slots=True)
class StepReport:
    """What one training step did."""

    step: int
    quotas: Mapping[str, int]
    """Prompts asked for, by task."""
    drawn: Sequence[Scored]
    """Every record of the step, refills included."""
    kept: Sequence[Scored]
    """Those that were trained on."""
    train: dict[str, float] = field(default_factory=dict)
    """Numbers of the update: ``grad_norm``, ``learning_rate``, ``padding_share``..."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock by stage, ``update`` and ``step`` among them."""

    def shares(self, tasks: Collection[str]) -> dict[str, float]:
        """Return the share of the loss of each of ``tasks``: that of its quota.

        A task without a quota in this step has late groups of earlier steps; their number replaces the quota.
        """
        kept = by_group(self.kept)
        parts = {name: self.quotas.get(name) or len(kept.get(name, ())) for name in tasks}
        total = sum(parts.values())
        return {name: part / total for name, part in parts.items() if total}


def observe_groups(report: StepReport, tasks: Mapping[str, TaskState]) -> list[Event]:
    """Show each task's stream the rewards of its groups; return the decisions of its curriculum."""
    events: list[Event] = []
    for name, groups in by_group(report.drawn).items():
        stream, task = tasks[name].stream, tasks[name]
        if stream is not None:
            earned = {g[0].rollout.prompt.draw: group_rewards(task, g) for g in groups.values()}
            events += stream.observe(earned, report.step)
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
        metrics.update(stream.metrics() if stream is not None else {})
        metrics.update(
            weight=weight,
            share_requested=report.quotas.get(name, 0) / max(1, num_asked),
            share_sampled=len(own) / max(1, num_drawn),
            share_trained=trained.get(name, 0) / max(1, num_trained),
            overlong_prompts=float(tasks[name].num_overlong),
            kl_coefficient=tasks[name].kl.coefficient,
            **{f"multiplier/{c}": m.value for c, m in tasks[name].multipliers.items()},
        )
        shift = stream.shift() if stream is not None and own else 0.0
        stats[name] = replace(task_stats(tasks[name], own, metrics), shift=shift)
    return stats


def step_numbers(
    report: StepReport, stats: Mapping[str, TaskStats], tasks: Mapping[str, TaskState]
) -> dict[str, float]:
    """Return every number of the step by its name in the logs."""
    seconds = report.seconds["step"]
    counts = Counter(scored.rollout.task for scored in report.drawn)
    per_task = {
        name: {
            **s.metrics,
            "reward_mean": s.reward_mean,
            "reward_std": s.reward_std,
            "informative_rate": s.num_informative / max(1, s.num_prompts),
            "samples_per_s": counts[name] / seconds,
        }
        for name, s in stats.items()
    }
    numbers = aggregate(per_task, "reward_mean", dict.fromkeys(stats, Direction.higher))
    numbers.update({f"train/{k}": v for k, v in report.train.items()})
    numbers.update({f"time/{k}_s": v for k, v in report.seconds.items()})
    num_tokens = sum(len(s.rollout.response_ids) for s in report.drawn)
    numbers["time/samples_per_s"] = len(report.drawn) / seconds
    numbers["time/tokens_per_s"] = num_tokens / seconds
    if (waited := report.seconds.get("rewards", 0.0)) > 1e-3:  # a shorter time is no rate
        numbers["time/rewards_per_s"] = len(report.drawn) / waited
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
