"""The training backend of one process: forward and backward passes, loss, optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from multitask_rl.algorithms.base import LossOutput, TokenBatch
from multitask_rl.config.run import RunConfig
from multitask_rl.records import TrainSample
from multitask_rl.training.backend import (
    CreditedSample,
    StepResult,
    StepStartOutputs,
    TrainingBackend,
    Weighted,
)
from multitask_rl.training.credit import LearnerTask
from multitask_rl.training.forward import TokenOutputs
from multitask_rl.training.metrics import TokenMeans
from multitask_rl.training.microbatch import MicroBatch, padding_share
from multitask_rl.training.optimizer import ActorCriticOptimizer
from multitask_rl.training.runner import ModelRunner, scatter

__all__ = ["InProcess"]


class InProcess(TrainingBackend):
    """The backend of this process; a learner rank has one for its part of the samples.

    Args:
        runner: the models.
        tasks: by name.
        config: the run.
        parameters: of the actor, that the optimizer moves; default: all that have a gradient.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tasks: Mapping[str, LearnerTask],
        config: RunConfig,
        parameters: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.runner = runner
        self.tasks = tasks
        actor = runner.actor.trainable_parameters() if parameters is None else list(parameters)
        critic = list(runner.critic.parameters()) if runner.critic.is_used else []
        self.optimizer = ActorCriticOptimizer(actor, critic, config.optimizer, config.critic)

    @torch.no_grad()
    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
    ) -> StepStartOutputs:
        """See ``TrainingBackend``."""
        runner = self.runner
        old: list[Tensor] = [torch.empty(0)] * len(samples)
        values: list[Tensor] | None = [torch.empty(0)] * len(samples) if want_values else None
        with runner.together():
            for batch in runner.batches(samples):
                out = runner.forward(batch, samples, want_hidden=want_values and runner.shares_trunk)
                scatter(old, batch, out.logprobs)
                if values is not None and batch.indices:
                    scatter(values, batch, runner.values(task, batch, out))
            return StepStartOutputs(old, runner.reference_logprobs(samples) if want_ref else None, values)

    def step(self, active: Sequence[Weighted], factor: float) -> StepResult:
        """Make one optimizer step; among ranks: on the sum of their gradients (see ``TrainingBackend``).

        Args:
            active: this process's samples; the factors' denominators count those of all ranks.
            factor: of the learning rates.
        """
        runner, means, total = self.runner, TokenMeans(), 0.0
        self.optimizer.zero_grad()
        with runner.actor.learning():
            batches = runner.cut([c.sample for c, _ in active])
            own = [batch for batch in batches if batch.indices]
            means.add_padding(padding_share(own), sum(b.num_cells for b in own))
            with runner.together():
                for batch in batches:
                    loss = self._loss(batch.to(runner.actor.device), active, means)
                    total += float(loss.detach())
                    if loss.requires_grad:
                        torch.autograd.backward(loss)
            return StepResult(loss=total, norms=self.optimizer.step(factor), means=means)

    def ema_update(self) -> None:
        """Move the reference towards the actor, where it is to move."""
        if self.runner.average is not None:
            self.runner.average.ema_update(self.runner.actor.model)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's moments and float32 masters."""
        return self.optimizer.state_bytes

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the optimizer's state (see ``TrainingBackend``)."""
        return self.optimizer.tensors(names)

    def load_optimizer(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Restore the optimizer's state (see ``TrainingBackend``)."""
        self.optimizer.load_tensors(tensors, parameters)

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
            if self.runner.passes.in_step and self._wants_exact_kl(task) and name not in names:
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
            # samples are numbered within the task: 0 .. len(own) - 1
            sequence = torch.searchsorted(members, batch.sequence[tokens])
            token_batch = self._token_batch(self.tasks[name], batch, out, tokens, own, logprobs, sequence)
            if (choices := _choices(own)) is not None:
                tokens = tokens[choices.to(device)]
            result = self.tasks[name].algorithm.loss(token_batch)
            means.add(name, _token_metrics(token_batch, result, out.entropy[tokens]))
            total = total + (result.loss * weight[tokens]).sum()
        if self.runner.passes.in_step and not total.requires_grad:
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
        sequence: Tensor,
    ) -> TokenBatch:
        """Gather the tensors of one task's tokens in a micro-batch, less those without a choice."""
        device, algorithm, runner = out.logprobs.device, task.algorithm, self.runner
        choices = _choices(own)
        chosen = slice(None) if choices is None else choices.to(device)

        def stack(parts: list[Tensor | None]) -> Tensor | None:
            found = [part for part in parts if part is not None]
            return torch.cat(found).to(device)[chosen] if found else None

        old = stack([c.old_logprobs for c in own])
        advantages = torch.cat([c.advantages for c in own]).to(device)[chosen]
        rollout = torch.cat([_rollout_logprobs(c.sample) for c in own]).to(device)[chosen]
        exact = self._wants_exact_kl(task)
        wants_entropy = algorithm.config.entropy_coefficient > 0
        values = runner.values(task.spec.name, batch, out, tokens) if algorithm.needs_critic else None
        return TokenBatch(
            logprobs=logprobs[chosen],
            old_logprobs=old if old is not None else logprobs.detach()[chosen],
            advantages=advantages,
            sequence=sequence[chosen],
            num_sequences=len(own),
            rollout_logprobs=rollout if algorithm.on_policy else None,
            ref_logprobs=stack([c.ref_logprobs for c in own]),
            exact_kl=_exact_kl(runner, own, out.logits, tokens)[chosen] if exact else None,
            entropy=out.entropy[tokens][chosen] if wants_entropy else None,
            values=None if values is None else values[chosen],
            old_values=stack([c.old_values for c in own]),
            returns=stack([c.returns for c in own]),
            kl_coefficient=task.kl_coefficient if task.spec.kl.placement == "loss" or exact else 0.0,
            kl_estimator=task.spec.kl.estimator,
        )

    @staticmethod
    def _wants_exact_kl(task: LearnerTask) -> bool:
        return task.algorithm.wants_exact_kl and task.kl_coefficient > 0


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
