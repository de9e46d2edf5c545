"""Masks over the vocabulary: the tokens that a grammar allows next, in sampling and in training.

A mask depends only on the grammar and the tokens before, so the trainer computes it again from the response.
Masks come from llguidance. Text with one possible continuation is allowed only as the tokenizer cuts it.

Axes: ``B`` rows, ``T`` response tokens, ``V`` vocabulary, ``U`` distinct masks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.config.grammar import lark_source
from multitask_rl.errors import ConfigError, EngineError, TrainingError, require_extra
from multitask_rl.models.sampling import TokenMask, keep_allowed

_UTF8_BYTES = frozenset(bytes([b]) for b in (*range(0xC0), *range(0xC2, 0xF5)))
_CACHE_BYTES = 128 * 2**20
"""Size of the masks kept: old policy, reference and every epoch need the same ones."""

_Key = tuple[str, tuple[int, ...]]
"""Grammar and token ids of a response."""


class Grammars:
    """Grammars compiled for one tokenizer of ``transformers``.

    Args:
        tokenizer: its tokens can be read as text, else a ``ConfigError`` is raised.
        vocab_size: width of the logits; ids that the tokenizer does not know are never allowed.
        eos_token_id: ends a response; allowed where the text so far is a sentence.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_id: int) -> None:
        require_extra("llguidance", "grammar", "constraints of mode grammar need llguidance")
        from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper
        from llguidance.hf import from_tokenizer

        self.logits_size, self.tokenizer_size = vocab_size, len(tokenizer)
        self.vocab_size = max(vocab_size, len(tokenizer))
        self._hf_tokenizer = tokenizer
        self.is_native = True
        """llguidance reads the tokenizer by itself, as vLLM does."""
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=self.vocab_size, eos_token=eos_token_id)
        except ValueError:
            self.is_native = False
            pieces = TokenizerWrapper(_Pieces(tokenizer, self.vocab_size, eos_token_id))
            self._tokenizer = LLTokenizer(pieces, n_vocab=self.vocab_size)
        ordinary = (i for i in range(len(tokenizer)) if not self._tokenizer.is_special_token(i))
        found = {self._tokenizer.decode_bytes([i]) for i in ordinary}
        characters = sorted(text for piece in found if len(text := piece.decode(errors="ignore")) == 1)
        self._alphabet = None if found >= _UTF8_BYTES else "".join(characters)
        """Characters that have a token of their own; None if every byte of UTF-8 has one."""
        self._executor = LLExecutor(num_threads=torch.get_num_threads())
        self._started: dict[str, Any] = {}
        self._replays: dict[_Key, _Replay] = {}
        self._cached_bytes = 0

    def source(self, grammar: str) -> str:
        """Return ``grammar`` in llguidance's syntax, limited to characters that the tokenizer can write."""
        if self._alphabet is not None and grammar.startswith('{"json_schema"'):
            raise ConfigError(
                "a grammar with a json_schema needs a tokenizer with a token for every byte (byte-level or "
                f"with byte fallback); this one can write {len(self._alphabet)} characters: use regex or "
                "choices, or another model"
            )
        return lark_source(grammar, self._alphabet)

    def check(self, grammar: str, max_new_tokens: int) -> None:
        """Raise ``ConfigError`` unless the tokenizer can write the grammar, choices in ``max_new_tokens``."""
        self._start(grammar)
        for choice in json.loads(grammar).get("choices", ()):
            need = len(self._hf_tokenizer.encode(choice, add_special_tokens=False)) + 1
            if need > max_new_tokens:
                raise ConfigError(
                    f"the choice {choice!r} takes {need} tokens with the end token, max_new_tokens is "
                    f"{max_new_tokens}; raise it or shorten the choice"
                )

    def follow(self, grammars: Sequence[str]) -> GrammarRows | None:
        """Return the masks for sampling a batch, from a grammar per row ('' = none); None: no row has one."""
        matchers = {i: self._start(grammar) for i, grammar in enumerate(grammars) if grammar}
        return GrammarRows(matchers, self._executor, self.vocab_size) if matchers else None

    def token_mask(self, grammars: Sequence[str], responses: Sequence[Sequence[int]]) -> TokenMask:
        """Return the masks under which the tokens of ``responses`` were sampled.

        Args:
            grammars: [B], '' for a response without a grammar; one at least has one.
            responses: [B] token ids, end token included.

        Raises:
            TrainingError: a response does not follow its grammar.
        """
        keys = [(g, tuple(r)) for g, r in zip(grammars, responses, strict=True)]
        replays = self._replay([key for key in keys if key[0]])
        starts = np.cumsum([0, *(len(r) for r in responses)])
        rows, tokens, which, forced, packed = 0, [], [], [], []
        for start, key in zip(starts, keys, strict=False):
            if key[0]:
                replay = replays[key]
                tokens.append(np.arange(start, start + len(key[1])))
                which.append(replay.which + rows)
                forced.append(replay.forced[replay.which])
                packed.append(replay.packed)
                rows += len(replay.packed)
        parts = (tokens, packed, which, forced)
        return TokenMask(*(torch.from_numpy(np.concatenate(part)) for part in parts))

    def choices(self, grammars: Sequence[str], responses: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return where more than one token was allowed: [T] bool for each of ``responses``.

        Args and errors: see ``token_mask``. At most ``_CACHE_BYTES`` of masks exist at once.
        """
        keys = [(g, tuple(r)) for g, r in zip(grammars, responses, strict=True)]
        longest = max((len(r) for r in responses), default=0)
        size = max(1, 8 * _CACHE_BYTES // (self.vocab_size * max(1, longest)))
        result: list[Tensor] = []
        for start in range(0, len(keys), size):
            replays = self._replay([key for key in keys[start : start + size] if key[0]])
            for key in keys[start : start + size]:
                forced = replays[key].forced[replays[key].which] if key[0] else np.zeros(len(key[1]), bool)
                result.append(torch.from_numpy(~forced))
        return result

    def _start(self, grammar: str) -> Any:
        """Return a matcher at the start of ``grammar``."""
        if grammar not in self._started:
            from llguidance import LLMatcher

            matcher = LLMatcher(self._tokenizer, self.source(grammar), log_level=0)
            probe = matcher.deep_copy()
            probe.compute_bitmask()
            if probe.is_error():
                raise ConfigError(
                    f"no text of the grammar {grammar} can be written in the tokenizer's vocabulary: "
                    f"{probe.get_error().partition('<state>')[0].strip()}"
                )
            self._started[grammar] = matcher
        return self._started[grammar].deep_copy()

    def _replay(self, keys: Sequence[_Key]) -> dict[_Key, _Replay]:
        found = {key: self._replays[key] for key in keys if key in self._replays}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill

            # the library writes one mask more than there are tokens: what could come after the last
            starts = np.cumsum([0, *(len(ids) + 1 for _, ids in missing)]).tolist()
            words = np.zeros((starts.pop(), -(-self.vocab_size // 32)), dtype=np.int32)
            work = [(self._start(g), at, list(ids)) for at, (g, ids) in zip(starts, missing, strict=True)]
            fill(self._executor, work, words)
            for at, key in zip(starts, missing, strict=True):
                grammar, ids = key
                masks, tokens = words.view(np.uint8)[at : at + len(ids)], np.array(ids)
                allowed = masks[np.arange(len(ids)), tokens // 8] >> (tokens % 8) & 1
                if not allowed.all():
                    place = int(np.argmin(allowed))
                    raise TrainingError(
                        f"a response does not follow its grammar {grammar}: token {ids[place]} at position "
                        f"{place} is not allowed there; it was sampled without the grammar or with another "
                        "tokenizer"
                    )
                numbers: dict[bytes, int] = {}
                which = np.array([numbers.setdefault(mask.tobytes(), len(numbers)) for mask in masks])
                packed = np.frombuffer(b"".join(numbers), dtype=np.uint8).reshape(len(numbers), -1).copy()
                forced = np.unpackbits(packed, axis=1).sum(axis=1) == 1
                found[key] = replay = _Replay(packed, which, forced)
                self._cached_bytes += replay.packed.nbytes
                if self._cached_bytes > _CACHE_BYTES:
                    self._replays.clear()
                    self._cached_bytes = replay.packed.nbytes
                self._replays[key] = replay
        return found


class GrammarRows:
    """The grammars of a batch that is sampled, by row."""

    def __init__(self, matchers: dict[int, Any], executor: Any, vocab_size: int) -> None:
        self._matchers = matchers
        self._executor = executor
        self._width = -(-vocab_size // 32)

    def mask(self, logits: Tensor, active: Tensor) -> Tensor:
        """Set ``logits`` [A, V] of the rows ``active`` [A] to -inf, in place, for refused tokens."""
        from llguidance.numpy import fill_next_token_bitmask_par

        rows = active.tolist()
        places = [place for place, row in enumerate(rows) if row in self._matchers]
        if not places:
            return logits
        matchers = [(self._matchers[rows[place]], number) for number, place in enumerate(places)]
        words = np.empty((len(places), self._width), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, matchers, words)
        packed = torch.from_numpy(words.view(np.uint8)).to(logits.device)
        where = torch.tensor(places, device=logits.device)
        logits[where] = keep_allowed(logits[where], packed)
        return logits

    def advance(self, active: Tensor, tokens: Tensor) -> None:
        """Append the sampled tokens [A] of the rows ``active`` [A]."""
        for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers.get(row)
            if matcher is not None and not matcher.consume_token(token):
                problem = matcher.get_error().partition("<state>")[0].strip()
                raise EngineError(f"a grammar cannot be followed any further ({problem}); make it simpler")


@dataclass(frozen=True, slots=True)
class _Replay:
    """The masks of one response without repetitions."""

    packed: np.ndarray
    """[U, >= V / 8] uint8."""
    which: np.ndarray
    """[T] int64."""
    forced: np.ndarray
    """[U] bool: a single token is allowed."""


class _Pieces:
    """A vocabulary whose tokens, put side by side, give the text."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        special = {*tokenizer.all_special_ids, eos_token_id}
        texts = ["" if i in special else str(tokenizer.decode([i])) for i in range(len(tokenizer))]
        ordinary = [i for i, text in enumerate(texts) if text]
        if str(tokenizer.decode(ordinary)) != "".join(texts):
            raise ConfigError(
                "constraints of mode grammar need a tokenizer whose tokens put side by side give the text "
                f"(byte-level, with byte fallback, or plain pieces); {type(tokenizer).__name__} of "
                f"{tokenizer.name_or_path!r} writes something between them"
            )
        self.special_token_ids = sorted(special)
        self.tokens = [text.encode() for text in texts] + [b""] * (vocab_size - len(texts))
        self._encode = tokenizer.encode
        self._single = {text: i for i, text in enumerate(texts) if len(text) == 1}

    def __call__(self, text: str) -> list[int]:
        ids = [int(i) for i in self._encode(text, add_special_tokens=False)]
        if b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return [self._single[character] for character in text if character in self._single]
