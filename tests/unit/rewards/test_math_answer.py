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
        "The answer is:\n\n\\[ 72 \\]",
        "### Answer\n72",
        "**Final Answer**\n72",
        "The answer to 48 + 24 is 72.",
        "The correct answer would be 72",
        "<answer>72</answer>",
        "<answer></answer> 72",
        "Answer: 72\n\nThe answer can be checked by adding 2 and 3.",
        "The answer is 72. The answer must be a whole number, so we are done.",
        "Our answer must be positive.\nx = 72 or x = -72, so it is 72.",
        "#### 72\n\nThe answer may be possible to shorten.",
        "Natalia sold 72. That is the answer\n",
        "first <answer>70</answer>, no: <answer> 72 </answer>",
        "`72`",
        "The answer is `72`.",
        "'72'",
        "\u201c72\u201d",
        "*72*",
        "(72)",
        "\\[72\\]",
        "\\$72",
        "72 (48 + 24)",
        "72\n\n48 + 24",
        "\u7b54\u6848\u662f72\u3002",
        "\u7b54\u6848\uff1a72",
        "\u6240\u4ee5\u670948+24=72\u4e2a\u3002",
        "\\boxed{72\u4e2a}",
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
        "71 (48 + 24)",
        "71\n48 + 24",
        "72 (48 + 23) 71",
        "72\n71",
        "(71, 72)",
        "`48 + 24`",
        "<answer>48 + 24</answer>",
        "<answer>71</answer> 72",
        "\u7b54\u6848\u662f71\u3002",
        "\u7b54\u6848\u662f-72\u3002",
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
        (r"4\sqrt3", r"\boxed{\frac{12}{\sqrt{3}}}"),
        ("6x+3", r"\boxed{3(2x+1)}"),
        ("(2,400)", "(2,400)"),
        ("1234", r"\boxed{1\,234}"),
        ("-5", "\u20135"),
        (r"10\%", r"\boxed{10}"),
        ("10%", "10"),
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
        ("5", "How many apples?", r"\boxed{5\text{ percent}}", 0.0),
        ("5", "What percentage of the apples?", r"\boxed{5\text{ percent}}", 1.0),
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
        ("120", "120", r"\boxed{\binom{10}{3}}"),
        ("-2", "-2", r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}"),
        (r"\frac{1}{20}", "0.05", r"\boxed{\frac{1}{\binom{6}{3}}}"),
        ("1/6", "1/6", r"\boxed{\frac{1}{2\cdot 3}}"),
        (r"\sqrt{13}", r"\boxed{\sqrt{13}}", r"\boxed{\sqrt{(3-1)^2+(5-2)^2}}"),
        (r"9\pi", r"$9\pi$", r"\boxed{\pi \cdot 3^2}"),
        ("(7, 2)", "(7,2)", r"\boxed{(3+4, 1+1)}"),
        (r"\{7,9\}", r"\boxed{\{9,7\}}", r"\boxed{\{3+4,3^2\}}"),
        ("2k+2", "$2+2k$", r"\boxed{(-k+4)+(-2+3k)}"),
        ("6+9i", "$9i+6$", r"\boxed{(2+4i)+(4+5i)}"),
        (r"\sqrt3", r"\boxed{\sqrt{3}}", r"\boxed{\tan\frac{\pi}{3}}"),
        ("7", "7", r"\boxed{\binom{10^5}{5000}}"),  # of more digits than Python writes
    ],
)
def test_a_computation_that_is_left_to_do_is_no_number(reference, right, left_to_do):
    assert value(right, reference) == 1.0
    assert value(left_to_do, reference) == 0.0


@pytest.mark.parametrize(
    ("question", "reference", "copied", "worked_out"),
    [
        (r"Simplify $\sqrt{242}$.", r"11\sqrt2", r"\sqrt{242}", r"11\sqrt{2}"),
        ("Factor $ab + 5b + 2a + 10$.", "(a+5)(b+2)", "ab+5b+2a+10", "(b+2)(a+5)"),
        (r"Simplify $\sqrt{242}$. Answer in \boxed{}.", r"11\sqrt2", r"\sqrt{242}", r"11\sqrt{2}"),
        ("Who won, Angela, Briana or Evelyn?", r"\text{Evelyn}", "Briana", "Evelyn"),
        ("Choose A, B, C or D.", r"\text{(C)}", "(B)", "C"),
        ("Is 1/2 or 1/3 greater?", r"\frac{1}{2}", "1/3", "1/2"),
        (r"Write $\frac{3}{20}$ as a decimal.", "0.15", r"\frac{3}{20}", "0.150"),
        (r"Which is larger, $\frac{1}{2}$ or $\frac{1}{3}$?", r"\frac12", r"\frac{1}{3}", r"\dfrac{1}{2}"),
        ("If $x=2$, factor $x^2+5x+6=0$ (left of $=$).", "(x+2)(x+3)", "x^2+5x+6", "(x+3)(x+2)"),
        (r"Which is larger, $\sqrt{2}$ or $1$?", r"\sqrt2", "1", r"\sqrt{2}"),
        ("Is $y=2x+3$ or $y=2x$ the line?", "y=2x+3", "2x", "2x+3"),
    ],
)
def test_an_expression_of_the_question_is_an_answer_only_as_the_reference_writes_it(
    question, reference, copied, worked_out
):
    assert value(rf"\boxed{{{copied}}}", reference, prompt=question) == 0.0
    assert value(rf"\boxed{{{worked_out}}}", reference, prompt=question) == 1.0


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (r"(-\infty,2)\cup(3,\infty)", r"x \in (-\infty, 2) \cup (3, \infty)", r"x \in (-\infty, 2)"),
        (r"\pm 5", r"x = \pm 5", r"x = \pm 4"),
        ("-5, 5", "x = -5, 5", "x = 5"),
        ("(3,4)", "(x,y)=(3,4)", "(x,y)=(4,3)"),
        ("(7,2)", "(x,y)=(7,2)", "(x,y)=(3+4,2)"),
        ("x>2", "2<x", "2>x"),
        ("x>2", r"(2,\infty)", r"(-\infty,2)"),
        ("x>2", r"x \in (2,\infty)", "2"),
        ("2", "x=2", "x>2"),
    ],
)
def test_an_answer_may_be_a_relation_or_the_values_that_it_states(reference, right, wrong):
    assert value(rf"\boxed{{{right}}}", reference) == 1.0
    assert value(rf"\boxed{{{wrong}}}", reference) == 0.0


@pytest.mark.parametrize("unit", ["dollars", "days", "cm", "eggs in all", "cups."])
@pytest.mark.parametrize("form", ["18 {}", r"18\ {}", "18~{}", r"18\,{}", r"18\text{{ {}}}", r"\$18 {}"])
def test_a_unit_in_a_box_is_no_part_of_the_number(form, unit):
    assert value(rf"\boxed{{{form.format(unit)}}}", "18") == 1.0
    assert value(rf"\boxed{{{form.format(unit)}}}", "8") == 0.0


@pytest.mark.parametrize("word", ["percent", "\uff05", "thousand", "million", "\u4e07", "pi", "squared"])
@pytest.mark.parametrize("form", ["18 {}", "18~{}"])
def test_a_word_that_changes_the_number_is_no_unit(form, word):
    assert value(rf"\boxed{{{form.format(word)}}}", "18") == 0.0


@pytest.mark.parametrize("form", [r"\boxed{{{}}}", "#### {}", "The answer is {}.", "{}"])
@pytest.mark.parametrize("other", ["72", "9", "14", "7", "2", "7.2"])
def test_numbers_with_a_space_between_are_no_number(form, other):
    assert value(form.format("7 2"), other) == 0.0
    assert value(form.format("7 2.5"), "72.5") == 0.0
    assert value(form.format("7  2"), other) == 0.0
    assert value(form.format("(7 2, 3)"), f"({other}, 3)") == 0.0
    assert value(form.format("12 345"), "12345") == 1.0, "but thousands may be grouped"
    assert value(form.format("12,345"), "12 345") == 1.0
    assert value(form.format("2 1/2"), "5/2") == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 million", "2000000"),
        ("2.5 million", "2500000"),
        (r"2\text{ million}", "2000000"),
        (r"2~\text{million dollars}", "2000000"),
        (r"\$2 million", "2000000"),
        ("2 Billion people", "2000000000"),
        ("1 1/2 thousand", "1500"),
        ("3 hundred thousand", "300000"),
        ("-1,200 thousand", "-1200000"),
    ],
)
@pytest.mark.parametrize("form", [r"\boxed{{{}}}", "#### {}", "The answer is {}.", "{}"])
def test_a_number_word_multiplies_the_number_before_it(form, text, number):
    answer = form.format(text)
    assert value(answer, number) == 1.0
    shown = number.rstrip("0")
    assert value(answer, shown) == 0.0


@pytest.mark.parametrize("reference", ["2 million", r"2\text{ million}", "2,000 thousand"])
def test_a_reference_may_have_a_number_word(reference):
    assert value("2000000", reference) == value(r"\boxed{2 million}", reference) == 1.0
    assert value("2", reference) == 0.0


def test_where_the_question_speaks_of_millions_the_number_before_the_word_is_one_too():
    question = "How many million people live there?"
    for answer in (r"\boxed{2 million}", "The answer is 2 million.", "#### 2"):
        assert value(answer, "2", prompt=question) == 1.0
        assert value(answer, "3", prompt=question) == 0.0
    assert value("The answer is 2 million.", "2000000", prompt=question) == 1.0


@pytest.mark.parametrize(
    ("responses", "answer"),
    [
        (["72", "72.0", r"\boxed{72}", r"\boxed{x = 72.00}", r"\boxed{72 eggs}"], "72"),
        (["1/2", "0.5", ".50", r"\boxed{\frac{2}{4}}", "50%"], "1/2"),
        (["-0.25", r"$-\frac14$"], "-1/4"),
        (["144/2"], "144/2"),
        ([r"$x^2+1$", r"$y=x^2+1$"], "x**2 + 1"),
    ],
)
def test_one_value_is_one_answer_for_the_majority_however_it_is_written(responses, answer):
    scores = MathAnswer(MathAnswer.Config()).score([rollout(r, reference="3") for r in responses])
    assert [score.answer for score in scores] == [answer] * len(responses)


@pytest.mark.parametrize("response", ["$2^{10}$", r"\boxed{2^{10}}", "1024"])
def test_where_the_reference_is_a_computation_it_may_be_left_to_do(response):
    assert value(response, "2^{10}") == 1.0


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
        ("-0.5", "The answer is -.5.", "The answer is .5."),
        ("-.5", "-0.5", "5"),
        ("1.5", "The answer is 1 1/2 cups.", "The answer is 1 1/3 cups."),
        ("1 1/2", "1.5", "1"),
        ("x^2+3", "x^2+3", "x^2 3/4"),
        ("-3/2", r"\boxed{-1 1/2}", r"\boxed{-1/2}"),
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
