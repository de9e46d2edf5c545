import math

import pytest
import torch

from algorithm_builders import credit_batch, scored
from multitask_rl.algorithms.constrained_decoding import ConstrainedDecoding
from multitask_rl.errors import ConfigError

REWARDS = torch.tensor([1.0, 0.4, 0.9, 0.1], dtype=torch.float64)
IS_ACCEPTED = torch.tensor([True, True, False, False])
LOGITS = torch.tensor([0.2, 0.5, 1.0, -0.3], dtype=torch.float64)


def _score_functions():
    """Return grad log pi(y) for the four responses of a softmax policy [4, 4]."""
    return torch.eye(4, dtype=torch.float64) - LOGITS.softmax(0)


def _expected_gradient_of_attempts(max_attempts, rejected_reward):
    """Enumerate reject-and-resample exactly: the mean over slots of the summed attempts' gradients."""
    probs, scores = LOGITS.softmax(0), _score_functions()
    outcome = torch.where(IS_ACCEPTED, REWARDS, rejected_reward)
    one_attempt = (probs[:, None] * outcome[:, None] * scores).sum(0)
    probability_to_get_here, total, attempts = 1.0, torch.zeros(4, dtype=torch.float64), 0.0
    for _ in range(max_attempts):
        total += probability_to_get_here * one_attempt
        attempts += probability_to_get_here
        probability_to_get_here *= probs[~IS_ACCEPTED].sum().item()
    return total, attempts


def test_all_attempts_together_give_the_true_gradient():
    logits = LOGITS.clone().requires_grad_(True)
    objective = (logits.softmax(0) * torch.where(IS_ACCEPTED, REWARDS, 0.0)).sum()
    (true,) = torch.autograd.grad(objective, logits)
    total, attempts = _expected_gradient_of_attempts(max_attempts=4, rejected_reward=0.0)
    torch.testing.assert_close(total, attempts * true)


def test_accepted_attempts_alone_are_biased_by_the_score_of_being_accepted():
    logits = LOGITS.clone().requires_grad_(True)
    acceptance = logits.softmax(0)[IS_ACCEPTED].sum()
    (score_of_acceptance,) = torch.autograd.grad(acceptance.log(), logits)
    probs, scores = LOGITS.softmax(0), _score_functions()
    conditional = torch.where(IS_ACCEPTED, probs, 0.0) / probs[IS_ACCEPTED].sum()
    # a score function has mean 0 under its own distribution; the unconstrained one does not under this
    torch.testing.assert_close((conditional[:, None] * scores).sum(0), score_of_acceptance)
    assert score_of_acceptance.abs().max() > 0.1


def test_every_attempt_becomes_a_sample_with_its_own_reward_and_log_probabilities():
    attempts = [
        scored(None, rejected=True, attempt=0, response_ids=(1, 2)),
        scored(0.9, rejected=True, attempt=1, response_ids=(3,)),
        scored(0.7, attempt=2, response_ids=(4, 5, 6)),
    ]
    algorithm = ConstrainedDecoding(ConstrainedDecoding.Config(rejected_reward=-0.5))
    samples = algorithm.select(attempts)
    assert [s.reward for s in samples] == [-0.5, -0.5, 0.7]
    assert [len(s.rollout_logprobs) for s in samples] == [2, 1, 3]
    assert algorithm.is_informative([algorithm.outcome(a) for a in attempts])


def test_rejected_attempts_are_pushed_down_within_their_larger_group():
    algorithm = ConstrainedDecoding(ConstrainedDecoding.Config())
    samples = algorithm.select([scored(None, rejected=True), scored(1.0), scored(1.0, sample=1)])
    advantages = algorithm.credit(credit_batch([s.reward for s in samples])).advantages
    assert advantages[0] < 0 < advantages[1] == advantages[2]


def test_rejected_reward_must_be_finite():
    with pytest.raises(ConfigError, match="rejected_reward"):
        ConstrainedDecoding.Config(rejected_reward=math.nan)
