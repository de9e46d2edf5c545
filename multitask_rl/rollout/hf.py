"""Rollouts with the actor's own weights through ``transformers``: nothing is copied, nothing can lag behind.

A prompt is computed once and read once for the whole group; rows that have ended leave the batch. Works for
every causal language model: see ``decoder.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.attention.interface import use_attention
from multitask_rl.attention.shared import SHARED_PROMPT
from multitask_rl.errors import EngineError
from multitask_rl.models.grammar import GrammarRows, Grammars
from multitask_rl.models.modes import evaluating
from multitask_rl.models.sampling import draw_uniforms, sample_tokens, suppress
from multitask_rl.records import FLAGGED, SamplingParams
from multitask_rl.rollout.base import (
    Ended,
    Generation,
    GenerationRequest,
    RolloutEngine,
    Watch,
    collect,
    look,
)
from multitask_rl.rollout.decoder import (
    PlainDecoder,
    SharedDecoder,
    TokenDecoder,
    can_decode_cached,
    can_share_prompts,
)

if TYPE_CHECKING:
    from multitask_rl.config.run import RolloutConfig
    from multitask_rl.models.actor import Actor

__all__ = ["HFEngine"]


HAND_ON_EVERY = 8
"""Tokens after which rows that ended are handed on under autocast, which casts all weights anew after it."""
PADDING_SLACK = 32
"""Tokens by which even the shortest prompt may be padded in a batch of plain rows on the CPU."""


@dataclass(slots=True)
class _Row:
    request: int
    sample: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    watch: Watch | None = None


@dataclass(frozen=True, slots=True)
class _Room:
    """What a batch takes; its rows come in ascending order of prompt length."""

    rows: int = 0
    new: int = 0
    """Most tokens that one of them may generate."""
    shortest: int = 0
    longest: int = 0
    prompt_tokens: int = 0
    """Of each request once."""
    request: int = -1

    def with_row(self, row: _Row) -> _Room:
        length = len(row.prompt_ids)
        return _Room(
            rows=self.rows + 1,
            new=max(self.new, row.sampling.max_new_tokens),
            shortest=self.shortest or length,
            longest=length,
            prompt_tokens=self.prompt_tokens + (length if row.request != self.request else 0),
            request=row.request,
        )


class HFEngine(RolloutEngine):
    """Samples from the model it is given, as it is at the moment of the call."""

    shares_weights = True
    can_watch = True

    def __init__(
        self,
        model: Any,
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_batch_tokens: int = 65536,
        grammars: Callable[[], Grammars] | None = None,
        autocast: bool = False,
    ) -> None:
        self.model = model
        self._autocast = autocast
        self.policy_version = 0
        self.max_batch_tokens = max_batch_tokens
        self._eos = torch.tensor(sorted(eos_token_ids))
        self._pad = pad_token_id
        self._decode = decode
        self._grammars = grammars
        self._shares_prompts: bool | None = None
        """Whether the model can; None: to be tried."""
        self._cached = True
        """Keys and values are kept from token to token."""
        self._is_open = False

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> HFEngine:
        """Return the engine of ``actor``; it shares the actor's weights."""
        return cls(
            actor.model,
            eos_token_ids=actor.eos_token_ids,
            pad_token_id=actor.pad_token_id,
            # special tokens are text here: one of them may be a stop string
            decode=lambda ids: str(actor.tokenizer.decode(ids, skip_special_tokens=False)),
            max_batch_tokens=config.max_batch_tokens,
            grammars=lambda: actor.grammars,
            autocast=actor.config.autocast,
        )

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Take note of the version; the weights are the actor's own."""
        self.policy_version = policy_version

    def close(self) -> None:
        """Nothing to free."""

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Generation]]:
        """Return ``len(seeds)`` generations per request (see ``RolloutEngine``)."""
        return collect(requests, self.generate_stream(requests))

    @torch.no_grad()
    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield the rows of each decoding step that ended in it (see ``rollout.base.stream``)."""
        if self._is_open:  # two would put back the model's modes and attention in the wrong order
            raise EngineError(
                "the engine is at work on another call; end that one, or close its stream, first"
            )
        self._is_open = True
        device = next(self.model.parameters()).device
        try:
            with evaluating(self.model), self._attention():
                for batch in self._batches(requests):
                    decoding = self._generate_batch(batch)
                    while True:
                        # one distribution: what the trainer computes in bfloat16 is sampled in bfloat16;
                        # but not what is done with the rows meanwhile
                        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocast):
                            ended = next(decoding, None)
                        if ended is None:
                            break
                        yield ended
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"out of memory while sampling {self.max_batch_tokens} tokens at once; lower "
                f"rollout.max_batch_tokens ({error})"
            ) from error
        finally:
            self._is_open = False

    def _attention(self) -> AbstractContextManager[None]:
        if self._shares_prompts is None:
            self._shares_prompts = can_share_prompts(self.model)
            self._cached = self._shares_prompts or can_decode_cached(self.model)
        return use_attention([self.model], SHARED_PROMPT) if self._shares_prompts else nullcontext()

    def _batches(self, requests: Sequence[GenerationRequest]) -> Iterator[list[_Row]]:
        """Cut the rows into batches of one sampling distribution, similar length and bounded tokens."""
        rows = [
            _Row(i, j, r.prompt_ids, r.sampling, seed, r.watch)
            for i, r in enumerate(requests)
            for j, seed in enumerate(r.seeds)
        ]
        for row in rows:
            if not row.prompt_ids:
                raise EngineError(f"request {row.request} has an empty prompt; give it at least one token")

        def key(row: _Row) -> tuple[float, int, float, tuple[int, ...], int, int, int, int]:
            s = row.sampling
            return (
                s.temperature,
                s.top_k,
                s.top_p,
                s.suppressed_ids,
                len(row.prompt_ids),
                s.max_new_tokens,
                row.request,
                row.sample,
            )

        batch: list[_Row] = []
        room = _Room()
        for row in sorted(rows, key=key):
            grown = room.with_row(row)
            if batch and (key(batch[0])[:4] != key(row)[:4] or not self._fits(grown)):
                yield batch
                batch, grown = [], _Room().with_row(row)
            batch.append(row)
            room = grown
        if batch:
            yield batch

    def _fits(self, room: _Room) -> bool:
        if self._shares_prompts:
            return room.prompt_tokens + room.new * room.rows <= self.max_batch_tokens
        if not self._cached and room.longest != room.shortest:
            return False
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        # on a CPU a row pays for every key it attends to, padding too; on a GPU fewer, larger batches win
        widest = 2 * room.shortest + PADDING_SLACK if on_cpu else math.inf
        return room.longest <= widest and (room.longest + room.new) * room.rows <= self.max_batch_tokens

    def _generate_batch(self, rows: list[_Row]) -> Iterator[list[Ended]]:
        """Decode one batch; rows leave it, and are yielded, as they end."""
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
        watched = any(row.watch for row in rows)

        state = self._decoder([row.prompt_ids for row in rows])
        active = torch.arange(len(rows), device=device)
        eos, first = self._eos.to(device), rows[0].sampling
        grammar = self._follow([row.sampling.grammar for row in rows])
        never = torch.tensor(first.suppressed_ids, device=device) if first.suppressed_ids else None
        every = HAND_ON_EVERY if self._autocast else 1
        finished: list[Ended] = []
        for step in range(steps):
            logits = state.logits if grammar is None else grammar.mask(state.logits, active)
            tokens, chosen = sample_tokens(
                logits if never is None else suppress(logits, never),
                uniforms[active, step],
                temperature=first.temperature,
                top_k=first.top_k,
                top_p=first.top_p,
            )
            ids[active, step] = tokens
            logprobs[active, step] = chosen
            if grammar is not None:
                grammar.advance(active, tokens)
            ended = torch.isin(tokens, eos) | self._hit_stop_string(rows, ids, active, step)
            going = ~ended & (lengths[active] > step + 1)
            flagged = _look(rows, ids, active, going, step) if watched else []
            going[flagged] = False
            if not bool(going.all()):
                reasons = {int(active[p]): FLAGGED for p in flagged}
                reasons |= dict.fromkeys(active[ended].tolist(), "stop")
                gone = active[~going]
                finished += _ended(rows, gone, reasons, ids[gone, : step + 1], logprobs[gone, : step + 1])
                kept = state.keep(going.nonzero().squeeze(-1)) if bool(going.any()) else active[:0]
                active, tokens = active[kept], tokens[kept]
            if finished and (not len(active) or (step + 1) % every == 0):
                yield finished
                finished = []
            if not len(active):
                break
            state.advance(tokens)

    def _decoder(self, prompts: Sequence[Sequence[int]]) -> TokenDecoder:
        if self._shares_prompts:
            return SharedDecoder(self.model, prompts, self._pad)
        return PlainDecoder(self.model, prompts, self._pad, cached=self._cached)

    def _follow(self, grammars: list[str]) -> GrammarRows | None:
        if not any(grammars):
            return None
        if self._grammars is None:
            raise EngineError("a request has a grammar, but the engine was built without 'grammars'")
        return self._grammars().follow(grammars)

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


def _ended(
    rows: list[_Row], which: Tensor, reasons: Mapping[int, str], ids: Tensor, logprobs: Tensor
) -> list[Ended]:
    """Return what the rows ``which`` of a batch generated: ``ids``, ``logprobs`` [rows, tokens]."""
    numbers = zip(which.tolist(), ids.tolist(), logprobs.tolist(), strict=True)
    return [
        (
            rows[i].request,
            rows[i].sample,
            Generation(response_ids=own, rollout_logprobs=nats, finish_reason=reasons.get(i, "length")),
        )
        for i, own, nats in numbers
    ]


def _look(rows: list[_Row], ids: Tensor, active: Tensor, going: Tensor, step: int) -> list[int]:
    """Return which positions of the batch their monitors end after ``step``."""
    positions, shown = [], []
    for position, (index, goes_on) in enumerate(zip(active.tolist(), going.tolist(), strict=True)):
        watch = rows[index].watch
        if goes_on and watch is not None and (step + 1) % watch.every == 0:
            positions.append(position)
            shown.append((watch.monitor, rows[index].seed, ids[index, : step + 1].tolist()))
    return [positions[i] for i in look(shown)]
