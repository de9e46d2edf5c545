import numpy as np
import pytest
import torch

from multitask_rl.models.sampling import (
    CELLS,
    draw_uniforms,
    invert,
    keep_top,
    nearest_possible,
    sample_tokens,
)

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_uniforms_are_a_stream_of_their_own_per_seed():
    assert (draw_uniforms(7, 5) == draw_uniforms(7, 8)[:5]).all()
    assert (draw_uniforms(7, 5) != draw_uniforms(8, 5)).any()


def test_top_k_keeps_the_k_most_likely():
    assert keep_top(LOGITS, 2, 1.0).isinf().tolist() == [[False, False, True, True]]


def test_top_p_keeps_the_smallest_set_with_the_mass():
    probabilities = LOGITS.softmax(-1)[0]
    mass = float(probabilities[0] + probabilities[1])
    assert keep_top(LOGITS, 0, mass - 1e-4).isinf().tolist() == [[False, False, True, True]]
    assert keep_top(LOGITS, 0, mass + 1e-4).isinf().tolist() == [[False, False, False, True]]
    for nearly_nothing in (1e-6, 0.0):
        assert keep_top(LOGITS, 0, nearly_nothing).isinf().tolist() == [[False, True, True, True]]


def test_a_token_that_was_sampled_stays_whatever_the_filter_says():
    kept = keep_top(LOGITS, 1, 1.0, keep=torch.tensor([3]))
    assert kept.isinf().tolist() == [[False, True, True, False]]


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.9999999])
def test_a_token_without_probability_is_never_drawn(uniform):
    logits = torch.tensor([[float("-inf"), 1.0, float("-inf"), 0.5, float("-inf")]])
    tokens, logprobs = sample_tokens(logits, torch.tensor([uniform]), temperature=1.0, top_k=0, top_p=1.0)
    assert tokens.item() in (1, 3)
    assert torch.isfinite(logprobs).all()


def test_a_search_that_ends_at_a_token_without_probability_goes_to_the_nearest_with_one():
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.0, 0.5, 0.0]]).expand(7, -1)
    found = nearest_possible(torch.arange(7).unsqueeze(-1), probabilities)
    assert found.squeeze(-1).tolist() == [1, 1, 1, 1, 5, 5, 5]


def test_sums_that_rise_where_there_is_no_probability_draw_nothing_from_there(monkeypatch):
    logits = torch.full((1, 9), float("-inf"))
    logits[0, [2, 7]] = 0.0

    def rounded(self, dim):
        """As sums in parallel may come out: above the threshold at a token without probability."""
        return torch.tensor([[0.0, 0.0, 0.5, 0.5, 0.5 + 1e-6, 0.5, 0.5, 1.0, 1.0]])

    monkeypatch.setattr(torch.Tensor, "cumsum", rounded)
    uniform = torch.tensor([0.5 + 5e-7])
    tokens, logprobs = sample_tokens(logits, uniform, temperature=1.0, top_k=0, top_p=1.0)
    assert tokens.item() == 2
    assert logprobs.item() == pytest.approx(float(torch.tensor(0.5).log()))


def test_inverting_the_distribution_takes_the_right_interval():
    first = float(LOGITS.softmax(-1)[0, 0])
    below, above = (
        sample_tokens(LOGITS, torch.tensor([u]), temperature=1.0, top_k=0, top_p=1.0)[0].item()
        for u in (first - 1e-4, first + 1e-4)
    )
    assert (below, above) == (0, 1)


@pytest.mark.parametrize("size", [5, 128, 1000, 50257])
def test_the_token_is_that_of_the_cumulative_distribution_in_float64(size):
    generator = torch.Generator().manual_seed(size)
    probabilities = (3 * torch.randn(64, size, generator=generator)).softmax(-1)
    uniforms = torch.rand(64, generator=generator)
    bounds = probabilities.double().numpy().cumsum(axis=-1)
    targets = uniforms.double().numpy() * bounds[:, -1]
    expected = [
        np.searchsorted(row, target, side="right") for row, target in zip(bounds, targets, strict=True)
    ]
    # a uniform nearer to a bound than float32 tells may fall on either side of it
    clear = np.abs(bounds - targets[:, None]).min(axis=-1) > 1e-6
    assert clear.sum() > 56
    assert invert(probabilities, uniforms).squeeze(-1)[clear].tolist() == np.array(expected)[clear].tolist()


def test_temperature_zero_is_greedy_with_the_plain_logprobs():
    tokens, logprobs = sample_tokens(LOGITS, torch.tensor([0.99]), temperature=0, top_k=0, top_p=1.0)
    assert tokens.item() == 0
    assert logprobs.item() == pytest.approx(float(LOGITS.log_softmax(-1)[0, 0]))


def test_logprobs_are_those_of_the_filtered_and_tempered_distribution():
    tokens, logprobs = sample_tokens(LOGITS, torch.tensor([0.0]), temperature=0.5, top_k=2, top_p=1.0)
    expected = (torch.tensor([4.0, 2.0])).log_softmax(-1)[0]
    assert tokens.item() == 0
    assert logprobs.item() == pytest.approx(float(expected), abs=1e-6)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0, 0, 1.0), (0.7, 0, 1.0), (1.0, 50, 0.9)])
def test_a_large_batch_gives_each_row_the_token_that_it_has_alone(temperature, top_k, top_p):
    size = CELLS // 8
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(19, size, generator=generator)
    uniforms = torch.rand(19, generator=generator)
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    tokens, logprobs = sample_tokens(logits, uniforms, **given)
    alone = [sample_tokens(logits[row : row + 1], uniforms[row : row + 1], **given) for row in range(19)]
    assert tokens.tolist() == [int(token) for token, _ in alone]
    assert logprobs.tolist() == [float(nats) for _, nats in alone]
