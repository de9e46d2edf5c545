"""The training backend of one process: forward and backward passes, loss, optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from multitask_rl.algorithms.base import LossOutput, TokenBatch, check_result
from multitask_rl.config.run import RunConfig
from multitask_rl.records import TrainSample
from multitask_rl.training.backend import (
    LearnerTask,
    StepStartOutputs,
    TokenMeans,
    TrainingBackend,
    UpdateResult,
    Weighted,
)
from multitask_rl.training.microbatch import MicroBatch
from multitask_rl.training.optimizer import ActorCriticOptimizer
from multitask_rl.training.runner import ModelRunner, scatter
from multitask_rl.training.sketch import SIZE, sketch_gradient

MAX_OVERFLOWS = 12
"""Times that the passes of a step are made again with a smaller loss scale (float16)."""
ROUNDING = 1e-5
"""Nats. A smaller difference between the log-probabilities of engine and trainer is rounding of float32. It
depends on the rows that the engine computed together."""


class InProcess(TrainingBackend):
    """The backend of this process. Each learner rank has one, for its part of the samples.

    ``parameters`` are those of the actor that the optimizer moves; default: all trainable ones.
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
        critic = list(runner.critic.parameters())
        is_half = any(p.dtype == torch.float16 for p in (*runner.actor.model.parameters(), *critic))
        self.optimizer = ActorCriticOptimizer(
            actor, critic, config.optimizer, config.critic, scales_loss=is_half
        )

    @classmethod
    def build(
        cls, runner: ModelRunner, tasks: Mapping[str, LearnerTask], config: RunConfig
    ) -> TrainingBackend:
        """See ``TrainingBackend``."""
        return cls(runner, tasks, config)

    @torch.no_grad()
    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
    ) -> StepStartOutputs:
        """See ``TrainingBackend``."""
        runner = self.runner
        old: list[Tensor] = [torch.empty(0)] * len(samples)
        values: list[Tensor] | None = [torch.empty(0)] * len(samples) if want_values else None
        with runner.together():
            for batch in (cut.to(runner.actor.device) for cut in runner.cut(samples)):
                out = runner.forward(batch, samples, want_hidden=want_values and runner.shares_trunk)
                scatter(old, batch, out.logprobs)
                if values is not None and batch.indices:
                    scatter(values, batch, runner.values(task, batch, out))
            return StepStartOutputs(
                old, runner.reference_logprobs(samples, task) if want_ref else None, values
            )

    @torch.enable_grad()
    def step(self, active: Sequence[Weighted], factor: float, compared: Sequence[str] = ()) -> UpdateResult:
        """Make one optimizer step on this process's samples; ranks sum their gradients."""
        result = self._step(active, factor, compared)
        for _ in range(MAX_OVERFLOWS if self.optimizer.scales_loss else 0):
            # all ranks see the same norms, so they make the same number of passes
            if result.norms is None:
                result = self._step(active, factor, compared)
        return result

    def _step(self, active: Sequence[Weighted], factor: float, compared: Sequence[str]) -> UpdateResult:
        result = UpdateResult(loss=0.0, norms=None, means=TokenMeans())
        self.optimizer.zero_grad()
        with self.runner.actor.learning(), self.runner.critic.learning():
            if not compared:
                self._backward(active, result)
            before = torch.zeros(SIZE, dtype=torch.float64)
            for name in compared:
                self._backward([(c, weight) for c, weight in active if c.sample.task == name], result)
                # the gradients add up: a task's is what it adds
                seen = sketch_gradient(self.optimizer.parameters[0])
                result.sketches[name] = (seen - before) / self.optimizer.loss_scale
                before = seen
            result.norms = self.optimizer.step(factor)
        return result

    def _backward(self, active: Sequence[Weighted], result: UpdateResult) -> None:
        """Add the gradients of ``active`` to those of the parameters, and their numbers to ``result``."""
        runner = self.runner
        batches = runner.cut([c.sample for c, _ in active])
        own = [batch for batch in batches if batch.indices]
        result.means.add_padding(sum(b.num_tokens for b in own), sum(b.num_cells for b in own))
        with runner.together():
            for batch in batches:
                loss = self._loss(batch.to(runner.actor.device), active, result.means)
                result.loss += float(loss.detach())
                if loss.requires_grad:
                    torch.autograd.backward(loss * self.optimizer.loss_scale)

    def _loss(self, batch: MicroBatch, active: Sequence[Weighted], means: TokenMeans) -> Tensor:
        """Return the weighted sum of the token losses of one micro-batch."""
        runner, chosen = self.runner, [active[i] for i in batch.indices]
        names = [c.sample.task for c, _ in chosen]
        tasks = [self.tasks[name] for name in dict.fromkeys(names)]
        out = runner.forward(
            batch,
            [c.sample for c, _ in active],
            want_hidden=runner.shares_trunk and any(t.algorithm.needs_critic for t in tasks),
            want_logits=any(self._wants_exact_kl(t) for t in tasks),
            entropy_gradient=any(t.algorithm.config.entropy_coefficient > 0 for t in tasks),
        )
        for name, task in self.tasks.items():
            if runner.passes.in_step and self._wants_exact_kl(task) and name not in names:
                runner.pass_reference_idly()
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
            task, algorithm = self.tasks[name], self.tasks[name].algorithm
            positions = [i for i, n in enumerate(names) if n == name]
            members, own = torch.tensor(positions, device=device), [chosen[i][0] for i in positions]
            samples = [c.sample for c in own]
            # either all samples of a task have choices, or none
            choices = [c.choices for c in own if c.choices is not None]
            in_loss = torch.cat(choices).to(device) if choices else slice(None)

            def stack(tensors: Sequence[Tensor | None], in_loss: slice | Tensor = in_loss) -> Tensor | None:
                found = [tensor for tensor in tensors if tensor is not None]
                return torch.cat(found).to(device)[in_loss] if found else None

            exact = rollout = None
            if self._wants_exact_kl(task):
                assert out.logits is not None
                exact = runner.exact_kl(samples, out.logits[tokens], name)[in_loss]
            if algorithm.on_policy:
                known = [s.rollout_logprobs or [math.nan] * len(s.response_ids) for s in samples]
                rollout = stack([torch.tensor(one, dtype=torch.float32) for one in known])
            values = runner.values(name, batch, out, tokens)[in_loss] if algorithm.needs_critic else None
            entropy, old = out.entropy[tokens][in_loss], stack([c.old_logprobs for c in own])
            old = logprobs.detach()[in_loss] if old is None else old
            if rollout is not None:
                # so a step on new samples does not depend on how engines share them out, or on a lost one
                rollout = torch.where((old - rollout).abs() < ROUNDING, old, rollout)
            wants_entropy = algorithm.config.entropy_coefficient > 0
            token_batch = TokenBatch(
                logprobs=logprobs[in_loss],
                old_logprobs=old,
                advantages=torch.cat([c.advantages for c in own]).to(device)[in_loss],
                # samples are numbered within the task: 0 .. len(own) - 1
                sequence=torch.searchsorted(members, batch.sequence[tokens])[in_loss],
                num_sequences=len(own),
                rollout_logprobs=rollout,
                ref_logprobs=stack([c.ref_logprobs for c in own]),
                exact_kl=exact,
                entropy=entropy if wants_entropy else None,
                values=values,
                old_values=stack([c.old_values for c in own]),
                returns=stack([c.returns for c in own]),
                kl_coefficient=0.0 if task.kl_in_reward else task.kl_coefficient,
                kl_estimator=task.spec.kl.estimator,
            )
            result = algorithm.loss(token_batch)
            place = f"task {name!r}: loss() of {task.spec.type}"
            check_result(result, LossOutput, len(token_batch.logprobs), place)
            metrics = {**result.metrics, "loss": result.loss.detach(), "entropy": entropy.detach()}
            if token_batch.rollout_logprobs is not None:
                with torch.no_grad():
                    gap = (token_batch.old_logprobs - token_batch.rollout_logprobs).abs()
                metrics["mismatch"] = gap[~gap.isnan()]
            means.add(name, metrics)
            total = total + (result.loss * weight[tokens][in_loss]).sum()
        if runner.passes.in_step and not total.requires_grad:
            total = total + 0.0 * out.logprobs.sum()  # the other ranks go backward
        return total

    @staticmethod
    def _wants_exact_kl(task: LearnerTask) -> bool:
        return task.algorithm.wants_exact_kl and (task.kl_coefficient > 0 or task.algorithm.has_teacher)
