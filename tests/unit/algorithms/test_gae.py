import pytest
import torch

from multitask_rl.algorithms.ppo import compute_gae

REWARDS = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
VALUES = torch.tensor([0.5, 0.4, 0.6, 0.7], dtype=torch.float64)
FOUR = torch.tensor([4])


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "expected"),
    [
        (1.0, 0.95, [0.4374625, 0.56575, 0.385, 0.3]),
        (0.9, 0.8, [0.0883264, 0.31712, 0.246, 0.3]),
        (1.0, 1.0, [0.5, 0.6, 0.4, 0.3]),
    ],
)
def test_golden_values(gamma, gae_lambda, expected):
    advantages, returns = compute_gae(REWARDS, VALUES, FOUR, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, advantages + VALUES)


def test_lambda_zero_is_the_temporal_difference():
    advantages, _ = compute_gae(REWARDS, VALUES, FOUR, gamma=0.9, gae_lambda=0.0)
    next_values = torch.tensor([0.4, 0.6, 0.7, 0.0], dtype=torch.float64)
    torch.testing.assert_close(advantages, REWARDS + 0.9 * next_values - VALUES)


def test_gae_is_the_direct_sum_of_discounted_differences():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    advantages, _ = compute_gae(rewards, values, torch.tensor([9]), gamma=0.9, gae_lambda=0.8)
    deltas = rewards + 0.9 * torch.cat([values[1:], torch.zeros(1)]) - values
    direct = [sum(0.72**k * deltas[t + k] for k in range(9 - t)) for t in range(9)]
    torch.testing.assert_close(advantages, torch.stack(direct))


def test_samples_laid_end_to_end_equal_samples_alone():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([3, 0, 1, 6])
    rewards, values = torch.randn(2, 10, dtype=torch.float64, generator=generator)
    together, _ = compute_gae(rewards, values, lengths, gamma=0.95, gae_lambda=0.9)
    alone = [
        compute_gae(r, v, torch.tensor([len(r)]), gamma=0.95, gae_lambda=0.9)[0]
        for r, v in zip(rewards.split(lengths.tolist()), values.split(lengths.tolist()), strict=True)
    ]
    torch.testing.assert_close(together, torch.cat(alone))


def test_no_token_gives_no_advantage():
    nothing = torch.zeros(0)
    advantages, returns = compute_gae(nothing, nothing, torch.tensor([0, 0]), gamma=1.0, gae_lambda=0.95)
    assert advantages.shape == returns.shape == (0,)


def test_unequal_shapes_are_refused():
    with pytest.raises(ValueError, match="values must have shape"):
        compute_gae(REWARDS, VALUES[:3], FOUR, gamma=1.0, gae_lambda=1.0)
