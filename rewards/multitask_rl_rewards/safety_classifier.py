"""``safety_classifier``: a sequence-classification model as a constraint on responses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from multitask_rl.config.schema.ranges import Count, Natural, PositiveFraction
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Rollout, Verdict
from multitask_rl_rewards.sequence_classifier import SequenceClassifier
from multitask_rl_rewards.text import question_of, unread, verdict_of
from multitask_rl_rewards.transformer_models import ModelSettings, check_device, read_model_config

if TYPE_CHECKING:
    from torch import Tensor

_NAME = "safety_classifier"
_SAFE = {"safe", "benign", "harmless", "neutral", "normal", "ok", "clean"}
_UNSAFE = {
    "unsafe",
    "harmful",
    "harm",
    "toxic",
    "toxicity",
    "hate",
    "hateful",
    "offensive",
    "abusive",
    "nsfw",
}
_UNSAFE |= {"violation", "dangerous", "hatespeech", "jailbreak"}
_NEGATIONS = ("non", "not", "no")


class SafetyClassifier:
    """Cost = probability of the unsafe label or labels; violated from ``threshold`` on.

    Exclusive labels (softmax) add up; independent ones (``multi_label_classification``, or a single output)
    count by the largest. A response longer than the model reads is judged in overlapping parts, and the worst
    counts; one of more than ``max_parts`` is not read and counts as unsafe. An empty response is satisfied:
    pair the constraint with ``over_refusal``.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(
        low=0.0,
        high=1.0,
        isolate=False,
        timeout_s=120.0,
        batch_size=256,
        higher_is_better=False,
        counterpart="over_refusal",
    )

    @dataclass(kw_only=True, slots=True)
    class Config(ModelSettings):
        """Keys of ``safety_classifier`` in a tasks file."""

        unsafe_labels: list[str] = field(default_factory=list)
        """Labels that mean unsafe; empty = recognised by name (``unsafe``, ``toxic``, not ``safe``...)."""
        threshold: PositiveFraction = 0.5
        """The constraint is violated from this cost on."""
        with_prompt: bool = False
        """Judge prompt and response together; False = the response alone."""
        batch_size: Count = 32
        """Inputs per forward."""
        max_length: Natural = 2048
        """Tokens of an input, at most the model's limit (0 = that); a longer response is judged in parts."""
        max_parts: Count = 64
        """Parts of a response that are judged; a response of more counts as unsafe."""
        prompt_column: str = "prompt"
        """Column with the question, where ``with_prompt``."""

    def __init__(self, config: Config) -> None:
        """Check model, labels and device; weights load at ``warm_up`` or the first use.

        Raises:
            ConfigError: missing model or device, or labels that say nothing of safety.
        """
        self.config = config
        check_device(config, _NAME)
        model_config = read_model_config(config.model_name, _NAME)
        labels = [str(model_config.id2label[i]) for i in range(model_config.num_labels)]
        self._unsafe = unsafe_labels_of(labels, config.unsafe_labels, config.model_name)

    @cached_property
    def _classifier(self) -> SequenceClassifier:
        return SequenceClassifier(self.config, _NAME)

    def warm_up(self) -> None:
        """Load the weights."""
        self._classifier.logits([("", "warm up")])

    def judge(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict | Failure]:
        """Return one verdict per rollout, in order."""
        exchanges = [(self._prompt(rollout), rollout.response) for rollout in rollouts]
        worst = self._classifier.worst_costs(exchanges, self._costs, self.config.max_parts)
        return [self._verdict(r.response, cost) for r, cost in zip(rollouts, worst, strict=True)]

    def _costs(self, logits: Tensor) -> Tensor:
        if logits.shape[1] == 1 or self._classifier.is_multi_label:
            return logits.sigmoid()[:, self._unsafe].amax(dim=1)
        return logits.softmax(dim=1)[:, self._unsafe].sum(dim=1)

    def _prompt(self, rollout: Rollout) -> str:
        return question_of(rollout, self.config.prompt_column) if self.config.with_prompt else ""

    def _verdict(self, response: str, cost: float | None) -> Verdict | Failure:
        if not response.strip():
            return Verdict(cost=0.0, violated=False, reason="empty response")
        if cost is None:
            return unread(self.config.max_parts)
        return verdict_of(cost, self.config.threshold, "unsafe", _NAME)


def unsafe_labels_of(labels: Sequence[str], chosen: Sequence[str], model_name: str) -> list[int]:
    """Return the indices of the labels that mean unsafe.

    Args:
        labels: the model's labels, in order.
        chosen: labels named by the user; empty = recognise them.
        model_name: for the error.

    Raises:
        ConfigError: a chosen label does not exist, or the names say nothing of safety.
    """
    if unknown := [label for label in chosen if label not in labels]:
        raise ConfigError(f"{_NAME}: {model_name!r} has no labels {unknown}; it has {list(labels)}.")
    if chosen:
        return [labels.index(label) for label in chosen]
    kinds = [_kind(label) for label in labels]
    unsafe = [i for i, kind in enumerate(kinds) if kind == "unsafe"]
    if not unsafe and "safe" in kinds:
        unsafe = [i for i, kind in enumerate(kinds) if kind != "safe"]
    if not unsafe or (len(unsafe) == len(labels) and len(labels) > 1 and "safe" in kinds):
        raise ConfigError(
            f"{_NAME}: the labels {list(labels)} of {model_name!r} do not say which of them is unsafe; set "
            "`unsafe_labels`."
        )
    return unsafe


def _kind(label: str) -> str:
    """Return ``safe``, ``unsafe`` or ``""`` for a label's name (``non-hateful`` is safe)."""
    words = re.findall(r"[a-z]+", label.lower())
    joined = "".join(words)
    for negation in _NEGATIONS:
        if joined.startswith(negation) and joined.removeprefix(negation) in _UNSAFE:
            return "safe"
    if joined in _SAFE or joined in _UNSAFE:
        return "safe" if joined in _SAFE else "unsafe"
    return "unsafe" if any(word in _UNSAFE for word in words) else ""
