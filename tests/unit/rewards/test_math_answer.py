from __future__ import annotations

import threading

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Score
from multitask_rl_rewards.math_answer import MathAnswer, last_boxed
from reward_builders import real_rows, rollout


def value(response: str, reference: object = "72", answer: str = "any", **row: object) -> float:
    (result,) = MathAnswer(MathAnswer.Config(answer=answer)).score(
        [rollout(response, reference=reference, **row)]
    )
    assert isinstance(result, Score), result
    return result.value


@pytest.mark.parametrize(
    "response",
    [
        r"\boxed{72}",
        "48 + 24 = 72",
        "#### 72",
        "The answer is 72. Note that 5 were left.",
        "Answer: $72$",
        "72.0",
        r"first \boxed{70}, no: \boxed{72.0} at last",
        "<think>maybe 3?</think>72",
        "The answer is\n\n72",
    ],
)
def test_right_answers_in_many_forms_score_one(response):
    assert value(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   ",
        "I cannot determine the answer.",
        "71",
        "72 clips in April, 71 in all",
        r"\boxed{}",
        r"\boxed{71} and 72",
        r"\boxed{72",
        "<think>72",
        "{{{{{{" * 50,
        "\x00\ud83d",
        "the answer is unknown",
    ],
)
def test_wrong_empty_and_garbage_answers_score_zero(response):
    assert value(response) == 0.0


def test_repeating_the_question_is_no_answer():
    question = "How many are 72 and 0? Think of 72"
    assert value(question, prompt=question) == 0.0
    assert value(f"{question}\n72", prompt=question) == 1.0


@pytest.mark.parametrize(
    ("reference", "response"),
    [
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}"),
        (r"x \in [-2,7]", r"$x \in [-2,7]$"),
        ("1,000", "1000"),
        (5, "5"),
        (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
        (r"11\sqrt2", r"\boxed{\sqrt{242}}"),
    ],
)
def test_latex_is_compared_by_value(reference, response):
    assert value(response, reference) == 1.0


def test_answer_mode_says_where_an_answer_counts():
    assert value("it is 72", answer="marked") == 0.0
    assert value("the answer is 72", answer="marked") == 1.0
    assert value("the answer is 72", answer="boxed") == 0.0
    assert value(r"\boxed{72}", answer="boxed") == 1.0
    with pytest.raises(ConfigError, match="answer must be one of any, boxed, marked"):
        MathAnswer(MathAnswer.Config(answer="last"))


def test_missing_or_unusable_reference_is_a_data_failure():
    reward = MathAnswer(MathAnswer.Config())
    for row in ({}, {"reference": None}, {"reference": ""}, {"reference": "$$"}):
        (result,) = reward.score([rollout("72", **row)])
        assert isinstance(result, Failure)
        assert result.kind == "data"


def test_works_off_the_main_thread():
    # math_verify's own limit needs SIGALRM, which only the main thread may set.
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(value(r"\boxed{72.0}")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_last_boxed_handles_nesting_and_truncation():
    assert last_boxed(r"\boxed{a} \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{a} \boxed{\frac{1}{2}") == "a"
    assert last_boxed("none") is None


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["math500", "gsm8k_test", "math_easy"])
def test_gold_answers_of_real_rows_score_one_and_echoes_zero(name):
    for row in real_rows(name, 60):
        assert value(rf"So \boxed{{{row['reference']}}}.", **row) == 1.0
        assert value(f"The answer is ${row['reference']}$.", **row) == 1.0
        assert value(row["prompt"], **row) == 0.0
        assert value("", **row) == 0.0


@pytest.mark.realdata
def test_worked_solutions_of_gsm8k_score_one():
    rows = real_rows("gsm8k_train", 200)
    assert sum(value(row["solution"] + f"\n#### {row['reference']}", **row) for row in rows) == len(rows)


@pytest.mark.parametrize(
    ("reference", "question", "response", "value"),
    [
        ("5", "How many apples?", "5%", 0.0),
        ("5", "How many apples?", "The answer is 5 percent.", 0.0),
        ("5", "How many apples?", r"\boxed{5\%}", 0.0),
        ("42/29", "Which share?", "**42/29**", 1.0),
        ("232", "Which number?", "2**3**2", 0.0),
        ("0.5", "Which share?", "50%", 1.0),
        ("0.5", "Which share?", r"\boxed{50\%}", 1.0),
        ("5", "What percentage of the apples?", "5%", 1.0),
        ("5", "By how many % does it grow?", r"\boxed{5\%}", 1.0),
        ("5%", "How much does it grow?", "5%", 1.0),
        (r"5\%", "How much does it grow?", r"\boxed{5\%}", 1.0),
    ],
)
def test_a_percent_sign_is_a_unit_only_where_the_row_speaks_of_percent(
    reference: str, question: str, response: str, value: float
) -> None:
    row = {"reference": reference, "prompt": question}
    reward = MathAnswer(MathAnswer.Config())
    assert reward.score([rollout(response, **row)]) == [Score(value=value)]


@pytest.mark.parametrize(
    ("reference", "right", "left_to_do"),
    [
        ("408", "12 * 34 = 408", "12 * 34"),
        ("408", r"\boxed{408.0}", r"\boxed{12 \cdot 34}"),
        ("408", "$x=408$", r"$x = 12 \times 34$"),
        ("5", "8 - 3 = 5 apples", "The answer is 8 - 3 apples"),
        ("3", "12/4 = 3", "12/4"),
        ("3", "3", r"$\frac{12}{4}$"),
        ("0.75", "3/4", "1/2 + 1/4"),
        (r"\frac{1}{2}", "0.5", r"$2 \cdot \frac{1}{4}$"),
        ("4.5", r"$4\frac{1}{2}$", "9 * 0.5"),
        ("42/29", "84/58", "40/29 + 2/29"),
        ("1500", r"$1.5 \times 10^{3}$", r"$15 \cdot 100$"),
        ("512", "512", "2^9"),
        ("120", "120", "$5!$"),
        ("50", "50", "100 * 50%"),
        ("2", "200%", r"$\sqrt{4}$"),
        ("7", r"$\frac{84}{12} = 7$", r"$7 = \frac{84}{12}$"),
        ("80", r"\boxed{240 / 3 = 80}", "240 / 3"),
        ("20", r"\text{20}", "2000/100"),
        ("7", r"\boxed{\mathbf{7}}", r"$14 \div 2$"),
        ("3", "3", r"\boxed{(12)/(4)}"),
    ],
)
def test_a_computation_that_is_left_to_do_is_no_number(reference, right, left_to_do):
    assert value(right, reference) == 1.0
    assert value(left_to_do, reference) == 0.0


@pytest.mark.parametrize(
    ("reference", "response"), [(r"11\sqrt2", r"\boxed{\sqrt{242}}"), ("2^{10}", "$2^{10}$")]
)
def test_where_the_reference_is_no_plain_number_equal_expressions_count(reference, response):
    assert value(response, reference) == 1.0


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("1/2", r"#### \frac{1}{2}", r"#### 4\frac{1}{2}"),
        (r"\frac12", r"The answer is \frac{1}{2}.", r"The answer is \frac{1}{2}x."),
        (r"\frac12", r"The answer is \frac{2}{4}", r"The answer is 2^{\frac{1}{2}}"),
        ("9/2", r"The answer is 4\frac{1}{2}.", r"The answer is \frac{1}{2}."),
        (r"\frac12", r"The answer is \frac{1}{2} of it.", r"The answer is 3+\frac{1}{2}"),
        ("100000", "The answer is 1e5.", "The answer is 1e-5."),
        ("1e5", "100000", "1"),
        ("3", "#### 3", "#### 1 or 2 or 3"),
        ("3", "The answer is 3 or 3.0.", "The answer is 1, 2, 3."),
        ("1", "#### $1$", "#### 0 1"),
        ("1000", "#### $1,000", "#### 1 and 1000"),
        ("1000", "#### 1 000", "#### 10 000"),
        ("1, 2", "#### 1, 2", "#### 1, 3"),
    ],
)
def test_the_whole_answer_counts_not_the_part_that_is_easily_read(reference, right, wrong):
    assert value(right, reference) == 1.0
    assert value(wrong, reference) == 0.0
