"""GRPO, group-relative policy optimisation: the default algorithm and the base class of its variants.

One advantage per response, from its group. Variants override the baseline (``centre``) or the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from multitask_rl.algorithms import group
from multitask_rl.algorithms.base import (
    Algorithm,
    AlgorithmConfig,
    Credit,
    CreditBatch,
    LossOutput,
    TokenBatch,
)
from multitask_rl.algorithms.group import subtract_costs
from multitask_rl.algorithms.kl import sampled_kl
from multitask_rl.algorithms.policy_loss import policy_loss
from multitask_rl.algorithms.ragged import broadcast, check_tokens, segment_sum
from multitask_rl.algorithms.running import RunningScale
from multitask_rl.config.schema.ranges import OneOf, Positive
from multitask_rl.errors import PluginError

Normalisation = Annotated[str, OneOf("group", "task", "none")]


@dataclass(kw_only=True, slots=True)
class GRPOConfig(AlgorithmConfig):
    """Settings of ``GRPO``."""

    clip_high: Positive = 0.28
    """Upper clip of the ratio: 1 + clip_high (clip-higher of DAPO)."""
    normalisation: Normalisation = "task"
    """Divisor of centred rewards: ``group`` = standard deviation of the group (as in the paper; gives more
    weight to prompts that are almost always or almost never solved), ``task`` = running scale of the task's
    within-group deviations (tasks comparable, prompts unweighted), ``none`` = 1 (the reward's scale acts as a
    loss weight)."""


class GRPO(Algorithm):
    """Group-relative advantages with PPO's clipped ratio.

    ``A_i = (A^r_i - lambda A^c_i) / (1 + lambda) - beta (K_i - mean K)`` for every token of response i, where
    ``A^r = (r_i - mean r) / s`` over the group, ``A^c`` the same of the constraint costs (only with a
    multiplier lambda > 0), and ``K_i = sum_t log(old / reference)`` the KL penalty inside the reward (k1).

    Rewards, costs and KL are combined as advantages, after scaling: beta is in units of the normalised
    reward. Normalising a combined reward instead would let lambda act only through the sign of 1 - lambda,
    and would turn tiny KL differences of an all-solved group into full-size advantages.

    Source: DeepSeekMath (arXiv:2402.03300) sec. 4.1; centring without the group's deviation: Dr.GRPO
    (arXiv:2503.20783); scale per task: AgentRL (arXiv:2510.04206); (1 + lambda): OmniSafe's ``sum_norm`` and
    Stooke et al. (arXiv:2007.03964); k1 in the reward: arXiv:2512.21852.
    """

    Config: ClassVar[type[AlgorithmConfig]] = GRPOConfig
    config: GRPOConfig

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self._scales = {"reward": RunningScale()}

    @property
    def min_group_size(self) -> int:
        """Two: an advantage compares a response with the others of its group."""
        return 2

    def is_informative(self, rewards: Sequence[float]) -> bool:
        """Whether the group's rewards differ."""
        return group.has_variance(rewards)

    def centre(self, values: Tensor, batch: CreditBatch) -> Tensor:
        """Return values [B] minus the baseline of their group."""
        return group.centre(values, batch.groups)

    def normalise(self, deviations: Tensor, batch: CreditBatch, signal: str) -> Tensor:
        """Return centred values [B] divided as the setting ``normalisation`` says.

        ``task`` updates and uses the running scale of ``signal``: ``reward`` or ``cost/<constraint>``.
        """
        if self.config.normalisation == "none":
            return deviations
        if self.config.normalisation == "group":
            return group.divide_by_group_std(deviations, batch.groups)
        scale = self._scales.setdefault(signal, RunningScale())
        mean_square = group.mean_square_deviation(deviations, batch.groups)
        if mean_square > 0:
            scale.update(mean_square)
        return deviations / scale.value

    def reward_advantages(self, batch: CreditBatch) -> Tensor:
        """Return the rewards' part of the advantage [B]."""
        return self.normalise(self.centre(batch.rewards, batch), batch, "reward")

    def credit(self, batch: CreditBatch) -> Credit:
        """Return one advantage per response, given to each of its tokens."""
        check_tokens(batch.lengths, old_logprobs=batch.old_logprobs, ref_logprobs=batch.ref_logprobs)
        advantages = _checked(self.reward_advantages(batch), len(batch.rewards))
        metrics = {"reward_scale": self._scales["reward"].value}

        def of_cost(own: CreditBatch, index: int) -> Tensor:
            name = batch.constraints[index] if batch.constraints else str(index)
            return self.normalise(self.centre(own.rewards, own), own, f"cost/{name}")

        advantages = subtract_costs(advantages, batch, of_cost)
        if batch.kl_coefficient > 0:
            samples = broadcast(torch.arange(len(batch.groups), device=batch.groups.device), batch.lengths)
            response_kl = segment_sum(sampled_kl(batch), samples, len(batch.groups))
            penalty = self.centre(response_kl, batch).to(advantages.dtype)
            advantages = advantages - batch.kl_coefficient * penalty
            metrics["response_kl"] = float(response_kl.mean())
        metrics["advantage_rms"] = float(advantages.square().mean().sqrt()) if len(advantages) else 0.0
        return Credit(advantages=broadcast(advantages, batch.lengths), metrics=metrics)

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return the clipped policy loss per token."""
        return policy_loss(batch, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {f"{signal}_scale": scale.state_dict() for signal, scale in self._scales.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._scales = {"reward": RunningScale()}  # costs that came later have none
        for key, saved in state.items():
            self._scales.setdefault(key.removesuffix("_scale"), RunningScale()).load_state_dict(saved)

    def forget(self, redefined: Collection[str]) -> None:
        """Restart the running scales of the signals ``redefined``: ``reward``, ``cost/<constraint>``."""
        self._scales |= {signal: RunningScale() for signal in redefined}


def _checked(advantages: object, number: int) -> Tensor:
    """Return what ``reward_advantages`` of a subclass returned; ``PluginError`` if it is not [B]."""
    if isinstance(advantages, Tensor) and tuple(advantages.shape) == (number,):
        return advantages
    found = f"{advantages!r:.80}"
    if isinstance(advantages, Tensor):
        found = f"a tensor of shape {tuple(advantages.shape)}"
    raise PluginError(
        f"reward_advantages() returned {found}, expected a tensor [{number}]: one value per response"
    )
