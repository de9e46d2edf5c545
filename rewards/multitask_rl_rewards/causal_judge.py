"""Causal language models as judges: the probability of each verdict word from one forward, no sampling.

A sampled verdict is random. The logits at the first token in which the verdict words differ give its
probability, for the cost of the prompt alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from multitask_rl.errors import ConfigError
from multitask_rl_rewards.transformer_models import LoadedModel, ModelSettings, batches, load_model

if TYPE_CHECKING:
    from torch import Tensor

_SLACK = 16
_LEAST_SAVED = 512
"""Tokens that a forward of its own for what prompts have in common must save."""
_ANSWER_TOKENS = 1024
"""As ``batches``' for answers: every token of one costs a forward, however many answers it adds to."""


class CausalJudge:
    """A causal LM that gives one of a few verdict words, loaded (or shared) at construction.

    A prompt of more than ``config.max_length`` tokens gets None: a judge that reads a part of it would judge
    something else. ``plugin`` is the name for errors.
    """

    def __init__(self, config: ModelSettings, plugin: str) -> None:
        self._loaded: LoadedModel = load_model("AutoModelForCausalLM", config, plugin)
        self._batch_size, self._plugin, self._name = config.batch_size, plugin, config.model_name
        self.max_length = self._loaded.max_length(config.max_length)
        kinds = getattr(self._loaded.model.config.get_text_config(), "layer_types", None) or []
        stateful = getattr(self._loaded.model, "_is_stateful", False)
        self._can_share = not stateful and set(kinds) <= {"full_attention", "sliding_attention"}

    @property
    def has_chat_template(self) -> bool:
        """The tokenizer brings the prompt format the model was trained on."""
        return bool(getattr(self._loaded.tokenizer, "chat_template", None))

    def knows(self, token: str) -> bool:
        """Whether ``token`` is a control token of this model."""
        return token in self._loaded.tokenizer.all_special_tokens

    def clean(self, text: str) -> str:
        """Return ``text`` without strings that the tokenizer reads as control tokens."""
        return self._loaded.clean(text)

    def room(self, prompt: str) -> int:
        """Return how many tokens of an input remain after ``prompt``, less a small reserve.

        A text may take more tokens inside a prompt than alone, and a verdict follows its ``lead``.
        """
        return self.max_length - len(self._encode(prompt)) - _SLACK

    def split(self, text: str, room: int, most: int) -> list[str] | None:
        """Return overlapping parts of ``text`` of at most ``room`` tokens; None = more than ``most``."""
        return self._loaded.split(text, room, most)

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        """Return the prompt text that the tokenizer's template makes of ``messages``."""
        text: str = self._loaded.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text

    def verdict_probabilities(
        self, prompts: Sequence[str], words: Sequence[str], lead: str = ""
    ) -> list[list[float] | None]:
        """Return per prompt the probability of each word, given that it is one of them.

        Args:
            prompts: whole prompts; control tokens in them are read as such.
            words: verdicts, as they are spelt after ``lead``.
            lead: what the model writes before every verdict.

        Returns:
            [K] probabilities that sum to 1, or None for a prompt longer than ``max_length``.

        Raises:
            ConfigError: the tokenizer cannot tell the words apart by one token.
        """
        shared, parting = self._parting_tokens(words, lead)
        encoded = [self._encode(prompt) + shared for prompt in prompts]
        results: list[list[float] | None] = [None] * len(encoded)
        readable = [i for i, ids in enumerate(encoded) if len(ids) <= self.max_length]
        for common, group in self._groups(encoded, readable):
            for batch in batches([len(encoded[i]) for i in group], self._batch_size):
                indices = [group[at] for at in batch]
                logits = self._last_logits([encoded[i] for i in indices], common)[:, parting]
                for i, row in zip(indices, logits.softmax(dim=1).tolist(), strict=True):
                    results[i] = row
        return results

    def answers(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        """Return the model's greedy answer to each prompt, without control tokens, sampled in batches."""
        import torch

        tokenizer, device = self._loaded.tokenizer, self._loaded.device
        pad = tokenizer.pad_token_id or 0
        encoded = [self._encode(prompt) for prompt in prompts]
        texts = [""] * len(encoded)
        lengths = [len(ids) + max_new_tokens for ids in encoded]
        for batch in batches(lengths, self._batch_size, _ANSWER_TOKENS):
            longest = max(len(encoded[i]) for i in batch)
            # Padding is on the left, so that every answer begins in the same column.
            padding = [longest - len(encoded[i]) for i in batch]
            ids = torch.tensor([[pad] * n + encoded[i] for n, i in zip(padding, batch, strict=True)])
            mask = torch.arange(longest)[None, :] >= torch.tensor(padding)[:, None]
            with torch.no_grad(), self._loaded.lock:
                out = self._loaded.model.generate(
                    ids.to(device),
                    attention_mask=mask.long().to(device),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=pad,
                )
            for i, answer in zip(batch, out[:, longest:].tolist(), strict=True):
                texts[i] = tokenizer.decode(answer, skip_special_tokens=True).strip()
        return texts

    def _parting_tokens(self, words: Sequence[str], lead: str) -> tuple[list[int], list[int]]:
        """Return the ids that all verdicts share, and the first id of each that differs."""
        tokenizer = self._loaded.tokenizer
        spelt = [tokenizer(lead + word, add_special_tokens=False)["input_ids"] for word in words]
        length = 0
        while all(len(ids) > length for ids in spelt) and len({ids[length] for ids in spelt}) == 1:
            length += 1
        parting = [ids[length] for ids in spelt if len(ids) > length]
        unknown = tokenizer.unk_token_id
        if len(set(parting)) < len(words) or (unknown is not None and unknown in parting):
            raise ConfigError(
                f"{self._plugin}: the tokenizer of {self._name!r} cannot tell the verdicts {list(words)} "
                "apart by one token; this model is no judge of that family. Choose another `model_name` or "
                "`family`."
            )
        return spelt[0][:length], parting

    def _encode(self, prompt: str) -> list[int]:
        # A chat template writes the beginning-of-text token itself; plain prompts need the tokenizer's.
        ids: list[int] = self._loaded.tokenizer(prompt, add_special_tokens=not self.has_chat_template)[
            "input_ids"
        ]
        return ids

    def _groups(self, encoded: list[list[int]], readable: list[int]) -> list[tuple[int, list[int]]]:
        """Return groups of neighbours with the number of tokens at which all of a group begin alike.

        Responses to one question are neighbours: what stands before them is computed once. Where that would
        save little, a prompt is in the last group, with 0 tokens in common.
        """
        groups: list[tuple[int, list[int]]] = []
        others: list[int] = []
        at = 0
        while at < len(readable):
            first = encoded[readable[at]]
            common, end = len(first) - 1, at + 1
            while end < len(readable):
                ids = encoded[readable[end]]
                alike = next((n for n, (a, b) in enumerate(zip(first, ids, strict=False)) if a != b), common)
                if 2 * min(alike, len(ids) - 1) < len(ids):
                    break
                common, end = min(common, alike, len(ids) - 1), end + 1
            if self._can_share and (end - at - 1) * common >= _LEAST_SAVED:
                groups.append((common, readable[at:end]))
            else:
                others += readable[at:end]
            at = end
        return [*groups, (0, others)]

    def _last_logits(self, batch: list[list[int]], common: int) -> Tensor:
        """Return [B, V] float32 logits after each prompt; their first ``common`` tokens are equal.

        Padding is on the right, where causality hides it: without a mask attention skips what is later.
        """
        import torch
        from transformers import DynamicCache

        model, device = self._loaded.model, self._loaded.device
        past = DynamicCache(config=model.config) if common else None
        # transformers 5.24 renames the argument
        has_new_name = "cache" in inspect.signature(model.forward).parameters
        cached = {"cache" if has_new_name else "past_key_values": past}
        beginning = torch.tensor([batch[0][:common]], device=device)
        batch = [row[common:] for row in batch]

        longest = max(len(ids) for ids in batch)
        pad = self._loaded.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in batch], device=device)
        # The logits of all places would take a vocabulary per token.
        lengths = torch.tensor([len(row) for row in batch], device=device)
        places, index = torch.unique(lengths - 1, return_inverse=True)
        with torch.no_grad(), self._loaded.lock:
            if past is not None:
                model(input_ids=beginning, **cached, use_cache=True, logits_to_keep=1)
                past.batch_repeat_interleave(len(batch))
            logits: Tensor = model(
                input_ids=ids, **cached, use_cache=past is not None, logits_to_keep=places
            ).logits
        return logits[torch.arange(len(batch), device=device), index].float().cpu()
