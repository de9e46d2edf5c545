"""Numbers of a set of attempts, each over its own population (docs/definitions.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from .experience import Prices, credited_rewards, groups_of, has_spread, overall_cost
from .records import Answer, Attempt, Number, number
from .settings import Task

Refused = dict[str, float]
"""Metric -> the worst value served in the first step or evaluation that had one; fixed from then on."""


def last_attempts(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The last attempt of every slot: what a user sees."""
    return list({a.slot: a for a in attempts}.values())


def value_of(task: Task, name: str, attempt: Attempt) -> float:
    """What a served attempt says of ``reward``, of one of its rewards or of a part of one."""
    if "/" in name:
        return math.nan if attempt.failed or attempt.refused else attempt.parts.get(name, math.nan)
    if attempt.failed or attempt.refused:
        return math.nan
    if name == "reward":
        return math.nan if attempt.reward is None else attempt.reward
    value = attempt.values.get(name)
    return value if isinstance(value, float) else math.nan


def slot_values(
    task: Task, name: str, final: Sequence[Attempt], direction: str, refused: Refused, key: str
) -> list[float]:
    """Value of every slot: its own, or the refused value; NaN where it failed or is not concerned.

    A response that exceeds the limits of a reward has no part of it, and the refused value instead.
    """
    served = [value_of(task, name, a) for a in final]
    known = [v for v in served if not math.isnan(v)]
    pick = min if direction == "higher" else max
    rule, _, part = name.partition("/")
    if known and key not in refused and direction != "none":
        refused[key] = pick(known)
    ends = task.range_of(name)
    instead = pick(ends) if ends is not None else refused.get(key, math.nan)
    lost = [a.refused or (bool(part) and rule in a.over and name not in a.parts) for a in final]
    if name == "reward" and task.type == "constrained_decoding":
        instead = task.config["rejected_reward"]
    return [
        math.nan if a.failed else instead if is_lost else value
        for a, value, is_lost in zip(final, served, lost, strict=True)
    ]


def direction_of(task: Task, name: str) -> str:
    if "/" in name:
        return "none"
    rule = next((r for r in task.rewards if r.name == name), None)
    return "higher" if rule is None or rule.higher_is_better else "lower"


def primary(task: Task, attempts: Sequence[Attempt], refused: Refused) -> Number | None:
    """The primary metric over the slots."""
    name, final = task.primary_metric, last_attempts(attempts)
    direction = "higher" if task.higher_is_better else "lower"
    values = slot_values(task, name, final, direction, refused, "primary")
    return number(values, [a.group for a in final], direction, task.range_of(name))


def describe(task: Task, attempts: Sequence[Attempt], refused: Refused) -> dict[str, Number]:
    """Return every metric of the attempts that has a value."""
    final = last_attempts(attempts)
    ends = [a for a in final if not a.failed]
    alive = [a for a in attempts if not a.failed]
    first = [a for a in alive if a.attempt == 0]
    found: dict[str, Number | None] = {}

    def over_slots(metric: str, name: str, direction: str) -> None:
        values = slot_values(task, name, final, direction, refused, name)
        found[metric] = number(values, [a.group for a in final], direction, task.range_of(name))

    def rate(metric: str, own: Sequence[Attempt], values: Sequence[float]) -> None:
        found[metric] = number(values, [a.group for a in own], "lower", (0.0, 1.0))

    over_slots("reward_mean", "reward", "higher")
    for rule in task.rewards:
        over_slots(f"reward/{rule.name}", rule.name, direction_of(task, rule.name))
    for part in dict.fromkeys(part for a in ends for part in a.parts):
        over_slots(f"reward/{part}", part, "none")
    found["length"] = number([float(len(a.ids)) for a in ends], [a.group for a in ends], "none", None)
    rate("truncated_rate", ends, [float(a.finish == "length") for a in ends])
    rate("failure_rate", final, [float(a.failed) for a in final])
    if task.sentences is not None:
        whole = [float(all(answer.finish == "stop" for answer in a.answers)) for a in ends]
        found["grammar/accepted_rate"] = number(whole, [a.group for a in ends], "higher", (0.0, 1.0))
    if task.max_turns:
        turns = [float(len(a.answers)) for a in ends]
        found["turns"] = number(turns, [a.group for a in ends], "none", None)
        given = [float(sum(given_before(a.answers))) for a in ends]
        found["given_tokens"] = number(given, [a.group for a in ends], "none", None)
        for fact in {name for a in ends for name in a.facts}:
            counts = [float(a.facts[fact]) for a in ends]
            found[f"environment/{fact}"] = number(counts, [a.group for a in ends], "none", None)
    if task.constraints:
        counted = [c for c in task.constraints if not (c.mode == "penalty" and c.weight == 0.0)]
        rate("cost", alive, [overall_cost(counted, a) for a in alive])
        for c in task.constraints:
            rate(f"cost/{c.name}", alive, [a.cost(c.name) for a in alive])
        rate("flagged_rate", alive, [float(a.finish == "flagged") for a in alive])
        rate("rejection_rate", alive, [float(a.refused) for a in alive])
        rate("violation_rate", first, [violates(a) for a in first])
        rate("served_violation_rate", ends, [violates(a) for a in ends])
    return {name: value for name, value in found.items() if value is not None}


def given_before(answers: Sequence[Answer]) -> list[int]:
    """Tokens of the world between answers of one conversation."""
    return [len(b.context) - len(a.context) - len(a.ids) for a, b in pairwise(answers) if not b.is_anew]


def solved_rates(task: Task, attempts: Sequence[Attempt], refused: Refused) -> dict[str, Number]:
    """pass@j: the chance that one of j responses to a prompt reaches ``solved_at`` or the good end."""
    name, final = task.primary_metric, last_attempts(attempts)
    found: dict[str, Number] = {}
    if task.eval_samples == 1 or (task.solved_at is None and task.range_of(name) is None):
        return found
    direction = "higher" if task.higher_is_better else "lower"
    values = slot_values(task, name, final, direction, refused, "primary")
    side = 1 if task.higher_is_better else -1
    prompts: dict[object, list[bool]] = {a.group: [] for a in final}
    for a, value in zip(final, values, strict=True):
        if not math.isnan(value):
            good = task.solved_at
            if good is None:
                ends = (applied_ranges(task, [a]) if name == "reward" else []) or [task.range_of(name)]
                assert ends[0] is not None
                good = ends[0][1] if side > 0 else ends[0][0]
            prompts[a.group].append(not a.refused and side * (value - good) >= -1e-9)
    for j in sorted({2**i for i in range(9) if 2**i <= task.eval_samples} | {task.eval_samples}):
        rates = []
        for own in prompts.values():
            n, c = len(own), sum(own)
            rates.append(1.0 - math.comb(n - c, j) / math.comb(n, j) if n >= j else math.nan)
        if (rate := number(rates, list(prompts), "higher", (0.0, 1.0))) is not None:
            found[f"pass@{j}"] = rate
    return found


def majority(
    task: Task, attempts: Sequence[Attempt], refused: Refused, read: Callable[[Attempt, str], str]
) -> Number | None:
    """maj@k: the mean value of a prompt's most frequent answer, of several such ones the mean of theirs.

    Responses without an answer do not vote, unless all have none; without any answer there is no number.
    ``read``: attempt, reward -> the answer that the reward read.
    """
    name, final = task.primary_metric, last_attempts(attempts)
    names = [r.name for r in task.rewards] if name == "reward" else [name.partition("/")[0]]
    answers = []
    for a in final:
        scored = [n for n in names if isinstance(a.values.get(n), float) and n not in a.over]
        answers.append(next((said for n in scored if (said := read(a, n))), ""))
    if task.eval_samples == 1 or not any(answers):
        return None
    direction = "higher" if task.higher_is_better else "lower"
    values = slot_values(task, name, final, direction, refused, "primary")
    prompts: dict[object, list[tuple[str, float]]] = {a.group: [] for a in final}
    for a, answer, value in zip(final, answers, values, strict=True):
        if not math.isnan(value):
            prompts[a.group].append((answer, value))
    found = []
    for votes in prompts.values():
        said = [answer for answer, _ in votes if answer]
        most = max(map(said.count, said), default=0)
        means = []
        for answer in {a for a, _ in votes if said.count(a) == most}:
            own = [value for a, value in votes if a == answer]
            means.append(math.fsum(own) / len(own))
        found.append(math.fsum(means) / len(means) if means else math.nan)
    return number(found, list(prompts), direction, task.range_of(name))


def violates(attempt: Attempt) -> float:
    """1 where a constraint is violated, 0 where none is, NaN where none concerns the response."""
    concerned = [v for v in attempt.verdicts.values() if isinstance(v, tuple)]
    return float(any(violated for _, violated in concerned)) if concerned else math.nan


def shown_by_group(
    task: Task, attempts: Sequence[Attempt], refused: Refused
) -> dict[tuple[str, int], list[float]]:
    """Rewards of the slots of every group that has any."""
    final = last_attempts(attempts)
    found: dict[tuple[str, int], list[float]] = {}
    for a, value in zip(final, slot_values(task, "reward", final, "higher", refused, "reward"), strict=True):
        if not math.isnan(value):
            found.setdefault(a.group, []).append(value)
    return found


def applied_ranges(task: Task, attempts: Sequence[Attempt]) -> list[tuple[float, float]]:
    """Of every slot with a reward, the declared range of a sum of the rewards that applied."""
    rules = [r for r in task.rewards if r.weight]
    if not rules or task.range_of("reward") is None:
        return []
    price = math.fsum(c.weight for c in task.constraints if c.mode == "penalty")
    found = []
    for a in last_attempts(attempts):
        if a.reward is not None and a.terms:
            own = [r for r, (_, value) in zip(rules, a.terms, strict=False) if not math.isnan(value)]
            ends = [(r.signed_weight * r.low, r.signed_weight * r.high) for r in own]
            found.append((sum(min(pair) for pair in ends) - price, sum(max(pair) for pair in ends)))
    return found


def step_statistics(
    task: Task, attempts: Sequence[Attempt], refused: Refused, prices: Prices
) -> tuple[int, int, float, float, float, dict[str, Number]]:
    """Return groups, those with a spread, mean, deviation and headroom of rewards in groups, all numbers."""
    groups = list(groups_of(attempts).values())
    rewards = [r for g in groups if len(r := credited_rewards(task, g)) > 1]
    deviations, above = [], []
    for own in rewards:
        mean = math.fsum(own) / len(own)
        deviations.append(math.sqrt(math.fsum((r - mean) ** 2 for r in own) / len(own)))
        *rest, best = sorted(own)
        if task.needs_reward:
            above.append(best - math.fsum(rest) / len(rest))
    numbers = describe(task, attempts, refused)
    mean = numbers["reward_mean"].mean if "reward_mean" in numbers else math.nan
    spread = math.fsum(deviations) / len(deviations) if deviations else math.nan
    headroom = math.fsum(above) / len(above) if above else math.nan
    return len(groups), sum(has_spread(task, g, prices) for g in groups), mean, spread, headroom, numbers
