"""Sequence-classification models on (prompt, response) exchanges: encoding and batching by length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from multitask_rl_rewards.text import render
from multitask_rl_rewards.transformer_models import LoadedModel, load_model, remove_special_tokens

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SequenceClassifier", "worst_of_windows"]


class SequenceClassifier:
    """A classifier over exchanges, loaded (or shared) at construction.

    Args:
        model_name: directory or Hugging Face id of a sequence-classification model.
        device: torch device or ``auto``.
        dtype: see ``transformer_models.load_model``.
        batch_size: inputs per forward.
        max_length: tokens per input, 0 = the model's limit. A longer input loses its beginning (of a pair:
            the longer part does), see ``is_cut`` and ``windows``.
        plugin: name for errors.
    """

    def __init__(
        self, model_name: str, *, device: str, dtype: str, batch_size: int, max_length: int, plugin: str
    ) -> None:
        self._loaded: LoadedModel = load_model(
            "AutoModelForSequenceClassification", model_name, device=device, dtype=dtype, plugin=plugin
        )
        self._batch_size = batch_size
        self._max_length = self._loaded.max_length(max_length)

    @property
    def labels(self) -> list[str]:
        """[L] names of the outputs, in order."""
        names = self._loaded.model.config.id2label
        return [str(names[i]) for i in range(int(self._loaded.model.config.num_labels))]

    @property
    def is_multi_label(self) -> bool:
        """The outputs are independent (sigmoid each), not one choice (softmax)."""
        return bool(self._loaded.model.config.problem_type == "multi_label_classification")

    def logits(self, exchanges: Sequence[tuple[str, str]], template: str = "") -> Tensor:
        """Return [N, L] float32 logits on the CPU, in the order given.

        Args:
            exchanges: (prompt, response); an empty prompt means the response alone.
            template: text with ``{prompt}`` and ``{response}``; empty = the tokenizer's chat template if it
                has one, else its own encoding of a pair.
        """
        import torch

        encoded = [self._encode(prompt, response, template) for prompt, response in exchanges]
        out = torch.zeros(len(encoded), len(self.labels))
        for indices in self._batches([len(features["input_ids"]) for features in encoded]):
            out[indices] = self._forward([encoded[i] for i in indices])
        return out

    def is_cut(self, prompt: str, response: str, template: str = "") -> bool:
        """Whether the exchange is longer than an input may be."""
        return len(self._encode(prompt, response, template, truncation=False)["input_ids"]) > self._max_length

    def windows(
        self, exchanges: Sequence[tuple[str, str]], template: str = ""
    ) -> tuple[list[tuple[str, str]], list[int]]:
        """Split responses that are too long into overlapping parts, each with its whole prompt.

        Half of a part is in the next one. A prompt that leaves less than a quarter of an input is cut.

        Returns:
            The exchanges of all parts, and for each the index of the exchange it comes from.
        """
        parts: list[tuple[str, str]] = []
        owners: list[int] = []
        for index, (prompt, response) in enumerate(exchanges):
            texts = [response]
            if self.is_cut(prompt, response, template):
                frame = len(self._encode(prompt, "", template, truncation=False)["input_ids"])
                texts = self._split(response, max(self._max_length - frame, self._max_length // 4, 2))
            parts += [(prompt, text) for text in texts]
            owners += [index] * len(texts)
        return parts, owners

    def _split(self, text: str, room: int) -> list[str]:
        """Return overlapping parts of ``text`` of at most ``room`` tokens."""
        tokenizer = self._loaded.tokenizer
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = offsets["offset_mapping"]
        starts = range(0, max(1, len(places) - room // 2), max(1, room // 2))
        return [text[places[s][0] : places[min(s + room, len(places)) - 1][1]] for s in starts] or [text]

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield index lists of inputs of like length, longest first (memory fails early, if at all)."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for start in range(0, len(order), self._batch_size):
            yield order[start : start + self._batch_size]

    def _forward(self, features: list[dict[str, list[int]]]) -> Tensor:
        import torch

        padded = self._loaded.tokenizer.pad(features, padding=True, padding_side="right", return_tensors="pt")
        inputs = {name: value.to(self._loaded.device) for name, value in padded.items()}
        with torch.no_grad(), self._loaded.lock:
            logits: Tensor = self._loaded.model(**inputs).logits
        return logits.float().cpu()

    def _encode(
        self, prompt: str, response: str, template: str, *, truncation: bool = True
    ) -> dict[str, list[int]]:
        tokenizer = self._loaded.tokenizer
        specials = [token for token in tokenizer.all_special_tokens if len(token) > 1]
        prompt, response = remove_special_tokens(prompt, specials), remove_special_tokens(response, specials)
        options: dict[str, Any] = {
            "truncation": truncation,
            "max_length": self._max_length if truncation else None,
            "verbose": False,
            "padding": False,
            "return_attention_mask": True,
        }
        tokenizer.truncation_side = "left"
        if template:
            features = tokenizer(render(template, prompt=prompt, response=response), **options)
        elif prompt and getattr(tokenizer, "chat_template", None):
            text = tokenizer.apply_chat_template(_conversation(prompt, response), tokenize=False)
            # The chat template writes the special tokens itself.
            features = tokenizer(text, add_special_tokens=False, **options)
        elif prompt:
            features = tokenizer(prompt, response, **options)
        else:
            features = tokenizer(response, **options)
        return _non_empty(features, tokenizer)


def worst_of_windows(costs: Sequence[float], owners: Sequence[int], count: int) -> list[float]:
    """Return the largest cost of each of ``count`` exchanges over its windows; NaN where one is."""
    worst = [0.0] * count
    for owner, cost in zip(owners, costs, strict=True):
        worst[owner] = cost if math.isnan(cost) else max(worst[owner], cost)  # max keeps a NaN that is first
    return worst


def _conversation(prompt: str, response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _non_empty(features: Mapping[str, list[int]], tokenizer: Any) -> dict[str, list[int]]:
    """An empty text of a tokenizer without special tokens has no id at all: give it the end token."""
    if features["input_ids"]:
        return dict(features)
    token = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.pad_token_id
    return {name: [token if name == "input_ids" else int(name == "attention_mask")] for name in features}
