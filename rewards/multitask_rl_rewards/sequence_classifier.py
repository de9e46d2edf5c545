"""Sequence-classification models on (prompt, response) exchanges: encoding and batching by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from multitask_rl_rewards.text import render
from multitask_rl_rewards.transformer_models import (
    LoadedModel,
    ModelSettings,
    batches,
    load_model,
    worst_of_parts,
)

if TYPE_CHECKING:
    from torch import Tensor


class SequenceClassifier:
    """A sequence-classification model over exchanges, loaded (or shared) at construction.

    In an input of more than ``config.max_length`` tokens the response loses its end; ``worst_costs`` reads it
    in parts. The prompt stays whole, unless it leaves less than a quarter of an input to the response: then
    it loses its beginning. ``plugin`` is the name for errors.
    """

    def __init__(self, config: ModelSettings, plugin: str) -> None:
        self._loaded: LoadedModel = load_model("AutoModelForSequenceClassification", config, plugin)
        self._batch_size = config.batch_size
        self._max_length = self._loaded.max_length(config.max_length)

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

        encoded = [
            self._encode(p, self._fitted(p, response, template), template) for p, response in exchanges
        ]
        out = torch.zeros(len(encoded), len(self.labels))
        for indices in batches([len(features["input_ids"]) for features in encoded], self._batch_size):
            out[indices] = self._forward([encoded[i] for i in indices])
        return out

    def is_cut(self, prompt: str, response: str, template: str = "") -> bool:
        """Whether the exchange is longer than an input may be."""
        return self._length(prompt, response, template) > self._max_length

    def is_prompt_cut(self, prompt: str, response: str) -> bool:
        """Whether ``prompt`` leaves too little of an input to ``response``, and loses its beginning."""
        return self._room(prompt, "") < self._least_room and self.is_cut(prompt, response)

    def worst_costs(
        self, exchanges: Sequence[tuple[str, str]], cost: Callable[[Tensor], Tensor], most: int
    ) -> list[float | None]:
        """Return the largest cost of each exchange over the parts of its response.

        A response that is too long is read in overlapping parts, each with its whole prompt; a prompt that
        leaves less than a quarter of an input is cut.

        Args:
            exchanges: (prompt, response); an empty prompt means the response alone.
            cost: [N, L] logits -> [N] costs.
            most: parts of a response that are read, > 0.

        Returns:
            NaN where a part's cost is; None for a response of more than ``most`` parts.
        """
        parts = ([(prompt, part) for part in self._parts(prompt, text, most)] for prompt, text in exchanges)
        worst = worst_of_parts(parts, lambda own: cost(self.logits(own)).tolist())
        return [None if found is None else found[0] for found in worst]

    @property
    def _least_room(self) -> int:
        return max(self._max_length // 4, 2)

    def _room(self, prompt: str, template: str) -> int:
        """Return the tokens that ``prompt`` leaves of an input."""
        return self._max_length - self._length(prompt, "", template)

    def _length(self, prompt: str, response: str, template: str) -> int:
        return len(self._encode(prompt, response, template, truncation=False)["input_ids"])

    def _fitted(self, prompt: str, response: str, template: str) -> str:
        """Return ``response`` without the end that an input has no room for."""
        if not self.is_cut(prompt, response, template):
            return response
        response = self._loaded.clean(response)
        room, fitted = max(self._room(prompt, template), self._least_room), ""
        for _ in range(3):  # beside other text the response may have a token more
            fitted = self._loaded.beginning(response, room)
            excess = self._length(prompt, fitted, template) - self._max_length
            if excess <= 0:
                break
            room = max(room - excess, self._least_room)
        return fitted

    def _parts(self, prompt: str, response: str, most: int) -> list[str]:
        """Return the parts of ``response`` that are read; none if there are more than ``most``."""
        if not self.is_cut(prompt, response):
            return [response]
        room = max(self._room(prompt, ""), self._least_room)
        return self._loaded.split(self._loaded.clean(response), room, most) or []

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
        prompt, response = self._loaded.clean(prompt), self._loaded.clean(response)
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
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            # The chat template writes the special tokens itself.
            features = tokenizer(text, add_special_tokens=False, **options)
        elif prompt:
            features = tokenizer(prompt, response, **options)
        else:
            features = tokenizer(response, **options)
        if features["input_ids"]:
            return dict(features)
        # An empty text of a tokenizer without special tokens has no id: give it the end token.
        token = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.pad_token_id
        return {name: [token if name == "input_ids" else int(name == "attention_mask")] for name in features}
