"""``rm_hf``: any sequence-classification reward model of ``transformers``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from multitask_rl.config.schema.ranges import Natural
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, FailureKind, RewardResult, Rollout, Score
from multitask_rl_rewards.sequence_classifier import SequenceClassifier
from multitask_rl_rewards.text import question_of
from multitask_rl_rewards.transformer_models import ModelSettings, check_device, read_model_config


class RewardModel:
    """Score a response by the logit of a reward model, as trained on preference pairs.

    With one output the value is that logit (unbounded; only differences mean something). With several,
    ``label`` names one, and the value is its probability.

    Component ``truncated``: 1 where the exchange was longer than ``max_length`` and the response lost its
    end. What stands there is not judged: keep prompt and response below ``max_length``.

    A reward model is a proxy: pair it with a held-out metric of another kind, and a KL leash.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(isolate=False, timeout_s=120.0, batch_size=256)

    @dataclass(kw_only=True, slots=True)
    class Config(ModelSettings):
        """Keys of ``rm_hf`` in a tasks file."""

        max_length: Natural = 2048
        """Tokens of prompt and response, at most the model's limit (0 = that). A response that does not fit
        loses its end; a prompt that leaves it less than a quarter loses its beginning."""
        label: str = ""
        """Output to use of a model with several."""
        template: str = ""
        """Text with ``{prompt}`` and ``{response}``; empty = chat template, else the tokenizer's pair."""

    def __init__(self, config: Config) -> None:
        """Check model and device; weights load at ``warm_up`` or the first score.

        Raises:
            ConfigError: missing model or device, or several outputs and no ``label``.
        """
        self.config = config
        check_device(config, "rm_hf")
        model_config = read_model_config(config.model_name, "rm_hf")
        labels = [str(model_config.id2label[i]) for i in range(model_config.num_labels)]
        if config.label and config.label not in labels:
            raise ConfigError(f"rm_hf: {config.model_name!r} has no label {config.label!r}; it has {labels}.")
        if len(labels) > 1 and not config.label:
            kind = next(iter(model_config.architectures or []), "")
            if kind.endswith(("ForCausalLM", "LMHeadModel")):  # its labels are those of any configuration
                raise ConfigError(
                    f"rm_hf: {config.model_name!r} is a {kind}, no reward model: give a model trained as a "
                    "sequence classifier on preference pairs, such as RewardTrainer of TRL saves."
                )
            raise ConfigError(
                f"rm_hf: {config.model_name!r} has {len(labels)} outputs; set `label` to one of {labels}."
            )
        self._index = labels.index(config.label) if config.label else 0

    @cached_property
    def _classifier(self) -> SequenceClassifier:
        return SequenceClassifier(self.config, "rm_hf")

    def warm_up(self) -> None:
        """Load the weights (before step 1, so that a full device is found then)."""
        self._classifier.logits([("warm", "up")], self.config.template)

    def score(self, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Return one value per rollout, in order."""
        exchanges = [(question_of(r, self.config.prompt_column), r.response) for r in rollouts]
        logits = self._classifier.logits(exchanges, self.config.template)
        if logits.shape[1] > 1:
            logits = logits.softmax(dim=1)
        cut = [self._classifier.is_cut(*exchange, self.config.template) for exchange in exchanges]
        results: list[RewardResult] = []
        for value, is_cut in zip(logits[:, self._index].tolist(), cut, strict=True):
            if math.isfinite(value):
                results.append(Score(value=value, components={"truncated": float(is_cut)}))
            else:
                message = f"the reward model returned {value}"
                results.append(Failure(kind=FailureKind.grader, message=message, source="rm_hf"))
        return results
