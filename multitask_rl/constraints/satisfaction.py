"""Test of constraints: the upper confidence bound of the violation rate must not exceed the limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from multitask_rl.boundary.printable import counted
from multitask_rl.config.task import TaskSpec
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Direction, Scored, Statistic
from multitask_rl.statistics.definitions import violations
from multitask_rl.statistics.intervals import rate_upper_bound

PREFIX = "constraint/"
"""Prefix of the names of metrics."""


def constraint_metrics(spec: TaskSpec, scored: Sequence[Scored]) -> dict[str, Statistic]:
    """Return the statistics of each constraint that has a limit.

    ``scored``: all attempts of the held-out responses. Only the first response of a prompt counts, since the
    bound assumes independent responses.

    Names are ``constraint/<name>/...``:

    - ``violation_rate``: rate over first attempts; missing if the constraint applies to no response.
    - ``upper_bound``: its one-sided 95 % Clopper-Pearson bound; 1 if the constraint applies to no response.
    - ``satisfied``: 1 if ``upper_bound`` is at most ``limit``, else 0.
    - ``limit``: the limit itself.
    - ``n``: first attempts that the constraint applies to.
    - ``served_violation_rate``: rate over last attempts; for mode ``reject`` only.
    """
    numbers: dict[str, Statistic] = {}
    scored = [s for s in scored if s.rollout.sample == 0]
    for constraint in spec.constraints:
        if constraint.limit is None:
            continue
        name = constraint.name
        prefix, rate = f"{PREFIX}{name}/", violations(name, scored, of_served=False)
        bound = rate_upper_bound(round(rate.mean * rate.n) if rate.n else 0, rate.n)
        for key, value, direction in (
            ("limit", constraint.limit, Direction.none),
            ("n", float(rate.n), Direction.none),
            ("upper_bound", bound, Direction.lower),
            ("satisfied", float(bound <= constraint.limit), Direction.higher),
        ):
            numbers[prefix + key] = Statistic(mean=value, n=rate.n, error=math.nan, direction=direction)
        if rate.n:
            numbers[f"{prefix}violation_rate"] = rate
        if constraint.mode == "reject" and (outcome := violations(name, scored, of_served=True)).n:
            numbers[f"{prefix}served_violation_rate"] = outcome
    return numbers


def smallest_number(limit: float) -> float:
    """Return how many responses without a violation prove ``limit`` at 95 % (0.05: 59); infinite for 0."""
    if limit <= 0:
        return math.inf
    return 1 if limit >= 0.95 else math.ceil(math.log(0.05) / math.log1p(-limit))


def constraint_warnings(
    spec: TaskSpec, traits: Mapping[str, PluginTraits], num_prompts: int | None
) -> list[str]:
    """Warn of limits that the evaluation is too small to prove and of constraints without counterpart.

    ``traits`` are by constraint name; ``num_prompts`` is the size of an evaluation, None = unknown.
    """
    warnings = []
    known = {n for p in spec.rewards for n in (p.name, p.plugin)}
    known |= {n for p in spec.constraints for n in (p.name, p.plugin)}
    for constraint in spec.constraints:
        name, limit = constraint.name, constraint.limit
        if limit is not None and num_prompts is not None and num_prompts < smallest_number(limit):
            remedy = "a limit of 0 can never be proved; allow a small one"
            if limit > 0:
                number = f"{smallest_number(limit)} (eval.num_prompts and as many rows)"
                remedy = f"evaluate on {number} or raise the limit"
            warnings.append(
                f"constraint {name!r}: no violation in {counted(num_prompts, 'held-out prompt')} bounds "
                f"the rate by {rate_upper_bound(0, num_prompts):.3g}, so the limit "
                f"{limit:g} never counts as satisfied; {remedy}"
            )
        counterpart = traits[name].counterpart if name in traits else ""
        if counterpart and counterpart not in known:
            warnings.append(
                f"constraint {name!r} alone is satisfied by refusing everything; measure the other side "
                f"too: add {counterpart!r} to the rewards (weight 0 only measures) or constraints"
            )
    return warnings
