"""Credit: rewards of scored samples become advantages of tokens, task by task."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from multitask_rl.algorithms.base import Credit, CreditBatch, check_result
from multitask_rl.errors import PluginError
from multitask_rl.records import TrainSample, concerned_cost, is_sum_of_terms
from multitask_rl.training.backend import CreditedSample, LearnerTask, TrainingBackend

logger = logging.getLogger(__name__)


class CreditAssigner:
    """Calls each task's algorithm with the task's samples of the step.

    ``many_updates``: a step makes several updates; ratios then need the log-probabilities before the first.
    """

    def __init__(
        self, backend: TrainingBackend, tasks: Mapping[str, LearnerTask], *, many_updates: bool
    ) -> None:
        self._backend = backend
        self._tasks = tasks
        self._many_updates = many_updates
        self._told: set[str] = set()
        """Tasks of which a step was told to train nothing."""

    def credit(
        self, samples: Sequence[TrainSample]
    ) -> tuple[list[CreditedSample], dict[str, dict[str, float]]]:
        """Return the credited samples (by task as configured, then as given) and metrics per task.

        Samples without a response token are left out.
        """
        credited: list[CreditedSample] = []
        metrics: dict[str, dict[str, float]] = {}
        by_task: dict[str, list[TrainSample]] = {}
        for sample in samples:
            if len(sample.response_ids):
                by_task.setdefault(sample.task, []).append(sample)
        for name, task in self._tasks.items():
            if own := by_task.get(name):
                part, metrics[name] = self._credit_task(task, own)
                credited.extend(part)
        return credited, metrics

    def _credit_task(
        self, task: LearnerTask, samples: list[TrainSample]
    ) -> tuple[list[CreditedSample], dict[str, float]]:
        """Credit episodes as a whole; return a sample per context that they were sampled in."""
        needs_critic = task.algorithm.needs_critic
        whole_and_parts = [(sample, part) for sample in samples for part in sample.split()]
        parts = [part for _, part in whole_and_parts]
        has_ref = task.spec.kl.coefficient > 0 or task.algorithm.has_teacher
        want_ref = has_ref and not task.algorithm.wants_exact_kl
        before = None
        if want_ref or needs_critic or self._many_updates:
            before = self._backend.step_start_outputs(
                task.spec.name, parts, want_values=needs_critic, want_ref=want_ref
            )
        known = None
        answers = [(s.scored.rollout.sampling.grammar, answer) for s in samples for answer in s.answers]
        if any(grammar for grammar, _ in answers):
            restricted = self._backend.runner.actor.grammars
            known = torch.cat(restricted.choices([g for g, _ in answers], [answer for _, answer in answers]))
        costs = None
        if task.multipliers:
            rows = [[concerned_cost(s.scored, name) for name in task.multipliers] for s in samples]
            costs = torch.tensor([[math.nan if c is None else c for c in row] for row in rows])
        # a rejected response was not scored and has no terms
        longest = max((s.scored.terms for s in samples), key=len)
        components: dict[str, Tensor] = {}
        # a stage may have set another reward: then its terms are no longer what counts
        if len(longest) > 1 and all(is_sum_of_terms(s.scored) for s in samples):
            missing = [math.nan] * len(longest)
            terms = [[value for _, value in s.scored.terms] or missing for s in samples]
            components = {
                "component_rewards": torch.tensor(terms, dtype=torch.float32),
                "component_weights": torch.tensor([weight for weight, _ in longest], dtype=torch.float32),
            }
        groups: dict[str, int] = {}
        batch = CreditBatch(
            rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
            groups=torch.tensor([groups.setdefault(s.scored.rollout.group_id, len(groups)) for s in samples]),
            lengths=torch.tensor([len(s.response_ids) for s in samples]),
            # a critic learns a value at every token
            choices=None if needs_critic else known,
            old_logprobs=torch.cat(before.old_logprobs) if before else None,
            ref_logprobs=torch.cat(before.ref_logprobs) if before and before.ref_logprobs else None,
            values=torch.cat(before.values) if before and before.values else None,
            kl_coefficient=task.kl_coefficient if task.kl_in_reward else 0.0,
            costs=costs,
            multipliers=tuple(task.multipliers.values()),
            constraints=tuple(task.multipliers),
            **components,
        )
        place, number = f"task {task.spec.name!r}: credit() of {task.spec.type}", int(batch.lengths.sum())
        try:
            credit = task.algorithm.credit(batch)
        except PluginError as error:
            raise PluginError(f"{place}: {error}") from error
        except Exception as error:
            error.add_note(f"in {place}")
            raise
        check_result(credit, Credit, number, place)

        def by_part(tokens: Tensor) -> list[Tensor]:
            return [own.clone() for own in torch.split(tokens, [len(part.response_ids) for part in parts])]

        advantages = by_part(credit.advantages)
        returns = None if credit.returns is None else by_part(credit.returns)
        in_loss = batch.choices
        # after the credit: a group's baseline counts truncated responses
        if task.algorithm.config.mask_truncated:
            ended = torch.tensor([not s.scored.rollout.is_truncated for s in samples])
            ended = ended.repeat_interleave(batch.lengths)
            in_loss = ended if in_loss is None else in_loss & ended
            if not ended.any() and task.spec.name not in self._told:
                self._told.add(task.spec.name)
                logger.warning(
                    "task %s: all %d responses of a step were cut at a limit, and mask_truncated leaves them "
                    "out of the loss: nothing was learnt; raise max_new_tokens, or an episode's limits",
                    *(task.spec.name, len(samples)),
                )
        choices = None if in_loss is None else by_part(in_loss)
        old = before.old_logprobs if before and self._many_updates else None
        ref = before.ref_logprobs if before else None
        values = before.values if before else None
        if values is not None and credit.value_rescale is not None:
            scale, shift = credit.value_rescale
            self._backend.runner.critic.rescale(task.spec.name, scale, shift)
            values = [scale * v + shift for v in values]
        metrics = dict(credit.metrics)
        if known is not None:
            metrics["grammar/forced_share"] = 1.0 - float(known.float().mean())
        # of a task with a teacher they are the teacher's
        ref_logprobs = None if task.algorithm.has_teacher else batch.ref_logprobs
        if batch.old_logprobs is not None and ref_logprobs is not None:
            gaps = torch.split(batch.old_logprobs - ref_logprobs, batch.lengths.tolist())
            metrics["kl"] = float(torch.stack([gap.sum() for gap in gaps]).mean())
        may_skip = task.zero_advantage_is_zero_gradient
        has_gradient = [not may_skip or bool(own.any()) for own in advantages]
        if choices is not None:
            has_gradient = [h and bool(own.any()) for h, own in zip(has_gradient, choices, strict=True)]
        counts = [int(own.sum()) for own in choices] if choices else [len(p.response_ids) for p in parts]
        whole: Counter[int] = Counter()
        for (sample, _), number in zip(whole_and_parts, counts, strict=True):
            whole[id(sample)] += number
        return [
            CreditedSample(
                sample=part,
                advantages=advantages[i],
                old_logprobs=old[i] if old else None,
                ref_logprobs=ref[i] if ref else None,
                old_values=values[i] if values else None,
                returns=returns[i] if returns else None,
                choices=choices[i] if choices else None,
                has_gradient=has_gradient[i],
                fraction=counts[i] / whole[id(sample)]
                if whole[id(sample)]
                else len(part.response_ids) / len(sample.response_ids),
            )
            for i, (sample, part) in enumerate(whole_and_parts)
        ], metrics
