"""Rollouts with the actor's own weights through ``transformers``: no copy, no update to wait for.

Works for every causal language model (see ``decoder.py``). Rows that have ended leave the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.attention.interface import use_attention
from multitask_rl.attention.shared import SHARED_PROMPT
from multitask_rl.config.run import RolloutConfig
from multitask_rl.config.schema.ranges import OneOf, Settings
from multitask_rl.errors import EngineError
from multitask_rl.models.actor import Actor
from multitask_rl.models.grammar import Grammars
from multitask_rl.models.rope import context_length
from multitask_rl.models.sampling import draw_uniforms, sample_tokens, suppress
from multitask_rl.models.trial import evaluating
from multitask_rl.plugins import build_config
from multitask_rl.records import FLAGGED, SamplingParams
from multitask_rl.rollout.base import Ended, Generation, GenerationRequest, RolloutEngine, Watch, look
from multitask_rl.rollout.decoder import (
    CHUNK_TOKENS,
    Past,
    PlainDecoder,
    SharedDecoder,
    TokenDecoder,
    can_decode_cached,
    can_share_prompts,
    is_recurrent,
)

HAND_ON_EVERY = 8
"""Tokens between two parts of a stream under autocast, which casts all weights again after each part."""
PADDING_SLACK = 32
"""Tokens by which even the shortest prompt may be padded in a batch of plain rows on the CPU."""
_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8."""


@dataclass(slots=True)
class _Row:
    request: int
    sample: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    watch: Watch | None = None
    conversation: int = 0


@dataclass(kw_only=True, slots=True)
class HFConfig(Settings):
    """Keys of ``rollout.engine_config``."""

    weights: Annotated[str, OneOf("actor", "bfloat16")] = "actor"
    """What is sampled from: ``actor`` (its own tensors), or a copy of them with the weights of linear layers
    in ``bfloat16``, computed as under ``model.autocast``. Faster where the CPU multiplies bfloat16."""


class HFEngine(RolloutEngine):
    """Samples from the model it is given, with its weights at the time of the call.

    Args:
        model: a causal language model of ``transformers``.
        eos_token_ids: tokens that end a response.
        pad_token_id: token in cells without one.
        decode: text of token ids, special tokens included; None = stop strings end no response.
        max_batch_tokens: most prompt and response tokens in one batch.
        grammars: the grammars of the tokenizer; None = a request with a grammar is an ``EngineError``.
        autocast: sample under bfloat16 autocast.
        prefill_tokens: prompt tokens of one forward pass.
        use_cache: keep keys and values from token to token where the model can.
        kept_tokens: most tokens of conversations whose keys and values are kept between calls.
    """

    Config = HFConfig
    shares_weights = True
    can_watch = True
    can_constrain = True

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
        prefill_tokens: int = CHUNK_TOKENS,
        use_cache: bool = True,
        kept_tokens: int = 65536,
    ) -> None:
        self.model = model
        self._prefill_tokens = prefill_tokens
        self._autocast = autocast
        self.max_batch_tokens = max_batch_tokens
        self._eos = torch.tensor(sorted(eos_token_ids))
        self._pad = pad_token_id
        self._decode = decode
        self._grammars = grammars
        self._shares_prompts: bool | None = None if use_cache else False
        """Whether the model can; None: not tried yet."""
        self._cached = use_cache
        """Keys and values are kept from token to token."""
        self._is_open = False
        self._between_steps: Callable[[], None] = lambda: None
        self._kept_tokens = kept_tokens
        self._pasts: dict[int, Past] = {}
        """Conversation -> what is known of it, at most ``kept_tokens`` tokens of all."""
        self.num_prompt_tokens = 0
        """Prompt tokens of the last call; those that several samples share count once."""
        self.num_cached_tokens = 0
        """Of these tokens, those whose keys and values were known from an earlier turn or another prompt."""

    @classmethod
    def build(cls, actor: Actor, config: RolloutConfig, *, seed: int, output_dir: Path) -> HFEngine:
        """Return an engine that shares the actor's weights; ``build_engine`` makes the copy it may need."""
        settings: HFConfig = build_config(cls, config.engine_config, where="rollout.engine_config")
        engine = cls(
            actor.model,
            eos_token_ids=actor.eos_token_ids,
            pad_token_id=actor.pad_token_id,
            # special tokens are text here: one of them may be a stop string
            decode=lambda ids: str(actor.tokenizer.decode(ids, skip_special_tokens=False)),
            max_batch_tokens=config.max_batch_tokens,
            grammars=lambda: actor.grammars,
            autocast=actor.config.autocast,
            prefill_tokens=config.prefill_tokens,
            kept_tokens=config.max_batch_tokens,
        )
        if settings.weights != "actor":  # the trial needs exact weights, which will be converted
            with torch.no_grad(), evaluating(engine.model):
                engine._try_model()
        return engine

    def _try_model(self) -> None:
        if self._shares_prompts is None:
            self._shares_prompts = can_share_prompts(self.model)
            self._cached = self._shares_prompts or can_decode_cached(self.model)

    def update_weights(self, weights: Mapping[str, Tensor], policy_version: int) -> None:
        """Store the version; the weights are the actor's own. What is known under the old ones is dropped."""
        self.policy_version = policy_version
        self._pasts.clear()

    def call_between_steps(self, hook: Callable[[], None]) -> bool:
        """See ``RolloutEngine``."""
        self._between_steps = hook
        return True

    def retain(self, conversations: Collection[int]) -> None:
        """See ``RolloutEngine``."""
        for number in self._pasts.keys() - set(conversations):
            del self._pasts[number]

    @torch.no_grad()
    def generate_stream(self, requests: Sequence[GenerationRequest]) -> Iterator[list[Ended]]:
        """Yield the rows that ended, after every decoding step or several (see ``RolloutEngine``)."""
        if self._is_open:  # two would restore the model's modes and attention in the wrong order
            raise EngineError(
                "the engine is at work on another call; end that one, or close its stream, first"
            )
        self._is_open = True
        self.num_prompt_tokens = self.num_cached_tokens = 0
        device = next(self.model.parameters()).device
        try:
            with evaluating(self.model):
                self._try_model()
                sharing = use_attention([self.model], SHARED_PROMPT)
                with sharing if self._shares_prompts else nullcontext():
                    for batch in self._batches(requests):
                        decoding = self._generate_batch(batch)
                        while True:
                            # sampled in bfloat16 where the trainer computes in bfloat16; the caller's code
                            # between two parts is not under autocast
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

    def _batches(self, requests: Sequence[GenerationRequest]) -> Iterator[list[_Row]]:
        """Cut the rows into batches of one sampling distribution, similar length and bounded tokens."""
        rows = [
            _Row(i, j, r.prompt_ids, r.sampling, seed, r.watch, number)
            for i, r in enumerate(requests)
            for j, (seed, number) in enumerate(
                zip(r.seeds, r.conversations or [0] * len(r.seeds), strict=True)
            )
        ]
        for row in rows:
            if not row.prompt_ids:
                raise EngineError(f"request {row.request} has an empty prompt; give it at least one token")

        def distribution(row: _Row) -> tuple[float, int, float, tuple[int, ...]]:
            s = row.sampling
            return s.temperature, s.top_k, s.top_p, s.suppressed_ids

        def place(row: _Row) -> tuple[Any, ...]:
            lengths = len(row.prompt_ids), row.sampling.max_new_tokens
            return *distribution(row), *lengths, row.request, row.sample

        on_cpu = next(self.model.parameters()).device.type == "cpu"
        most = context_length(self.model.config) or math.inf
        recurrent = is_recurrent(self.model)
        batch: list[_Row] = []
        new = prompt_tokens = 0
        for row in sorted(rows, key=place):
            length = len(row.prompt_ids)
            further = 0 if batch and row.request == batch[-1].request else length
            new = max(new, row.sampling.max_new_tokens)
            if batch:
                number, shortest = len(batch) + 1, len(batch[0].prompt_ids)
                if self._shares_prompts:
                    fits = prompt_tokens + further + new * number <= self.max_batch_tokens
                elif length != shortest and (not self._cached or recurrent):
                    fits = False
                else:
                    # on a CPU a row pays for every key, padding too; on a GPU fewer, larger batches win
                    widest = 2 * shortest + PADDING_SLACK if on_cpu else math.inf
                    fits = length <= widest and (length + new) * number <= self.max_batch_tokens
                    # the biases of MPT cover so many columns, padding too
                    fits = fits and length + new <= most
                if not fits or distribution(batch[0]) != distribution(row):
                    yield batch
                    batch, new, prompt_tokens, further = [], row.sampling.max_new_tokens, 0, length
            batch.append(row)
            prompt_tokens += further
        if batch:
            yield batch

    def _generate_batch(self, rows: list[_Row]) -> Iterator[list[Ended]]:
        """Decode one batch; rows leave it, and are yielded, as they end."""
        device = next(self.model.parameters()).device
        first = rows[0].sampling
        limits = np.array([row.sampling.max_new_tokens for row in rows])
        steps = int(limits.max())
        uniforms = torch.zeros(len(rows), steps)
        if first.temperature > 0:
            for i, row in enumerate(rows):
                uniforms[i, : limits[i]] = torch.from_numpy(draw_uniforms(row.seed, int(limits[i])))
        uniforms = uniforms.to(device)
        ids = torch.full((len(rows), steps), self._pad, device=device)
        logprobs = torch.zeros(len(rows), steps, device=device)
        lengths = torch.from_numpy(limits).to(device)
        eos = self._eos.to(device)
        never = torch.tensor(first.suppressed_ids, device=device) if first.suppressed_ids else None
        watched = any(row.watch for row in rows)
        stops = any(row.sampling.stop for row in rows)
        every = HAND_ON_EVERY if self._autocast else 1

        prompts = [row.prompt_ids for row in rows]
        state: TokenDecoder
        if self._shares_prompts:
            pasts = {
                i: self._pasts.pop(row.conversation)
                for i, row in enumerate(rows)
                if row.conversation in self._pasts
            }
            state = SharedDecoder(self.model, prompts, self._pad, self._prefill_tokens, pasts)
            del pasts
            self.num_cached_tokens += state.num_known
        else:
            state = PlainDecoder(self.model, prompts, self._pad, self._prefill_tokens, cached=self._cached)
        self.num_prompt_tokens += state.num_tokens
        grammar = None
        if any(row.sampling.grammar for row in rows):
            if self._grammars is None:
                raise EngineError("a request has a grammar, but the engine was built without 'grammars'")
            grammar = self._grammars().follow([row.sampling.grammar for row in rows])
        active = torch.arange(len(rows), device=device)
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
            ended = torch.isin(tokens, eos)
            if self._decode is not None and stops:
                for position, index in enumerate(active.tolist()):
                    if stop := rows[index].sampling.stop:
                        # a token holds at least one byte of text: this covers the longest stop string
                        window = max(len(s.encode()) for s in stop) + _CHARACTER_BYTES
                        tail = ids[index, max(0, step + 1 - window) : step + 1].tolist()
                        if _holds(tail, stop, self._decode):
                            ended[position] = True
            going = ~ended & (lengths[active] > step + 1)
            flagged = _flagged(rows, ids, active, going, step) if watched else []
            going[flagged] = False
            if not bool(going.all()):
                reasons = {int(active[p]): FLAGGED for p in flagged}
                reasons |= dict.fromkeys(active[ended].tolist(), "stop")
                gone = active[~going]
                tokens_of, logprobs_of = ids[gone, : step + 1].tolist(), logprobs[gone, : step + 1].tolist()
                places = (~going).nonzero().squeeze(-1).tolist()
                for place, i, own, nats in zip(places, gone.tolist(), tokens_of, logprobs_of, strict=True):
                    if rows[i].conversation and isinstance(state, SharedDecoder):
                        self._keep(rows[i], own, state, place)
                    reason = reasons.get(i, "length")
                    generation = Generation(response_ids=own, rollout_logprobs=nats, finish_reason=reason)
                    finished.append((rows[i].request, rows[i].sample, generation))
                kept = state.keep(going.nonzero().squeeze(-1)) if bool(going.any()) else active[:0]
                active, tokens = active[kept], tokens[kept]
            if finished and (not len(active) or (step + 1) % every == 0):
                yield finished
                finished = []
            if not len(active):
                break
            state.advance(tokens)
            self._between_steps()

    def _keep(self, row: _Row, response_ids: Sequence[int], state: SharedDecoder, place: int) -> None:
        """Keep the keys and values of an ended row, if there is room; its last token has none yet."""
        ids = (*row.prompt_ids, *response_ids[:-1])
        if len(ids) + sum(len(past.ids) for past in self._pasts.values()) <= self._kept_tokens:
            self._pasts[row.conversation] = Past(ids, state.known(place))


def _holds(ids: list[int], stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> bool:
    """Return whether the text of ``ids``, the end of a response, holds one of the texts ``stop``.

    Where ``ids`` begin inside a character, some decoders (byte fallback) read no character behind it either,
    so the first tokens are left out.
    """
    for begin in range(_CHARACTER_BYTES):
        text = decode(ids[begin:])
        if any(s in text for s in stop):
            return True
        if "\ufffd" not in text:
            return False
    return False


def _flagged(rows: list[_Row], ids: Tensor, active: Tensor, going: Tensor, step: int) -> list[int]:
    """Return the positions in the batch that their monitors end after ``step``."""
    positions, shown = [], []
    for position, (index, goes_on) in enumerate(zip(active.tolist(), going.tolist(), strict=True)):
        watch = rows[index].watch
        if goes_on and watch is not None and (step + 1) % watch.every == 0:
            positions.append(position)
            shown.append((watch.monitor, rows[index].seed, ids[index, : step + 1].tolist()))
    return [positions[i] for i in look(shown)]
