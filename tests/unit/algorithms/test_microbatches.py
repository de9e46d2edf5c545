"""The loss of a token must not depend on which samples share its micro-batch."""

from dataclasses import fields, replace
from importlib.metadata import entry_points

import pytest
import torch

from multitask_rl.algorithms.base import TokenBatch

# an anchor has no loss; a teacher's distributions are cut in tests/unit/training/test_teachers.py
OTHERS = {"anchor", "distill"}
CLASSES = {e.name: e.load() for e in entry_points(group="multitask_rl.algorithms") if e.name not in OTHERS}
LENGTHS = [2, 9, 4, 10, 1, 7]
COUNT = sum(LENGTHS)
SEQUENCE = torch.arange(6).repeat_interleave(torch.tensor(LENGTHS))


def _whole(logprobs):
    generator = torch.Generator().manual_seed(11)

    def noise():
        return torch.randn(COUNT, dtype=torch.float64, generator=generator)

    old = logprobs.detach() + 0.3 * noise()
    rollout = old + 0.2 * noise()
    rollout[:3] = torch.nan
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=noise(),
        sequence=SEQUENCE,
        num_sequences=6,
        rollout_logprobs=rollout,
        ref_logprobs=old + 0.1 * noise(),
        exact_kl=noise().abs(),
        entropy=noise().abs(),
        values=noise(),
        old_values=noise(),
        returns=noise(),
        kl_coefficient=0.1,
    )


def _part(whole, samples):
    tokens = torch.cat([(whole.sequence == s).nonzero().flatten() for s in samples])
    cut = {
        f.name: getattr(whole, f.name)[tokens]
        for f in fields(whole)
        if isinstance(getattr(whole, f.name), torch.Tensor)
    }
    cut["sequence"] = torch.arange(len(samples)).repeat_interleave(
        torch.tensor([LENGTHS[s] for s in samples])
    )
    return replace(whole, num_sequences=len(samples), **cut)


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("cuts", [[[0, 1, 2], [3, 4, 5]], [[5, 0], [3], [2, 4, 1]], [[s] for s in range(6)]])
def test_gradient_is_the_same_however_the_samples_are_cut(name, cuts):
    algorithm = CLASSES[name](CLASSES[name].Config(entropy_coefficient=0.01))
    logprobs = (
        -torch.rand(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ).requires_grad_()
    whole = _whole(logprobs)
    (expected,) = torch.autograd.grad(algorithm.loss(whole).loss.sum(), logprobs)
    summed = sum(
        torch.autograd.grad(algorithm.loss(_part(whole, samples)).loss.sum(), logprobs)[0] for samples in cuts
    )
    torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-12)
    assert expected.abs().max() > 0


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_metrics_are_one_detached_number_per_token(name):
    algorithm = CLASSES[name](CLASSES[name].Config(entropy_coefficient=0.01))
    out = algorithm.loss(_whole(torch.zeros(COUNT, dtype=torch.float64, requires_grad=True)))
    assert out.loss.shape == (COUNT,)
    for metric, values in out.metrics.items():
        assert values.shape == (COUNT,), metric
        assert not values.requires_grad, metric
        assert values.isfinite().all(), metric
