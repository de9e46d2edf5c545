import json
import math

import pytest
import torch

from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.algorithms.kl import KLController, estimate_kl, exact_kl, sampled_kl
from multitask_rl.config.task import KLSpec
from multitask_rl.errors import ConfigError

LOGITS = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64)
REF_LOGITS = torch.tensor([0.0, 0.5, -0.5, 0.2], dtype=torch.float64)
GOLDEN_KL = 0.317496


@pytest.mark.parametrize(
    ("estimator", "mean", "std"), [("k1", 0.317496, 0.811), ("k2", 0.379382, 0.300), ("k3", 0.317496, 0.235)]
)
def test_estimators_have_the_golden_moments(estimator, mean, std):
    log_p, log_q = LOGITS.log_softmax(0), REF_LOGITS.log_softmax(0)
    kl = estimate_kl(log_p, log_q, estimator)
    probs = log_p.exp()
    expected = (probs * kl).sum()
    assert float(expected) == pytest.approx(mean, abs=1e-6)
    assert float(((probs * kl.square()).sum() - expected.square()).sqrt()) == pytest.approx(std, abs=1e-3)


def _gradient(value_of_logprobs):
    logits = LOGITS.clone().requires_grad_(True)
    return torch.autograd.grad(value_of_logprobs(logits.log_softmax(0)), logits)[0]


def test_expected_gradients_as_a_loss_are_zero_reverse_and_forward():
    log_q = REF_LOGITS.log_softmax(0)
    probs = LOGITS.softmax(0)

    def expected(estimator):
        return _gradient(lambda log_p: (probs * estimate_kl(log_p, log_q, estimator)).sum())

    reverse = _gradient(lambda log_p: (log_p.exp() * (log_p - log_q)).sum())
    forward = _gradient(lambda log_p: (log_q.exp() * (log_q - log_p)).sum())
    torch.testing.assert_close(expected("k1"), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected("k2"), reverse)
    torch.testing.assert_close(expected("k3"), forward)


def test_exact_kl_is_the_golden_value_and_has_the_right_gradient():
    assert float(exact_kl(LOGITS, REF_LOGITS)) == pytest.approx(GOLDEN_KL, abs=1e-6)
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: exact_kl(x, ref), logits)
    assert exact_kl(ref, ref).abs().max() == 0


def test_exact_kl_ignores_tokens_masked_in_both():
    masked = torch.tensor([0.3, -0.2, 0.9, 0.0, -math.inf], dtype=torch.float64, requires_grad=True)
    masked_ref = torch.tensor([0.0, 0.5, -0.5, 0.2, -math.inf], dtype=torch.float64)
    kl = exact_kl(masked, masked_ref)
    (gradient,) = torch.autograd.grad(kl, masked)
    assert kl.item() == pytest.approx(GOLDEN_KL, abs=1e-6)
    assert gradient.isfinite().all()


def test_k3_stays_finite_where_the_policy_abandoned_a_token():
    kl = estimate_kl(torch.tensor([-200.0]), torch.tensor([0.0]), "k3")
    assert kl.isfinite().all()


def test_unknown_estimator_and_missing_reference_are_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        estimate_kl(LOGITS, REF_LOGITS, "k4")
    with pytest.raises(ValueError, match="differ"):
        estimate_kl(LOGITS, REF_LOGITS[:2], "k1")
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="ref_logprobs"):
        sampled_kl(CreditBatch(rewards=torch.ones(1), groups=one, lengths=one))


def test_fixed_coefficient_never_moves():
    controller = KLController(KLSpec(coefficient=0.1))
    assert controller.update(1000.0, 0) == []
    assert controller.coefficient == 0.1


def test_adaptive_coefficient_follows_the_formula():
    controller = KLController(KLSpec(coefficient=0.1, target=5.0, horizon=10.0))
    assert controller.update(5.5, 0) == []
    assert controller.coefficient == pytest.approx(0.1 * (1 + 0.1 / 10))
    controller.update(1e9, 1)  # the error is clipped to 0.2
    assert controller.coefficient == pytest.approx(before := 0.1 * 1.01 * 1.02)
    controller.update(5.0, 2)
    controller.update(math.nan, 3)
    assert controller.coefficient == pytest.approx(before)


def test_a_move_by_a_quarter_is_an_event_and_the_coefficient_stays_positive():
    controller = KLController(KLSpec(coefficient=0.1, target=5.0, horizon=1.0))
    events = [event for step in range(20) for event in controller.update(0.0, step)]
    assert events[0].step == 1
    assert events[0].data["from"] == 0.1
    assert events[0].data["to"] == pytest.approx(0.064)
    assert "below the target 5: coefficient 0.1 -> 0.064" in events[0].reason
    assert events[1].data["from"] == events[0].data["to"]
    assert controller.coefficient > 0


def test_controller_brings_a_responding_system_to_its_target():
    controller = KLController(KLSpec(coefficient=0.01, target=4.0, horizon=20.0))
    for _ in range(2000):
        controller.update(0.4 / controller.coefficient, 0)
    assert 0.4 / controller.coefficient == pytest.approx(4.0, rel=1e-3)


def test_controller_state_round_trip_continues_identically():
    spec = KLSpec(coefficient=0.1, target=5.0)
    first, second = KLController(spec), KLController(spec)
    first.update(9.0, 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    first.update(2.0, 1)
    second.update(2.0, 1)
    assert first.coefficient == second.coefficient


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (KLSpec(coefficient=0.0), KLSpec(coefficient=0.1)),
        (KLSpec(coefficient=0.1), KLSpec(coefficient=0.0)),
        (KLSpec(coefficient=0.1, target=5.0), KLSpec(coefficient=0.3, target=5.0)),
        (KLSpec(coefficient=0.1, target=5.0), KLSpec(coefficient=0.1)),
    ],
)
def test_a_coefficient_that_was_configured_anew_is_the_one_that_counts(before, after):
    first, second = KLController(before), KLController(after)
    first.update(9.0, 0)
    second.load_state_dict(first.state_dict())
    assert second.coefficient == after.coefficient


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficient": -0.1}, "coefficient must be"),
        ({"coefficient": math.nan}, "coefficient must be"),
        ({"coefficient": 0.0, "target": 5.0}, "0 stays 0"),
        ({"coefficient": 0.1, "target": 0.0}, "target must be"),
        ({"coefficient": 0.1, "target": 1.0, "horizon": 0.0}, "horizon must be"),
    ],
)
def test_impossible_controllers_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        KLSpec(**settings)
