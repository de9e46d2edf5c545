"""A bandit whose regularised optima are known tells every KL placement apart (arXiv:2512.21852)."""

import pytest
import torch

from multitask_rl.algorithms.base import CreditBatch, TokenBatch
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig

REWARDS = torch.tensor([1.0, 0.5, 0.0, 0.8, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 1.0, 0.5, -1.0, 0.3], dtype=torch.float64).log_softmax(0)
BETA = 0.3
REVERSE_OPTIMUM = torch.tensor([0.5391, 0.2768, 0.0317, 0.1018, 0.0506], dtype=torch.float64)
FORWARD_OPTIMUM = torch.tensor([0.6091, 0.2021, 0.0653, 0.0578, 0.0657], dtype=torch.float64)
NUM_STEPS, BATCH = 600, 512


def _train(placement, estimator="k1", normalisation="none"):
    """Train one softmax over 5 one-token responses and return its average over the last quarter."""
    generator = torch.Generator().manual_seed(0)
    algorithm = GRPO(GRPOConfig(normalisation=normalisation))
    theta = REFERENCE.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([theta], lr=0.05)
    lengths, groups = torch.ones(BATCH, dtype=torch.int64), torch.zeros(BATCH, dtype=torch.int64)
    average = torch.zeros(5, dtype=torch.float64)
    for step in range(NUM_STEPS):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / NUM_STEPS) + 1e-4
        all_logprobs = theta.log_softmax(0)
        actions = torch.multinomial(all_logprobs.detach().exp(), BATCH, replacement=True, generator=generator)
        logprobs, ref_logprobs = all_logprobs[actions], REFERENCE[actions]
        credit = algorithm.credit(
            CreditBatch(
                rewards=REWARDS[actions],
                groups=groups,
                lengths=lengths,
                old_logprobs=logprobs.detach(),
                ref_logprobs=ref_logprobs,
                kl_coefficient=BETA if placement == "reward" else 0.0,
            )
        )
        out = algorithm.loss(
            TokenBatch(
                logprobs=logprobs,
                old_logprobs=logprobs.detach(),
                advantages=credit.advantages,
                sequence=torch.arange(BATCH),
                num_sequences=BATCH,
                ref_logprobs=ref_logprobs,
                kl_coefficient=BETA if placement == "loss" else 0.0,
                kl_estimator=estimator,
            )
        )
        optimizer.zero_grad()
        out.loss.mean().backward()
        optimizer.step()
        if step >= NUM_STEPS * 3 // 4:
            average += theta.detach().softmax(0) / (NUM_STEPS // 4)
    return average


def _distance(p, q):
    return 0.5 * (p - q).abs().sum().item()


@pytest.mark.parametrize(("placement", "estimator"), [("reward", "k1"), ("loss", "k2")])
def test_k1_in_the_reward_and_k2_in_the_loss_reach_the_exponential_tilt(placement, estimator):
    policy = _train(placement, estimator)
    assert _distance(policy, REVERSE_OPTIMUM) < 0.02
    assert _distance(policy, FORWARD_OPTIMUM) > 0.08


def test_k3_in_the_loss_reaches_the_forward_kl_optimum():
    policy = _train("loss", "k3")
    assert _distance(policy, FORWARD_OPTIMUM) < 0.02
    assert _distance(policy, REVERSE_OPTIMUM) > 0.08


def test_k1_in_the_loss_regularises_nothing():
    assert _train("loss", "k1")[0] > 0.9
