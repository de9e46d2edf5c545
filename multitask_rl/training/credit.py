"""Credit: rewards of scored samples become advantages of tokens, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from multitask_rl.algorithms.base import Algorithm, CreditBatch
from multitask_rl.config.task import TaskSpec
from multitask_rl.records import TrainSample, concerned_cost
from multitask_rl.training.runner import ModelRunner, scatter

__all__ = ["Before", "CreditAssigner", "CreditedSample", "LearnerTask", "look_before", "merge_before"]


@dataclass(kw_only=True, slots=True)
class LearnerTask:
    """What learning needs to know of a task."""

    spec: TaskSpec
    algorithm: Algorithm
    kl_coefficient: float = 0.0
    """beta now (the controller's)."""
    multipliers: dict[str, float] = field(default_factory=dict)
    """Lagrange multiplier now, by name of the constraint."""

    @property
    def is_regularised(self) -> bool:
        """A KL or entropy term is on: it gives every response a gradient, whatever its reward."""
        return self.kl_coefficient > 0 or self.algorithm.config.entropy_coefficient > 0

    @property
    def zero_advantage_is_zero_gradient(self) -> bool:
        """A sample whose advantages are all zero cannot move the weights."""
        kl_in_loss = self.kl_coefficient > 0 and self.spec.kl.placement == "loss"
        plain = self.algorithm.config.entropy_coefficient == 0 and not kl_in_loss
        return plain and self.algorithm.on_policy and not self.algorithm.needs_critic


@dataclass(kw_only=True, slots=True)
class CreditedSample:
    """A training sample with the credit of each of its response tokens."""

    sample: TrainSample
    advantages: Tensor
    """[T]"""
    old_logprobs: Tensor | None = None
    """[T]; None when the step makes one update (the ratio is then exactly 1)."""
    ref_logprobs: Tensor | None = None
    """[T]"""
    old_values: Tensor | None = None
    """[T]"""
    returns: Tensor | None = None
    """[T]"""
    choices: Tensor | None = None
    """[T] bool: the tokens that the loss is over and its denominator counts; None = all. A token that a
    grammar forced is none: it has probability 1 whatever the weights."""
    has_gradient: bool = True
    """False: the loss does not depend on the sample; it only counts in the denominator."""

    @property
    def num_choices(self) -> int:
        """Tokens that the loss is over."""
        return len(self.sample.response_ids) if self.choices is None else int(self.choices.sum())

    def compact(self) -> CreditedSample:
        """Return it with tensors of its own: a view travels with all that it is a view of."""
        names = ("old_logprobs", "ref_logprobs", "old_values", "returns", "choices")
        given: dict[str, Any] = {
            n: None if (found := getattr(self, n)) is None else found.clone() for n in names
        }
        return replace(self, advantages=self.advantages.clone(), **given)


@dataclass(slots=True)
class Before:
    """What the models say of the samples before the update, ragged [T] each."""

    old_logprobs: list[Tensor]
    ref_logprobs: list[Tensor] | None
    values: list[Tensor] | None

    def compact(self) -> Before:
        """Return it with tensors of their own: a view travels with all that it is a view of."""
        old, ref, values = (
            None if own is None else [tensor.clone() for tensor in own]
            for own in (self.old_logprobs, self.ref_logprobs, self.values)
        )
        return Before(old or [], ref, values)


class Look(Protocol):
    """``look_before``, in this process or shared out to several."""

    def __call__(
        self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
    ) -> Before:
        """Return what the models say of ``samples``."""
        ...


class CreditAssigner:
    """Calls each task's algorithm with all of the task's samples of the step, and nobody else's.

    Args:
        runner: the models.
        tasks: by name.
        many_updates: a step makes several updates, so ratios need the log-probabilities before the first.
        look: who runs the models; default: this process.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tasks: Mapping[str, LearnerTask],
        *,
        many_updates: bool,
        look: Look | None = None,
    ) -> None:
        self._runner = runner
        self._tasks = tasks
        self._many_updates = many_updates
        self._look = look or partial(look_before, runner)

    def credit(
        self, samples: Sequence[TrainSample]
    ) -> tuple[list[CreditedSample], dict[str, dict[str, float]]]:
        """Return the credited samples (by task as configured, then as given) and metrics per task.

        Samples without a response token are left out: there is no token to credit.
        """
        credited: list[CreditedSample] = []
        metrics: dict[str, dict[str, float]] = {}
        by_task: dict[str, list[TrainSample]] = {name: [] for name in self._tasks}
        for sample in samples:
            if sample.task in by_task and len(sample.response_ids):
                by_task[sample.task].append(sample)
        for name, task in self._tasks.items():
            if own := by_task[name]:
                part, metrics[name] = self._credit_task(task, own)
                credited.extend(part)
        return credited, metrics

    def _credit_task(
        self, task: LearnerTask, samples: list[TrainSample]
    ) -> tuple[list[CreditedSample], dict[str, float]]:
        before = self._look_before(task, samples)
        lengths = torch.tensor([len(s.response_ids) for s in samples])
        known = self._choices(samples)
        # a critic learns a value at every token
        choices = None if task.algorithm.needs_critic else known
        credit = task.algorithm.credit(_credit_batch(task, samples, lengths, before, choices))
        sizes = lengths.tolist()
        advantages = torch.split(credit.advantages, sizes)
        returns = torch.split(credit.returns, sizes) if credit.returns is not None else None
        old = before.old_logprobs if before and self._many_updates else None
        ref = before.ref_logprobs if before else None
        values = before.values if before else None
        if values is not None and credit.value_rescale is not None:
            scale, shift = credit.value_rescale
            self._runner.critic.rescale(task.spec.name, scale, shift)
            values = [scale * v + shift for v in values]
        metrics = dict(credit.metrics)
        if known is not None:
            metrics["grammar/forced_share"] = 1.0 - float(torch.cat(known).float().mean())
        if before and before.ref_logprobs:
            gaps = [(o - r).sum() for o, r in zip(before.old_logprobs, before.ref_logprobs, strict=True)]
            metrics["kl"] = float(torch.stack(gaps).mean())
        may_skip = task.zero_advantage_is_zero_gradient
        has_gradient = [not may_skip or bool(own.any()) for own in advantages]
        if choices is not None:
            has_gradient = [h and bool(own.any()) for h, own in zip(has_gradient, choices, strict=True)]
        return [
            CreditedSample(
                sample=sample,
                advantages=advantages[i],
                old_logprobs=old[i] if old else None,
                ref_logprobs=ref[i] if ref else None,
                old_values=values[i] if values else None,
                returns=returns[i] if returns is not None else None,
                choices=choices[i] if choices else None,
                has_gradient=has_gradient[i],
            )
            for i, sample in enumerate(samples)
        ], metrics

    def _choices(self, samples: Sequence[TrainSample]) -> list[Tensor] | None:
        """Return where each response had a choice; None if no grammar restricts them."""
        grammars = [s.scored.rollout.sampling.grammar for s in samples]
        if not any(grammars):
            return None
        return self._runner.actor.grammars.choices(grammars, [s.response_ids for s in samples])

    def _look_before(self, task: LearnerTask, samples: list[TrainSample]) -> Before | None:
        """Compute what credit needs of the weights as they are; None when it needs nothing."""
        needs_critic = task.algorithm.needs_critic
        want_ref = task.spec.kl.coefficient > 0 and not task.algorithm.wants_exact_kl
        if not (want_ref or needs_critic or self._many_updates):
            return None
        return self._look(task.spec.name, samples, want_values=needs_critic, want_ref=want_ref)


@torch.no_grad()
def look_before(
    runner: ModelRunner, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
) -> Before:
    """Return log-probabilities and, as wanted, reference log-probabilities and values of all responses."""
    old: list[Tensor] = [torch.empty(0)] * len(samples)
    values: list[Tensor] | None = [torch.empty(0)] * len(samples) if want_values else None
    with runner.together():
        for batch in runner.batches(samples):
            out = runner.forward(batch, samples, want_hidden=want_values and runner.shares_trunk)
            scatter(old, batch, out.logprobs)
            if values is not None and batch.indices:
                scatter(values, batch, runner.values(task, batch, out))
        return Before(old, runner.reference_logprobs(samples) if want_ref else None, values)


def merge_before(shares: Sequence[Sequence[int]], parts: Sequence[Before]) -> Before:
    """Return what ``parts`` say in the order of all samples.

    Args:
        shares: places of each part's samples.
        parts: of disjoint samples.
    """
    number = sum(map(len, shares))

    def whole(lists: Sequence[list[Tensor] | None]) -> list[Tensor] | None:
        result = [torch.empty(0)] * number
        for share, own in zip(shares, lists, strict=True):
            if own is None:
                return None
            for index, tensor in zip(share, own, strict=True):
                result[index] = tensor
        return result

    old = whole([part.old_logprobs for part in parts])
    if old is None:
        raise AssertionError("log-probabilities are always computed")
    return Before(old, whole([part.ref_logprobs for part in parts]), whole([part.values for part in parts]))


def _credit_batch(
    task: LearnerTask,
    samples: list[TrainSample],
    lengths: Tensor,
    before: Before | None,
    choices: list[Tensor] | None,
) -> CreditBatch:
    groups: dict[str, int] = {}
    return CreditBatch(
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        groups=torch.tensor([groups.setdefault(s.scored.rollout.group_id, len(groups)) for s in samples]),
        lengths=lengths,
        choices=None if choices is None else torch.cat(choices),
        old_logprobs=torch.cat(before.old_logprobs) if before else None,
        ref_logprobs=torch.cat(before.ref_logprobs) if before and before.ref_logprobs else None,
        values=torch.cat(before.values) if before and before.values else None,
        kl_coefficient=task.kl_coefficient if task.spec.kl.placement == "reward" else 0.0,
        costs=_costs(samples, list(task.multipliers)) if task.multipliers else None,
        multipliers=tuple(task.multipliers.values()),
        **_components(samples),
    )


def _costs(samples: list[TrainSample], names: Sequence[str]) -> Tensor:
    """Return the cost of each sample under each of the constraints, NaN where it does not apply: [B, C]."""
    costs = [[concerned_cost(s.scored, name) for name in names] for s in samples]
    return torch.tensor([[math.nan if c is None else c for c in row] for row in costs])


def _components(samples: list[TrainSample]) -> dict[str, Tensor]:
    """Return the summands of each sample's reward, for algorithms that normalise them one by one."""
    # a refused response was not scored: it has none
    longest = max((s.scored.terms for s in samples), key=len)
    if len(longest) < 2:
        return {}
    nothing = [float("nan")] * len(longest)
    rows = [[value for _, value in s.scored.terms] or nothing for s in samples]
    return {
        "component_rewards": torch.tensor(rows, dtype=torch.float32),
        "component_weights": torch.tensor([weight for weight, _ in longest], dtype=torch.float32),
    }
