"""Proximal policy optimisation with a critic: a value head per task, GAE, KL penalty per token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
from multitask_rl.algorithms.ragged import check_tokens, discounted_suffix_sum, last_tokens
from multitask_rl.algorithms.running import RunningMoments
from multitask_rl.config.schema.ranges import Fraction, NotNegative, PositiveFraction

_ADVANTAGE_FLOOR = 0.1
"""Smallest divisor of the advantages, in standard deviations of the reward. If the critic explains nearly
all of the reward, the residual is noise and must not be whitened to unit variance."""


def compute_gae(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages [N] and critic targets [N] by generalised advantage estimation.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = sum_k (gamma lambda)^k delta_{t+k}``, ``R_t = A_t +
    V_t``. Every response ends its episode: V after the last token is 0, also when the token limit cut it off.

    ``values`` [N] are the critic's before each token; ``token_rewards`` is [N], ``lengths`` [B] int64.

    Source: Schulman et al., "High-Dimensional Continuous Control Using GAE" (arXiv:1506.02438) Eq. 16.

    >>> rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.5])
    >>> compute_gae(rewards, values, torch.tensor([2]), gamma=1.0, gae_lambda=1.0)[0].tolist()
    [0.75, 0.5]
    """
    check_tokens(lengths, token_rewards=token_rewards, values=values)
    next_values = torch.roll(values, -1)
    next_values[last_tokens(lengths)] = 0.0
    deltas = token_rewards + gamma * next_values - values
    advantages = discounted_suffix_sum(deltas, lengths, gamma * gae_lambda)
    return advantages, advantages + values


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return the pessimistic value loss [N], and 1.0 where the clipped term is the larger one [N].

    ``L = 1/2 max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2)`` of the ``values`` [N] now, with
    gradient, the ``old_values`` [N] at the start of the step, the targets ``returns`` [N] and ``clip`` eps; 0
    = off.

    Source: "Implementation Matters in Deep Policy Gradients" (arXiv:2005.12729), sec. 3, item 1.
    """
    plain = (values - returns).square()
    if clip == 0:
        return 0.5 * plain, torch.zeros_like(plain)
    # within the bounds the value itself: a sum of old value and change would differ by rounding
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), (clipped > plain).to(plain.dtype)


class PPO(Algorithm):
    """PPO for language models: the response's reward on its last token, a KL penalty on every token.

    ``r_t = -beta log(old_t / reference_t) + [t last] (r' - lambda c) / (1 + lambda)``, GAE, then advantages
    whitened over the tokens of the task (divisor at least 0.1).

    ``r' = (r - mean) / std`` with the task's running moments over about 20 steps (state of the algorithm): a
    reward model of any scale and shift gives the same training, and beta is in units of the reward's standard
    deviation. The shift is common to all responses: it moves the critic's target, not the preferences.

    With ``popart`` the value head's unit is that of the value targets instead: mean ``mu`` and deviation
    ``sigma``, averaged at rate ``popart_rate``. When they move to ``mu', sigma'`` the head is rescaled, ``w
    <- w sigma / sigma'``, ``b <- (sigma b + mu - mu') / sigma'``: values in the reward's own unit stay the
    same. beta and the multiplier keep their unit. If a resume turns ``popart`` off, the head is rescaled once
    more, to the unit of the reward.

    Source: PPO (arXiv:1707.06347); the KL penalty per token: Ziegler et al. (arXiv:1909.08593), InstructGPT
    (arXiv:2203.02155); PopArt: van Hasselt et al. (arXiv:1602.07714) sec. 2, per task Hessel et al.
    (arXiv:1809.04474).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AlgorithmConfig):
        """Settings of ``PPO``."""

        gamma: Fraction = 1.0
        """Discount per token."""
        gae_lambda: Fraction = 0.95
        """1 = Monte-Carlo, 0 = one-step temporal difference."""
        value_coefficient: NotNegative = 0.5
        """Weight of the value loss beside the policy loss; it also shapes the shared trunk."""
        value_clip: NotNegative = 0.2
        """Largest change of a value within a step, in the unit of the value head: standard deviations of the
        reward, or of the value targets with ``popart``. 0 = off."""
        popart: bool = False
        """Normalise value targets by their running moments, and rescale the value head when they change."""
        popart_rate: PositiveFraction = 3e-4
        """``popart``: weight beta of the newest step in the moments."""

    needs_critic: ClassVar[bool] = True
    config: Config

    def __init__(self, config: AlgorithmConfig) -> None:
        super().__init__(config)
        self._reward_moments = RunningMoments()
        self._value_moments = RunningMoments(self.config.popart_rate)
        self._waits_for_unit = False
        """A resume has changed the rewards, and all new ones were equal so far: ``popart`` waits until they
        have a deviation, which becomes the unit of the trained value head."""

    def credit(self, batch: CreditBatch) -> Credit:
        """Return whitened GAE advantages and the critic's targets."""
        if batch.values is None:
            raise ValueError("ppo needs values [N] of the critic in its credit batch")
        check_tokens(batch.lengths, values=batch.values)
        rewards, targets = self._reward_moments, self._value_moments
        outcomes, wide = torch.zeros_like(batch.rewards), batch.rewards.double()
        if wide.numel() > 0:
            offset = wide - wide[0]  # relative to the first: equal rewards have exactly no variance
            rewards.update(float(wide[0] + offset.mean()), float(offset.var(correction=0)))
        if rewards.std > 0.0:
            outcomes = ((wide - rewards.mean) / rewards.std).to(batch.rewards.dtype)
        outcomes = subtract_costs(outcomes, batch, lambda own, _: own.rewards)
        token_rewards = torch.zeros_like(batch.values)
        metrics = {"reward_running_mean": rewards.mean, "reward_scale": rewards.std}
        if batch.kl_coefficient > 0:
            kl = sampled_kl(batch)
            token_rewards -= batch.kl_coefficient * kl.to(token_rewards.dtype)
            metrics["response_kl"] = float(kl.sum() / max(len(batch.lengths), 1))
        token_rewards[last_tokens(batch.lengths)] += outcomes[batch.lengths > 0].to(token_rewards.dtype)
        # without ``popart``, the head's unit is still that of the targets if a resume has turned it off
        is_popart = (self.config.popart or targets.num_steps > 0) and batch.values.numel() > 0
        if self._waits_for_unit and rewards.std == 0.0:
            is_popart = False  # a trained head would be rescaled by the first unit that is not 0
        self._waits_for_unit &= rewards.std == 0.0
        if is_popart:  # from the reward's unit to that of the value targets
            if targets.num_steps == 0:  # an untrained head has nothing to preserve: the units are equal
                targets.update(rewards.mean, rewards.std**2)
            token_rewards *= (rewards.std or 1.0) / (targets.std or 1.0)
            token_rewards[last_tokens(batch.lengths)] += (rewards.mean - targets.mean) / (targets.std or 1.0)
        discounts = {"gamma": self.config.gamma, "gae_lambda": self.config.gae_lambda}
        advantages, returns = compute_gae(token_rewards, batch.values, batch.lengths, **discounts)
        spread = float(returns.var(correction=0)) if returns.numel() > 1 else 0.0
        unexplained = float((returns - batch.values).var(correction=0)) if spread > 0 else 0.0
        metrics["explained_variance"] = 1.0 - unexplained / spread if spread > 0 else 0.0
        rescale = None
        if is_popart:
            mean, std = targets.mean, targets.std or 1.0
            wide = returns.double()
            targets.update(mean + std * float(wide.mean()), std**2 * float(wide.var(correction=0)))
            unit = targets if self.config.popart else rewards
            rescale = std / (unit.std or 1.0), (mean - unit.mean) / (unit.std or 1.0)
            returns = rescale[0] * returns + rescale[1]
            metrics["value_mean"], metrics["value_scale"] = unit.mean, unit.std
            if not self.config.popart:
                self._value_moments = RunningMoments(self.config.popart_rate)
        return Credit(
            advantages=group.whiten(advantages, floor=_ADVANTAGE_FLOOR),
            returns=returns,
            value_rescale=rescale,
            metrics=metrics,
        )

    def loss(self, batch: TokenBatch) -> LossOutput:
        """Return policy loss plus weighted value loss per token."""
        if batch.values is None or batch.old_values is None or batch.returns is None:
            raise ValueError("ppo needs values, old_values and returns [N] in its token batch")
        policy = policy_loss(batch, self.config)
        values = (batch.values, batch.old_values, batch.returns)
        value_loss, is_clipped = clipped_value_loss(*values, self.config.value_clip)
        metrics = {"policy_loss": policy.loss.detach(), "value_loss": value_loss.detach()}
        metrics |= {**policy.metrics, "value_clip_fraction": is_clipped}
        return LossOutput(loss=policy.loss + self.config.value_coefficient * value_loss, metrics=metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, JSON-able."""
        return {
            "reward_moments": self._reward_moments.state_dict(),
            "value_moments": self._value_moments.state_dict(),
            "waits_for_unit": self._waits_for_unit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._reward_moments.load_state_dict(state["reward_moments"])
        self._value_moments.load_state_dict(state["value_moments"])
        self._waits_for_unit = state["waits_for_unit"]

    def forget(self, redefined: Collection[str]) -> None:
        """Measure mean and deviation of other rewards anew; the critic keeps its weights."""
        if "reward" in redefined:
            self._reward_moments = RunningMoments()
            self._value_moments = RunningMoments(self.config.popart_rate)
            self._waits_for_unit = True
