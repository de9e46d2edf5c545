"""``fact_checker``: does the evidence contradict the response? By an NLI classifier or a generative judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from multitask_rl.config.schema.ranges import Natural
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Rollout, Verdict
from multitask_rl_rewards.llama_guard import GuardConfig, GuardModel
from multitask_rl_rewards.sequence_classifier import SequenceClassifier
from multitask_rl_rewards.text import question_of, unread, value_of, verdict_of
from multitask_rl_rewards.transformer_models import check_device, read_model_config

_NAME = "fact_checker"
_POLICY = (
    "Factual errors. The answer states something that the evidence or question contradicts, or that is false."
)
_CONTRADICTION = ("contradiction", "contradictory", "contradicts", "refutes", "refuted", "refute")


class FactChecker:
    """Cost = probability that the response is wrong by the evidence.

    A sequence-classification model (NLI) reads evidence and response as premise and hypothesis; the cost is
    the probability of contradiction. A causal language model (Llama Guard, ShieldGemma, any instruct model)
    answers whether the response contains a factual error.

    A response longer than an input of the classifier is judged in overlapping parts, and the worst counts.
    The reason of a verdict says if the evidence was cut.

    The evidence is the column ``evidence``, else the question itself ("Claim: ... Evidence: ..."). An empty
    response, or one that states nothing, is satisfied: the task needs a reward of what the response says.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(
        low=0.0,
        high=1.0,
        isolate=False,
        timeout_s=120.0,
        batch_size=256,
        higher_is_better=False,
    )

    @dataclass(kw_only=True, slots=True)
    class Config(GuardConfig):
        """Keys of ``fact_checker`` in a tasks file."""

        evidence_column: str = ""
        """Column with the evidence; empty = ``evidence`` where the row has it, else the question."""
        contradiction_labels: list[str] = field(default_factory=list)
        """NLI labels that mean wrong; empty = recognised by name (``contradiction``, ``refutes``)."""
        max_new_tokens: Natural = 128
        """Tokens a generative judge may write to explain a violation that the run stores (greedy); 0 = no
        explanation."""

    def __init__(self, config: Config) -> None:
        """Check model and device; weights load at ``warm_up`` or the first use.

        Raises:
            ConfigError: missing model or device, or a model that is neither classifier nor language model.
        """
        self.config = config
        check_device(config, _NAME)
        model_config = read_model_config(config.model_name, _NAME)
        architectures = list(getattr(model_config, "architectures", None) or [])
        self._is_classifier = any(name.endswith("ForSequenceClassification") for name in architectures)
        self._wrong: list[int] = []
        if self._is_classifier:
            labels = [str(model_config.id2label[i]) for i in range(model_config.num_labels)]
            self._wrong = _contradictions(labels, config)
        elif any("CausalLM" in name or "ConditionalGeneration" in name for name in architectures):
            self._judge = GuardModel(config, _NAME, [_POLICY])
        else:
            raise ConfigError(
                f"{_NAME}: {config.model_name!r} is {architectures or 'of no declared architecture'}; "
                "expected a sequence-classification (NLI) model or a causal language model."
            )

    @cached_property
    def _classifier(self) -> SequenceClassifier:
        return SequenceClassifier(self.config, _NAME)

    def warm_up(self) -> None:
        """Load the weights and judge once."""
        self._judge_all([("the sky is blue", "the sky is blue")])

    def judge(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict | Failure]:
        """Return one verdict per rollout, in order; a missing evidence column is a ``data`` failure."""
        evidence = [self._evidence(rollout) for rollout in rollouts]
        asked = [i for i, text in enumerate(evidence) if not isinstance(text, Failure)]
        verdicts = self._judge_all([(str(evidence[i]), rollouts[i].response) for i in asked])
        found: dict[int, Verdict | Failure] = dict(zip(asked, verdicts, strict=True))
        return [text if isinstance(text, Failure) else found[i] for i, text in enumerate(evidence)]

    def explain(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> list[str]:
        """Return what a generative judge writes about each rollout; "" from a classifier."""
        if self._is_classifier:
            return [""] * len(rollouts)
        return self._judge.explain([(str(self._evidence(rollout)), rollout.response) for rollout in rollouts])

    def _evidence(self, rollout: Rollout) -> str | Failure:
        if self.config.evidence_column:
            value = value_of(rollout.row, self.config.evidence_column, _NAME)
            return value if isinstance(value, Failure) else str(value)
        evidence = rollout.row.get("evidence")
        question = question_of(rollout, self.config.prompt_column)
        if not evidence:
            return question
        return str(evidence) if self._is_classifier else f"{question}\n\nEvidence: {evidence}"

    def _judge_all(self, exchanges: list[tuple[str, str]]) -> list[Verdict | Failure]:
        if not self._is_classifier:
            return self._judge.judge(exchanges)
        worst = self._classifier.worst_costs(
            exchanges, lambda logits: logits.softmax(dim=1)[:, self._wrong].sum(dim=1), self.config.max_parts
        )
        return [
            self._verdict(exchange[1], cost, is_cut=self._classifier.is_prompt_cut(*exchange))
            for exchange, cost in zip(exchanges, worst, strict=True)
        ]

    def _verdict(self, response: str, cost: float | None, *, is_cut: bool) -> Verdict | Failure:
        if not response.strip():
            return Verdict(cost=0.0, violated=False, reason="empty response")
        if cost is None:
            return unread(self.config.max_parts)
        verdict = verdict_of(cost, self.config.threshold, "contradicted", _NAME)
        if is_cut and isinstance(verdict, Verdict):
            told = f"{verdict.reason} (truncated: the evidence is longer than the model reads)".lstrip()
            verdict = replace(verdict, reason=told)
        return verdict


def _contradictions(labels: list[str], config: FactChecker.Config) -> list[int]:
    if unknown := [label for label in config.contradiction_labels if label not in labels]:
        raise ConfigError(f"{_NAME}: {config.model_name!r} has no labels {unknown}; it has {labels}.")
    chosen = config.contradiction_labels or [label for label in labels if label.lower() in _CONTRADICTION]
    if not chosen or len(labels) < 2:
        raise ConfigError(
            f"{_NAME}: the labels {labels} of {config.model_name!r} do not say which means contradiction; "
            "set `contradiction_labels`."
        )
    return [labels.index(label) for label in chosen]
