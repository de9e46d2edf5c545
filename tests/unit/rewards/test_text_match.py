from __future__ import annotations

import subprocess
import sys

import pytest

from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Score
from multitask_rl.scoring.pool import plan_plugin
from multitask_rl_rewards.text_match import F1, ExactMatch, Rouge
from reward_builders import real_rows, rollout

LETTER = r"Answer:\s*\(?([A-Z])\b|^\W*([A-Z])\W*$"


def one(reward, response, **row):
    (result,) = reward.score([rollout(response, **row)])
    return result


def exact(response: str, reference: object, **config: object) -> float:
    result = one(ExactMatch(ExactMatch.Config(**config)), response, reference=reference)
    assert isinstance(result, Score), result
    return result.value


def test_exact_match_ignores_case_articles_and_punctuation():
    assert exact(" The Eiffel tower. ", "eiffel tower") == 1.0
    assert exact("the Eiffel towers", "eiffel tower") == 0.0
    assert exact("The Eiffel tower.", "eiffel tower", normalise=False) == 0.0
    assert exact("<think>Rome?</think>Paris", "paris") == 1.0


@pytest.mark.parametrize("plugin", ["exact_match", "f1", "rouge"])
def test_a_pattern_of_the_user_runs_where_it_can_be_killed(plugin):
    plans = [
        plan_plugin(TaskSpec(name="t"), RewardSpec(plugin=plugin, config=config), 0, seed=0, devices={})
        for config in ({"pattern": "(x+x+)+y"}, {"pattern": ""}, {})
    ]
    assert [plan.isolate for plan in plans] == [True, False, False]
    assert [plan.build().traits.isolate for plan in plans] == [True, False, False]


def test_any_of_several_references_counts():
    assert exact("paid monument", ["visited paid monument", "paid monument"]) == 1.0
    result = one(ExactMatch(ExactMatch.Config(reference_column="answers")), "b", answers=["a", "b"])
    assert result == Score(value=1.0)


@pytest.mark.parametrize(
    "response", ["", "   ", "!", "the", "garbage", "\x00", "paris or rome", "<think>paris"]
)
def test_empty_garbage_and_hedged_answers_score_zero(response):
    assert exact(response, "paris") == 0.0


def test_reference_of_punctuation_alone_matches_only_itself():
    assert exact("!", "?") == 0.0
    assert exact("?", "?") == 1.0


@pytest.mark.parametrize(
    ("response", "normalise", "vote"),
    [
        ("The  Nile.", True, "nile"),
        ("2.50", True, "2.5"),
        ("!", True, "!"),
        ("The Nile.", False, "The Nile."),
        (" ", True, ""),
    ],
)
def test_answers_that_match_alike_are_one_vote(response, normalise, vote):
    result = one(ExactMatch(ExactMatch.Config(normalise=normalise)), response, reference="Nile")
    assert result.answer == vote


def test_pattern_takes_the_last_match_and_no_match_is_no_answer():
    assert exact("Answer: A\nno,\nAnswer: (B)", "B", pattern=LETTER) == 1.0
    assert exact("B", "B", pattern=LETTER) == 1.0
    assert exact("it is B", "B", pattern=LETTER) == 0.0
    with pytest.raises(ConfigError, match="not a regular expression"):
        ExactMatch(ExactMatch.Config(pattern="("))


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"reference": None},
        {"reference": ""},
        {"reference": []},
        {"reference": [" "]},
        {"reference": {"gold": "a"}},
    ],
)
def test_missing_reference_is_a_data_failure(row):
    for reward in (ExactMatch(ExactMatch.Config()), F1(F1.Config()), Rouge(Rouge.Config())):
        result = one(reward, "", **row)
        assert isinstance(result, Failure)
        assert result.kind == "data"
        assert result.source == reward.name


def test_one_bad_row_leaves_its_neighbours_alone():
    results = ExactMatch(ExactMatch.Config()).score(
        [
            rollout("a b", reference="a b"),
            rollout("x"),
            rollout("", reference="q"),
            rollout("q", reference="q"),
        ]
    )
    assert [getattr(r, "value", r.__class__.__name__) for r in results] == [1.0, "Failure", 0.0, 1.0]


@pytest.mark.parametrize(
    ("response", "reference"),
    [
        ("Sa\u0303o Paulo", "S\u00e3o Paulo"),
        ("\u201cParis\u201d", "Paris"),
        ("O\u2019Brien", "O'Brien"),
        ("Paris\u2026", "Paris"),
        ("\u5df4\u9ece\u3002", "\u5df4\u9ece"),
    ],
)
def test_one_text_in_two_spellings_of_unicode_is_equal(response, reference):
    assert exact(response, reference) == exact(reference, response) == 1.0
    assert one(F1(F1.Config()), response, reference=reference) == Score(value=1.0)
    assert one(Rouge(Rouge.Config()), "Sa\u0303o", reference="S\u00e3o") == Score(value=1.0)


@pytest.mark.parametrize(
    ("response", "same", "other"),
    [("2,5", "2,5", "25"), ("1,2", "(1,2)", "12"), ("June 5, 2012,", "June 5 2012", "June 52012")],
)
def test_a_comma_between_digits_counts_unless_it_parts_thousands(response, same, other):
    assert (exact(response, same), exact(response, other), exact("1,234,567", "1234567")) == (1.0, 0.0, 1.0)


def test_f1_counts_shared_words():
    f1 = F1(F1.Config())
    assert one(f1, "the red house", reference="house red big").value == pytest.approx(0.8)
    assert one(f1, "blue", reference="house red big").value == 0.0
    assert one(f1, "house house house", reference="house").value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    # hypothesis "the cat sat here", reference "the cat was here": 3 of 4 words, 1 of 3 pairs, LCS 3
    [("rouge1", 3 / 4), ("rouge2", 1 / 3), ("rougeL", 3 / 4)],
)
def test_rouge_equals_hand_computed_values(kind, expected):
    assert one(
        Rouge(Rouge.Config(kind=kind)), "the cat sat here", reference="The cat was here."
    ).value == pytest.approx(expected)


def test_rouge_l_respects_order_and_unknown_kind_is_refused():
    assert one(Rouge(Rouge.Config()), "here was cat", reference="cat was here").value == pytest.approx(1 / 3)
    with pytest.raises(ConfigError, match="kind must be one of rouge1, rouge2, rougeL"):
        Rouge(Rouge.Config(kind="rouge9"))


@pytest.mark.parametrize("reward", [F1(F1.Config()), Rouge(Rouge.Config())])
def test_references_without_a_word_are_compared_by_their_signs(reward):
    assert one(reward, ":-)", reference=":-)").value == 1.0
    assert one(reward, "smile", reference=":-)").value == 0.0


def test_module_imports_neither_torch_nor_evaluate():
    code = (
        "import sys, multitask_rl_rewards.text_match; print(sorted({'torch', 'evaluate'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_metric_is_a_real_evaluate_metric():
    import evaluate

    from multitask_rl_rewards.evaluate_metrics import ReferenceMetric, compute_f1

    metric = ReferenceMetric("f1", compute_f1)
    assert isinstance(metric, evaluate.Metric)
    assert metric.compute(predictions=["a b", "c"], references=[["b"], ["c"]])["f1"] == pytest.approx(1.0)


@pytest.mark.realdata
def test_gold_answers_of_real_rows_score_one():
    rows = real_rows("nq_open", 100)
    reward = ExactMatch(ExactMatch.Config(reference_column="answers"))
    gold = reward.score([rollout(row["reference"], **row) for row in rows])
    echo = reward.score([rollout(row["prompt"], **row) for row in rows])
    assert {r.value for r in gold} == {1.0}
    assert {r.value for r in echo} == {0.0}


def test_the_metrics_load_neither_torch_nor_transformers_and_leave_both_to_others():
    code = """
import sys
import multitask_rl_rewards.evaluate_metrics as metrics
assert {"torch", "transformers"}.isdisjoint(sys.modules)
assert metrics.per_prediction("same", lambda one, other: float(one == other), ["a"], [["b", "a"]]) == [1.0]
import transformers
assert transformers.utils.is_torch_available()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
