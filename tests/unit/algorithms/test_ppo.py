import json

import pytest
import torch

from algorithm_builders import credit_batch
from multitask_rl.algorithms.base import TokenBatch
from multitask_rl.algorithms.ppo import PPO, clipped_value_loss, compute_gae
from multitask_rl.algorithms.running import RunningMoments
from multitask_rl.errors import ConfigError

GENERATOR = torch.Generator().manual_seed(5)
LENGTHS = torch.tensor([3, 1, 0, 4, 2])
REWARDS = torch.tensor([1.0, -0.5, 9.0, 0.25, 2.0], dtype=torch.float64)
VALUES, OLD, REF = torch.randn(3, 10, dtype=torch.float64, generator=GENERATOR)


def _credit(algorithm=None, rewards=REWARDS, values=VALUES, **others):
    algorithm = algorithm or PPO(PPO.Config())
    return algorithm.credit(credit_batch(rewards, torch.arange(5), LENGTHS, values=values, **others))


def test_reward_arrives_at_the_last_token_whitened_by_the_task():
    credit = _credit(PPO(PPO.Config(gae_lambda=1.0)), values=torch.zeros(10, dtype=torch.float64))
    whitened = (REWARDS - REWARDS.mean()) / REWARDS.std(correction=0)
    torch.testing.assert_close(credit.returns, whitened.repeat_interleave(LENGTHS))


def test_advantages_are_whitened_gae_with_the_kl_on_every_token():
    credit = _credit(old_logprobs=OLD, ref_logprobs=REF, kl_coefficient=0.1)
    token_rewards = -0.1 * (OLD - REF)
    whitened = (REWARDS - REWARDS.mean()) / REWARDS.std(correction=0)
    token_rewards[torch.tensor([2, 3, 7, 9])] += whitened[torch.tensor([0, 1, 3, 4])]
    advantages, returns = compute_gae(token_rewards, VALUES, LENGTHS, gamma=1.0, gae_lambda=0.95)
    torch.testing.assert_close(credit.returns, returns)
    torch.testing.assert_close(
        credit.advantages, (advantages - advantages.mean()) / advantages.std(correction=0)
    )


def test_reward_model_times_20_minus_50_trains_the_same_from_the_first_step():
    plain, wild = PPO(PPO.Config()), PPO(PPO.Config())
    kl = {"old_logprobs": OLD, "ref_logprobs": REF, "kl_coefficient": 0.1}
    for step in range(5):
        rewards = REWARDS + 0.3 * step
        first = _credit(plain, rewards, **kl)
        second = _credit(wild, rewards * 20.0 - 50.0, **kl)
        torch.testing.assert_close(second.advantages, first.advantages)
        torch.testing.assert_close(second.returns, first.returns)


def test_equal_rewards_give_no_reward_signal():
    credit = _credit(rewards=torch.full((5,), 0.1, dtype=torch.float64), values=torch.zeros(10).double())
    assert (credit.advantages == 0).all()
    assert (credit.returns == 0).all()


def test_costs_lower_the_advantage_only_with_a_multiplier():
    costs = torch.tensor([[1.0], [0.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    free = _credit()
    assert (_credit(costs=costs, multipliers=(0.0,)).advantages == free.advantages).all()
    assert _credit(costs=costs, multipliers=(2.0,)).advantages[0] < free.advantages[0]


def test_perfect_critic_explains_everything():
    returns = _credit(PPO(PPO.Config(gae_lambda=1.0))).returns
    credit = _credit(PPO(PPO.Config(gae_lambda=1.0)), values=returns)
    assert credit.metrics["explained_variance"] == pytest.approx(1.0)
    assert credit.advantages.abs().max() < 1e-6


def test_one_token_is_no_advantage_and_nothing_is_nothing():
    one = PPO(PPO.Config()).credit(credit_batch([1.0], values=torch.tensor([0.3]).double()))
    assert one.advantages.tolist() == [0.0]
    none = PPO(PPO.Config()).credit(credit_batch([], values=torch.zeros(0).double()))
    assert none.advantages.shape == none.returns.shape == (0,)


def test_every_group_is_informative():
    assert PPO(PPO.Config()).is_informative([1.0, 1.0])
    assert PPO.needs_critic


def test_value_loss_is_pessimistic_about_moves_beyond_the_clip():
    values = torch.tensor([0.1, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    loss, clipped = clipped_value_loss(values, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.5 * 0.81, 0.5 * 0.64, 0.5 * 4.0])
    assert clipped.tolist() == [0.0, 1.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.9, 0.0, 2.0])
    unclipped, _ = clipped_value_loss(values, old, returns, 0.0)
    assert unclipped.tolist() == pytest.approx([0.5 * 0.81, 0.0, 0.5 * 4.0])


def _tokens(values, logprobs=OLD, **others):
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=OLD,
        advantages=VALUES,
        sequence=torch.arange(5).repeat_interleave(LENGTHS),
        num_sequences=5,
        values=values,
        **others,
    )


def test_loss_is_policy_plus_weighted_value_and_differentiable_in_both():
    ppo = PPO(PPO.Config(value_coefficient=0.1, value_clip=0.0))
    values = (VALUES + 0.05).requires_grad_(True)
    logprobs = (OLD + 0.05).requires_grad_(True)
    out = ppo.loss(_tokens(values, logprobs, old_values=VALUES, returns=REF))
    torch.testing.assert_close(
        out.loss, out.metrics["policy_loss"] + 0.1 * out.metrics["value_loss"], check_stride=False
    )
    assert torch.autograd.gradcheck(
        lambda v, x: ppo.loss(_tokens(v, x, old_values=VALUES, returns=REF)).loss, (values, logprobs)
    )


def test_state_survives_json_and_continues_identically():
    first, second = PPO(PPO.Config()), PPO(PPO.Config())
    _credit(first)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (_credit(first, REWARDS * 3).advantages == _credit(second, REWARDS * 3).advantages).all()


def test_running_moments_of_a_steady_stream_are_its_moments_despite_a_large_shift():
    moments = RunningMoments()
    for _ in range(100):
        moments.update(1e6, 0.25)
    assert moments.mean == pytest.approx(1e6)
    assert moments.std == pytest.approx(0.5)


def test_missing_critic_and_bad_settings_are_named():
    with pytest.raises(ValueError, match="values"):
        PPO(PPO.Config()).credit(credit_batch([1.0]))
    with pytest.raises(ValueError, match="old_values"):
        PPO(PPO.Config()).loss(_tokens(VALUES))
    for name, value in {
        "gamma": 1.5,
        "gae_lambda": -0.1,
        "value_clip": -1.0,
        "value_coefficient": -1.0,
    }.items():
        with pytest.raises(ConfigError, match=name):
            PPO.Config(**{name: value})


def test_values_within_the_clip_count_as_unclipped_whatever_the_rounding():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = 0.2 * torch.rand(3, 10_000, generator=generator) - 0.1
    loss, is_clipped = clipped_value_loss(values, old, returns, 0.2)
    assert not is_clipped.any()
    assert torch.equal(loss, 0.5 * (values - returns).square())
