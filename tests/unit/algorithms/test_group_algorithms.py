"""What every group-relative algorithm must satisfy, whichever estimator it uses."""

import json
import math
from importlib.metadata import entry_points

import pytest
import torch

from algorithm_builders import credit_batch
from multitask_rl.algorithms.base import Algorithm
from multitask_rl.algorithms.grpo import GRPO, GRPOConfig
from multitask_rl.errors import ConfigError

NAMES = [
    "grpo",
    "constrained_decoding",
    "dr_grpo",
    "rloo",
    "reinforce_pp",
    "dapo",
    "gspo",
    "cispo",
    "opo",
    "gdpo",
]
CLASSES = {
    e.name: e.load() for e in entry_points(group="multitask_rl.algorithms") if e.name in (*NAMES, "ppo")
}
SCALE_FREE = [n for n in NAMES if n not in ("dr_grpo", "rloo", "opo")]

GENERATOR = torch.Generator().manual_seed(3)
GROUPS = torch.arange(4).repeat_interleave(6)
LENGTHS = torch.randint(0, 9, (24,), generator=GENERATOR)
REWARDS = torch.rand(24, dtype=torch.float64, generator=GENERATOR).round(decimals=1)
REWARDS[6:12] = 0.7
COSTS = torch.randint(0, 2, (24, 1), generator=GENERATOR).double()
NUM_TOKENS = int(LENGTHS.sum())
OLD, REF = -torch.rand(2, NUM_TOKENS, dtype=torch.float64, generator=GENERATOR)


def _build(name, **settings) -> Algorithm:
    cls = CLASSES[name]
    return cls(cls.Config(**settings))


def _credit(name_or_algorithm, rewards=REWARDS, **others):
    algorithm = _build(name_or_algorithm) if isinstance(name_or_algorithm, str) else name_or_algorithm
    return algorithm.credit(credit_batch(rewards, GROUPS, LENGTHS, **others)).advantages


KL = {"old_logprobs": OLD, "ref_logprobs": REF, "kl_coefficient": 0.1}


@pytest.mark.parametrize("name", NAMES)
def test_adding_a_constant_to_the_rewards_changes_nothing(name):
    torch.testing.assert_close(_credit(name, REWARDS + 7.0), _credit(name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SCALE_FREE)
def test_a_task_times_100_plus_7_trains_the_same_also_with_costs_and_kl(name):
    first, second = _build(name), _build(name)
    others = {**KL, "costs": COSTS, "multipliers": (0.7,)}
    for step in range(3):
        rewards = REWARDS * (1 + step) ** 0.5
        plain = _credit(first, rewards, **others)
        scaled = _credit(second, rewards * 100.0 + 7.0, **others)
        # the group's epsilon of 1e-6 is the only thing with a unit
        torch.testing.assert_close(scaled, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "opo"])
def test_estimators_without_scale_are_equivariant_and_task_scale_makes_them_invariant(name):
    torch.testing.assert_close(_credit(name, REWARDS * 100.0), _credit(name) * 100.0)
    scaled = _credit(_build(name, normalisation="task"), REWARDS * 100.0)
    torch.testing.assert_close(scaled, _credit(_build(name, normalisation="task")))


@pytest.mark.parametrize("name", NAMES)
def test_order_of_the_samples_does_not_matter(name):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    tokens = torch.arange(NUM_TOKENS).split(LENGTHS.tolist())
    token_order = torch.cat([tokens[i] for i in order.tolist()])
    batch = credit_batch(
        REWARDS[order],
        GROUPS[order] * 10 + 5,  # nor do the groups' numbers
        LENGTHS[order],
        costs=COSTS[order],
        multipliers=(0.5,),
        old_logprobs=OLD[token_order],
        ref_logprobs=REF[token_order],
        kl_coefficient=0.1,
    )
    shuffled = _build(name).credit(batch).advantages
    straight = _credit(name, costs=COSTS, multipliers=(0.5,), **KL)
    torch.testing.assert_close(shuffled, straight[token_order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_equal_rewards_give_exactly_zero(name):
    assert (_credit(name, torch.full((24,), 0.3, dtype=torch.float64)) == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_group_of_one_gives_zero_not_its_raw_reward(name):
    batch = credit_batch([5.0, 1.0], groups=[0, 1], lengths=[2, 1])
    assert _build(name).credit(batch).advantages.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_empty_batch_and_empty_responses_give_no_advantage(name):
    assert _build(name).credit(credit_batch([], groups=[], lengths=[])).advantages.shape == (0,)
    assert _build(name).credit(credit_batch([1.0, 0.0], lengths=[0, 0])).advantages.shape == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_better_responses_get_larger_advantages_in_their_group(name):
    advantages = _build(name).credit(credit_batch([0.0, 0.5, 1.0, 3.0], [0, 0, 0, 0])).advantages
    assert (advantages.diff() > 0).all()
    assert advantages[0] < 0 < advantages[3]


@pytest.mark.parametrize("name", NAMES)
def test_without_multiplier_costs_change_nothing(name):
    unconstrained = _credit(name)
    assert (_credit(name, costs=COSTS, multipliers=(0.0,)) == unconstrained).all()


@pytest.mark.parametrize("name", NAMES)
def test_large_multiplier_leaves_only_the_costs(name):
    constrained = _credit(name, costs=COSTS, multipliers=(1e9,))
    costs_alone = _credit(name, torch.zeros_like(REWARDS), costs=COSTS, multipliers=(1e9,))
    torch.testing.assert_close(constrained, costs_alone, rtol=0, atol=1e-6)
    mean_cost_advantage = (constrained * COSTS[:, 0].repeat_interleave(LENGTHS)).sum()
    assert mean_cost_advantage < 0


@pytest.mark.parametrize("name", NAMES)
def test_several_constraints_are_combined_each_with_its_own_multiplier(name):
    second = torch.randint(0, 2, (24, 1), generator=torch.Generator().manual_seed(8)).double()
    zero, both = torch.zeros_like(REWARDS), torch.cat([COSTS, second], dim=1)
    reward = _credit(name)
    # a very large multiplier leaves minus the advantage of one cost alone
    first_cost = -_credit(name, zero, costs=COSTS, multipliers=(1e12,))
    second_cost = -_credit(name, zero, costs=second, multipliers=(1e12,))
    combined = _credit(name, costs=both, multipliers=(0.5, 2.0))
    expected = (reward - 0.5 * first_cost - 2.0 * second_cost) / 3.5
    torch.testing.assert_close(combined, expected, rtol=1e-6, atol=1e-6)
    alone = _credit(name, costs=both, multipliers=(0.5, 0.0))
    assert (alone == _credit(name, costs=COSTS, multipliers=(0.5,))).all(), (
        "an idle constraint changes nothing"
    )


@pytest.mark.parametrize("name", [*NAMES, "ppo"])
def test_a_cost_that_does_not_concern_a_sample_is_in_no_statistic(name):
    concerned = torch.arange(24) % 3 != 1
    costs = torch.where(concerned, COSTS[:, 0], torch.nan).unsqueeze(1)
    of_tokens = concerned.repeat_interleave(LENGTHS)
    zero, values = torch.zeros(24, dtype=torch.float64), torch.zeros(NUM_TOKENS, dtype=torch.float64)

    def credit(rewards, members, **others):
        batch = credit_batch(rewards[members], GROUPS[members], LENGTHS[members], **others)
        batch.values = values[: int(batch.lengths.sum())]
        return _build(name).credit(batch).advantages

    everyone = torch.ones_like(concerned)
    found = credit(zero, everyone, costs=costs, multipliers=(0.5,))
    assert (found[~of_tokens] == found[~of_tokens][0]).all(), "nothing tells them apart"
    if name != "ppo":  # whose advantages are whitened together
        alone = credit(zero, concerned, costs=costs[concerned], multipliers=(0.5,))
        torch.testing.assert_close(found[of_tokens], alone)
        assert (found[~of_tokens] == 0).all()


@pytest.mark.parametrize("normalisation", ["group", "task", "none"])
def test_multiplier_acts_by_its_size_not_by_its_sign(normalisation):
    # the trap: a combined reward r - lambda c, normalised, knows only whether lambda < 1
    algorithm = GRPO(GRPOConfig(normalisation=normalisation))
    gaps = []
    for multiplier in (0.25, 0.5, 2.0, 4.0):
        batch = credit_batch(
            [1.0, 0.0], costs=torch.tensor([[1.0], [0.0]], dtype=torch.float64), multipliers=(multiplier,)
        )
        advantages = algorithm.credit(batch).advantages
        gaps.append((advantages[0] - advantages[1]).item())
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > gaps[1] > 0 > gaps[2] > gaps[3]


@pytest.mark.parametrize("name", NAMES)
def test_kl_in_the_reward_pulls_towards_the_reference(name):
    old = torch.tensor([-0.1, -3.0], dtype=torch.float64)  # the policy likes 0, the reference both
    ref = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    batch = credit_batch([0.5, 0.5], old_logprobs=old, ref_logprobs=ref, kl_coefficient=0.1)
    advantages = _build(name).credit(batch).advantages
    assert advantages[0] < 0 < advantages[1]


def test_kl_of_an_all_solved_group_stays_small():
    # normalised together with the rewards, these differences of 0.001 would become +-1
    old = torch.tensor([-1.0, -1.1], dtype=torch.float64)
    ref = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    batch = credit_batch([1.0, 1.0], old_logprobs=old, ref_logprobs=ref, kl_coefficient=0.01)
    advantages = GRPO(GRPOConfig(normalisation="group")).credit(batch).advantages
    assert advantages.abs().max().item() == pytest.approx(0.0005)


def test_kl_without_normalisation_is_the_reward_minus_beta_kl():
    response_kl = torch.stack([x.sum() for x in (OLD - REF).split(LENGTHS.tolist())])
    with_kl = _credit("dr_grpo", **KL)
    penalised = _credit("dr_grpo", REWARDS - 0.1 * response_kl)
    torch.testing.assert_close(with_kl, penalised)


@pytest.mark.parametrize("name", NAMES)
def test_missing_log_probabilities_are_named(name):
    with pytest.raises(ValueError, match="old_logprobs"):
        _credit(name, kl_coefficient=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_state_survives_json_and_continues_identically(name):
    first, second = _build(name), _build(name)
    _credit(first, costs=torch.cat([COSTS, COSTS.flip(0)], dim=1), multipliers=(0.5, 0.5))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    later = REWARDS.flip(0) * 3.0
    others = {"costs": torch.cat([COSTS, COSTS * 0.5], dim=1), "multipliers": (1.0, 2.0)}
    assert (_credit(first, later, **others) == _credit(second, later, **others)).all()


def test_a_cost_keeps_its_scale_when_another_constraint_comes_before_it():
    """After a resume with one constraint more; and a state from before a cost has no scale of it."""
    old, resumed, fresh = (GRPO(GRPOConfig()) for _ in range(3))
    start = json.dumps(old.state_dict())
    small = {"costs": 0.01 * COSTS, "multipliers": (1.0,), "constraints": ("small",)}
    for _ in range(5):
        old.credit(credit_batch(REWARDS, GROUPS, LENGTHS, **small))
        fresh.credit(credit_batch(REWARDS, GROUPS, LENGTHS, **small))
    resumed.load_state_dict(json.loads(json.dumps(old.state_dict())))
    both = {"multipliers": (1.0, 1.0), "constraints": ("large", "small")}
    found = resumed.credit(
        credit_batch(REWARDS, GROUPS, LENGTHS, costs=torch.cat([COSTS, 0.01 * COSTS], dim=1), **both)
    )
    turned = {"multipliers": (1.0, 1.0), "constraints": ("small", "large")}
    expected = fresh.credit(
        credit_batch(REWARDS, GROUPS, LENGTHS, costs=torch.cat([0.01 * COSTS, COSTS], dim=1), **turned)
    )
    torch.testing.assert_close(found.advantages, expected.advantages)
    old.load_state_dict(json.loads(start))
    assert json.dumps(old.state_dict()) == start


def test_task_scale_does_not_depend_on_how_many_groups_were_filtered():
    with_flat = GRPO(GRPOConfig()).credit(credit_batch([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]))
    without = GRPO(GRPOConfig()).credit(credit_batch([1.0, 0.0], [0, 0]))
    assert with_flat.metrics["reward_scale"] == without.metrics["reward_scale"]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "gdpo"])
def test_group_methods_ask_for_variance(name):
    algorithm = _build(name)
    assert algorithm.is_informative([0.0, 1.0])
    assert not algorithm.is_informative([1.0, 1.0, 1.0])


def test_gdpo_cannot_tell_from_the_sums():
    assert _build("gdpo").is_informative([1.0, 1.0])


def test_plain_reinforce_pp_needs_no_group():
    algorithm = _build("reinforce_pp", group_baseline=False)
    assert algorithm.is_informative([1.0])
    advantages = algorithm.credit(credit_batch([2.0, 0.0], groups=[0, 1], lengths=[1, 1])).advantages
    assert advantages.tolist() == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("name", ["reinforce_pp", "opo", "grpo"])
def test_a_forced_token_is_in_no_statistic(name):
    """Free tokens get what they would get if the forced ones had not been written."""
    rewards, groups, lengths, free = [1.0, 0.0, 0.5, 0.0], [0, 0, 1, 1], [5, 3, 2, 4], [2, 3, 1, 0]
    where = torch.cat([torch.arange(n) < f for n, f in zip(lengths, free, strict=True)])
    costs = torch.tensor([[1.0], [0.0], [math.nan], [0.2]])
    old, ref = (torch.randn(sum(lengths), generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    old[~where] = ref[~where] = 0.0
    given = {"costs": costs, "multipliers": (0.5,), "kl_coefficient": 0.1}
    bare = credit_batch(rewards, groups, free, old_logprobs=old[where], ref_logprobs=ref[where], **given)
    whole = credit_batch(rewards, groups, lengths, choices=where, old_logprobs=old, ref_logprobs=ref, **given)
    found, expected = (_build(name).credit(batch).advantages for batch in (whole, bare))
    assert torch.allclose(found[where], expected, atol=1e-12)


def test_unknown_normalisation_is_refused():
    with pytest.raises(ConfigError, match="normalisation must be one of group, task, none"):
        GRPOConfig(normalisation="batch")
