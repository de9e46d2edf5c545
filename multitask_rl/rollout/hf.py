"""Rollouts with the actor's own weights through ``transformers``: nothing is copied, nothing can lag behind.

A prompt is computed once and its keys and values are shared out to the group; rows that have ended leave the
batch. Works for every causal language model that keeps a key-value cache; those with another state (Mamba)
are recomputed without one, which is right but slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.errors import EngineError
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import Generation, GenerationRequest
from multitask_rl.rollout.cache import make_cache, select_rows
from multitask_rl.rollout.sampling import draw_uniforms, sample_tokens

if TYPE_CHECKING:
    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.training.actor import Actor

__all__ = ["HFEngine"]


PADDING_SLACK = 32
"""Tokens by which even the shortest prompt may be padded in a batch on the CPU."""


@dataclass(slots=True)
class _Row:
    request: int
    sample: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int


class HFEngine:
    """Samples from the model it is given, as it is at the moment of the call."""

    shares_weights = True
    """Nothing has to be sent after an update."""

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_batch_tokens: int = 65536,
    ) -> None:
        self.model = model
        self.policy_version = 0
        self.max_batch_tokens = max_batch_tokens
        self._eos = torch.tensor(sorted(eos_token_ids))
        self._pad = pad_token_id
        self._decode = decode
        self._cached = not (getattr(model, "_is_stateful", False))

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> HFEngine:
        """Return the engine of ``actor``; it shares the actor's weights."""
        return cls(
            actor.model,
            eos_token_ids=actor.eos_token_ids,
            pad_token_id=actor.pad_token_id,
            decode=lambda ids: str(actor.tokenizer.decode(ids, skip_special_tokens=True)),
            max_batch_tokens=config.max_batch_tokens,
        )

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take note of the version; the weights are the actor's own."""
        self.policy_version = policy_version

    def close(self) -> None:
        """Nothing to free."""

    @torch.no_grad()
    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``)."""
        results: list[list[Generation | None]] = [[None] * len(r.seeds) for r in requests]
        was_training = self.model.training
        self.model.eval()
        try:
            for batch in self._batches(requests):
                for row, generation in zip(batch, self._generate_batch(batch), strict=True):
                    results[row.request][row.sample] = generation
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"out of memory while sampling {self.max_batch_tokens} tokens at once; lower "
                f"rollout.max_batch_tokens ({error})"
            ) from error
        finally:
            self.model.train(was_training)
        return [[g for g in group if g is not None] for group in results]

    def _batches(self, requests: Sequence[GenerationRequest]) -> Iterator[list[_Row]]:
        """Cut the rows into batches of one sampling distribution, similar length and bounded tokens."""
        rows = [
            _Row(i, j, r.prompt_ids, r.sampling, seed)
            for i, r in enumerate(requests)
            for j, seed in enumerate(r.seeds)
        ]
        for row in rows:
            if not row.prompt_ids:
                raise EngineError(f"request {row.request} has an empty prompt; give it at least one token")

        def key(row: _Row) -> tuple[float, int, float, int, int, int, int]:
            s = row.sampling
            return (
                s.temperature,
                s.top_k,
                s.top_p,
                len(row.prompt_ids),
                s.max_new_tokens,
                row.request,
                row.sample,
            )

        batch: list[_Row] = []
        width = 0
        for row in sorted(rows, key=key):
            longest = max(width, len(row.prompt_ids) + row.sampling.max_new_tokens)
            fresh = batch and (
                key(batch[0])[:3] != key(row)[:3]
                or longest * (len(batch) + 1) > self.max_batch_tokens
                or len(row.prompt_ids) > self._widest_beside(len(batch[0].prompt_ids))
                or (not self._cached and len(batch[0].prompt_ids) != len(row.prompt_ids))
            )
            if fresh:
                yield batch
                batch, longest = [], len(row.prompt_ids) + row.sampling.max_new_tokens
            batch.append(row)
            width = longest
        if batch:
            yield batch

    def _widest_beside(self, shortest: int) -> float:
        """Return the longest prompt that may be padded to beside one of ``shortest`` tokens.

        On a CPU a row pays for every key it attends to, padding too; on a GPU fewer, larger batches win.
        """
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return 2 * shortest + PADDING_SLACK if on_cpu else math.inf

    def _generate_batch(self, rows: list[_Row]) -> list[Generation]:
        """Decode one batch; rows leave it as they end."""
        device = next(self.model.parameters()).device
        limits = np.array([row.sampling.max_new_tokens for row in rows])
        steps = int(limits.max())
        uniforms = torch.zeros(len(rows), steps)
        if rows[0].sampling.temperature > 0:
            for i, row in enumerate(rows):
                uniforms[i, : limits[i]] = torch.from_numpy(draw_uniforms(row.seed, int(limits[i])))
        uniforms = uniforms.to(device)
        ids = torch.full((len(rows), steps), self._pad, device=device)
        logprobs = torch.zeros(len(rows), steps, device=device)
        lengths = torch.from_numpy(limits).to(device)
        stopped = torch.zeros(len(rows), dtype=torch.bool, device=device)

        state = _Decoder(self.model, [row.prompt_ids for row in rows], steps, self._pad, device, self._cached)
        active = torch.arange(len(rows), device=device)
        eos, first = self._eos.to(device), rows[0].sampling
        for step in range(steps):
            tokens, chosen = sample_tokens(
                state.logits,
                uniforms[active, step],
                temperature=first.temperature,
                top_k=first.top_k,
                top_p=first.top_p,
            )
            ids[active, step] = tokens
            logprobs[active, step] = chosen
            ended = torch.isin(tokens, eos) | self._hit_stop_string(rows, ids, active, step)
            lengths[active[ended]] = step + 1
            stopped[active[ended]] = True
            going = ~ended & (lengths[active] > step + 1)
            if not bool(going.any()):
                break
            if not bool(going.all()):
                kept = state.keep(going.nonzero().squeeze(-1))
                active, tokens = active[kept], tokens[kept]
            state.advance(tokens)
        return [
            Generation(
                response_ids=ids[i, :n].tolist(),
                rollout_logprobs=logprobs[i, :n].tolist(),
                finish_reason="stop" if ended else "length",
            )
            for i, (n, ended) in enumerate(zip(lengths.tolist(), stopped.tolist(), strict=True))
        ]

    def _hit_stop_string(self, rows: list[_Row], ids: Tensor, active: Tensor, step: int) -> Tensor:
        hit = torch.zeros(len(active), dtype=torch.bool, device=ids.device)
        if self._decode is None or not any(row.sampling.stop for row in rows):
            return hit
        for position, index in enumerate(active.tolist()):
            stop = rows[index].sampling.stop
            if stop:
                # a token can hold no less than one byte of text: this window covers the longest stop string
                window = max(len(s.encode()) for s in stop) + 4
                tail = self._decode(ids[index, max(0, step + 1 - window) : step + 1].tolist())
                hit[position] = any(s in tail for s in stop)
        return hit


class _Decoder:
    """The model's state over a batch: left-padded prompts, cache, next-token logits."""

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        steps: int,
        pad: int,
        device: torch.device,
        cached: bool,
    ) -> None:
        unique: dict[tuple[int, ...], int] = {}
        which = torch.tensor([unique.setdefault(tuple(p), len(unique)) for p in prompts], device=device)
        width = max(len(p) for p in unique)
        ids = torch.full((len(unique), width), pad, device=device)
        mask = torch.zeros(len(unique), width + steps, dtype=torch.long, device=device)
        for i, prompt in enumerate(unique):
            ids[i, width - len(prompt) :] = torch.tensor(prompt, device=device)
            mask[i, width - len(prompt) :] = 1
        self._model, self._width, self._cached = model, width, cached
        # what is generated is always seen: only the prompt's columns are ever 0
        mask[:, width:] = 1
        self._mask = mask[which]
        self._position = mask[which, :width].sum(-1)
        self._padded = bool((mask[:, :width] == 0).any())
        self._cache: Any = None
        self._ids = ids[which]
        if not cached:
            self.logits = self._forward_all()
            return
        positions = (mask[:, :width].cumsum(-1) - 1).clamp(min=0)
        out = model(
            input_ids=ids,
            attention_mask=mask[:, :width] if self._padded else None,
            position_ids=positions,
            past_key_values=make_cache(model, width + steps),
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        self.logits = out.logits[:, -1][which]
        if len(unique) != len(prompts):
            self._cache.batch_select_indices(which)
        elif not torch.equal(which, torch.arange(len(prompts), device=device)):
            raise AssertionError("unique prompts are numbered in order of appearance")

    def keep(self, rows: Tensor) -> Tensor:
        """Drop every row but ``rows`` (ascending); return them in their new order."""
        if self._cached:
            rows = select_rows(self._cache, rows, len(self._position))
        self._position = self._position[rows]
        if self._padded:
            self._mask = self._mask[rows]
        if not self._cached:
            self._ids = self._ids[rows]
        return rows

    def advance(self, tokens: Tensor) -> None:
        """Append ``tokens`` [B] and compute the next logits."""
        self._width += 1
        if not self._cached:
            self._ids = torch.cat([self._ids, tokens.unsqueeze(-1)], dim=-1)
            self.logits = self._forward_all()
            return
        out = self._model(
            input_ids=tokens.unsqueeze(-1),
            attention_mask=self._mask[:, : self._width] if self._padded else None,
            position_ids=self._position.unsqueeze(-1),
            past_key_values=self._cache,
            use_cache=True,
        )
        self._position = self._position + 1
        self.logits = out.logits[:, -1]

    def _forward_all(self) -> Tensor:
        logits: Tensor = self._model(input_ids=self._ids, use_cache=False).logits[:, -1]
        return logits
