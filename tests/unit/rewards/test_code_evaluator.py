from __future__ import annotations

import sys

import pytest

from multitask_rl.errors import ConfigError
from multitask_rl.records import Failure, Score
from multitask_rl.sandbox.base import Ending, Outcome
from multitask_rl_rewards import code_evaluator
from multitask_rl_rewards.code_evaluator import CodeEvaluator
from multitask_rl_rewards.codebleu_score import load_language
from reward_builders import real_rows, rollout

ROW = {
    "prompt": "Write a function add.",
    "entry_point": "add",
    "tests": [
        "assert add(1, 2) == 3",
        "assert add(0, 0) == 0",
        "assert add(-1, 1) == 0",
        "assert add(2, 2) == 4",
    ],
    "reference": "def add(a, b):\n    c = a + b\n    return c\n",
}
STDIO = {
    "prompt": "Add two numbers.",
    "tests": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "2 2\n", "stdout": "4"}],
}
HUMANEVAL = {
    "prompt": 'def add(a, b):\n    """ Add. """\n',
    "entry_point": "add",
    "tests": ["def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 1) == 1\n"],
    "reference": "    return a + b\n",
}


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def build(**config: object) -> CodeEvaluator:
    return CodeEvaluator(CodeEvaluator.Config(**{"timeout": 2.0, **config}))


def score(response: str, row: dict, **config: object) -> Score:
    (result,) = build(**config).score([rollout(response, **row)])
    assert isinstance(result, Score), result
    return result


def test_right_programs_score_one_in_every_kind_of_row():
    assert score(fenced(ROW["reference"]), ROW) == Score(value=1.0, components={"tests": 1.0})
    assert score(ROW["reference"], ROW).value == 1.0
    assert score(fenced("print(sum(map(int, input().split())))"), STDIO).value == 1.0
    assert score("    return a + b", HUMANEVAL).value == 1.0
    assert score(fenced("def add(a, b):\n    return a + b"), HUMANEVAL).value == 1.0


HELPED = {
    "prompt": (
        'import math\n\ndef encode(s):\n    return s[::-1]\n\ndef decode(s):\n    """ Undo encode. """\n'
    ),
    "entry_point": "decode",
    "tests": ["def check(f):\n    for s in ('ab', 'xyz'):\n        assert f(encode(s)) == s\n"],
    "reference": "    return s[::-1]\n",
}


def test_a_helper_of_the_prompt_is_the_rows_not_the_programs():
    assert score("    return s[::-1]", HELPED).value == 1.0
    cheat = "def encode(s):\n    return s\n\ndef decode(s):\n    return s"
    assert score(fenced(cheat), HELPED).value == 0.0


def test_modules_come_from_the_reference_and_only_classes_from_the_program():
    row = {
        "prompt": "Count, with pairs.",
        "entry_point": "most",
        "tests": ["assert Counter(most([Pair('a', 2)])) == Counter('aa')"],
        "reference": (
            "from collections import Counter\n"
            "class Pair:\n    def __init__(self, k, n):\n        self.k, self.n = k, n\n"
            "def most(pairs):\n    return [p.k for p in pairs for _ in range(p.n)]\n"
        ),
    }
    assert score(fenced(row["reference"]), row).value == 1.0
    lend = row["reference"].replace("return [", "return 0 and [") + "Counter = lambda x: 1\n"
    assert score(fenced(lend), row).value == 0.0


def test_what_a_row_exports_comes_from_the_program():
    row = {"entry_point": "f", "tests": ["assert f(2) == g(2)"], "exports": ["g"]}
    assert score(fenced("def g(x): return x\ndef f(x): return x"), row).value == 1.0


def test_partial_solutions_earn_their_share():
    assert score(fenced("def add(a, b): return 0"), ROW).value == 0.5
    assert score(fenced("def add(a, b): return 0"), ROW, all_or_nothing=True).value == 0.0
    assert score(fenced("print(3)"), STDIO).value == 0.5
    assert score(fenced("def add(a, b): return 3"), HUMANEVAL).value == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   ",
        "I would add the numbers.",
        "I cannot solve this.",
        fenced(""),
        fenced("def add(a, b"),
        fenced("def sub(a, b): return a + b"),
        fenced("raise SystemExit(0)"),
        fenced("import os; os._exit(0)"),
        fenced("import sys; sys.exit(0)\ndef add(a, b): return a + b"),
        fenced("def add(a, b): raise ValueError"),
        fenced("class T:\n    def __eq__(s, o): return True\ndef add(a, b): return T()"),
        fenced("def add(a, b):\n    import atexit\n    atexit.register(print, 'passed')"),
        "```text\nassert add(1, 2) == 3\n```",
        ROW["prompt"],
        "\n".join(ROW["tests"]),
        "```python\n\x00\n```",
    ],
    ids=range(17),
)
def test_crashes_cheats_echoes_and_non_answers_score_zero(response):
    assert score(response, ROW).value == 0.0


def test_a_usage_example_after_the_solution_does_not_replace_it():
    row = {"tests": ROW["tests"]}
    response = fenced(ROW["reference"]) + "\nFor example:\n```python\nprint(add(1, 2))\n```"
    assert score(response, row).value == 1.0, "the tests tell what has to be defined"


@pytest.mark.parametrize("row", [ROW, STDIO], ids=["asserts", "stdio"])
@pytest.mark.parametrize(
    "after", ["Example:\n```\n1 2\n3\n```", "```\n$ echo 1 2 | python a.py\n3\n```"], ids=range(2)
)
def test_sample_output_without_a_label_does_not_replace_the_program(row, after):
    code = row.get("reference", "print(sum(map(int, input().split())))")
    assert score(f"{fenced(code)}\n{after}", row).value == 1.0


def test_a_program_in_two_blocks_is_one():
    parts = "def total(text):\n    return sum(map(int, text.split()))", "print(total(input()))"
    assert score("\nCall it:\n".join(map(fenced, parts)), STDIO).value == 1.0
    helper, body = "def plus(a, b):\n    return a + b", "    return plus(a, b)"
    assert score("\n".join(map(fenced, (helper, body))), HUMANEVAL).value == 1.0


def test_expected_output_that_is_empty_is_no_gift():
    row = {"tests": [{"stdin": "", "stdout": ""}]}
    assert score(fenced("raise ValueError"), row).value == 0.0
    assert score("", row).value == 0.0


def test_endless_program_fails_its_tests_in_time():
    assert score(fenced("def add(a, b):\n    while True: pass"), ROW, timeout=1.0).value == 0.0


def test_codebleu_compares_and_runs_nothing():
    same = score(fenced(ROW["reference"]), ROW, evaluator="codebleu")
    assert same.value == pytest.approx(1.0)
    assert score(fenced("raise SystemExit"), ROW, evaluator="codebleu").value < 0.4
    assert score("", ROW, evaluator="codebleu").value == 0.0
    assert score("I cannot say.", ROW, evaluator="codebleu").value == 0.0
    assert "tests" not in same.components


@pytest.mark.parametrize(
    ("response", "low", "high"),
    [
        ("x", 0.0, 0.1),
        ("return 0", 0.0, 0.3),
        (fenced(HUMANEVAL["prompt"]), 0.0, 0.0),
        ("def add(a, b", 0.0, 0.1),
        (fenced("-" * 5000 + "1"), 0.0, 0.1),
        ("    return a + b", 1.0, 1.0),
        (fenced("# the sum\nreturn (a + b)"), 1.0, 1.0),
        (fenced("def add(a, b): return a+b"), 1.0, 1.0),
        (fenced(HUMANEVAL["prompt"] + HUMANEVAL["reference"]), 1.0, 1.0),
        (fenced('def add(a, b):\n    """ Sum. """\n    return a + b'), 1.0, 1.0),
    ],
    ids=range(10),
)
@pytest.mark.parametrize("entry_point", ["add", ""])
def test_codebleu_compares_only_what_follows_the_prompt(response, low, high, entry_point):
    row = {**HUMANEVAL, "entry_point": entry_point, "tests": ["assert add(1, 2) == 3"]}
    assert low <= score(response, row, evaluator="codebleu").value <= high


def test_mixed_is_the_weighted_mean_of_its_components():
    result = score(
        fenced("def add(a, b): return 0"), ROW, evaluator="mixed", tests_weight=3.0, codebleu_weight=1.0
    )
    assert result.components["tests"] == 0.5
    assert result.value == pytest.approx((3 * 0.5 + result.components["codebleu"]) / 4)


@pytest.mark.parametrize(
    ("row", "evaluator", "message"),
    [
        ({}, "tests", "no `tests`"),
        ({"tests": []}, "tests", "no `tests`"),
        ({"tests": "assert 1"}, "tests", "no `tests`"),
        ({"tests": ["assert ("]}, "tests", "cannot be used"),
        (
            {"tests": ["assert near(f(1), 2)"], "entry_point": "f"},
            "tests",
            "use near, which the row does not",
        ),
        ({"tests": ["assert 1 == 1"]}, "tests", "no `entry_point`"),
        ({"tests": [{"stdin": "1"}]}, "tests", "lacks the key 'stdout'"),
        ({"tests": [{"stdin": 5, "stdout": "5"}]}, "tests", "must be text, got 5 and '5'"),
        ({"tests": [{"stdin": "", "stdout": 5}]}, "tests", "must be text, got '' and 5"),
        ({"tests": [{"stdin": "", "stdout": "5"}, "assert f(1) == 2"]}, "tests", "neither all statements"),
        ({"tests": ["assert f(1) == 2", True]}, "tests", "neither all statements"),
        ({"tests": ["assert f(1)"]}, "mixed", "needs a program in `reference`"),
        ({"reference": ""}, "codebleu", "needs a program in `reference`"),
    ],
)
def test_unusable_rows_are_data_failures(row, evaluator, message):
    (result,) = build(evaluator=evaluator).score([rollout(fenced("def f(x): return x"), **row)])
    assert isinstance(result, Failure)
    assert result.kind == "data"
    assert message in result.message


class BrokenSandbox:
    """A sandbox whose workers are gone."""

    def map(self, programs):
        return [Outcome(ending=Ending.infrastructure_error, message="worker lost") for _ in programs]


def test_broken_sandbox_is_an_infra_failure_not_a_zero(monkeypatch):
    monkeypatch.setattr(code_evaluator, "_sandbox", BrokenSandbox)
    results = build().score([rollout(fenced(ROW["reference"]), **ROW), rollout("", **ROW)])
    assert isinstance(results[0], Failure)
    assert (results[0].kind, results[0].message) == ("infra", "sandbox: worker lost")
    assert results[1] == Score(value=0.0, components={"tests": 0.0})


def test_order_is_kept_over_a_mixed_batch():
    rows = [
        (fenced(ROW["reference"]), ROW),
        ("", ROW),
        ("x", {}),
        (fenced("print(3)"), STDIO),
        (ROW["reference"], ROW),
    ]
    results = build().score([rollout(response, **row) for response, row in rows])
    assert [getattr(r, "value", None) for r in results] == [1.0, 0.0, None, 0.5, 1.0]


def test_needs_and_time_limit_follow_the_configuration():
    assert build(evaluator="codebleu").traits.needs == ("reference",)
    assert build(evaluator="mixed").traits.needs == ("tests", "reference")
    assert build(timeout=5.0).traits.timeout_s == 110.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"evaluator": "bleu"}, "evaluator must be one of tests, codebleu, mixed"),
        ({"timeout": 0.0}, r"timeout must be in \(0, 3600\)"),
        ({"tests_weight": -1.0}, "tests_weight must be >= 0"),
        ({"tests_weight": 0.0, "codebleu_weight": 0.0}, "positive sum"),
        ({"language": "rust"}, "tests run Python only"),
        ({"evaluator": "codebleu", "language": "cobol"}, "`language` must be one of"),
    ],
)
def test_bad_configuration_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build(**config)


def test_missing_grammar_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tree_sitter_rust", None)
    load_language.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'multitask-rl\[codebleu-languages\]'"):
        build(evaluator="codebleu", language="rust")


@pytest.mark.realdata
def test_reference_solutions_of_mbpp_score_one_and_prompts_zero():
    rows = real_rows("mbpp", 40)
    gold = build(evaluator="mixed").score([rollout(fenced(row["reference"]), **row) for row in rows])
    assert [r.value for r in gold] == pytest.approx([1.0] * len(rows))
    echo = build().score([rollout(row["prompt"], **row) for row in rows])
    assert {r.value for r in echo} == {0.0}


@pytest.mark.realdata
def test_bodies_and_whole_functions_of_humaneval_score_one():
    rows = real_rows("humaneval", 25)
    body = build().score([rollout(row["reference"], **row) for row in rows])
    whole = build().score([rollout(fenced(row["prompt"] + row["reference"]), **row) for row in rows])
    echo = build().score([rollout(row["prompt"], **row) for row in rows])
    assert {r.value for r in body} == {1.0}
    assert {r.value for r in whole} == {1.0}
    assert {r.value for r in echo} == {0.0}
