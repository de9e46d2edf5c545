"""The update: one loss over the mixed batch of all tasks, one optimizer step per minibatch.

The loss is ``sum_k share_k * loss_weight_k * loss_k``. ``loss_k`` is the mean over all tokens (or samples) of
task k in the minibatch; cutting, packing and padding do not change it. Samples with a gradient that is known
to be zero count in the denominator and are not computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multitask_rl.config.run import RunConfig
from multitask_rl.errors import TrainingError
from multitask_rl.seeding import random_stream
from multitask_rl.tracking.timeline import Span
from multitask_rl.training.backend import CreditedSample, LearnerTask, TokenMeans, TrainingBackend
from multitask_rl.training.sketch import compare_gradients

MAX_BAD_UPDATES = 3
"""The run stops after so many updates in a row with a gradient that is not finite."""


@dataclass(kw_only=True, slots=True)
class UpdateReport:
    """Numbers of one step's updates; ``skipped_updates`` had a gradient that was not finite."""

    metrics: dict[str, float]
    task_metrics: dict[str, dict[str, float]]
    spans: list[tuple[str, Span]]
    """Spans in which each learner rank computed or waited (``tracking/timeline.py``)."""


class Learner:
    """Trains actor and critic on credited samples of many tasks."""

    def __init__(self, backend: TrainingBackend, tasks: Mapping[str, LearnerTask], config: RunConfig) -> None:
        self.backend = backend
        self.tasks = tasks
        self._config = config
        self.bad_updates = 0
        """Present number of updates in a row that were not applied; part of the checkpoint."""

    def update(
        self,
        credited: Sequence[CreditedSample],
        *,
        shares: Mapping[str, float],
        step: int,
        learning_rate_factor: float = 1.0,
        compare: bool = False,
    ) -> UpdateReport:
        """Make the step's optimizer updates.

        Args:
            credited: samples of all tasks.
            shares: task -> weight of its loss, summing to 1 over the tasks that have samples.
            step: number of the training step; seeds the shuffle.
            learning_rate_factor: product of the schedule's and the guard's factors.
            compare: report norms and cosines of the tasks' gradients in the first of the updates.

        Raises:
            TrainingError: gradients were not finite ``MAX_BAD_UPDATES`` updates in a row.
        """
        means = TokenMeans()
        norms: list[dict[str, float]] = []
        compared: dict[str, dict[str, float]] | None = None if compare else {}
        num_skipped = num_applied = 0
        for epoch in range(self._config.batch.num_epochs):
            # every task's samples are dealt evenly to the minibatches
            number, dealt = self._config.batch.num_minibatches, list(credited)
            if number > 1:
                dealt = []
                for name in self.tasks:
                    own = [c for c in credited if c.sample.task == name]
                    random_stream(self._config.seed, "minibatch", name, step, epoch).shuffle(own)
                    dealt += own
            minibatches = [part for i in range(number) if (part := dealt[i::number]) or number == 1]
            # a task that few minibatches have weighs more in those, so that its mean weight is its share
            present = Counter(name for part in minibatches for name in {c.sample.task for c in part})
            weights = {
                name: share * (len(minibatches) / max(1, present[name])) for name, share in shares.items()
            }
            for minibatch in minibatches:
                factors = zip(minibatch, self._token_weights(minibatch, weights), strict=True)
                active = [(c, factor) for c, factor in factors if c.has_gradient]
                names = [n for n in self.tasks if any(c.sample.task == n for c, _ in active)]
                result = self.backend.step(active, learning_rate_factor, names if compared is None else ())
                means.merge(result.means)
                if result.norms is not None:
                    self.bad_updates = 0
                    if any(result.norms.values()):
                        num_applied += 1
                        if compared is None:
                            compared = compare_gradients(result.sketches)
                    norms.append({"loss": result.loss, **result.norms})
                    continue
                num_skipped += 1
                self.bad_updates += 1
                if self.bad_updates >= MAX_BAD_UPDATES:
                    self.backend.gather_weights()  # for a checkpoint that is saved now
                    losses = {name: found.get("loss", 0.0) for name, found in means.by_task().items()}
                    bad = [repr(name) for name, loss in losses.items() if not math.isfinite(loss)]
                    told = f"the loss is NaN or infinite of {', '.join(bad)}; " if bad else ""
                    raise TrainingError(
                        f"the gradient was not finite {self.bad_updates} updates in a row (none was applied);"
                        f" {told}lower optimizer.learning_rate, or look for rewards without bounds in"
                        " metrics.jsonl. The last checkpoint is intact."
                    )
        self.backend.gather_weights()
        self.backend.ema_update()
        metrics, spans = self.backend.report()
        for key in ("loss", "grad_norm", "critic_grad_norm"):
            found = [n[key] for n in norms if key in n]
            if found:
                metrics[key] = sum(found) / len(found)
        metrics |= {"padding_share": means.padding, "skipped_updates": float(num_skipped)}
        metrics["updates"] = float(num_applied)
        per_task = means.by_task()
        for name, numbers in (compared or {}).items():
            per_task[name] = per_task.get(name, {}) | numbers
        return UpdateReport(metrics=metrics, task_metrics=per_task, spans=spans)

    def _token_weights(self, minibatch: list[CreditedSample], shares: Mapping[str, float]) -> list[float]:
        """Return the factor of each sample's token losses: share * loss_weight / denominator."""
        counts: dict[str, tuple[float, int]] = {}
        for c in minibatch:
            num_samples, num_tokens = counts.get(c.sample.task, (0.0, 0))
            counts[c.sample.task] = (num_samples + c.fraction, num_tokens + c.num_choices)
        weights = []
        for c in minibatch:
            task = self.tasks[c.sample.task]
            num_samples, num_tokens = counts[c.sample.task]
            denominator = {
                "token": num_tokens,
                "sequence": num_samples * c.num_choices / (c.fraction or 1.0),
                "constant": num_samples * c.sample.scored.rollout.max_response_tokens,
            }[task.algorithm.config.aggregation]
            weights.append(shares.get(c.sample.task, 0.0) * task.spec.loss_weight / max(denominator, 1))
        return weights
