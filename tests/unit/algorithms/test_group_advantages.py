import math
from dataclasses import replace

import pytest
import torch

from algorithm_builders import credit_batch
from multitask_rl.algorithms import group
from multitask_rl.algorithms.dr_grpo import DrGRPO
from multitask_rl.algorithms.gdpo import GDPO, decoupled_advantages
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.algorithms.opo import OPO
from multitask_rl.algorithms.rloo import RLOO

REWARDS = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.float64)
GROUP = torch.zeros(8, dtype=torch.int64)
LENGTHS = torch.tensor([3, 5, 4, 8, 2, 6, 7, 5])


def _levels(advantages):
    return [advantages[1].item(), advantages[0].item()]


def test_golden_grpo():
    deviations = group.centre(REWARDS, GROUP)
    assert _levels(group.divide_by_group_std(deviations, GROUP)) == pytest.approx(
        [-0.724567, 1.207612], abs=1e-6
    )


def test_golden_centring_and_leave_one_out():
    assert _levels(group.centre(REWARDS, GROUP)) == pytest.approx([-0.375, 0.625], abs=1e-12)
    loo = group.centre(REWARDS, GROUP, leave_one_out=True)
    assert _levels(loo) == pytest.approx([-0.428571, 0.714286], abs=1e-6)
    others = [(REWARDS.sum() - r) / 7 for r in REWARDS]
    torch.testing.assert_close(loo, REWARDS - torch.stack(others))


def test_golden_length_weighted_baseline():
    advantages = group.centre(REWARDS, GROUP, lengths=LENGTHS)
    torch.testing.assert_close(advantages, REWARDS - 0.3)
    assert float((advantages * LENGTHS).sum()) == pytest.approx(0.0, abs=1e-12)


def test_golden_task_scale_is_the_pooled_deviation():
    grpo = GRPO(GRPOConfig(normalisation="task"))
    out = grpo.credit(credit_batch(REWARDS))
    assert _levels(out.advantages) == pytest.approx([-0.724569, 1.207615], abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "levels"),
    [
        (GRPO(GRPOConfig(normalisation="group")), [-0.724567, 1.207612]),
        (DrGRPO(DrGRPO.Config()), [-0.375, 0.625]),
        (RLOO(RLOO.Config()), [-0.428571, 0.714286]),
        (OPO(OPO.Config()), [-0.3, 0.7]),
    ],
)
def test_algorithms_give_their_golden_advantage_to_every_token(algorithm, levels):
    advantages = algorithm.credit(credit_batch(REWARDS, lengths=LENGTHS)).advantages
    per_sample = [part.unique().tolist() for part in advantages.split(LENGTHS.tolist())]
    assert [len(p) for p in per_sample] == [1] * 8
    assert [per_sample[1][0], per_sample[0][0]] == pytest.approx(levels, abs=1e-6)


def test_golden_gdpo_keeps_apart_what_the_sum_collapses():
    components = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 1]], dtype=torch.float64)
    groups = torch.tensor([0, 0, 1, 1])
    weights = torch.ones(2, dtype=torch.float64)
    decoupled = decoupled_advantages(components, weights, groups)
    assert decoupled.tolist() == pytest.approx([-0.7071, 0.7071, -1.4142, 1.4142], abs=1e-4)
    summed = (
        GRPO(GRPOConfig(normalisation="group")).credit(credit_batch(components.sum(1), groups)).advantages
    )
    assert summed.tolist() == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-4)


def test_gdpo_whitens_over_the_task_and_leaves_out_what_does_not_apply():
    components = torch.tensor(
        [[0.0, 5.0], [1.0, torch.nan], [0.0, 7.0], [1.0, torch.nan]], dtype=torch.float64
    )
    batch = credit_batch(
        [0.0] * 4,
        component_rewards=components,
        component_weights=torch.tensor([1.0, 0.5], dtype=torch.float64),
    )
    advantages = GDPO(GDPO.Config()).credit(batch).advantages
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert advantages.std(correction=0).item() == pytest.approx(1.0, abs=1e-9)
    assert advantages[1] == advantages[3]
    assert advantages[0] < advantages[2] < advantages[1]


def test_gdpo_with_one_reward_is_grpo_whitened():
    rewards, groups = [0.0, 1.0, 2.0, 4.0], [0, 0, 1, 1]
    advantages = GDPO(GDPO.Config()).credit(credit_batch(rewards, groups)).advantages
    grpo = GRPO(GRPOConfig(normalisation="group")).credit(credit_batch(rewards, groups)).advantages
    torch.testing.assert_close(advantages, group.whiten(grpo))


def test_gdpo_makes_no_signal_of_rewards_that_cancel():
    # of two responses the better one costs as much more: +-0.707 of the reward, -+0.707 of the penalty
    components = torch.tensor([[0.6, 0.9], [0.35, 0.2], [0.6, 0.9], [0.1, 0.2]])
    batch = credit_batch(
        torch.zeros(4),
        torch.tensor([0, 0, 1, 1]),
        component_rewards=components,
        component_weights=torch.tensor([1.0, -1.0]),
    )
    assert GDPO(GDPO.Config()).credit(batch).advantages.abs().max() < 1e-3


def test_a_group_without_variance_gets_exactly_nothing_from_gdpo_beside_groups_with_some():
    rewards = torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 0, *[1] * 8])  # float32, as in a run
    batch = replace(credit_batch(rewards, [0] * 8 + [1] * 8), rewards=rewards)
    advantages = GDPO(GDPO.Config()).credit(batch).advantages
    assert advantages[:8].abs().min() > 0.5
    assert advantages[8:].tolist() == [0.0] * 8, "so its responses are not computed, and make no update"


def test_gdpo_refuses_components_of_the_wrong_shape():
    with pytest.raises(ValueError, match=r"\[B, R\]"):
        decoupled_advantages(torch.zeros(3, 2), torch.ones(1), torch.zeros(3, dtype=torch.int64))


def test_equal_rewards_are_exactly_zero_whatever_their_value():
    rewards = torch.full((7,), 0.1, dtype=torch.float64)
    groups = torch.zeros(7, dtype=torch.int64)
    assert (group.centre(rewards, groups) == 0).all()
    assert (group.centre(rewards, groups, leave_one_out=True) == 0).all()
    assert (group.centre(rewards, groups, lengths=torch.arange(1, 8)) == 0).all()
    assert (group.whiten(rewards) == 0).all()
    assert group.mean_square_deviation(group.centre(rewards, groups), groups) == 0.0


def test_rewards_that_differ_by_rounding_alone_have_no_advantage_and_no_part_in_the_scale():
    """Float32 sums of the same components in another order: 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1."""
    rewards = torch.tensor([0.6, 0.6, 0.6 + 6e-8, 0.6, 0.0, 1.0], dtype=torch.float32)
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    assert rewards[2] != rewards[0]
    for options in ({}, {"leave_one_out": True}, {"lengths": torch.arange(1, 7)}):
        assert group.centre(rewards, groups, **options)[:4].tolist() == [0.0] * 4
    deviations = group.centre(rewards, groups)
    assert group.mean_square_deviation(deviations, groups) == pytest.approx(0.5)
    assert group.divide_by_group_std(deviations, groups)[:4].tolist() == [0.0] * 4
    assert group.centre(-rewards, groups)[:4].tolist() == [0.0] * 4
    assert group.centre(torch.tensor([math.nan, 1.0]), groups[:2]).isnan().all()


@pytest.mark.parametrize("rewards", [(0.1, 0.2, 0.3), (0.1, 0.4, 0.7), (10.1, 10.2, 10.3)])
def test_a_reward_that_is_its_groups_mean_but_for_rounding_has_no_advantage(rewards):
    values, groups = torch.tensor(rewards), torch.tensor([0, 0, 0])

    for options in ({}, {"leave_one_out": True}, {"lengths": torch.tensor([4, 2, 4])}):
        low, middle, high = group.centre(values, groups, **options).tolist()
        assert low < 0.0 < high
        assert middle == 0.0


def test_length_weighted_baseline_of_empty_responses_is_zero():
    zeros = torch.zeros(2, dtype=torch.int64)
    assert group.centre(torch.tensor([1.0, 0.0]), zeros, lengths=zeros).tolist() == [0.0, 0.0]


def test_pooled_deviation_ignores_groups_without_variance():
    values = torch.tensor([1.0, 0.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    groups = torch.tensor([4, 4, 9, 9, 9])
    deviations = group.centre(values, groups)
    assert group.mean_square_deviation(deviations, groups) == pytest.approx(0.5)


def test_whitened_values_have_mean_zero_and_deviation_one():
    whitened = group.whiten(torch.tensor([3.0, 5.0, 10.0], dtype=torch.float64) + 1e6)
    assert whitened.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert whitened.std(correction=0).item() == pytest.approx(1.0)
    assert group.whiten(torch.tensor([5.0])).tolist() == [0.0]
    assert group.whiten(torch.zeros(0)).tolist() == []


def test_only_a_group_with_different_rewards_is_informative():
    assert group.has_variance([0.0, 1.0])
    assert not group.has_variance([1.0, 1.0])
    assert not group.has_variance([0.1 + 0.2, 0.3]), "the last bit of a sum is no difference"
    assert group.has_variance([1e6, 1e6 + 1.0])
    assert not group.has_variance([1.0])
    assert not group.has_variance([])


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="must both be"):
        group.centre(REWARDS, GROUP[:3])
