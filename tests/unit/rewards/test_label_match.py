from __future__ import annotations

import pytest

from multitask_rl.records import Failure, Score
from multitask_rl_rewards.label_match import LabelMatch
from reward_builders import rollout

LABELS = ["hateful", "non-hateful"]


def value(response: str, reference: str = "non-hateful", **row: object) -> float:
    (result,) = LabelMatch(LabelMatch.Config()).score(
        [rollout(response, reference=reference, labels=LABELS, **row)]
    )
    assert isinstance(result, Score), result
    return result.value


@pytest.mark.parametrize(
    "response", ["non-hateful", "It is NON-HATEFUL.", "<think>hateful?</think>non-hateful", "**non-hateful**"]
)
def test_the_one_right_label_scores_one(response):
    assert value(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        " ",
        "hateful",
        "hateful or non-hateful",
        "non-hateful, not hateful",
        "nonhateful",
        "hatefully",
        "none",
    ],
)
def test_wrong_hedged_and_missing_labels_score_zero(response):
    assert value(response) == 0.0


def test_repeating_the_question_names_no_label():
    question = "Is it hateful or non-hateful?"
    assert value(question, prompt=question) == 0.0
    assert value(f"{question} non-hateful", prompt=question) == 1.0


@pytest.mark.parametrize(
    "row", [{}, {"reference": "a"}, {"reference": "a", "labels": ["b"]}, {"reference": "a", "labels": "abc"}]
)
def test_rows_without_labels_are_data_failures(row):
    (result,) = LabelMatch(LabelMatch.Config()).score([rollout("a", **row)])
    assert isinstance(result, Failure)
    assert result.kind == "data"
