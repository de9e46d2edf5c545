"""What the world of an episode gave, also of an episode that a constraint ended."""

from dataclasses import replace

import pytest

from multitask_rl.records import FLAGGED, NOT_APPLICABLE, Score
from multitask_rl.testing.builders import make_rollout
from multitask_rl_rewards.environment import EnvironmentReward


@pytest.mark.parametrize(
    ("earned", "reason", "key", "expected"),
    [
        (None, "stop", "", None),
        (None, FLAGGED, "", 0.0),
        (None, "length", "", 0.0),
        (0.5, "length", "", 0.5),
        ({"a": 0.25}, "length", "b", 0.0),
        (0.5, FLAGGED, "", 0.5),
        ({"a": 0.25, "b": 0.5}, FLAGGED, "", 0.75),
        ({"a": 0.25}, "stop", "b", None),
        ({"a": 0.25}, FLAGGED, "b", 0.0),
    ],
)
def test_an_episode_that_a_limit_or_a_constraint_ended_has_earned_nothing_more(earned, reason, key, expected):
    rollout = replace(make_rollout(), earned=earned, finish_reason=reason)
    (found,) = EnvironmentReward(EnvironmentReward.Config(key=key)).score([rollout])
    assert found is NOT_APPLICABLE if expected is None else isinstance(found, Score)
    assert expected is None or found.value == expected


def test_an_unfinished_episode_has_the_value_that_the_task_gives_it():
    reward = EnvironmentReward(EnvironmentReward.Config(unfinished=-1.0))
    rollouts = [replace(make_rollout(), earned=None, finish_reason=r) for r in ("length", FLAGGED, "stop")]
    first, second, third = reward.score(rollouts)
    assert (first, second, third) == (Score(value=-1.0), Score(value=-1.0), NOT_APPLICABLE)
