"""Running the models over samples: cut, forward, values, reference. Credit and update both stand on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multitask_rl.algorithms.kl import exact_kl
from multitask_rl.attention.block import BLOCKS
from multitask_rl.attention.interface import use_attention
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.models.sampling import TokenMask
from multitask_rl.records import SamplingParams, TrainSample
from multitask_rl.training.critic import Critic
from multitask_rl.training.forward import TokenOutputs, forward_tokens
from multitask_rl.training.microbatch import MicroBatch, build_microbatches, make_microbatch
from multitask_rl.training.offload import ActivationOffload
from multitask_rl.training.packing import supports_packing
from multitask_rl.training.reference import AveragedReference
from multitask_rl.training.shared_prompt import supports_shared_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ModelRunner", "Passes", "scatter"]


class Passes:
    """How micro-batches go through the models: whole, in this process. Learner ranks override methods."""

    layout = ""
    """The only layout of micro-batches that it takes; empty = any."""
    in_step = False
    """All processes make each pass together: each makes as many as the others, one per micro-batch."""

    def most(self, number: int) -> int:
        """Return the largest ``number`` of any process that makes its passes ``in_step``."""
        return number

    def attention(self, models: Sequence[Any]) -> contextlib.AbstractContextManager[None] | None:
        """Return the context in which ``models`` have the attention they need; None = that of one process."""
        return None

    def forward(
        self,
        model: Any,
        batch: MicroBatch,
        sampling: list[SamplingParams],
        *,
        mask: TokenMask | None,
        pad_token_id: int,
        **wants: bool,
    ) -> TokenOutputs:
        """Return what ``forward_tokens`` returns for the whole micro-batch; ``pad_token_id`` is any id."""
        return forward_tokens(model, batch, sampling, mask=mask, **wants)


class ModelRunner:
    """Actor, critic and reference behind the few calls that losses need.

    Args:
        actor: of the run.
        critic: of the run.
        config: the run.
        reference: model that the KL is measured to; None = the actor without its adapters.
        passes: how micro-batches go through the models; default: in this process.
        shares_prompts: whether the actor can compute a group's prompt once; None = tried on first use.
        is_whole: the actor's weights are here; else they come later or are a part, and nothing is tried now.

    Raises:
        ConfigError: the model cannot do the configured ``batch.layout``.
    """

    def __init__(
        self,
        actor: Actor,
        critic: Critic,
        config: RunConfig,
        reference: PreTrainedModel | None = None,
        *,
        passes: Passes | None = None,
        shares_prompts: bool | None = None,
        is_whole: bool = True,
    ) -> None:
        self.passes = passes or Passes()
        self.actor = actor
        self.critic = critic
        self.reference = reference
        decay = config.model.reference_decay
        self.average = AveragedReference(reference, decay) if reference is not None and decay < 1.0 else None
        """Moves the reference, where it is to move."""
        self._config = config
        self._shares_prompts = shares_prompts
        if is_whole and config.batch.layout == "shared":
            self._layout()  # refused before anything is sampled
        if is_whole and config.batch.layout == "packed":
            self._check_packing()

    @property
    def shares_trunk(self) -> bool:
        """Values are read from the actor's hidden states."""
        return self.critic.trunk is None

    def cut(self, samples: Sequence[TrainSample], *, for_reference: bool = False) -> list[MicroBatch]:
        """Cut samples into micro-batches by the configured token budget and layout."""
        prompts = [_reference_prompt(s) if for_reference else s.prompt_ids for s in samples]
        batches = self._cut(prompts, [s.response_ids for s in samples])
        missing = self.passes.most(len(batches)) - len(batches)
        return batches + [self._idle() for _ in range(missing)]

    def _idle(self) -> MicroBatch:
        (batch,) = self._cut([[0]], [[0]])
        return replace(batch, indices=[])

    def _cut(self, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[MicroBatch]:
        return build_microbatches(
            prompts,
            responses,
            max_tokens=self._config.batch.tokens_per_microbatch,
            layout=self._layout(),
            pad_token_id=self.actor.pad_token_id,
            device_type=self.actor.device.type,
            one_pass=self.passes.in_step,
        )

    def _check_packing(self) -> None:
        """Refuse a model that would mix up packed samples.

        Raises:
            ConfigError: it would.
        """
        if not supports_packing(self.actor.model):
            raise ConfigError(
                f"batch.layout=packed: {type(self.actor.model).__name__} cannot tell packed samples apart ("
                "it has another state than keys and values, or makes no mask from positions that start again)"
                "; set batch.layout=auto"
            )

    def _layout(self) -> str:
        """Return the layout of samples.

        Raises:
            ConfigError: ``shared`` was asked for and the model cannot.
        """
        layout = self._config.batch.layout
        if self.passes.layout:
            return self.passes.layout
        if layout not in ("auto", "shared"):
            return layout
        if self._shares_prompts is None:
            self._shares_prompts = supports_shared_prompts(self.actor.model)
        if layout == "shared" and not self._shares_prompts:
            raise ConfigError(
                f"batch.layout=shared: {type(self.actor.model).__name__} cannot share a group's prompt (it "
                "attends through windows, has another state than keys and values, or its attention does not "
                "go through the interface of transformers); set batch.layout=auto"
            )
        return "shared" if self._shares_prompts else "bucketed"

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of forward and backward passes together.

        It has to last until the backward pass is done: checkpointed layers are computed again there.
        """
        models = [self.actor.model] + ([] if self.reference is None else [self.reference])
        attention = self.passes.attention(models)
        if attention is not None:
            return attention
        if not self._shares_prompts:
            return contextlib.nullcontext()
        return use_attention(models + ([] if self.critic.trunk is None else [self.critic.trunk]), BLOCKS)

    def forward(self, batch: MicroBatch, samples: Sequence[TrainSample], **wants: bool) -> TokenOutputs:
        """Run the actor over one micro-batch of ``samples`` (all of them, indexed by ``batch.indices``).

        ``wants``: see ``forward_tokens``.
        """
        with self._autocast(), self._offload():
            return self._forward(self.actor.model, batch, samples, **wants)

    def batches(self, samples: Sequence[TrainSample]) -> Iterator[MicroBatch]:
        """Yield the micro-batches of ``samples`` on the actor's device."""
        for batch in self.cut(samples):
            yield batch.to(self.actor.device)

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[TrainSample]) -> list[Tensor]:
        """Return the reference policy's log-probabilities of each response: [T] nats each, on the CPU."""
        result: list[Tensor] = [torch.empty(0)] * len(samples)
        with self.actor.reference_policy(self.reference) as reference, self._autocast():
            for batch in self.cut(samples, for_reference=True):
                out = self._forward(reference, batch.to(self.actor.device), samples)
                scatter(result, batch, out.logprobs)
        return result

    @torch.no_grad()
    def pass_reference_idly(self) -> None:
        """Make a pass through the reference that other processes need: all gather its weights together."""
        with self.actor.reference_policy(self.reference) as reference, self._autocast():
            self._forward(reference, self._idle().to(self.actor.device), [])

    def exact_kl(self, samples: Sequence[TrainSample], logits: Tensor) -> Tensor:
        """Return KL(policy || reference) over the whole vocabulary: [N], with gradient in the policy.

        Args:
            samples: the samples whose response tokens ``logits`` predicts, in order.
            logits: [N, V] of the policy, after temperature and filter.
        """
        batch = make_microbatch(
            list(range(len(samples))),
            [_reference_prompt(s) for s in samples],
            [s.response_ids for s in samples],
            layout="packed" if self._config.batch.layout == "packed" else "bucketed",
            pad_token_id=self.actor.pad_token_id,
        ).to(logits.device)
        with torch.no_grad(), self.actor.reference_policy(self.reference) as reference, self._autocast():
            logits_ref = self._forward(reference, batch, samples, want_logits=True).logits
        if logits_ref is None:
            raise AssertionError("logits were asked for")
        return exact_kl(logits, logits_ref)

    def values(self, task: str, batch: MicroBatch, out: TokenOutputs, tokens: Tensor | None = None) -> Tensor:
        """Return the values of the task's head for ``tokens`` (default: all) of a micro-batch: [N]."""
        hidden = out.hidden if self.shares_trunk else self.critic.hidden(batch)
        if hidden is None:
            raise AssertionError("hidden states were not asked for")
        values = self.critic.values(task, hidden if tokens is None else hidden[tokens])
        return values.to(out.logprobs.device)

    def _forward(
        self, model: Any, batch: MicroBatch, samples: Sequence[TrainSample], **wants: bool
    ) -> TokenOutputs:
        chosen = [samples[i] for i in batch.indices]
        sampling = [_distribution(s) for s in chosen]
        grammars = [s.grammar for s in sampling]
        mask = None
        if any(grammars):
            masks = self.actor.grammars.token_mask(grammars, [s.response_ids for s in chosen])
            mask = masks.to(batch.targets.device)
        pad = self.actor.pad_token_id
        return self.passes.forward(model, batch, sampling, mask=mask, pad_token_id=pad, **wants)

    def _offload(self) -> contextlib.AbstractContextManager[None]:
        offload = self._config.model.activation_offload and torch.is_grad_enabled()
        return ActivationOffload(self.actor.model) if offload else contextlib.nullcontext()

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.actor.device.type,
            torch.bfloat16,
            enabled=self._config.model.autocast,
            cache_enabled=not self.passes.in_step,  # it would keep a copy of every block that was gathered
        )


def scatter(target: list[Tensor], batch: MicroBatch, flat: Tensor) -> None:
    """Hand the tokens [N] of each sample of ``batch`` back to its place in ``target``."""
    if not batch.indices:
        return
    sizes = torch.bincount(batch.sequence, minlength=len(batch.indices)).tolist()
    for index, part in zip(batch.indices, torch.split(flat.detach().cpu(), sizes), strict=True):
        target[index] = part


def _distribution(sample: TrainSample) -> SamplingParams:
    """Return the distribution its log-probabilities are of: the sampled one; the plain one off-policy.

    Grammar and suppressed ids stay: they are no way of sampling but a part of the policy wherever it is used.
    """
    sampling = sample.scored.rollout.sampling
    if len(sample.rollout_logprobs):
        return sampling
    return SamplingParams(grammar=sampling.grammar, suppressed_ids=sampling.suppressed_ids)


def _reference_prompt(sample: TrainSample) -> Sequence[int]:
    return sample.ref_prompt_ids if sample.ref_prompt_ids is not None else sample.prompt_ids
