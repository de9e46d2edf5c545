import pytest
import torch

from multitask_rl.algorithms import ragged


def test_suffix_sum_equals_the_slow_loop_on_ragged_samples():
    lengths = torch.tensor([1, 0, 13, 4, 8, 0])
    values = torch.randn(26, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for decay in (0.0, 0.5, 0.97, 1.0):
        expected, start = [], 0
        for length in lengths.tolist():
            total, part = 0.0, []
            for x in reversed(values[start : start + length].tolist()):
                total = x + decay * total
                part.append(total)
            expected += part[::-1]
            start += length
        result = ragged.discounted_suffix_sum(values, lengths, decay)
        torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_suffix_sum_of_nothing_is_nothing():
    empty = torch.zeros(0)
    assert ragged.discounted_suffix_sum(empty, torch.zeros(0, dtype=torch.int64), 0.9).shape == (0,)
    assert ragged.discounted_suffix_sum(empty, torch.zeros(3, dtype=torch.int64), 0.9).shape == (0,)


def test_suffix_sum_has_the_right_gradient():
    values = torch.randn(7, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([3, 0, 4])
    assert torch.autograd.gradcheck(lambda x: ragged.discounted_suffix_sum(x, lengths, 0.8), values)


def test_segments_without_values_are_zero_and_order_does_not_matter():
    values, segments = torch.tensor([1.0, 10.0, 2.0, 4.0]), torch.tensor([3, 0, 3, 3])
    assert ragged.segment_sum(values, segments, 5).tolist() == [10.0, 0.0, 0.0, 7.0, 0.0]
    assert ragged.segment_mean(values, segments, 5).tolist() == pytest.approx([10.0, 0.0, 0.0, 7 / 3, 0.0])


def test_wrong_token_count_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"values must have shape \[5\].*got \[4\]"):
        ragged.check_tokens(torch.tensor([2, 3]), values=torch.zeros(4))
    with pytest.raises(ValueError, match="must be"):
        ragged.broadcast(torch.zeros(2), torch.tensor([1, 1, 1]))
