"""From quotas to the records of a step's update: attempts, verdicts, rewards, refill, kept groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from .records import Attempt
from .settings import FAILED, Answer, Settings, Task

Sampler = Callable[[str, int, int, int, int, Sequence[int]], Attempt]
"""(task, draw, sample, attempt, version, control tokens before the prompt) -> an attempt without verdicts."""


def judge(task: Task, attempt: Attempt, answer: Answer) -> None:
    """Ask every constraint; above 0.4 it is violated. A failing judge makes the record a failed one."""
    for rule in task.constraints:
        said = answer(task.name, rule.name, attempt.draw, attempt.index, attempt.attempt, attempt.ids)
        attempt.verdicts[rule.name] = (
            said if said is None or said == FAILED else (float(said), float(said) > 0.4)
        )
        if said == FAILED:
            attempt.failed = True
    attempt.refused = any(
        rule.mode == "reject" and isinstance(v := attempt.verdicts[rule.name], tuple) and v[1]
        for rule in task.constraints
    )


def score(task: Task, attempt: Attempt, answer: Answer) -> None:
    """Ask the rewards; a refused or failed attempt is not scored."""
    if attempt.refused or attempt.failed:
        return
    for rule in task.rewards:
        attempt.values[rule.name] = answer(
            task.name, rule.name, attempt.draw, attempt.index, attempt.attempt, attempt.ids
        )
    weighted = [rule for rule in task.rewards if rule.weight]
    said = [attempt.values[rule.name] for rule in weighted]
    if FAILED in said or (weighted and all(v is None for v in said)):
        attempt.failed = True
        return
    attempt.terms = [
        (rule.signed_weight, math.nan if v is None else float(v))
        for rule, v in zip(weighted, said, strict=True)
    ]
    costs = [rule for rule in task.constraints if not (rule.mode == "penalty" and rule.weight == 0.0)]
    if not task.rewards:
        attempt.reward = 1.0 - _cost(costs, attempt)
        return
    attempt.terms += [(-rule.weight, attempt.cost(rule.name)) for rule in costs if rule.mode == "penalty"]
    attempt.reward = math.fsum(w * v for w, v in attempt.terms if not math.isnan(v))


def _cost(rules: Sequence[object], attempt: Attempt) -> float:
    """Largest cost of the constraints of the first mode there is: lagrangian, penalty, reject."""
    value = overall_cost(rules, attempt)
    return 0.0 if math.isnan(value) else value


def overall_cost(rules: Sequence[object], attempt: Attempt) -> float:
    for mode in ("lagrangian", "penalty", "reject"):
        own = [attempt.cost(r.name) for r in rules if r.mode == mode]  # type: ignore[attr-defined]
        if own:
            return max((c for c in own if not math.isnan(c)), default=math.nan)
    return math.nan


def run_prompt(
    task: Task,
    draw: int,
    version: int,
    sampler: Sampler,
    answer: Answer,
    control: Sequence[int] = (),
    group_size: int | None = None,
    engine_fails: Callable[[str, int, int], bool] = lambda task, draw, index: False,
) -> list[Attempt]:
    """All attempts of all samples of one prompt; one that the engine lost is neither judged nor repeated."""
    most = max((r.max_attempts for r in task.constraints if r.mode == "reject"), default=1)
    found = []
    for index in range(group_size or task.group_size):
        for number in range(most):
            attempt = sampler(task.name, draw, index, number, version, control)
            if number == 0 and engine_fails(task.name, draw, index):
                attempt.failed = True
                found.append(attempt)
                break
            judge(task, attempt, answer)
            score(task, attempt, answer)
            found.append(attempt)
            if not attempt.refused:
                break
    return found


def outcome(task: Task, attempt: Attempt) -> float | None:
    """What the algorithm is credited; None: it does not learn from the record."""
    if attempt.failed:
        return None
    if attempt.refused:
        return task.config["rejected_reward"] if task.type == "constrained_decoding" else None
    if attempt.reward is None:
        return None
    buffer = task.config.get("overlong_buffer", 0)
    if buffer:
        excess = len(attempt.ids) - (task.max_new_tokens - buffer)
        penalty = min(max(excess, 0) / buffer, 1.0)
        return attempt.reward - task.config["overlong_weight"] * penalty
    return attempt.reward


def groups_of(attempts: Sequence[Attempt]) -> dict[tuple[str, int], list[Attempt]]:
    found: dict[tuple[str, int], list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.group, []).append(attempt)
    return found


def credited_rewards(task: Task, group: Sequence[Attempt]) -> list[float]:
    return [r for a in group if (r := outcome(task, a)) is not None]


def differ(values: Sequence[float]) -> bool:
    """Whether values are not all equal; less than 1e-7 of their size is rounding."""
    return len(values) > 1 and max(values) - min(values) > 1e-7 * max(abs(v) for v in values)


def costs_differ(task: Task, group: Sequence[Attempt]) -> bool:
    """Whether a lagrangian constraint tells the responses apart that it concerns."""
    trained = [a for a in group if outcome(task, a) is not None]
    for rule in task.constraints:
        if rule.mode == "lagrangian":
            costs = [c for a in trained if not math.isnan(c := a.cost(rule.name))]
            if differ(costs):
                return True
    return False


def is_informative(task: Task, group: Sequence[Attempt]) -> bool:
    """Whether the group gives the task's loss a gradient."""
    rewards = credited_rewards(task, group)
    if not rewards:
        return False
    if task.type in ("ppo", "gdpo", "reward_conditioned"):
        return True
    if task.type == "reinforce_pp" and not task.config["group_baseline"]:
        return True
    return differ(rewards) or costs_differ(task, group)


def has_spread(task: Task, group: Sequence[Attempt]) -> bool:
    """What schedulers call learnable: rewards differ, or costs do; of one response the algorithm's word."""
    rewards = credited_rewards(task, group)
    if len(rewards) > 1:
        return differ(rewards) or costs_differ(task, group)
    return is_informative(task, group)


def missing(
    settings: Settings,
    drawn: Sequence[Attempt],
    quotas: Mapping[str, int],
    late: Mapping[str, int],
    rate_of: Callable[[str], float],
) -> dict[str, int]:
    """Prompts of another round: what lacks over the share of groups that give a gradient, at most three each.

    The share is this step's together with four groups of the smoothed one; under 5 % nothing is tried.
    """
    wanted = {}
    groups = groups_of(drawn)
    for task in settings.tasks:
        own = [g for (name, _), g in groups.items() if name == task.name]
        if not own:
            continue
        found = sum(is_informative(task, g) for g in own)
        lacks = quotas[task.name] - found - late.get(task.name, 0)
        rate = (found + 4.0 * rate_of(task.name)) / (len(own) + 4.0)
        if lacks > 0 and rate >= 0.05:
            wanted[task.name] = math.ceil(lacks * min(1.0 / rate, 3.0))
    return wanted


def keep(
    settings: Settings, drawn: Sequence[Attempt], quotas: Mapping[str, int], betas: Mapping[str, float]
) -> list[Attempt]:
    """Each task's quota of groups: those with a gradient first, in order of drawing.

    With a KL or entropy term no group is passed over: all of them up to the last one that the quota of
    informative ones needs.
    """
    kept = []
    groups = groups_of(drawn)
    names = list(dict.fromkeys(name for name, _ in groups))
    for name in names:
        task, quota = settings[name], quotas[name]
        own = [g for (n, _), g in groups.items() if n == name]
        good = [g for g in own if is_informative(task, g)]
        rest = [g for g in own if not is_informative(task, g)]
        if betas[name] > 0.0 or task.config["entropy_coefficient"] > 0.0:
            chosen = own if len(good) < quota else own[: own.index(good[quota - 1]) + 1] if quota else []
        else:
            chosen = (good + rest)[:quota]
        kept += [a for group in chosen for a in group]
    return kept
