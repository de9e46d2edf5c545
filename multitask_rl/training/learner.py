"""The update: one loss over the mixed batch, one optimizer step.

The loss of a step is ``sum_k share_k * loss_weight_k * loss_k`` with ``loss_k`` the task's own mean over
*all* its tokens (or samples) of the minibatch: the denominator is counted before the samples are cut, so
cutting, packing and padding change nothing, and a task with long answers gets no more weight than its share.
A task with fewer samples than minibatches weighs so much more in those that have one: over the epoch it keeps
its share.

Samples whose gradient is known to be zero (a group in which all rewards are equal) count in the denominator
and are not computed.

A ``TrainingBackend`` computes the steps, in this process or in several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from multitask_rl.config.run import RunConfig
from multitask_rl.errors import TrainingError
from multitask_rl.seeding import random_stream
from multitask_rl.training.backend import CreditedSample, Span, TrainingBackend
from multitask_rl.training.credit import LearnerTask
from multitask_rl.training.metrics import TokenMeans

__all__ = ["Learner", "UpdateReport"]

MAX_BAD_UPDATES = 3
"""Updates in a row with a gradient that is not finite before the run stops."""


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """Numbers of one step's updates."""

    metrics: dict[str, float] = field(default_factory=dict)
    task_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    num_skipped_updates: int = 0
    """Updates not applied because a gradient was not finite."""
    spans: list[tuple[str, Span]] = field(default_factory=list)
    """When each of several learner ranks computed, and when the others waited (``tracking/timeline.py``)."""


class Learner:
    """Trains actor and critic on credited samples of many tasks."""

    def __init__(
        self,
        backend: TrainingBackend,
        tasks: Mapping[str, LearnerTask],
        config: RunConfig,
    ) -> None:
        self.backend = backend
        self.tasks = tasks
        self._config = config
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
        self.backend.gather_weights()
        self.backend.ema_update()
        metrics, report.spans = self.backend.report()
        report.metrics.update(metrics)
        for key in ("loss", "grad_norm", "critic_grad_norm"):
            found = [n[key] for n in norms if key in n]
            if found:
                report.metrics[key] = sum(found) / len(found)
        report.metrics["padding_share"] = means.padding
        report.metrics["skipped_updates"] = float(report.num_skipped_updates)
        report.task_metrics = means.by_task()
        return report

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
        result = self.backend.step(active, factor)
        means.merge(result.means)
        return None if result.norms is None else {"loss": result.loss, **result.norms}

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

    def _count_bad_update(self) -> None:
        self.bad_updates += 1
        if self.bad_updates >= MAX_BAD_UPDATES:
            self.backend.gather_weights()  # a checkpoint that is saved now has the weights of its state
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
