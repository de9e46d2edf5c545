import json
from collections import Counter

import pytest
import torch

from algorithm_builders import credit_batch, scored
from multitask_rl.algorithms.base import TokenBatch
from multitask_rl.algorithms.kl import exact_kl
from multitask_rl.algorithms.reward_conditioned import (
    RewardConditioned,
    quantile_of_each,
)
from multitask_rl.errors import ConfigError
from multitask_rl.records import Turn

CONTROL = [100, 101, 102, 103]


def _build(**settings):
    algorithm = RewardConditioned(RewardConditioned.Config(**{"quantiles": 4, **settings}))
    algorithm.bind(CONTROL)
    return algorithm


def _step(rewards, **fields):
    return [scored(r, sample=i, response_ids=(i, i + 1), **fields) for i, r in enumerate(rewards)]


def test_distinct_rewards_fill_the_quantiles_evenly():
    quantiles = quantile_of_each([r / 20 for r in range(20)], 4)
    assert quantiles == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5


@pytest.mark.parametrize("num_successes", [1, 5, 30, 50, 80, 99])
def test_equal_rewards_share_a_quantile_the_best_own_the_top_alone(num_successes):
    quantiles = quantile_of_each([0.0] * (100 - num_successes) + [1.0] * num_successes, 4)
    assert set(quantiles[100 - num_successes :]) == {3}
    failures = set(quantiles[: 100 - num_successes])
    assert len(failures) == 1
    assert failures < {0, 1, 2}


def test_one_level_of_reward_is_the_top_and_no_reward_no_quantile():
    assert quantile_of_each([5.0, 5.0], 4) == [3, 3]
    assert quantile_of_each([], 4) == []


def test_rewards_that_differ_by_rounding_share_a_quantile():
    same = [0.1 + 0.2, 0.3]
    assert len(set(same)) == 2
    assert len(set(quantile_of_each([0.0, *same, 1.0], 6)[1:-1])) == 1
    assert quantile_of_each([0.1 + 0.2 - 0.3, 0.0, 0.3], 2) == quantile_of_each([0.0, 0.0, 0.3], 2)


def test_quantiles_follow_the_order_not_the_scale():
    rewards = [0.3, -1.0, 7.0, 0.3, 2.0]
    assert quantile_of_each([100 * r - 50 for r in rewards], 4) == quantile_of_each(rewards, 4)


def test_training_prompts_are_conditioned_once_there_is_experience_evaluation_always():
    algorithm = _build()
    assert algorithm.num_control_tokens == 4
    assert algorithm.condition([7, 8], evaluation=False) == [7, 8]
    assert algorithm.condition([7, 8], evaluation=True) == [103, 7, 8]
    algorithm.select(_step([0.0, 1.0]))
    assert algorithm.condition([7, 8], evaluation=False) == [103, 7, 8]


def test_selection_has_the_size_of_the_step_and_an_even_share_per_quantile():
    algorithm = _build()
    samples = algorithm.select(_step([i / 40 for i in range(40)]))
    assert len(samples) == 40
    assert Counter(s.prompt_ids[0] for s in samples) == dict.fromkeys(CONTROL, 10)
    # one step alone is drawn without replacement
    assert sorted(s.reward for s in samples) == [i / 40 for i in range(40)]


def test_control_token_matches_the_reward_and_the_reference_never_sees_it():
    algorithm = _build()
    for sample in algorithm.select(_step([i / 40 for i in range(40)])):
        assert list(sample.prompt_ids) == [CONTROL[int(sample.reward * 4)], 7, 8]
        assert sample.ref_prompt_ids == [7, 8]
        assert sample.rollout_logprobs == []
        index = round(sample.reward * 40)
        assert list(sample.response_ids) == [index, index + 1]


def test_control_token_of_a_conditioned_rollout_is_replaced_not_stacked():
    algorithm = _build()
    samples = algorithm.select(_step([0.0, 1.0], prompt_ids=(103, 7, 8)))
    assert all(len(s.prompt_ids) == 3 for s in samples)
    assert all(s.ref_prompt_ids == [7, 8] for s in samples)


@pytest.mark.parametrize("is_conditioned", [False, True])
def test_every_context_of_an_episode_has_the_control_token_of_its_reward(is_conditioned):
    algorithm = _build()
    front = [103] * is_conditioned
    step = _step([i / 40 for i in range(40)], prompt_ids=(*front, 7, 8))
    for one in step:
        one.rollout.turns = [
            Turn(num_tokens=1),
            Turn(num_tokens=1, context_ids=[*front, 9, one.rollout.response_ids[0], 6]),
        ]
    algorithm.select(step)
    samples = algorithm.select(step)
    restored = _build()
    restored.load_state_dict(json.loads(json.dumps(algorithm.state_dict())))
    for sample in [*samples, *restored.select(step)]:
        control = CONTROL[int(sample.reward * 4)]
        first, second = sample.split()
        assert (list(first.prompt_ids), list(first.ref_prompt_ids)) == ([control, 7, 8], [7, 8])
        assert list(second.prompt_ids) == [control, 9, first.response_ids[0], 6]
        assert list(second.ref_prompt_ids) == [9, first.response_ids[0], 6]


def test_rare_successes_are_drawn_far_above_their_share():
    algorithm = _build()
    samples = algorithm.select(_step([0.0] * 95 + [1.0] * 5))
    tops = [s for s in samples if s.prompt_ids[0] == CONTROL[3]]
    assert {s.reward for s in tops} == {1.0}
    assert len(tops) == 50  # two quantiles hold something
    assert set(Counter(s.scored.rollout.sample for s in tops).values()) == {10}


def test_the_buffer_remembers_earlier_steps_and_forgets_the_oldest():
    algorithm = _build(buffer_size=4)
    algorithm.select(_step([9.0, 9.0, 9.0, 9.0]))
    samples = algorithm.select(_step([0.0, 1.0]))
    assert len(samples) == 2
    assert algorithm.credit(credit_batch([0.0])).metrics["buffer_reward_mean"] == pytest.approx(19.0 / 4)
    algorithm.select(_step([0.0, 1.0]))
    assert algorithm.credit(credit_batch([0.0])).metrics["buffer_reward_max"] == 1.0


def test_stop_and_resume_equals_the_uninterrupted_run():
    whole, first = _build(seed=3), _build(seed=3)
    steps = [_step([(i * 7 + j) % 5 for j in range(8)]) for i in range(6)]
    for step in steps[:3]:
        whole.select(step)
        first.select(step)
    resumed = _build(seed=3)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in steps[3:]:
        assert whole.select(step) == resumed.select(step)


def test_seeds_draw_differently():
    step = _step([float(i % 3) for i in range(30)])
    draws = [[s.scored.rollout.sample for s in _build(seed=seed).select(step)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_rebuilt_record_keeps_what_the_learner_reads():
    algorithm = _build()
    (sample,) = algorithm.select(_step([0.5], finish_reason="length", policy_version=3))
    rollout = sample.scored.rollout
    assert (sample.task, rollout.group_id, rollout.policy_version) == ("toy", "toy#0", 3)
    assert rollout.is_truncated
    assert rollout.sampling.max_new_tokens == 10
    assert rollout.sampling.stop == ("\n",)
    assert sample.scored.reward == sample.reward == 0.5


def test_nothing_scored_is_nothing_selected():
    algorithm = _build()
    assert algorithm.select([]) == []
    assert algorithm.condition([7], evaluation=False) == [7]


def test_loss_is_likelihood_plus_exact_kl_with_the_right_gradient():
    logits = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(5, 6, dtype=torch.float64)
    tokens = torch.tensor([0, 5, 2, 2, 1])
    algorithm = _build()

    def loss(x):
        logprobs = x.log_softmax(-1)[torch.arange(5), tokens]
        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            advantages=torch.ones(5, dtype=torch.float64),
            sequence=torch.zeros(5, dtype=torch.int64),
            num_sequences=1,
            exact_kl=exact_kl(x, ref),
            kl_coefficient=0.05,
        )
        return algorithm.loss(batch).loss

    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none") + 0.05 * exact_kl(
        logits, ref
    )
    torch.testing.assert_close(loss(logits), expected)
    assert torch.autograd.gradcheck(loss, logits)


def test_every_token_counts_alike():
    credit = _build().credit(credit_batch([1.0, 0.0], lengths=[2, 3]))
    assert credit.advantages.tolist() == [1.0] * 5


def test_missing_kl_wrong_tokens_and_bad_settings_are_named():
    batch = TokenBatch(
        logprobs=torch.zeros(1),
        old_logprobs=torch.zeros(1),
        advantages=torch.ones(1),
        sequence=torch.zeros(1, dtype=torch.int64),
        num_sequences=1,
        kl_coefficient=0.1,
    )
    with pytest.raises(ValueError, match="exact_kl"):
        _build().loss(batch)
    with pytest.raises(ConfigError, match="4 different control tokens"):
        _build().bind([1, 2, 3])
    with pytest.raises(ConfigError, match="4 different control tokens"):
        _build().bind([1, 2, 3, 3])
    with pytest.raises(RuntimeError, match="bind"):
        RewardConditioned(RewardConditioned.Config()).condition([1], evaluation=True)
    with pytest.raises(ConfigError, match="quantiles"):
        RewardConditioned.Config(quantiles=1)
    with pytest.raises(ConfigError, match="buffer_size"):
        RewardConditioned.Config(buffer_size=2)
