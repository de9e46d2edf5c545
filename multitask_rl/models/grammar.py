"""Masks over the vocabulary: what a grammar allows next, while sampling and, replayed, in training.

A mask depends on the grammar and the tokens so far only, so the trainer computes it again from a response
instead of storing it; engine and trainer then speak of one distribution. Masks come from llguidance, which
walks a trie of the vocabulary with a lazily built automaton. Text that can only go on in one way is allowed
as the tokenizer would cut it, so that the model is not led into spellings it never saw.

Axes: ``B`` rows, ``T`` response tokens, ``V`` vocabulary, ``U`` distinct masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multitask_rl.config.grammar import lark_source, read_choices, require_llguidance
from multitask_rl.errors import ConfigError, EngineError, TrainingError
from multitask_rl.models.sampling import TokenMask, keep_allowed

__all__ = ["GrammarRows", "Grammars"]

_UTF8_BYTES = frozenset(bytes([b]) for b in (*range(0xC0), *range(0xC2, 0xF5)))
_CACHE_BYTES = 128 * 2**20
"""Replays kept: old policy, reference and every epoch ask for the same ones."""


class Grammars:
    """Grammars compiled for one tokenizer.

    Args:
        tokenizer: of ``transformers``.
        vocab_size: width of the logits; what the tokenizer does not know is never allowed.
        eos_token_id: ends a response; allowed where the text so far is a sentence.

    Raises:
        MissingExtraError: llguidance is not installed.
        ConfigError: the tokenizer's tokens cannot be read as text.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, eos_token_id: int) -> None:
        require_llguidance()
        from llguidance import LLExecutor

        self.logits_size, self.tokenizer_size = vocab_size, len(tokenizer)
        self.vocab_size = max(vocab_size, len(tokenizer))
        self._hf_tokenizer = tokenizer
        self._tokenizer, self.is_native = _read_tokenizer(tokenizer, self.vocab_size, eos_token_id)
        self._alphabet = _find_alphabet(self._tokenizer, self.tokenizer_size)
        self._executor = LLExecutor(num_threads=torch.get_num_threads())
        self._started: dict[str, Any] = {}
        self._replays: dict[tuple[str, tuple[int, ...]], _Replay] = {}
        self._cached_bytes = 0

    def source(self, grammar: str) -> str:
        """Return ``grammar`` as llguidance reads it, within what the tokenizer can write.

        Raises:
            ConfigError: the vocabulary lacks bytes that a JSON schema may ask for.
        """
        if self._alphabet is not None and grammar.startswith('{"json_schema"'):
            raise ConfigError(
                "a grammar with a json_schema needs a tokenizer with a token for every byte (byte-level or "
                f"with byte fallback); this one can write {len(self._alphabet)} characters: use regex or "
                "choices, or another model"
            )
        return lark_source(grammar, self._alphabet)

    def check(self, grammar: str, max_new_tokens: int) -> None:
        """Refuse what this tokenizer cannot write, or cannot write in ``max_new_tokens`` tokens.

        The length is known for choices alone; a longest sentence may not exist, a shortest is hard to find.

        Raises:
            ConfigError: what, and what to do.
        """
        self._start(grammar)
        for choice in read_choices(grammar):
            need = len(self._hf_tokenizer.encode(choice, add_special_tokens=False)) + 1
            if need > max_new_tokens:
                raise ConfigError(
                    f"the choice {choice!r} takes {need} tokens with the end token, max_new_tokens is "
                    f"{max_new_tokens}; raise it or shorten the choice"
                )

    def follow(self, grammars: Sequence[str]) -> GrammarRows | None:
        """Return what masks the rows of a batch while it is sampled; None if no row has a grammar.

        Args:
            grammars: [B], empty for a row without.
        """
        matchers = {i: self._start(grammar) for i, grammar in enumerate(grammars) if grammar}
        return GrammarRows(matchers, self._executor, self.vocab_size) if matchers else None

    def token_mask(self, grammars: Sequence[str], responses: Sequence[Sequence[int]]) -> TokenMask:
        """Return the masks under which the tokens of ``responses`` were sampled.

        Args:
            grammars: [B], empty for a response without.
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
        return TokenMask(
            tokens=torch.from_numpy(np.concatenate(tokens)),
            packed=torch.from_numpy(np.concatenate(packed)),
            which=torch.from_numpy(np.concatenate(which)),
            forced=torch.from_numpy(np.concatenate(forced)),
        )

    def choices(self, grammars: Sequence[str], responses: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return where more than one token was allowed: [T] bool for each of ``responses``.

        Args and errors as ``token_mask``.
        """
        bytes_per_token = -(-self.vocab_size // 8)
        result: list[Tensor] = []
        waiting: list[tuple[str, tuple[int, ...]]] = []
        num_bytes = 0
        for number, key in enumerate(zip(grammars, map(tuple, responses), strict=True), start=1):
            waiting.append(key)
            num_bytes += len(key[1]) * bytes_per_token
            if num_bytes > _CACHE_BYTES or number == len(responses):
                replays = self._replay([k for k in waiting if k[0]])
                result += [
                    torch.from_numpy(~replays[k].forced[replays[k].which])
                    if k[0]
                    else torch.ones(len(k[1]), dtype=torch.bool)
                    for k in waiting
                ]
                waiting, num_bytes = [], 0
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

    def _replay(
        self, keys: Sequence[tuple[str, tuple[int, ...]]]
    ) -> dict[tuple[str, tuple[int, ...]], _Replay]:
        found = {key: self._replays[key] for key in keys if key in self._replays}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens as fill

            # the library writes one mask more than there are tokens: what could come after the last
            starts = np.cumsum([0, *(len(ids) + 1 for _, ids in missing)]).tolist()
            words = np.zeros((starts.pop(), -(-self.vocab_size // 32)), dtype=np.int32)
            work = [
                (self._start(grammar), at, list(ids))
                for at, (grammar, ids) in zip(starts, missing, strict=True)
            ]
            fill(self._executor, work, words)
            masks = words.view(np.uint8)
            for at, key in zip(starts, missing, strict=True):
                found[key] = _Replay.of(key, masks[at : at + len(key[1])])
                self._remember(key, found[key])
        return found

    def _remember(self, key: tuple[str, tuple[int, ...]], replay: _Replay) -> None:
        self._cached_bytes += replay.packed.nbytes
        if self._cached_bytes > _CACHE_BYTES:
            self._replays.clear()
            self._cached_bytes = replay.packed.nbytes
        self._replays[key] = replay


class GrammarRows:
    """The grammars of a batch while it is sampled, each at its place."""

    def __init__(self, matchers: dict[int, Any], executor: Any, vocab_size: int) -> None:
        self._matchers = matchers
        self._executor = executor
        self._width = -(-vocab_size // 32)

    def mask(self, logits: Tensor, active: Tensor) -> Tensor:
        """Set what is not allowed to -inf, in place.

        Args:
            logits: [A, V] of the rows still sampled.
            active: [A] their numbers in the batch.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        places: list[int] = []
        matchers: list[tuple[Any, int]] = []
        for place, row in enumerate(active.tolist()):
            if row in self._matchers:
                matchers.append((self._matchers[row], len(places)))
                places.append(place)
        if not places:
            return logits
        words = np.empty((len(places), self._width), dtype=np.int32)
        fill_next_token_bitmask_par(self._executor, matchers, words)
        packed = torch.from_numpy(words.view(np.uint8)).to(logits.device)
        where = torch.tensor(places, device=logits.device)
        logits[where] = keep_allowed(logits[where], packed)
        return logits

    def advance(self, active: Tensor, tokens: Tensor) -> None:
        """Take note of the tokens [A] sampled by the rows ``active`` [A].

        Raises:
            EngineError: the library gave up on a grammar.
        """
        for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers.get(row)
            if matcher is not None and not matcher.consume_token(token):
                problem = matcher.get_error().partition("<state>")[0].strip()
                raise EngineError(f"a grammar cannot be followed any further ({problem}); make it simpler")


@dataclass(frozen=True, slots=True)
class _Replay:
    """The masks of one response, each distinct one once."""

    packed: np.ndarray
    """[U, >= V / 8] uint8."""
    which: np.ndarray
    """[T] int64."""
    forced: np.ndarray
    """[U] bool: a single token is allowed."""

    @classmethod
    def of(cls, key: tuple[str, tuple[int, ...]], masks: np.ndarray) -> _Replay:
        """Return the masks [T, >= V / 8] of a response without repetitions."""
        grammar, ids = key
        tokens = np.array(ids)
        allowed = masks[np.arange(len(ids)), tokens // 8] >> (tokens % 8) & 1
        if not allowed.all():
            place = int(np.argmin(allowed))
            raise TrainingError(
                f"a response does not follow its grammar {grammar}: token {ids[place]} at position {place} "
                "is not allowed there; it was sampled without the grammar or with another tokenizer"
            )
        numbers: dict[bytes, int] = {}
        which = np.array([numbers.setdefault(mask.tobytes(), len(numbers)) for mask in masks])
        packed = np.frombuffer(b"".join(numbers), dtype=np.uint8).reshape(len(numbers), -1).copy()
        return cls(packed, which, np.unpackbits(packed, axis=1).sum(axis=1) == 1)


class _Pieces:
    """A vocabulary whose tokens are pieces of text that are simply put side by side."""

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


def _read_tokenizer(tokenizer: Any, vocab_size: int, eos_token_id: int) -> tuple[Any, bool]:
    """Return llguidance's view of ``tokenizer`` and whether the library reads it by itself (as in vLLM)."""
    from llguidance import LLTokenizer, TokenizerWrapper
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_id), True
    except ValueError:
        pieces = TokenizerWrapper(_Pieces(tokenizer, vocab_size, eos_token_id))
        return LLTokenizer(pieces, n_vocab=vocab_size), False


def _find_alphabet(tokenizer: Any, size: int) -> str | None:
    """Return the characters the vocabulary can write one by one; None if it has every byte of UTF-8."""
    pieces = {tokenizer.decode_bytes([i]) for i in range(size) if not tokenizer.is_special_token(i)}
    if pieces >= _UTF8_BYTES:
        return None
    texts = [piece.decode(errors="ignore") for piece in pieces]
    return "".join(sorted(text for text in texts if len(text) == 1))
