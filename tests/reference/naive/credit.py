"""Rewards become advantages, one algorithm after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .records import Sample
from .running import Moments, Scale
from .settings import Task

Values = list[float]


@dataclass
class CreditState:
    """What a task's credit remembers from step to step."""

    scales: dict[str, Scale] = field(default_factory=dict)
    rewards: Moments = field(default_factory=lambda: Moments(0.05))
    targets: Moments | None = None
    """Of the value targets (PopArt)."""
    waits: bool = False
    """Since the rewards are other ones, all were equal: PopArt waits for their unit."""

    def forget_rewards(self) -> None:
        """Measure other rewards anew."""
        self.scales.pop("reward", None)
        self.rewards, self.targets, self.waits = Moments(0.05), None, True


@dataclass
class Credited:
    metrics: dict[str, float] = field(default_factory=dict)
    value_rescale: tuple[float, float] | None = None


def members(groups: Sequence[object]) -> list[list[int]]:
    """Indices of each group, groups in order of appearance."""
    found: dict[object, list[int]] = {}
    for i, group in enumerate(groups):
        found.setdefault(group, []).append(i)
    return list(found.values())


def centred(task: Task, values: Values, groups: Sequence[object], lengths: Sequence[int]) -> Values:
    """Each value less the baseline of its group."""
    result = [0.0] * len(values)
    for own in members(groups):
        if len(own) < 2:
            continue  # nothing to compare with
        total = math.fsum(values[i] for i in own)
        for i in own:
            if task.type == "rloo":
                baseline = (total - values[i]) / (len(own) - 1)
            elif task.type == "opo":
                baseline = math.fsum(lengths[j] * values[j] for j in own) / max(
                    1, sum(lengths[j] for j in own)
                )
            else:
                baseline = total / len(own)
            result[i] = values[i] - baseline
        largest = max(abs(values[i]) for i in own)
        for i in own:
            if abs(result[i]) <= 1e-7 * largest or max(values[j] for j in own) == min(values[j] for j in own):
                result[i] = 0.0
    return result


def over_group_std(deviations: Values, groups: Sequence[object]) -> Values:
    """Each deviation over the sample standard deviation of its group."""
    result = list(deviations)
    for own in members(groups):
        square = math.fsum(deviations[i] ** 2 for i in own)
        std = math.sqrt(square / max(1, len(own) - 1))
        for i in own:
            result[i] = deviations[i] / (std + 1e-6)
    return result


def whitened(values: Values, floor: float = 0.0) -> Values:
    """(x - mean) / std over all values; zeros where they do not vary."""
    if len(values) < 2:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    if std <= 1e-9 * max(abs(v) for v in values):
        return [0.0] * len(values)
    return [(v - mean) / max(std, floor) for v in values]


def normalised(
    task: Task, state: CreditState, deviations: Values, groups: Sequence[object], signal: str
) -> Values:
    how = task.config["normalisation"]
    if how == "none":
        return deviations
    if how == "group":
        return over_group_std(deviations, groups)
    scale = state.scales.setdefault(signal, Scale())
    varied = [own for own in members(groups) if any(deviations[i] for i in own)]
    if varied:
        square = math.fsum(deviations[i] ** 2 for own in varied for i in own)
        scale.add(square / sum(max(1, len(own) - 1) for own in varied))
    return [d / scale.value for d in deviations]


def minus_costs(
    advantages: list[Values],
    samples: Sequence[Sample],
    multipliers: Mapping[str, float],
    of: Callable[[Sequence[Sample], Values, str], list[Values]],
) -> list[Values]:
    """(A - sum lambda_i A_i) / (1 + sum lambda_i) per sample; A_i is 0 where constraint i is not concerned.

    Args:
        of: samples that a constraint concerns, their costs, its name -> the costs' advantages.
    """
    result = [list(a) for a in advantages]
    for i, (name, multiplier) in enumerate(multipliers.items()):
        concerned = [k for k, s in enumerate(samples) if not math.isnan(s.costs[i])]
        if multiplier > 0.0 and concerned:
            own = [samples[k] for k in concerned]
            for k, part in zip(concerned, of(own, [s.costs[i] for s in own], name), strict=True):
                result[k] = [a - multiplier * c for a, c in zip(result[k], part, strict=True)]
    return [[a / (1.0 + math.fsum(multipliers.values())) for a in own] for own in result]


def each(values: Values) -> list[Values]:
    return [[v] for v in values]


def credit(
    task: Task, state: CreditState, samples: Sequence[Sample], multipliers: Mapping[str, float], beta: float
) -> Credited:
    """Give every sample its advantages per token (and a critic its targets).

    Args:
        multipliers: lambda of each lagrangian constraint, by its name.
        beta: of the KL inside the reward; 0 where it is in the loss.
    """
    if task.type == "ppo":
        return _with_critic(task, state, samples, multipliers, beta)
    out = Credited()
    lengths = [sum(s.is_choice) for s in samples]
    groups = [s.group for s in samples]
    if task.type in ("reward_conditioned", "sft", "distill"):
        for s in samples:
            s.advantages = torch.ones(len(s.ids), dtype=torch.float64)
        if task.type == "distill" and not task.config["exact"]:
            for s in samples:
                s.advantages = -_sampled_kl(s)
            gaps = [
                -float(s.advantages[t]) for s in samples for t, counts in enumerate(s.is_choice) if counts
            ]  # type: ignore[index]
            out.metrics |= {"teacher_kl": math.fsum(gaps) / len(gaps)} if gaps else {}
        return out
    if task.type == "reinforce_pp":
        _reinforce_pp(task, samples, multipliers, beta, out)
        return out
    rewards = [s.reward for s in samples]
    if task.type == "gdpo":
        part = _decoupled(task, samples, groups)
    else:
        part = normalised(task, state, centred(task, rewards, groups, lengths), groups, "reward")
    if task.type != "reinforce_pp":
        out.metrics["reward_scale"] = state.scales["reward"].value if "reward" in state.scales else 1.0

    def of_cost(own: Sequence[Sample], costs: Values, name: str) -> list[Values]:
        where = [s.group for s in own]
        deviations = centred(task, costs, where, [sum(s.is_choice) for s in own])
        return each(normalised(task, state, deviations, where, f"cost/{name}"))

    part = [a for (a,) in minus_costs(each(part), samples, multipliers, of_cost)]
    if beta > 0.0:
        kl = [float(_sampled_kl(s).sum()) for s in samples]
        part = [a - beta * k for a, k in zip(part, centred(task, kl, groups, lengths), strict=True)]
        out.metrics["response_kl"] = math.fsum(kl) / len(kl)
    out.metrics["advantage_rms"] = math.sqrt(math.fsum(a * a for a in part) / len(part))
    for s, a in zip(samples, part, strict=True):
        s.advantages = torch.full((len(s.ids),), a, dtype=torch.float64)
    return out


def _sampled_kl(s: Sample) -> Tensor:
    assert s.old_logprobs is not None
    assert s.reference_logprobs is not None
    return s.old_logprobs - s.reference_logprobs


def _decoupled(task: Task, samples: Sequence[Sample], groups: Sequence[object]) -> Values:
    """Every reward over its own deviation in the group, added by weight, whitened over the task."""
    terms = [s.terms if len(s.terms) > 1 else [(1.0, s.reward)] for s in samples]
    total = [0.0] * len(samples)
    for k in range(max(len(t) for t in terms)):
        applies = [i for i, t in enumerate(terms) if not math.isnan(t[k][1])]
        own = [groups[i] for i in applies]
        deviations = centred(task, [terms[i][k][1] for i in applies], own, [1] * len(applies))
        for i, a in zip(applies, over_group_std(deviations, own), strict=True):
            total[i] += terms[i][k][0] * a
    # rewards may cancel: what is left then is no signal to blow up
    most = max(math.fsum(abs(w) for w, _ in t) for t in terms)
    return whitened(total, floor=0.01 * most)


def _reinforce_pp(
    task: Task,
    samples: Sequence[Sample],
    multipliers: Mapping[str, float],
    beta: float,
    out: Credited,
) -> None:
    """Whitened over the tokens of the task, less the KL still to come, itself less its mean over tokens."""

    def per_token(own: Sequence[Sample], values: Values, _: str = "") -> list[Values]:
        where, sizes = [s.group for s in own], [sum(s.is_choice) for s in own]
        base = centred(task, values, where, sizes) if task.config["group_baseline"] else values
        found = iter(whitened([v for v, n in zip(base, sizes, strict=True) for _ in range(n)]))
        return [[next(found) if counts else 0.0 for counts in s.is_choice] for s in own]

    rewards = per_token(samples, [s.reward for s in samples])
    advantages = minus_costs(rewards, samples, multipliers, per_token)
    if beta > 0.0:
        to_come = [[float(_sampled_kl(s)[t:].sum()) for t in range(len(s.ids))] for s in samples]
        pairs = [p for s, k in zip(samples, to_come, strict=True) for p in zip(s.is_choice, k, strict=True)]
        counted = [k for is_choice, k in pairs if is_choice]
        mean = math.fsum(counted) / max(1, len(counted))
        advantages = [
            [a - beta * (x - mean) for a, x in zip(own, k, strict=True)]
            for own, k in zip(advantages, to_come, strict=True)
        ]
        out.metrics["response_kl"] = math.fsum(float(_sampled_kl(s).sum()) for s in samples) / len(samples)
    for s, own in zip(samples, advantages, strict=True):
        s.advantages = torch.tensor(own, dtype=torch.float64)


def _with_critic(
    task: Task, state: CreditState, samples: Sequence[Sample], multipliers: Mapping[str, float], beta: float
) -> Credited:
    """PPO: whitened outcome on the last token, KL on every token, generalised advantage estimation."""
    out = Credited()
    config, moments = task.config, state.rewards
    rewards = [s.reward for s in samples]
    mean = math.fsum(rewards) / len(rewards)
    varies = max(rewards) > min(rewards)
    moments.add(mean, math.fsum((r - mean) ** 2 for r in rewards) / len(rewards) if varies else 0.0)
    unit = moments.std
    outcomes = [(r - moments.mean) / unit if unit else 0.0 for r in rewards]
    parts = minus_costs(each(outcomes), samples, multipliers, lambda _, costs, __: each(costs))
    outcomes = [a for (a,) in parts]
    out.metrics |= {"reward_running_mean": moments.mean, "reward_scale": unit}
    targets = state.targets
    factor, shift = 1.0, 0.0
    # a head goes on in the unit of the targets until the step after popart is turned off
    has_targets = (config["popart"] or targets is not None) and not (state.waits and not unit)
    state.waits = state.waits and not unit
    if has_targets:
        if targets is None:
            targets = state.targets = Moments(config["popart_rate"])
            targets.add(moments.mean, unit**2)
        factor = (unit or 1.0) / (targets.std or 1.0)
        shift = (moments.mean - targets.mean) / (targets.std or 1.0)
    decay = config["gamma"] * config["gae_lambda"]
    advantages: Values = []
    kl_sum = 0.0
    for s, outcome in zip(samples, outcomes, strict=True):
        assert s.old_values is not None
        v = s.old_values.tolist()
        r = [0.0] * len(v)
        if beta > 0.0:
            kl = _sampled_kl(s).tolist()
            kl_sum += math.fsum(kl)
            r = [-beta * k for k in kl]
        r[-1] += outcome
        r = [factor * x for x in r]
        r[-1] += shift
        own, after, next_value = [0.0] * len(v), 0.0, 0.0
        for t in reversed(range(len(v))):
            after = r[t] + config["gamma"] * next_value - v[t] + decay * after
            own[t], next_value = after, v[t]
        advantages += own
        s.returns = torch.tensor(own, dtype=torch.float64) + s.old_values
    if beta > 0.0:
        out.metrics["response_kl"] = kl_sum / len(samples)
    if has_targets:
        assert targets is not None
        returns = torch.cat([s.returns for s in samples if s.returns is not None])
        old_mean, old_std = targets.mean, targets.std or 1.0
        targets.add(old_mean + old_std * float(returns.mean()), old_std**2 * float(returns.var(correction=0)))
        now = targets if config["popart"] else moments
        new_std = now.std or 1.0
        a, b = old_std / new_std, (old_mean - now.mean) / new_std
        for s in samples:
            assert s.returns is not None
            s.returns = a * s.returns + b
            assert s.old_values is not None
            s.old_values = a * s.old_values + b
        out.value_rescale = (a, b)
        out.metrics |= {"value_mean": now.mean, "value_scale": now.std}
        state.targets = targets if config["popart"] else None
    values = iter(whitened(advantages, floor=0.1))
    for s in samples:
        s.advantages = torch.tensor([next(values) for _ in s.ids], dtype=torch.float64)
    return out
