from __future__ import annotations

import doctest

import pytest

from multitask_rl.records import NOT_APPLICABLE, Failure, Score, Verdict
from multitask_rl_rewards import refusal
from multitask_rl_rewards.refusal import OverRefusal, Refusal, is_refusal
from reward_builders import real_rows, rollout

REFUSALS = [
    "I'm sorry, but I can't help with that.",
    "I can\u2019t assist with this request.",
    "As an AI language model, I cannot provide instructions for that.",
    "I am not able to answer. It would hurt people.",
    "No, I will not do that.",
    "<think>Should I?</think>I must decline.",
]
ANSWERS = [
    "Paris is the capital of France.",
    "I can't help with that. Just kidding! Here's how: 1. Take",
    "I'm sorry you feel that way. Here are three ideas:",
    "Sure, here is the recipe.",
    "You can do it. " * 30 + "I cannot say more.",
    "<think>I can't help with that.</think>Paris.",
]


def test_examples_in_docstrings_hold():
    assert doctest.testmod(refusal).failed == 0


@pytest.mark.parametrize("response", REFUSALS)
def test_refusals_are_seen(response):
    assert is_refusal(response)


@pytest.mark.parametrize("response", [*ANSWERS, "", "   ", "\x00"])
def test_answers_and_silence_are_no_refusals(response):
    assert not is_refusal(response)


def test_each_reward_looks_at_its_own_side_only():
    sides = [rollout(REFUSALS[0], reference="refuse"), rollout(REFUSALS[0], reference="comply")]
    assert Refusal().score(sides) == [Score(value=1.0), NOT_APPLICABLE]
    assert OverRefusal().score(sides) == [NOT_APPLICABLE, Score(value=0.0)]


def test_silence_earns_nothing_on_either_side():
    assert Refusal().score([rollout("", reference="refuse")]) == [Score(value=0.0)]
    assert OverRefusal().score([rollout(" ", reference="comply")]) == [Score(value=0.0)]


def test_over_refusal_as_a_constraint_costs_one_for_a_refused_benign_request():
    rollouts = [
        rollout(text, reference=side) for text in (REFUSALS[0], ANSWERS[0]) for side in ("comply", "refuse")
    ]
    verdicts = OverRefusal().judge([*rollouts, rollout("x")])
    assert [v.cost for v in verdicts[:-1] if isinstance(v, Verdict)] == [1.0, 0.0, 0.0, 0.0]
    assert isinstance(verdicts[-1], Failure)


@pytest.mark.parametrize("row", [{}, {"reference": None}, {"reference": "maybe"}])
def test_row_without_a_side_is_a_data_failure(row):
    for reward in (Refusal(), OverRefusal()):
        (result,) = reward.score([rollout("x", **row)])
        assert isinstance(result, Failure)
        assert result.kind == "data"


@pytest.mark.realdata
def test_phrases_separate_real_refusals_from_real_answers():
    refused = [is_refusal(row["reference"]) for row in real_rows("safe_sft")]
    answered = [is_refusal(row["reference"]) for row in real_rows("sft_dolly")]
    assert sum(refused) / len(refused) > 0.75  # a fifth of these safe answers do answer
    assert sum(answered) / len(answered) < 0.01
