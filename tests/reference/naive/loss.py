"""Loss per token of each algorithm, and its weight in the step's loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .model import Weights, before_each_token, logits_of, merged, sampled_logits, scores_of
from .records import Sample
from .settings import Settings, Task


@dataclass
class TokenSums:
    """Sums over trained tokens, per task and name."""

    sums: dict[tuple[str, str], float] = field(default_factory=dict)
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, task: str, name: str, values: Tensor) -> None:
        key = task, name
        self.sums[key] = self.sums.get(key, 0.0) + float(values.detach().sum())
        self.counts[key] = self.counts.get(key, 0) + values.numel()

    def means(self, task: str) -> dict[str, float]:
        own = [(key, total) for key, total in self.sums.items() if key[0] == task and self.counts[key]]
        return {key[1]: total / self.counts[key] for key, total in own}


def states_of(
    settings: Settings, weights: Weights, samples: Sequence[Sample], *, for_reference: bool = False
) -> list[Tensor]:
    """Return the hidden states [T, H] from which each sample's tokens are predicted."""
    answers = [(s, a) for s in samples for a in s.answers]
    hidden = iter(
        before_each_token(
            weights,
            [a.context[s.num_control :] if for_reference else a.context for s, a in answers],
            [a.ids for _, a in answers],
            settings.num_heads,
            settings.num_key_value_heads,
        )
    )
    return [torch.cat([next(hidden) for _ in s.answers]) for s in samples]


def outputs(
    settings: Settings,
    weights: Weights,
    samples: Sequence[Sample],
    margins: list[float],
    *,
    for_reference: bool = False,
    whole: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Return hidden states [T, H] and logits [T, V] of the distribution each sample's policy samples from.

    ``whole``: without top-k and top-p.
    """
    weights, found = merged(weights), []
    states = states_of(settings, weights, samples, for_reference=for_reference)
    for s, h in zip(samples, states, strict=True):
        task, logits = settings[s.task], logits_of(weights, h)
        never = torch.zeros(logits.shape, dtype=torch.bool)
        if task.sentences is not None:
            rows = [row for a in s.answers for row in allowed_tokens(settings, task.sentences, a.ids)]
            never = torch.tensor([[v not in row for v in range(logits.shape[-1])] for row in rows])
        never[:, settings.control_tokens] = True
        logits = logits.masked_fill(never, -math.inf)
        if s.rollout_logprobs is not None:
            cut = (0, 1.0) if whole else (task.top_k, task.top_p)
            logits = sampled_logits(logits, s.ids, task.temperature, *cut, margins)
        found.append((h, logits))
    return found


def allowed_tokens(
    settings: Settings, sentences: Sequence[Sequence[int]], ids: Sequence[int]
) -> list[set[int]]:
    """What a grammar allows in the place of each token: what leads to a sentence, the end after one."""
    found = []
    for t in range(len(ids)):
        before = list(ids[:t])
        longer = [s for s in sentences if list(s[:t]) == before]
        found.append({s[t] if len(s) > t else settings.end_token for s in longer})
    return found


def exact_kl(logits: Tensor, others: Tensor) -> Tensor:
    """``sum_v p (log p - log q)`` over the tokens that are possible: [T]."""
    p, q = logits.log_softmax(-1), others.log_softmax(-1)
    gap = torch.where(p == -math.inf, 0.0, p - q)
    return (p.exp() * gap).sum(-1)


def values_of(
    settings: Settings, weights: Weights, critic: Weights, samples: Sequence[Sample], hidden: Sequence[Tensor]
) -> list[Tensor]:
    """Return the value before each token: the task's head on the hidden states of actor or trunk."""
    if settings.critic_trunk == "separate":
        trunk = {n.removeprefix("trunk."): w for n, w in critic.items() if n.startswith("trunk.")}
        hidden = states_of(settings, merged(trunk), samples)
    return [
        h @ critic[f"{s.task}.weight"][0] + critic[f"{s.task}.bias"][0]
        for s, h in zip(samples, hidden, strict=True)
    ]


def estimate_kl(estimator: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    log_ratio = reference - logprobs
    return 0.5 * log_ratio**2 if estimator == "k2" else log_ratio.exp() - 1.0 - log_ratio


def token_losses(
    settings: Settings,
    weights: Weights,
    critic: Weights,
    reference: Weights | None,
    teachers: Mapping[str, Weights],
    samples: Sequence[Sample],
    betas: Mapping[str, float],
    sums: TokenSums,
    margins: list[float],
) -> list[Tensor]:
    """Return the loss of every response token of each sample: [T] each."""
    found = outputs(settings, weights, samples, margins)
    needs_values = [i for i, s in enumerate(samples) if settings[s.task].type == "ppo"]
    values = dict(
        zip(
            needs_values,
            values_of(
                settings,
                weights,
                critic,
                [samples[i] for i in needs_values],
                [found[i][0] for i in needs_values],
            )
            if needs_values
            else [],
            strict=True,
        )
    )
    losses = []
    for i, (s, (_, logits)) in enumerate(zip(samples, found, strict=True)):
        task, whole = settings[s.task], logits
        if task.type == "distill" and task.config["exact"]:
            ((_, whole),) = outputs(settings, weights, [s], margins, whole=True)
        other = reference
        if task.type == "distill":
            other = teachers[s.task]
        places = [t for t, is_choice in enumerate(s.is_choice) if is_choice]
        kl = None
        if (task.type == "distill" and task.config["exact"]) or (
            task.type == "reward_conditioned" and betas[s.task] > 0.0
        ):
            assert other is not None
            ((_, others),) = outputs(settings, other, [s], margins, for_reference=True, whole=True)
            kl = exact_kl(whole, others)[places]
        own = s.take(places)
        logp, entropy = (x[places] for x in scores_of(logits, s.ids))
        note = _Note(sums, s.task)
        if task.type in ("reward_conditioned", "sft"):
            loss = -logp
            note("nll", loss)
            if kl is not None:
                loss = loss + betas[s.task] * kl
                note("kl_loss", kl)
        elif kl is not None:
            note("teacher_kl", kl)
            note("mismatch", _gap(own, logp).abs())
            loss = kl
        else:
            loss = _policy_loss(task, own, logp, betas[s.task], note, margins)
            if task.type == "ppo":
                # the entropy is part of the policy's loss
                note("policy_loss", loss - task.config["entropy_coefficient"] * entropy)
                value_loss = _value_loss(task, own, values[i][places], note, margins)
                loss = loss + task.config["value_coefficient"] * value_loss
        loss = loss - task.config["entropy_coefficient"] * entropy
        note("loss", loss)
        note("entropy", entropy)
        losses.append(loss)
    return losses


@dataclass
class _Note:
    sums: TokenSums
    task: str

    def __call__(self, name: str, values: Tensor) -> None:
        self.sums.add(self.task, name, values)


def _correction(task: Task, s: Sample, logp: Tensor, note: _Note) -> Tensor:
    """min(old / engine, cap): what the engine's probabilities were off by; 1 without a cap."""
    gap = _gap(s, logp)
    note("mismatch", gap.abs())
    if task.config["truncated_is"] <= 0.0:
        return torch.ones_like(gap)
    correction = gap.exp().clamp(max=task.config["truncated_is"])
    note("is_weight", correction)
    return correction


def _gap(s: Sample, logp: Tensor) -> Tensor:
    """log old - log engine; a small one counts as rounding."""
    old = s.old_logprobs if s.old_logprobs is not None else logp.detach()
    assert s.rollout_logprobs is not None
    gap = old.detach() - torch.tensor(s.rollout_logprobs, dtype=logp.dtype)
    return torch.where(gap.abs() < 1e-5, 0.0, gap)


def _policy_loss(
    task: Task, s: Sample, logp: Tensor, beta: float, note: _Note, margins: list[float]
) -> Tensor:
    config = task.config
    old = s.old_logprobs if s.old_logprobs is not None else logp.detach()
    advantages = s.advantages
    assert advantages is not None
    low, high = 1.0 - config["clip_low"], 1.0 + config["clip_high"]
    ratio = (logp - old).exp()
    note("approx_kl", ratio - 1.0 - (logp - old))
    if task.type == "cispo":
        weight = ratio.detach().clamp(low, high)
        loss = -weight * advantages * logp
        note("clip_fraction", (weight != ratio).to(weight))
    else:
        if task.type == "gspo":
            ratio = ((logp - old).mean()).exp().expand(len(s.ids))
        plain, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
        loss = torch.maximum(plain, clipped)
        note("clip_fraction", (clipped > plain).to(loss))
        if config["dual_clip"] > 0.0:
            most = -config["dual_clip"] * advantages
            is_beyond = (advantages < 0.0) & (loss > most)
            loss = torch.where(is_beyond, most, loss)
            note("dual_clip_fraction", is_beyond.to(loss))
            margins += (ratio - config["dual_clip"]).abs().tolist()
        if bool((ratio.detach() != 1.0).any()):
            margins += (ratio - low).abs().tolist() + (ratio - high).abs().tolist()
    note("ratio", ratio)
    loss = loss * _correction(task, s, logp, note)
    if beta > 0.0 and task.kl_placement == "loss":
        assert s.reference_logprobs is not None
        kl = estimate_kl(task.kl_estimator, logp, s.reference_logprobs)
        loss = loss + beta * kl
        note("kl_loss", kl)
    return loss


def _value_loss(task: Task, s: Sample, values: Tensor, note: _Note, margins: list[float]) -> Tensor:
    """1/2 max((V - R)^2, (V_old + clip(V - V_old) - R)^2)."""
    assert s.returns is not None
    assert s.old_values is not None
    clip, plain = task.config["value_clip"], (values - s.returns) ** 2
    if clip > 0.0:
        near = s.old_values + (values - s.old_values).clamp(-clip, clip)
        clipped = (near - s.returns) ** 2
        moved = (values - s.old_values).abs() > clip
        note("value_clip_fraction", ((clipped > plain) & moved).to(plain))
        margins += ((values - s.old_values).abs() - clip).abs().tolist()
        margins += (clipped - plain)[moved].abs().tolist()
        plain = torch.maximum(plain, clipped)
    else:
        note("value_clip_fraction", torch.zeros_like(plain))
    note("value_loss", 0.5 * plain)
    return 0.5 * plain


def minibatches(
    settings: Settings, samples: Sequence[Sample], order: Mapping[str, Sequence[int]]
) -> list[list[Sample]]:
    """Deal every task's samples, in ``order``, round and round into as many minibatches."""
    if settings.num_minibatches == 1:
        return [list(samples)]
    dealt = []
    for task in settings.tasks:
        own = [s for s in samples if s.task == task.name]
        dealt += [own[i] for i in order.get(task.name, ())]
    parts = [dealt[i :: settings.num_minibatches] for i in range(settings.num_minibatches)]
    return [part for part in parts if part]


def token_weights(
    settings: Settings, parts: Sequence[Sequence[Sample]], part: Sequence[Sample], shares: Mapping[str, float]
) -> list[float]:
    """Weight of each sample's token losses: the task's mean over ``part``, times its share.

    A task that is in some of the minibatches only weighs more there: over all of them its share stays.
    """
    weights = []
    for s in part:
        task = settings[s.task]
        own = [other for other in part if other.task == s.task]
        present = sum(any(other.task == s.task for other in p) for p in parts)
        denominator = {
            "token": max(1, sum(other.num_counted for other in own)),
            "sequence": sum(other.fraction for other in own) * max(1, s.num_counted) / s.fraction,
            "constant": sum(other.fraction for other in own) * task.most_tokens,
        }[task.config["aggregation"]]
        weights.append(shares.get(s.task, 0.0) * len(parts) / present * task.loss_weight / denominator)
    return weights


def can_matter(task: Task, beta: float, s: Sample) -> bool:
    """Whether the loss may depend on the sample: an advantage, or a term that needs none."""
    assert s.advantages is not None
    always = (
        task.config["entropy_coefficient"] > 0.0
        or (beta > 0.0 and task.kl_placement == "loss")
        or task.type in ("ppo", "reward_conditioned")
    )
    return s.num_counted > 0 and (always or bool((s.advantages.abs() > 1e-9).any()))
