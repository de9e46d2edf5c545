"""Generalised advantage estimation on ragged samples."""

from __future__ import annotations

import torch
from torch import Tensor

from multitask_rl.algorithms.ragged import check_tokens, discounted_suffix_sum, last_tokens

__all__ = ["compute_gae"]


def compute_gae(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return advantages and critic targets per token.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = sum_k (gamma lambda)^k delta_{t+k}``, ``R_t = A_t +
    V_t``. Every response ends its episode: V after the last token is 0, also when the token limit cut it off.

    Source: Schulman et al., "High-Dimensional Continuous Control Using GAE" (arXiv:1506.02438) Eq. 16.

    Args:
        token_rewards: [N]
        values: [N] critic before each token.
        lengths: [B] int64
        gamma: discount per token, in [0, 1].
        gae_lambda: 1 = Monte-Carlo return minus value, 0 = one-step temporal difference.

    Returns:
        (advantages [N], returns [N]), in the dtype of ``values``.

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
