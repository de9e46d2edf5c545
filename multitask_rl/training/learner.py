"""The update: one loss over the mixed batch, one optimizer step.

The loss of a step is ``sum_k share_k * loss_weight_k * loss_k`` with ``loss_k`` the task's own mean over
*all* its tokens (or samples) of the minibatch: the denominator is counted before the samples are cut, so
cutting, packing and padding change nothing, and a task with long answers gets no more weight than its share.
A task with fewer samples than minibatches weighs so much more in those that have one: over the epoch it keeps
its share.

Samples whose gradient is known to be zero (a group in which all rewards are equal) count in the denominator
and are not computed.

With several learner ranks (``parallel/team.py``) each computes its part of the samples; the gradients are
summed, and each rank moves its part of the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from multitask_rl.algorithms.base import LossOutput, TokenBatch
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import TrainingError
from multitask_rl.records import TrainSample
from multitask_rl.seeding import random_stream
from multitask_rl.training.credit import CreditedSample, LearnerTask
from multitask_rl.training.forward import TokenOutputs
from multitask_rl.training.metrics import TokenMeans
from multitask_rl.training.microbatch import MicroBatch, padding_share
from multitask_rl.training.optimizer import ActorCriticOptimizer
from multitask_rl.training.runner import ModelRunner

__all__ = ["Learner", "Learnt", "UpdateReport", "Weighted"]

Weighted = tuple[CreditedSample, float]
"""A sample and the factor of its token losses."""

MAX_BAD_UPDATES = 3
"""Updates in a row with a gradient that is not finite before the run stops."""


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """Numbers of one step's updates."""

    metrics: dict[str, float] = field(default_factory=dict)
    task_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    num_skipped_updates: int = 0
    """Updates not applied because a gradient was not finite."""
    spans: list[tuple[str, tuple[float, float]]] = field(default_factory=list)
    """Who of several learner ranks was busy, or waited for, when (``tracking/timeline.py``)."""


@dataclass(kw_only=True, slots=True)
class Learnt:
    """What came of one optimizer step."""

    loss: float
    """Of this rank's samples."""
    norms: dict[str, float] | None
    """Of the whole gradient; None when it was not finite."""
    means: TokenMeans


class Team(Protocol):
    """Other ranks that learn with this one."""

    def learn(self, active: Sequence[Weighted], factor: float) -> Learnt:
        """Make one optimizer step, everybody on a part of ``active``."""
        ...

    def follow(self) -> None:
        """Move everybody's reference towards the actor."""
        ...

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's moments in this process."""
        ...

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return everybody's part of the optimizer's state (see ``ActorCriticOptimizer.tensors``)."""
        ...

    def report(self) -> tuple[dict[str, float], list[tuple[str, tuple[float, float]]]]:
        """Return metrics and spans since the last call."""
        ...

    def close(self) -> None:
        """End the others. Idempotent."""
        ...


class Learner:
    """Trains actor and critic on credited samples of many tasks."""

    def __init__(
        self,
        runner: ModelRunner,
        tasks: Mapping[str, LearnerTask],
        config: RunConfig,
    ) -> None:
        self.runner = runner
        self.tasks = tasks
        self.team: Team | None = None
        """In rank 0 the others."""
        self._config = config
        critic = list(runner.critic.parameters()) if runner.critic.is_used else []
        self.optimizer = ActorCriticOptimizer(
            runner.actor.trainable_parameters(), critic, config.optimizer, config.critic
        )
        self.bad_updates = 0
        """Updates in a row that were not applied; part of the checkpoint."""

    def update(
        self,
        credited: Sequence[CreditedSample],
        *,
        shares: Mapping[str, float],
        step: int,
        learning_rate_factor: float = 1.0,
    ) -> UpdateReport:
        """Make the step's optimizer updates.

        Args:
            credited: samples of all tasks.
            shares: task -> weight of its loss, summing to 1 over the tasks that have samples.
            step: number of the training step (names the shuffling stream).
            learning_rate_factor: of the schedule and the guard, multiplied.

        Raises:
            TrainingError: gradients were not finite ``MAX_BAD_UPDATES`` updates in a row.
        """
        report = UpdateReport()
        means = TokenMeans()
        norms: list[dict[str, float]] = []
        with self.runner.actor.learning():
            for epoch in range(self._config.batch.num_epochs):
                minibatches = self._minibatches(credited, step, epoch)
                weights = _weights_where_present(shares, minibatches)
                for minibatch in minibatches:
                    applied = self._apply(minibatch, weights, learning_rate_factor, means)
                    if applied is None:
                        report.num_skipped_updates += 1
                        self._count_bad_update()
                    else:
                        self.bad_updates = 0
                        norms.append(applied)
        self.follow()
        if self.team is not None:
            self.team.follow()
            metrics, report.spans = self.team.report()
            report.metrics.update(metrics)
        for key in ("loss", "grad_norm", "critic_grad_norm"):
            found = [n[key] for n in norms if key in n]
            if found:
                report.metrics[key] = sum(found) / len(found)
        report.metrics["padding_share"] = means.padding
        report.metrics["skipped_updates"] = float(report.num_skipped_updates)
        report.task_metrics = means.by_task()
        return report

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's moments in this process."""
        return self.optimizer.state_bytes if self.team is None else self.team.optimizer_bytes

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the whole state of the optimizer, for a checkpoint (see ``ActorCriticOptimizer.tensors``).

        Raises:
            TrainingError: other ranks that had a part of it have ended.
        """
        if self.team is not None:
            return self.team.optimizer_tensors(names)
        if self.optimizer.shared is not None:
            self.optimizer.shared.check_open()
        return self.optimizer.tensors(names)

    def close(self) -> None:
        """End the other ranks, if any. Idempotent."""
        if self.team is not None:
            self.team.close()

    def _minibatches(
        self, credited: Sequence[CreditedSample], step: int, epoch: int
    ) -> list[list[CreditedSample]]:
        """Split every task's samples evenly, so that each minibatch keeps the mix."""
        number = self._config.batch.num_minibatches
        if number == 1:
            return [list(credited)]
        dealt: list[CreditedSample] = []
        for name in self.tasks:
            own = [c for c in credited if c.sample.task == name]
            random_stream(self._config.seed, "minibatch", name, step, epoch).shuffle(own)
            dealt.extend(own)
        return [part for i in range(number) if (part := dealt[i::number])]

    def _apply(
        self,
        minibatch: list[CreditedSample],
        shares: Mapping[str, float],
        factor: float,
        means: TokenMeans,
    ) -> dict[str, float] | None:
        """Accumulate the gradient of one minibatch and step; None when it was not finite."""
        weights = self._token_weights(minibatch, shares)
        active = [(c, w) for c, w in zip(minibatch, weights, strict=True) if c.has_gradient]
        learnt = (self.learn if self.team is None else self.team.learn)(active, factor)
        means.merge(learnt.means)
        return None if learnt.norms is None else {"loss": learnt.loss, **learnt.norms}

    def learn(self, active: Sequence[Weighted], factor: float) -> Learnt:
        """Make one optimizer step on ``active``, with other ranks on their parts at the same time.

        Args:
            active: this rank's samples; the factors' denominators count all ranks' samples.
            factor: of the learning rates.
        """
        means = TokenMeans()
        self.optimizer.zero_grad()
        batches = self.runner.cut([c.sample for c, _ in active])
        own = [batch for batch in batches if batch.indices]
        means.add_padding(padding_share(own), sum(b.num_cells for b in own))
        total = 0.0
        with self.runner.together():
            for batch in batches:
                loss = self._loss(batch.to(self.runner.actor.device), active, means)
                total += float(loss.detach())
                if loss.requires_grad:
                    torch.autograd.backward(loss)
        return Learnt(loss=total, norms=self.optimizer.step(factor), means=means)

    def follow(self) -> None:
        """Move the reference towards the actor, where it is to move."""
        if self.runner.average is not None:
            self.runner.average.follow(self.runner.actor.model)

    def _token_weights(self, minibatch: list[CreditedSample], shares: Mapping[str, float]) -> list[float]:
        """Return the factor of each sample's token losses: share * loss_weight / denominator."""
        counts: dict[str, tuple[int, int]] = {}
        for c in minibatch:
            num_samples, num_tokens = counts.get(c.sample.task, (0, 0))
            counts[c.sample.task] = (num_samples + 1, num_tokens + c.num_choices)
        weights = []
        for c in minibatch:
            task = self.tasks[c.sample.task]
            num_samples, num_tokens = counts[c.sample.task]
            denominator = {
                "token": num_tokens,
                "sequence": num_samples * c.num_choices,
                "constant": num_samples * c.sample.scored.rollout.sampling.max_new_tokens,
            }[task.algorithm.config.aggregation]
            weights.append(shares.get(c.sample.task, 0.0) * task.spec.loss_weight / max(denominator, 1))
        return weights

    def _loss(self, batch: MicroBatch, active: Sequence[Weighted], means: TokenMeans) -> Tensor:
        """Return the weighted sum of the token losses of one micro-batch."""
        chosen = [active[i] for i in batch.indices]
        names = [c.sample.task for c, _ in chosen]
        tasks = [self.tasks[name] for name in dict.fromkeys(names)]
        out = self.runner.forward(
            batch,
            [c.sample for c, _ in active],
            want_hidden=self.runner.shares_trunk and any(t.algorithm.needs_critic for t in tasks),
            want_logits=any(self._wants_exact_kl(t) for t in tasks),
            entropy_gradient=any(t.algorithm.config.entropy_coefficient > 0 for t in tasks),
        )
        for name, task in self.tasks.items():
            if self.runner.is_sharded and self._wants_exact_kl(task) and name not in names:
                self.runner.pass_reference_idly()
        if not batch.indices:
            return 0.0 * out.logprobs.sum()
        device = out.logprobs.device
        weight = torch.tensor([w for _, w in chosen], device=device)[batch.sequence]
        total = out.logprobs.new_zeros(())
        # all tasks' tokens are put in order once: gathered task by task, each would cost a gradient of [N]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        of_token = torch.tensor([numbers[n] for n in names], device=device)[batch.sequence]
        order = of_token.argsort(stable=True)
        sizes = torch.bincount(of_token, minlength=len(numbers)).tolist()
        parts = zip(torch.split(order, sizes), torch.split(out.logprobs[order], sizes), strict=True)
        for name, (tokens, logprobs) in zip(numbers, parts, strict=True):
            positions = [i for i, n in enumerate(names) if n == name]
            members, own = torch.tensor(positions, device=device), [chosen[i][0] for i in positions]
            token_batch = self._token_batch(self.tasks[name], batch, out, tokens, own, logprobs)
            # samples are numbered within the task: 0 .. len(own) - 1
            token_batch.sequence = torch.searchsorted(members, batch.sequence[tokens])
            if (choices := _choices(own)) is not None:
                chosen_tokens = choices.to(device)
                token_batch, tokens = _only(token_batch, chosen_tokens), tokens[chosen_tokens]
            result = self.tasks[name].algorithm.loss(token_batch)
            means.add(name, _token_metrics(token_batch, result, out.entropy[tokens]))
            total = total + (result.loss * weight[tokens]).sum()
        if self.runner.is_sharded and not total.requires_grad:
            total = total + 0.0 * out.logprobs.sum()  # the other ranks go backward
        return total

    def _token_batch(
        self,
        task: LearnerTask,
        batch: MicroBatch,
        out: TokenOutputs,
        tokens: Tensor,
        own: list[CreditedSample],
        logprobs: Tensor,
    ) -> TokenBatch:
        """Gather the tensors of one task's tokens in a micro-batch."""
        device, algorithm, runner = out.logprobs.device, task.algorithm, self.runner
        old = _stack(own, "old_logprobs", device)
        rollout = torch.cat([_rollout_logprobs(c.sample) for c in own]).to(device)
        exact = self._wants_exact_kl(task)
        wants_entropy = algorithm.config.entropy_coefficient > 0
        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=old if old is not None else logprobs.detach(),
            advantages=torch.cat([c.advantages for c in own]).to(device),
            sequence=batch.sequence[tokens],
            num_sequences=len(own),
            rollout_logprobs=rollout if algorithm.on_policy else None,
            ref_logprobs=_stack(own, "ref_logprobs", device),
            exact_kl=_exact_kl(runner, own, out.logits, tokens) if exact else None,
            entropy=out.entropy[tokens] if wants_entropy else None,
            values=runner.values(task.spec.name, batch, out, tokens) if algorithm.needs_critic else None,
            old_values=_stack(own, "old_values", device),
            returns=_stack(own, "returns", device),
            kl_coefficient=task.kl_coefficient if task.spec.kl.placement == "loss" or exact else 0.0,
            kl_estimator=task.spec.kl.estimator,
        )

    @staticmethod
    def _wants_exact_kl(task: LearnerTask) -> bool:
        return task.algorithm.wants_exact_kl and task.kl_coefficient > 0

    def _count_bad_update(self) -> None:
        self.bad_updates += 1
        if self.bad_updates >= MAX_BAD_UPDATES:
            if self.team is not None:
                self.team.follow()  # who saves now saves the weights of the state
            raise TrainingError(
                f"the gradient was not finite {self.bad_updates} updates in a row (none was applied); lower "
                "optimizer.learning_rate, or look for rewards without bounds in metrics.jsonl. The last "
                "checkpoint is intact."
            )


def _weights_where_present(
    shares: Mapping[str, float], minibatches: Sequence[Sequence[CreditedSample]]
) -> dict[str, float]:
    """Return the weight of each task in the minibatches that have it: the mean over all is its share."""
    present = Counter(name for part in minibatches for name in {c.sample.task for c in part})
    return {name: share * (len(minibatches) / max(1, present[name])) for name, share in shares.items()}


def _token_metrics(batch: TokenBatch, result: LossOutput, entropy: Tensor) -> dict[str, Tensor]:
    metrics = dict(result.metrics)
    metrics["loss"] = result.loss.detach()
    with torch.no_grad():
        metrics["entropy"] = entropy.detach()
        if batch.rollout_logprobs is not None:
            gap = (batch.old_logprobs - batch.rollout_logprobs).abs()
            metrics["mismatch"] = gap[~gap.isnan()]
    return metrics


def _choices(own: Sequence[CreditedSample]) -> Tensor | None:
    """Return the tokens [N] bool of the samples that the loss is over; None for all."""
    if all(c.choices is None for c in own):
        return None
    return torch.cat([_all_tokens(c) if c.choices is None else c.choices for c in own])


def _all_tokens(credited: CreditedSample) -> Tensor:
    return torch.ones(len(credited.sample.response_ids), dtype=torch.bool)


def _only(batch: TokenBatch, tokens: Tensor) -> TokenBatch:
    """Return the chosen ``tokens`` [N] bool of a batch."""
    found = {f.name: getattr(batch, f.name) for f in fields(batch)}
    chosen: dict[str, Any] = {name: v[tokens] for name, v in found.items() if isinstance(v, Tensor)}
    return replace(batch, **chosen)


def _exact_kl(
    runner: ModelRunner, own: list[CreditedSample], logits: Tensor | None, tokens: Tensor
) -> Tensor:
    if logits is None:
        raise AssertionError("logits were not asked for")
    return runner.exact_kl([c.sample for c in own], logits[tokens])


def _rollout_logprobs(sample: TrainSample) -> Tensor:
    if len(sample.rollout_logprobs):
        return torch.tensor(sample.rollout_logprobs, dtype=torch.float32)
    return torch.full((len(sample.response_ids),), float("nan"))


def _stack(own: list[CreditedSample], name: str, device: torch.device) -> Tensor | None:
    parts = [getattr(c, name) for c in own]
    return None if parts[0] is None else torch.cat(parts).to(device)
