from __future__ import annotations

import pytest

from multitask_rl.records import Failure, Score
from multitask_rl_rewards.label_match import LabelMatch, find_labels
from reward_builders import rollout

LABELS = ["hateful", "non-hateful"]


def value(response: str, reference: str = "non-hateful", **row: object) -> float:
    (result,) = LabelMatch(LabelMatch.Config()).score(
        [rollout(response, reference=reference, labels=LABELS, **row)]
    )
    assert isinstance(result, Score), result
    return result.value


@pytest.mark.parametrize(
    "response",
    [
        "non-hateful",
        "It is NON-HATEFUL.",
        "<think>hateful?</think>non-hateful",
        "**non-hateful**",
        "_non-hateful_",
        "non hateful",
        "This text is not hateful.",
        "It isn\u2019t hateful.",
        "It does not contain hateful speech",
        "No, it is non-hateful.",
        "non-hateful, not hateful",
    ],
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
        "not non-hateful",
        "nonhateful",
        "hatefully",
        "none",
    ],
)
def test_wrong_hedged_and_missing_labels_score_zero(response):
    assert value(response) == 0.0


@pytest.mark.parametrize(
    ("response", "named"),
    [
        ("Animals", ["animal"]),
        ("animal\u017f", []),
        ("An_animal", ["animal"]),
        ("Not an animal", []),
        ("It is not a food but an animal.", ["animal"]),
        ("An animal, not a food", ["animal"]),
        ("It is neither animal nor food", []),
        ("There is no doubt that it is an animal", ["animal"]),
        ("animal/foods", ["animal", "food"]),
        ("non-animal", []),
        ("as", []),
        *((f"No{mark}animal", ["animal"]) for mark in (" - ", "\u2014", " \u2013 it is an ", " (", " -> ")),
        ("It is not only an animal", ["animal"]),
        ("none other than animal", ["animal"]),
    ],
)
def test_negated_labels_are_not_named_and_plurals_are(response, named):
    assert sorted(find_labels(response, ["animal", "food", "A"])) == named


@pytest.mark.parametrize(
    ("response", "named"),
    [
        ("Score: 1", ["1"]),
        ("Answer:\n1", ["1"]),
        ("Score: -1", ["-1"]),
        ("0", ["0"]),
        ("-1 or 1", ["-1", "1"]),
    ],
)
def test_a_sign_belongs_to_its_label(response, named):
    assert sorted(find_labels(response, ["-1", "0", "1"])) == named


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
