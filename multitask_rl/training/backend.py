"""The seam between the training step and the processes that compute it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from multitask_rl.records import TrainSample
from multitask_rl.rollout.base import RolloutEngine
from multitask_rl.training.metrics import TokenMeans
from multitask_rl.training.runner import ModelRunner

__all__ = ["CreditedSample", "Span", "StepResult", "StepStartOutputs", "TrainingBackend", "Weighted"]

Span = tuple[float, float]
"""Begin and end, ``time.monotonic`` seconds."""


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
        """Return it with tensors of its own: a view is pickled with all that it is a view of."""
        return replace(
            self,
            advantages=self.advantages.clone(),
            old_logprobs=_cloned(self.old_logprobs),
            ref_logprobs=_cloned(self.ref_logprobs),
            old_values=_cloned(self.old_values),
            returns=_cloned(self.returns),
            choices=_cloned(self.choices),
        )


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


Weighted = tuple[CreditedSample, float]
"""A sample and the factor of its token losses."""


@dataclass(slots=True)
class StepStartOutputs:
    """What the models compute of the samples before a step's first update, one tensor [T] per sample."""

    old_logprobs: list[Tensor]
    ref_logprobs: list[Tensor] | None
    """None: not asked for."""
    values: list[Tensor] | None
    """None: not asked for."""

    def compact(self) -> StepStartOutputs:
        """Return it with tensors of their own: a view is pickled with all that it is a view of."""
        old, ref, values = (
            None if own is None else [tensor.clone() for tensor in own]
            for own in (self.old_logprobs, self.ref_logprobs, self.values)
        )
        return StepStartOutputs(old or [], ref, values)

    @classmethod
    def merge(cls, shares: Sequence[Sequence[int]], parts: Sequence[StepStartOutputs]) -> StepStartOutputs:
        """Return the outputs of all samples, in their order.

        Args:
            shares: indices of each part's samples.
            parts: outputs of disjoint samples.
        """

        def whole(lists: Sequence[list[Tensor]]) -> list[Tensor]:
            result = [torch.empty(0)] * sum(map(len, shares))
            for share, own in zip(shares, lists, strict=True):
                for index, tensor in zip(share, own, strict=True):
                    result[index] = tensor
            return result

        ref = [part.ref_logprobs for part in parts if part.ref_logprobs is not None]
        values = [part.values for part in parts if part.values is not None]
        return cls(
            whole([part.old_logprobs for part in parts]),
            whole(ref) if ref else None,
            whole(values) if values else None,
        )


@dataclass(kw_only=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    loss: float
    """Sum over the samples of the step."""
    norms: dict[str, float] | None
    """``grad_norm`` and ``critic_grad_norm`` of the whole gradient before clipping; None: it was not finite
    and nothing was applied."""
    means: TokenMeans
    """Metrics of the tokens, per task."""


class TrainingBackend(Protocol):
    """Computes outputs and optimizer steps of the models, in this process or in several.

    ``backends.in_process.InProcess`` computes everything here. ``backends.rank_group.RankGroup`` shares the
    samples out to learner ranks, which may also hold parts of the sequences, weights or layers. Results are
    the same up to rounding.

    Methods with a body are right for one process. All raise ``TrainingError`` after another process that has
    a part in the work failed or ended.
    """

    num_ranks: int = 1
    """Capability: processes that take part."""
    runner: ModelRunner
    """The models as this process has them: whole, for engines, checkpoints and credit."""

    def step_start_outputs(
        self, task: str, samples: Sequence[TrainSample], *, want_values: bool, want_ref: bool
    ) -> StepStartOutputs:
        """Return log-probabilities of all responses under the weights as they are.

        Args:
            task: that all ``samples`` belong to; its value head is read.
            samples: each with a prompt of at least one token.
            want_values: also return the critic's values.
            want_ref: also return the reference policy's log-probabilities.
        """
        ...

    def step(self, active: Sequence[Weighted], factor: float) -> StepResult:
        """Make one optimizer step.

        Args:
            active: all samples of the step with a gradient; the factors hold shares and denominators.
            factor: of the learning rates.
        """
        ...

    def gather_weights(self) -> None:
        """Bring the weights of ``runner`` up to the last step, where other processes moved parts of them."""
        return

    def ema_update(self) -> None:
        """Move the reference one update towards the actor; nothing where the reference is fixed."""
        ...

    def spread(self, engine: RolloutEngine) -> RolloutEngine:
        """Return an engine that samples as ``engine`` does on all processes.

        ``engine`` itself where only this process can: it has weights of its own, or the other processes hold
        no whole weights.
        """
        return engine

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's moments and float32 masters in this process."""
        ...

    def optimizer_tensors(self, names: Mapping[int, str]) -> dict[str, Tensor]:
        """Return the whole state of the optimizer for a checkpoint, ``<parameter name>|<key>`` -> tensor.

        Args:
            names: ``id(parameter)`` of the parameters in ``runner`` -> name.
        """
        ...

    def load_optimizer(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Restore what ``optimizer_tensors`` returned; parameters without state start without.

        Args:
            tensors: ``<parameter name>|<key>`` -> tensor.
            parameters: name -> parameter in ``runner``.

        Raises:
            CheckpointError: a tensor has another shape than its parameter.
        """
        ...

    def report(self) -> tuple[dict[str, float], list[tuple[str, Span]]]:
        """Return metrics (``ranks/...``) and spans (when a rank computed or waited) since the last call."""
        return {}, []

    def close(self) -> None:
        """End the other processes. Idempotent."""
        return
