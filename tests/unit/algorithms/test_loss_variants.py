import pytest
import torch

from algorithm_builders import scored
from multitask_rl.algorithms.base import TokenBatch
from multitask_rl.algorithms.cispo import CISPO
from multitask_rl.algorithms.dapo import DAPO
from multitask_rl.algorithms.distill import Distill
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.gspo import GSPO
from multitask_rl.errors import ConfigError

GENERATOR = torch.Generator().manual_seed(7)
LENGTHS = torch.tensor([3, 5, 2])
SEQUENCE = torch.arange(3).repeat_interleave(LENGTHS)
OLD = -torch.rand(10, dtype=torch.float64, generator=GENERATOR) - 0.1
SHIFT = 0.3 * torch.randn(10, dtype=torch.float64, generator=GENERATOR)
ADVANTAGES = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[SEQUENCE]


def _batch(logprobs, **others):
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=OLD,
        advantages=ADVANTAGES,
        sequence=SEQUENCE,
        num_sequences=3,
        **others,
    )


def _sequence_mean(loss):
    return sum(part.mean() for part in loss.split(LENGTHS.tolist())) / 3


def test_of_a_stale_sample_the_exact_distance_from_a_teacher_does_not_depend_on_the_token_sampled():
    kl = torch.linspace(0.1, 1.0, 10, dtype=torch.float64, requires_grad=True)
    entropy = torch.full((10,), 0.5, dtype=torch.float64)
    stale = _batch(OLD + SHIFT, rollout_logprobs=OLD - SHIFT, exact_kl=kl, entropy=entropy)
    found = Distill(Distill.Config(entropy_coefficient=0.1)).loss(stale)
    torch.testing.assert_close(found.loss, kl - 0.05)
    assert "is_weight" not in found.metrics


def test_gspo_is_the_papers_objective_over_sequences():
    gspo = GSPO(GSPO.Config(clip_low=0.05, clip_high=0.1))
    logprobs = (OLD + SHIFT).requires_grad_(True)
    loss = _sequence_mean(gspo.loss(_batch(logprobs)).loss)
    expected = 0.0
    for new, old, advantage in zip(
        logprobs.split([3, 5, 2]), OLD.split([3, 5, 2]), [1.0, -2.0, 0.5], strict=True
    ):
        s = (new.sum() - old.sum()).div(len(new)).exp()
        expected = expected - torch.minimum(s * advantage, s.clamp(0.95, 1.1) * advantage) / 3
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logprobs, retain_graph=True)[0], torch.autograd.grad(expected, logprobs)[0]
    )


def test_gspo_of_one_token_responses_is_grpo():
    sequence, advantages = torch.arange(10), torch.randn(10, dtype=torch.float64, generator=GENERATOR)
    batch = TokenBatch(
        logprobs=OLD + SHIFT, old_logprobs=OLD, advantages=advantages, sequence=sequence, num_sequences=10
    )
    gspo = GSPO(GSPO.Config(clip_low=0.2, clip_high=0.28)).loss(batch)
    grpo = GRPO(GRPOConfig(dual_clip=0.0)).loss(batch)
    torch.testing.assert_close(gspo.loss, grpo.loss)


def test_gspo_ratio_is_shared_by_the_response_and_survives_empty_ones():
    gspo = GSPO(GSPO.Config())
    batch = _batch(OLD + SHIFT)
    batch.sequence, batch.num_sequences = SEQUENCE * 2, 6
    ratios = gspo.loss(batch).metrics["ratio"]
    assert [len(part.unique()) for part in ratios.split(LENGTHS.tolist())] == [1, 1, 1]
    assert ratios.isfinite().all()


def test_cispo_never_drops_a_token_where_ppo_does():
    logprobs = (OLD + 2.0 * ADVANTAGES.sign()).requires_grad_(True)  # every token moved beyond the clip
    (ppo,) = torch.autograd.grad(GRPO(GRPOConfig()).loss(_batch(logprobs)).loss.sum(), logprobs)
    out = CISPO(CISPO.Config(clip_high=0.5)).loss(_batch(logprobs))
    (cispo,) = torch.autograd.grad(out.loss.sum(), logprobs)
    assert (ppo == 0).all()
    weight = (logprobs.detach() - OLD).exp().clamp(max=1.5)
    torch.testing.assert_close(cispo, -weight * ADVANTAGES)
    assert out.metrics["clip_fraction"].tolist() == (ADVANTAGES > 0).double().tolist()


@pytest.mark.parametrize("algorithm", [GRPO(GRPOConfig()), GSPO(GSPO.Config()), CISPO(CISPO.Config())])
def test_first_update_is_reinforce_for_all(algorithm):
    logprobs = OLD.clone().requires_grad_(True)
    loss = algorithm.loss(_batch(logprobs)).loss
    total = _sequence_mean(loss)
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(gradient, -ADVANTAGES / LENGTHS[SEQUENCE] / 3)


@pytest.mark.parametrize(
    "algorithm",
    [GSPO(GSPO.Config(clip_low=0.5, clip_high=0.9)), GRPO(GRPOConfig(clip_low=0.9, clip_high=9.0))],
)
def test_gradient_is_right(algorithm):
    logprobs = (OLD + SHIFT).requires_grad_(True)
    ref = OLD - 0.1
    batch = {"ref_logprobs": ref, "kl_coefficient": 0.2, "rollout_logprobs": OLD + 0.2}
    assert torch.autograd.gradcheck(lambda x: algorithm.loss(_batch(x, **batch)).loss, logprobs)


def test_dapo_punishes_overlong_answers_before_normalising():
    dapo = DAPO(DAPO.Config(overlong_buffer=4, overlong_weight=0.5))
    answers = [scored(1.0, response_ids=range(n)) for n in (3, 6, 8, 10, 12)]  # the limit is 10
    assert [s.reward for s in dapo.select(answers)] == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.5])
    assert [s.reward for s in DAPO(DAPO.Config()).select(answers)] == [1.0] * 5


def test_dapo_with_equal_clips_and_no_buffer_is_grpo():
    batch = _batch(OLD + SHIFT)
    dapo = DAPO(DAPO.Config(clip_high=0.2)).loss(batch)
    assert (dapo.loss == GRPO(GRPOConfig(clip_high=0.2)).loss(batch).loss).all()


def test_dapo_buffer_larger_than_the_limit_is_refused():
    with pytest.raises(ConfigError, match=r"tasks\.toy\.\w+\.overlong_buffer is 11 tokens, more than the 10"):
        DAPO(DAPO.Config(overlong_buffer=11)).check_length("tasks.toy", 10)
    with pytest.raises(ConfigError, match="overlong_buffer"):
        DAPO.Config(overlong_buffer=-1)
