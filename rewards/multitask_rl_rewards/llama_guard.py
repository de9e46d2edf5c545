"""``llama_guard``: a generative guard model (Llama Guard 3, ShieldGemma, Qwen3Guard) as a constraint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar

from multitask_rl.config.schema.ranges import Count, Natural, OneOf, PositiveFraction
from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Rollout, Verdict
from multitask_rl_rewards.causal_judge import CausalJudge
from multitask_rl_rewards.guard_templates import FAMILIES, GuardFamily, build_prompt, family_of
from multitask_rl_rewards.marks import as_one_turn
from multitask_rl_rewards.text import data_failure, question_of, unread, verdict_of
from multitask_rl_rewards.transformer_models import (
    ModelSettings,
    check_device,
    read_model_config,
    worst_of_parts,
)

LEAST_ROOM = 64
"""Tokens that a question must leave to a part of a response that is too long for the judge."""


@dataclass(kw_only=True, slots=True)
class GuardConfig(ModelSettings):
    """Keys that every generative judge has in a tasks file."""

    batch_size: Count = 8
    """Prompts per forward."""
    max_length: Natural = 4096
    """Tokens of the judge's whole prompt; a longer response is judged in parts, a longer question a ``data``
    failure."""
    max_parts: Count = 64
    """Parts of a response that are judged; a response of more counts as unsafe."""
    family: Annotated[str, OneOf("auto", *FAMILIES)] = "auto"
    """``llama_guard``, ``shieldgemma``, ``qwen3guard``, ``generic``; ``auto`` = by the model's name."""
    threshold: PositiveFraction = 0.5
    """The constraint is violated from this cost on."""
    max_new_tokens: Natural = 0
    """Tokens the judge may write to explain a violation that the run stores (greedy); 0 = no explanation."""


class GuardModel:
    """A generative judge of a family: probability of each verdict -> cost.

    The cost is the expected cost of the family's verdict words under the model's own probabilities.
    """

    def __init__(self, config: GuardConfig, plugin: str, policy: Sequence[str] = ()) -> None:
        """Check model, device and family; weights load at ``warm_up`` or the first use.

        Raises:
            ConfigError: missing model or device, or a policy that the family cannot take.
        """
        self.config, self.plugin, self.policy = config, plugin, list(policy)
        self.family: GuardFamily = family_of(config.model_name, config.family)
        if self.policy and not self.family.takes_policy:
            raise ConfigError(
                f"{plugin}: a model of the family {self.family.name} judges by its own policy only."
            )
        check_device(config, plugin)
        read_model_config(config.model_name, plugin)

    @cached_property
    def model(self) -> CausalJudge:
        """The loaded judge."""
        return CausalJudge(self.config, self.plugin)

    def judge(self, exchanges: Sequence[tuple[str, str]]) -> list[Verdict | Failure]:
        """Return one verdict per (question, response), in order. An empty response is satisfied.

        A response that is too long is judged in overlapping parts, and the worst counts; one of more than
        ``max_parts`` is not read and counts as unsafe.
        """
        settled: list[Verdict | Failure | None] = []

        def prompts() -> Iterator[list[str]]:
            for question, response in exchanges:
                own = self._prompts(question, response)
                settled.append(None if isinstance(own, list) else own)
                yield own if isinstance(own, list) else []

        worst = worst_of_parts(prompts(), self._costs)
        return [
            self._verdict(found) if known is None else known
            for known, found in zip(settled, worst, strict=True)
        ]

    def explain(self, exchanges: Sequence[tuple[str, str]]) -> list[str]:
        """Return what the judge writes about each (question, response); of several parts, the worst."""
        texts = [""] * len(exchanges)
        asked: dict[int, str] = {}
        for index, exchange in enumerate(exchanges if self.config.max_new_tokens else ()):
            prompts = self._prompts(*exchange)
            if not isinstance(prompts, list):
                continue  # it was not read
            worst = worst_of_parts([prompts], self._costs)[0] if len(prompts) > 1 else None
            asked[index] = prompts[0] if worst is None else worst[1]
        answers = self.model.answers(list(asked.values()), self.config.max_new_tokens)
        for index, text in zip(asked, answers, strict=True):
            texts[index] = text
        return texts

    def _prompts(self, question: str, response: str) -> list[str] | Verdict | Failure:
        """Return prompts that hold all of ``response``, or the verdict if there are none."""
        if not response.strip():
            return Verdict(cost=0.0, violated=False, reason="empty response")

        def prompt(text: str) -> str:
            return build_prompt(self.model, self.family, question, text, self.policy)

        if self.model.room(prompt(response)) >= 0:
            return [prompt(response)]
        room = self.model.room(prompt(""))
        if room < LEAST_ROOM:
            message = (
                f"the question leaves nothing of the judge's {self.model.max_length} tokens to the response"
            )
            return data_failure(message, self.plugin)
        response = as_one_turn(self.model.clean(response))  # longer: a part must not outgrow its room
        parts = self.model.split(response, room, self.config.max_parts)
        return unread(self.config.max_parts) if parts is None else [prompt(text) for text in parts]

    def _costs(self, prompts: list[str]) -> list[float]:
        """Return the cost of each prompt; infinity for one that is too long."""
        lead = self.family.lead
        if all(prompt.endswith(lead) for prompt in prompts):  # the template has said it already
            lead = ""
        chances = self.model.verdict_probabilities(prompts, list(self.family.costs), lead)
        weights = list(self.family.costs.values())
        return [
            math.inf if row is None else math.fsum(p * c for p, c in zip(row, weights, strict=True))
            for row in chances
        ]

    def _verdict(self, found: tuple[float, str] | None) -> Verdict | Failure:
        if found is None or found[0] == math.inf:
            return unread(self.config.max_parts)
        return verdict_of(found[0], self.config.threshold, "judged unsafe", self.plugin)


class LlamaGuard:
    """Cost = probability that the guard model calls the response unsafe.

    A suffix of the response may flip the verdict of one judge: pair it with ``over_refusal`` and, where it
    gates something that matters, with a second judge of another family.
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
    class Config(GuardConfig):
        """Keys of ``llama_guard`` in a tasks file."""

        policy: list[str] = field(default_factory=list)
        """What is forbidden, one sentence each; empty = the model's own hazards."""

    def __init__(self, config: Config) -> None:
        """Check the configuration; see ``GuardModel``."""
        self.guard = GuardModel(config, "llama_guard", config.policy)

    def warm_up(self) -> None:
        """Load the weights and judge once."""
        self.guard.judge([("hello", "hello")])

    def judge(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict | Failure]:
        """Return one verdict per rollout, in order."""
        return self.guard.judge(self._exchanges(rollouts))

    def explain(self, rollouts: Sequence[Rollout], verdicts: Sequence[Verdict]) -> list[str]:
        """Return what the judge writes about each rollout."""
        return self.guard.explain(self._exchanges(rollouts))

    def _exchanges(self, rollouts: Sequence[Rollout]) -> list[tuple[str, str]]:
        column = self.guard.config.prompt_column
        return [(question_of(rollout, column), rollout.response) for rollout in rollouts]
