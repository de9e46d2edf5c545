"""Credit: rewards of scored samples become advantages of tokens, task by task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from multitask_rl.algorithms.base import Algorithm, CreditBatch
from multitask_rl.config.task import TaskSpec
from multitask_rl.records import TrainSample, concerned_cost
from multitask_rl.training.backend import CreditedSample, StepStartOutputs, TrainingBackend

__all__ = ["CreditAssigner", "LearnerTask"]


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


class CreditAssigner:
    """Calls each task's algorithm with all of the task's samples of the step, and with no others.

    Args:
        backend: runs the models.
        tasks: by name.
        many_updates: a step makes several updates, so ratios need the log-probabilities before the first.
    """

    def __init__(
        self, backend: TrainingBackend, tasks: Mapping[str, LearnerTask], *, many_updates: bool
    ) -> None:
        self._backend = backend
        self._tasks = tasks
        self._many_updates = many_updates

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
        before = self._step_start_outputs(task, samples)
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
            self._backend.runner.critic.rescale(task.spec.name, scale, shift)
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
        return self._backend.runner.actor.grammars.choices(grammars, [s.response_ids for s in samples])

    def _step_start_outputs(self, task: LearnerTask, samples: list[TrainSample]) -> StepStartOutputs | None:
        """Compute what credit needs of the weights as they are; None when it needs nothing."""
        needs_critic = task.algorithm.needs_critic
        want_ref = task.spec.kl.coefficient > 0 and not task.algorithm.wants_exact_kl
        if not (want_ref or needs_critic or self._many_updates):
            return None
        return self._backend.step_start_outputs(
            task.spec.name, samples, want_values=needs_critic, want_ref=want_ref
        )


def _credit_batch(
    task: LearnerTask,
    samples: list[TrainSample],
    lengths: Tensor,
    before: StepStartOutputs | None,
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
