import math

import pytest
import torch

from multitask_rl.algorithms.base import AlgorithmConfig, TokenBatch
from multitask_rl.algorithms.policy_loss import clipped_surrogate, policy_loss, truncated_is_weight
from multitask_rl.errors import ConfigError

GENERATOR = torch.Generator().manual_seed(0)
ADVANTAGES = torch.randn(50, dtype=torch.float64, generator=GENERATOR)
LOGPROBS = -torch.rand(50, dtype=torch.float64, generator=GENERATOR) - 0.1


def _batch(logprobs, old=None, advantages=ADVANTAGES, **others):
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old is None else old,
        advantages=advantages,
        sequence=torch.zeros(len(logprobs), dtype=torch.int64),
        num_sequences=1,
        **others,
    )


def test_first_update_is_reinforce_with_nothing_clipped():
    logprobs = LOGPROBS.clone().requires_grad_(True)
    out = policy_loss(_batch(logprobs), AlgorithmConfig())
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    torch.testing.assert_close(gradient, -ADVANTAGES)
    assert out.metrics["clip_fraction"].sum() == 0
    assert (out.metrics["ratio"] == 1).all()
    assert (out.metrics["approx_kl"] == 0).all()


def test_second_epoch_clips():
    out = policy_loss(_batch(LOGPROBS, old=LOGPROBS - 0.5 * ADVANTAGES), AlgorithmConfig())
    assert out.metrics["clip_fraction"].mean() > 0.3


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.3, 0.0),  # above 1 + clip_high with A > 0: clipped
        (1.25, 1.0, -1.25, -1.0),  # within clip-higher
        (0.5, 1.0, -0.5, -1.0),  # A > 0 has no lower clip
        (0.5, -1.0, 0.8, 0.0),  # below 1 - clip_low with A < 0: clipped
        (1.5, -1.0, 1.5, 1.0),  # A < 0 has no upper clip ...
        (4.0, -1.0, 3.0, 0.0),  # ... but the dual one
    ],
)
def test_each_side_of_the_clip(ratio, advantage, loss, slope):
    at = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    out = clipped_surrogate(
        at, torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.3, dual_clip=3.0
    )
    assert out.loss.item() == pytest.approx(loss)
    assert torch.autograd.grad(out.loss.sum(), at)[0].item() == pytest.approx(slope)


def test_dual_clip_bounds_negative_advantages_only():
    ratio = torch.linspace(0.01, 50.0, 50, dtype=torch.float64)
    out = clipped_surrogate(ratio, ADVANTAGES, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    off = clipped_surrogate(ratio, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    negative = ADVANTAGES < 0
    assert (out.loss[negative] <= -3.0 * ADVANTAGES[negative] + 1e-12).all()
    assert (out.loss[~negative] == off.loss[~negative]).all()
    assert off.loss[negative].max() > 10.0
    assert out.metrics["dual_clip_fraction"].sum() > 0


def test_truncated_importance_sampling_is_unbiased_only_without_the_cap():
    rollout = torch.tensor([0.0, 0.3, -0.2, 0.1], dtype=torch.float64).log_softmax(0)
    old = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64).log_softmax(0)
    value = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)

    def estimate(cap):
        return float((rollout.exp() * truncated_is_weight(old, rollout, cap) * value).sum())

    true = float((old.exp() * value).sum())
    assert estimate(1e9) == pytest.approx(true, abs=1e-12)
    assert true == pytest.approx(0.936, abs=1e-3)
    assert estimate(2.0) == pytest.approx(0.828, abs=1e-3)


def test_engine_that_agrees_and_samples_without_engine_are_not_corrected():
    plain = policy_loss(_batch(LOGPROBS), AlgorithmConfig()).loss
    agreeing = policy_loss(_batch(LOGPROBS, rollout_logprobs=LOGPROBS.clone()), AlgorithmConfig())
    unknown = policy_loss(_batch(LOGPROBS, rollout_logprobs=torch.full((50,), math.nan)), AlgorithmConfig())
    assert (agreeing.loss == plain).all()
    assert (unknown.loss == plain).all()


def test_nan_rollout_leaves_value_and_gradient_finite_beside_corrected_tokens():
    rollout = LOGPROBS - 1.0
    rollout[::2] = math.nan
    logprobs = LOGPROBS.clone().requires_grad_(True)
    out = policy_loss(_batch(logprobs, rollout_logprobs=rollout), AlgorithmConfig())
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    torch.testing.assert_close(gradient[::2], -ADVANTAGES[::2])
    torch.testing.assert_close(gradient[1::2], -2.0 * ADVANTAGES[1::2])  # e^1 is capped at 2


def test_correction_can_be_switched_off():
    out = policy_loss(_batch(LOGPROBS, rollout_logprobs=LOGPROBS - 1.0), AlgorithmConfig(truncated_is=0.0))
    torch.testing.assert_close(out.loss, -ADVANTAGES)


def test_extreme_ratio_with_zero_advantage_is_zero_not_nan():
    zero = torch.zeros(2, dtype=torch.float32)
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    old = torch.tensor([-500.0, 0.0])
    out = policy_loss(_batch(logprobs, old=old, advantages=zero), AlgorithmConfig())
    (gradient,) = torch.autograd.grad(out.loss.sum(), logprobs)
    assert (out.loss == 0).all()
    assert (gradient == 0).all()


def test_kl_and_entropy_enter_the_loss_with_their_coefficients():
    ref, entropy = LOGPROBS - 0.3, torch.rand(50, dtype=torch.float64, generator=GENERATOR)
    config = AlgorithmConfig(entropy_coefficient=0.01)
    batch = _batch(LOGPROBS, ref_logprobs=ref, entropy=entropy, kl_coefficient=0.1, kl_estimator="k2")
    out = policy_loss(batch, config)
    torch.testing.assert_close(out.loss, -ADVANTAGES + 0.1 * 0.5 * 0.3**2 - 0.01 * entropy)


def test_gradient_is_right_away_from_the_kinks():
    old = LOGPROBS[:8]
    advantages = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 0.0, 1.0], dtype=torch.float64)
    shift = torch.tensor([0.1, 0.1, -0.5, 0.4, 0.5, -0.5, 0.0, -0.1], dtype=torch.float64)
    logprobs = (old + shift).requires_grad_(True)
    ref = old - 0.2

    def loss(x):
        batch = _batch(x, old=old, advantages=advantages, ref_logprobs=ref, kl_coefficient=0.1)
        return policy_loss(batch, AlgorithmConfig()).loss

    assert torch.autograd.gradcheck(loss, logprobs)


def test_no_token_is_no_loss():
    empty = torch.zeros(0, requires_grad=True)
    out = policy_loss(
        _batch(empty, advantages=torch.zeros(0), rollout_logprobs=torch.zeros(0)), AlgorithmConfig()
    )
    assert out.loss.shape == (0,)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(_batch(LOGPROBS, kl_coefficient=0.1), AlgorithmConfig())
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(_batch(LOGPROBS), AlgorithmConfig(entropy_coefficient=0.1))
    with pytest.raises(ValueError, match="differ"):
        policy_loss(_batch(LOGPROBS, old=LOGPROBS[:3]), AlgorithmConfig())


@pytest.mark.parametrize(
    "setting",
    [
        {"clip_low": 0.0},
        {"clip_low": 1.5},
        {"clip_high": -1.0},
        {"dual_clip": 0.5},
        {"truncated_is": -1.0},
        {"entropy_coefficient": -0.1},
        {"aggregation": "mean"},
    ],
)
def test_settings_out_of_range_are_refused_by_name(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        AlgorithmConfig(**setting)
