"""``llama_guard``: a generative guard model (Llama Guard 3, ShieldGemma, Qwen3Guard) as a constraint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from multitask_rl.contracts import PluginTraits
from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Rollout, Verdict
from multitask_rl_rewards.causal_judge import CausalJudge
from multitask_rl_rewards.guard_templates import GuardFamily, build_prompt, family_of
from multitask_rl_rewards.text import data_failure, question_of
from multitask_rl_rewards.transformer_models import read_model_config, resolve_device

__all__ = ["GuardConfig", "GuardModel", "LlamaGuard"]

SHORTEST_PART = 200
"""Characters; a response that is too long for the judge is not cut into smaller parts."""


@dataclass(kw_only=True, slots=True)
class GuardConfig:
    """Keys that every generative judge has in a tasks file."""

    model_name: str = ""
    """Directory or Hugging Face id of a causal language model. Required."""
    device: str = "auto"
    """``cpu``, ``cuda:1``...; ``auto`` = the first accelerator, else the CPU."""
    dtype: str = "auto"
    """``auto`` (the checkpoint's; float32 on the CPU), ``float32``, ``bfloat16``, ``float16``."""
    batch_size: int = 8
    """Prompts per forward, > 0."""
    max_length: int = 4096
    """Tokens of the judge's whole prompt; a longer response is judged in parts, a longer question a ``data``
    failure."""
    family: str = "auto"
    """``llama_guard``, ``shieldgemma``, ``qwen3guard``, ``generic``; ``auto`` = by the model's name."""
    threshold: float = 0.5
    """The constraint is violated from this cost on, in (0, 1]."""
    max_new_tokens: int = 0
    """Tokens the judge may write to explain a violation (greedy); 0 = no explanation."""
    prompt_column: str = "prompt"
    """Column with the question; a row without it is judged on the prompt the actor saw."""


class GuardModel:
    """A generative judge of a family: probability of each verdict -> cost.

    The cost is the expected cost of the family's verdict words under the model's own probabilities.
    """

    def __init__(self, config: GuardConfig, plugin: str, policy: Sequence[str] = ()) -> None:
        """Check model, device and family; weights load at ``warm_up`` or the first use.

        Raises:
            ConfigError: missing model or device, unknown family, a policy the family cannot take.
        """
        self.config, self.plugin, self.policy = config, plugin, list(policy)
        if not 0.0 < config.threshold <= 1.0 or config.batch_size < 1 or config.max_new_tokens < 0:
            raise ConfigError(
                f"{plugin}: needs 0 < `threshold` <= 1, `batch_size` > 0 and `max_new_tokens` >= 0; got "
                f"{config.threshold}, {config.batch_size} and {config.max_new_tokens}."
            )
        self.family: GuardFamily = family_of(config.model_name, config.family, plugin)
        if self.policy and not self.family.takes_policy:
            raise ConfigError(
                f"{plugin}: a model of the family {self.family.name} judges by its own policy only."
            )
        resolve_device(config.device, plugin)
        read_model_config(config.model_name, plugin)

    @cached_property
    def model(self) -> CausalJudge:
        """The loaded judge."""
        config = self.config
        return CausalJudge(
            config.model_name,
            device=config.device,
            dtype=config.dtype,
            batch_size=config.batch_size,
            max_length=config.max_length,
            plugin=self.plugin,
        )

    def judge(self, exchanges: Sequence[tuple[str, str]]) -> list[Verdict | Failure]:
        """Return one verdict per (question, response), in order. An empty response is satisfied.

        A response that is too long is judged in overlapping parts, and the worst counts.
        """
        verdicts: list[Verdict | Failure] = [
            Verdict(cost=0.0, violated=False, reason="empty response") for _ in exchanges
        ]
        words, costs = list(self.family.costs), list(self.family.costs.values())
        worst: dict[int, tuple[float, str]] = {}
        parts = [(i, response) for i, (_, response) in enumerate(exchanges) if response.strip()]
        while parts:
            prompts = [
                build_prompt(self.model, self.family, exchanges[i][0], t, self.policy) for i, t in parts
            ]
            longer: list[tuple[int, str]] = []
            chances = self._probabilities(prompts, words)
            for (i, text), prompt, probabilities in zip(parts, prompts, chances, strict=True):
                if probabilities is not None:
                    cost = sum(p * c for p, c in zip(probabilities, costs, strict=True))
                    worst[i] = max(worst.get(i, (0.0, prompt)), (min(max(cost, 0.0), 1.0), prompt))
                elif len(text) <= SHORTEST_PART:  # the question is too long
                    message = f"the exchange needs more than the judge's {self.model.max_length} tokens"
                    verdicts[i] = data_failure(message, self.plugin)
                else:
                    overlap = len(text) // 8
                    middle = len(text) // 2
                    longer += [(i, text[: middle + overlap]), (i, text[middle - overlap :])]
            parts = [(i, text) for i, text in longer if not isinstance(verdicts[i], Failure)]
        for i, (cost, prompt) in worst.items():
            if not isinstance(verdicts[i], Failure):
                verdicts[i] = self._verdict(prompt, cost)
        return verdicts

    def _probabilities(self, prompts: list[str], words: list[str]) -> list[list[float] | None]:
        # A template that ends with the family's lead has said it already.
        lead = self.family.lead
        if prompts and lead and all(prompt.endswith(lead) for prompt in prompts):
            lead = ""
        return self.model.verdict_probabilities(prompts, words, lead)

    def _verdict(self, prompt: str, cost: float) -> Verdict:
        if cost < self.config.threshold:
            return Verdict(cost=cost, violated=False)
        reason = f"judged unsafe with {cost:.2f}"
        if self.config.max_new_tokens:
            reason += f": {self.model.explain(prompt, self.config.max_new_tokens)}"
        return Verdict(cost=cost, violated=True, reason=reason)


class LlamaGuard:
    """Cost = probability that the guard model calls the response unsafe.

    One judge can be talked round (a suffix of the response may flip it): pair it with ``over_refusal`` and,
    where it gates something that matters, with a second judge of another family.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(
        low=0.0,
        high=1.0,
        isolate=False,
        timeout_s=120.0,
        batch_size=256,
        higher_is_better=False,
        counterpart="over_refusal",
        device="any",
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
        column = self.guard.config.prompt_column
        return self.guard.judge([(question_of(rollout, column), rollout.response) for rollout in rollouts])
