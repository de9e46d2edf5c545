"""Runs the models over samples, for credit and update: micro-batches, forward, values, reference."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multitask_rl.algorithms.kl import exact_kl
from multitask_rl.attention.block import BLOCKS
from multitask_rl.attention.interface import use_attention
from multitask_rl.config.run import RunConfig
from multitask_rl.errors import CheckpointError, ConfigError
from multitask_rl.models.actor import Actor
from multitask_rl.records import SamplingParams, TrainSample
from multitask_rl.training.critic import Critic
from multitask_rl.training.forward import TokenOutputs, forward_tokens
from multitask_rl.training.microbatch import MicroBatch, build_microbatches, make_microbatch, supports_packing
from multitask_rl.training.shared_prompt import supports_shared_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TEXT_CELLS = 2**24
"""Logits of each model that ``score_texts`` holds at once, unless one text alone has more."""


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Context in which activations wait in host memory between forward and backward pass.

    The weights of ``model`` stay on the device; ``torch.autograd.graph.save_on_cpu`` would copy them in every
    pass. Expanded tensors stay there, too (biases of attention, expanded to all heads): a copy would have the
    expanded size. Copies keep their strides: CUDA's attention refuses or misreads others
    (pytorch/pytorch#134995).
    """

    def __init__(self, model: Any) -> None:
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            is_expanded = any(size > 1 and stride == 0 for size, stride in steps)
            if is_expanded or tensor.untyped_storage().data_ptr() in weights:
                return tensor.device, tensor
            saved = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            return tensor.device, saved.copy_(tensor)

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=True)

        super().__init__(pack, unpack)


class Passes:
    """How micro-batches go through the models: whole, in this process. Learner ranks override methods."""

    settings = ""
    """The setting that asks for these passes, for errors."""
    layout = ""
    """The only possible layout of micro-batches; empty = any."""
    in_step = False
    """All processes make each pass together; each makes the same number of passes, one per micro-batch."""

    def most(self, number: int) -> int:
        """Return the largest ``number`` of the processes that make passes together (``in_step``)."""
        return number

    def attention(self, models: Sequence[Any]) -> contextlib.AbstractContextManager[None] | None:
        """Return the context that sets the attention of ``models``; None = as in one process."""
        return None

    def forward(self, model: Any, batch: MicroBatch, *args: Any, **options: Any) -> TokenOutputs:
        """Return ``forward_tokens`` of the whole micro-batch."""
        return forward_tokens(model, batch, *args, **options)


class AveragedReference:
    """A reference that follows the actor: ``reference <- decay * reference + (1 - decay) * actor``.

    The KL to it bounds the speed of change, not the distance.

    ``model`` is the reference, at first a copy of the actor, and is updated in place. ``decay`` is in [0, 1]:
    1 = fixed, 0 = the actor after the last update. Averages are float32: bfloat16 would lose small steps.

    Source: Rame et al., "WARP" (arXiv:2406.16768), sec. 3.1.
    """

    def __init__(self, model: PreTrainedModel, decay: float) -> None:
        self._decay = decay
        self._scored = dict(model.named_parameters())
        self._averages = {name: p.detach().float() for name, p in self._scored.items()}

    @torch.no_grad()
    def ema_update(self, actor: PreTrainedModel) -> None:
        """Move one update towards the weights of ``actor``."""
        for name, parameter in actor.named_parameters():
            average = self._averages[name]
            average.lerp_(parameter.detach().to(average), 1.0 - self._decay)
        self._copy_to_model()

    def _copy_to_model(self) -> None:
        for name, parameter in self._scored.items():
            if parameter.data_ptr() != self._averages[name].data_ptr():  # float32: the average is the weight
                parameter.copy_(self._averages[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, for a checkpoint."""
        return dict(self._averages)

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore ``tensors``; an empty mapping changes nothing.

        Raises:
            CheckpointError: they belong to another model.
        """
        if not tensors:
            return
        for name, average in self._averages.items():
            if name not in tensors or tensors[name].shape != average.shape:
                raise CheckpointError(f"the reference in the checkpoint belongs to another model: {name!r}")
            average.copy_(tensors[name])
        self._copy_to_model()


class ModelRunner:
    """Runs actor, critic and reference over samples, for credit and losses.

    Args:
        actor, critic, config: those of the run.
        reference: model that the KL is measured to; None = the actor without its adapters.
        teachers: by task; each has as many logits as the actor.

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
        teachers: Mapping[str, PreTrainedModel] | None = None,
    ) -> None:
        self.passes = Passes()
        """How micro-batches go through the models; learner ranks set others."""
        self.actor = actor
        self.critic = critic
        self.reference = reference
        self.teachers = dict(teachers or {})
        decay = config.model.reference_decay
        self.average = AveragedReference(reference, decay) if reference is not None and decay < 1.0 else None
        """Moves the reference; None if it is fixed."""
        self._config = config
        self.shares_prompts: bool | None = None
        """Whether the models can compute a group's prompt once; None: not tried yet."""
        if config.batch.layout == "shared":
            self._layout()  # refused before anything is sampled
        unable = None
        if config.batch.layout == "packed":
            unable = next((m for m in self._laid_out() if not supports_packing(m)), None)
        if unable is not None:
            raise ConfigError(
                f"batch.layout=packed: {type(unable).__name__} cannot tell packed samples apart (it has "
                "another state than keys and values, or makes no mask from positions that start again); set "
                "batch.layout=auto"
            )

    @property
    def shares_trunk(self) -> bool:
        """The critic reads values from the actor's hidden states."""
        return self.critic.trunk is None

    def cut(self, samples: Sequence[TrainSample], *, for_reference: bool = False) -> list[MicroBatch]:
        """Cut samples into micro-batches by the configured token budget and layout."""
        batches = self._cut(*_rows(samples, for_reference=for_reference))
        missing = self.passes.most(len(batches)) - len(batches)
        return batches + [self._idle() for _ in range(missing)]

    def _as_one(
        self, indices: list[int], samples: Sequence[TrainSample], *, for_reference: bool = False
    ) -> MicroBatch:
        """Return the samples ``indices``, in their order, as one micro-batch on the actor's device."""
        return make_microbatch(
            indices,
            *_rows(samples, for_reference=for_reference),
            layout="packed" if self._config.batch.layout == "packed" else "bucketed",
            pad_token_id=self.actor.pad_token_id,
        ).to(self.actor.device)

    def _idle(self) -> MicroBatch:
        (batch,) = self._cut([[0]], [[0]])
        return replace(batch, indices=[])

    def _cut(self, *rows: Any) -> list[MicroBatch]:
        return build_microbatches(
            *rows,
            max_tokens=self._config.batch.tokens_per_microbatch,
            layout=self._layout(),
            pad_token_id=self.actor.pad_token_id,
            device_type=self.actor.device.type,
            one_pass=self.passes.in_step,
        )

    def _laid_out(self) -> list[Any]:
        """Return the models that micro-batches go through, but a reference: it is of the actor's class."""
        trunk = [] if self.critic.trunk is None else [self.critic.trunk]
        return [self.actor.model, *self.teachers.values(), *trunk]

    def _layout(self) -> str:
        layout = self._config.batch.layout
        if self.passes.layout:
            return self.passes.layout
        if layout not in ("auto", "shared"):
            return layout
        unable: Any = self.actor.model
        if self.shares_prompts is None:
            unable = next((m for m in self._laid_out() if not supports_shared_prompts(m)), None)
            self.shares_prompts = unable is None
        if layout == "shared" and not self.shares_prompts:
            raise ConfigError(
                f"batch.layout=shared: {type(unable).__name__} cannot share a group's prompt (it "
                "attends through windows, has another state than keys and values, or its attention does not "
                "go through the interface of transformers); set batch.layout=auto"
            )
        return "shared" if self.shares_prompts else "bucketed"

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return the context manager that sets the attention of the models.

        It must enclose forward and backward pass: the backward pass computes checkpointed layers again.
        """
        models = [self.actor.model, *self.teachers.values()]
        models += [] if self.reference is None else [self.reference]
        attention = self.passes.attention(models)
        if attention is not None:
            return attention
        if not self.shares_prompts:
            return contextlib.nullcontext()
        return use_attention(models + ([] if self.critic.trunk is None else [self.critic.trunk]), BLOCKS)

    def forward(self, batch: MicroBatch, samples: Sequence[TrainSample], **wants: bool) -> TokenOutputs:
        """Run the actor over one micro-batch of ``samples``; ``wants``: see ``forward_tokens``."""
        offload = self._config.model.activation_offload and torch.is_grad_enabled()
        with self._autocast(), ActivationOffload(self.actor.model) if offload else contextlib.nullcontext():
            # each slice that is kept would copy its cast of the head to the host, too
            return self._forward(self.actor.model, batch, samples, keep=not offload, **wants)

    @torch.no_grad()
    def reference_logprobs(self, samples: Sequence[TrainSample], task: str) -> list[Tensor]:
        """Return the log-probabilities of each response: [T] nats each, on the CPU.

        They are those of the teacher of ``task``, if it has one, else of the reference policy.
        """
        result: list[Tensor] = [torch.empty(0)] * len(samples)
        model = self.teachers.get(task, self.reference)
        with self.actor.reference_policy(model) as reference, self._autocast():
            for batch in self.cut(samples, for_reference=True):
                out = self._forward(reference, batch.to(self.actor.device), samples)
                scatter(result, batch, out.logprobs)
        return result

    @torch.no_grad()
    def pass_reference_idly(self) -> None:
        """Run the reference and drop its outputs: other ranks cannot gather its weights without this one."""
        with self.actor.reference_policy(self.reference) as reference, self._autocast():
            self._forward(reference, self._idle().to(self.actor.device), [])

    def exact_kl(self, samples: Sequence[TrainSample], logits: Tensor, task: str = "") -> Tensor:
        """Return KL(policy || reference) over the whole vocabulary: [N], with gradient in the policy.

        A teacher of ``task`` takes the place of the reference. ``logits`` [N, V] are those of the policy at
        all response tokens, after temperature and before top-k and top-p.
        """
        batch = self._as_one(list(range(len(samples))), samples, for_reference=True)
        model = self.teachers.get(task, self.reference)
        with torch.no_grad(), self.actor.reference_policy(model) as reference, self._autocast():
            logits_ref = self._forward(reference, batch, samples, want_logits=True).logits
        assert logits_ref is not None
        return exact_kl(logits, logits_ref)

    @torch.no_grad()
    def score_texts(
        self, samples: Sequence[TrainSample], *, with_kl: bool, task: str = ""
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return per sample the policy's log-probabilities [T] of its tokens, and a KL [T]; in nats.

        The second list is None without ``with_kl``. The KL is KL(reference || policy) or, if ``task`` has a
        teacher, KL(policy || teacher), summed over the vocabulary. Samples are computed in small parts, which
        bounds the logits.
        """
        teacher = self.teachers.get(task)
        logprobs: list[Tensor] = [torch.empty(0)] * len(samples)
        kls = [torch.empty(0)] * len(samples) if with_kl else None
        width = int(self.actor.model.config.get_text_config().vocab_size)
        parts: list[list[int]] = []
        used = 0
        for index, sample in enumerate(samples):
            size = len(sample.response_ids) * width
            if not parts or used + size > _TEXT_CELLS:
                parts.append([])
                used = 0
            parts[-1].append(index)
            used += size
        for part in parts:
            batch = self._as_one(part, samples)
            with self._autocast():
                out = self._forward(self.actor.model, batch, samples, want_logits=with_kl)
            scatter(logprobs, batch, out.logprobs)
            if kls is not None:
                assert out.logits is not None
                with self.actor.reference_policy(teacher or self.reference) as other, self._autocast():
                    logits = self._forward(other, batch, samples, want_logits=True).logits
                assert logits is not None
                pair = (logits, out.logits) if teacher is None else (out.logits, logits)
                scatter(kls, batch, exact_kl(*pair))
        return logprobs, kls

    def values(self, task: str, batch: MicroBatch, out: TokenOutputs, tokens: Tensor | None = None) -> Tensor:
        """Return the values of the task's head for ``tokens`` (default: all) of a micro-batch: [N]."""
        hidden = out.hidden if self.shares_trunk else self.critic.hidden(batch)
        assert hidden is not None
        values = self.critic.values(task, hidden if tokens is None else hidden[tokens.to(hidden.device)])
        return values.to(out.logprobs.device)

    def _forward(
        self, model: Any, batch: MicroBatch, samples: Sequence[TrainSample], **wants: bool
    ) -> TokenOutputs:
        chosen = [samples[i] for i in batch.indices]
        sampling = []
        for sample in chosen:
            own = sample.scored.rollout.sampling
            if not len(sample.rollout_logprobs):
                # off-policy: the policy's plain distribution, within grammar and suppressed ids
                own = SamplingParams(grammar=own.grammar, suppressed_ids=own.suppressed_ids)
            sampling.append(own)
        mask = None
        if any(s.grammar for s in sampling):
            # the grammar of a task begins again with every turn
            answers = [(s.grammar, own) for s, c in zip(sampling, chosen, strict=True) for own in c.answers]
            masks = self.actor.grammars.token_mask([g for g, _ in answers], [own for _, own in answers])
            mask = masks.to(batch.targets.device)
        return self.passes.forward(model, batch, sampling, mask=mask, **wants)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.actor.device.type,
            torch.bfloat16,
            enabled=self._config.model.autocast,
            cache_enabled=not self.passes.in_step,  # the cache would keep a copy of every gathered block
        )


def scatter(target: list[Tensor], batch: MicroBatch, flat: Tensor) -> None:
    """Copy the tokens [N] of each sample of ``batch`` to its place in ``target``, on the CPU."""
    if not batch.indices:
        return
    sizes = torch.bincount(batch.sequence, minlength=len(batch.indices)).tolist()
    for index, part in zip(batch.indices, torch.split(flat.detach().cpu(), sizes), strict=True):
        target[index] = part.clone()


def _rows(
    samples: Sequence[TrainSample], *, for_reference: bool = False
) -> tuple[list[Sequence[int]], list[Sequence[int]], list[Sequence[int] | None]]:
    """Return prompts, the tokens behind them, and the positions of the sampled ones (None = all)."""
    ref = [s.ref_prompt_ids if for_reference else None for s in samples]
    prompts = [s.prompt_ids if own is None else own for s, own in zip(samples, ref, strict=True)]
    found = [s.behind_prompt() for s in samples]
    return prompts, [tokens for tokens, _ in found], [sampled for _, sampled in found]
