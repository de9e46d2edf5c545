from __future__ import annotations

import os
import subprocess
import sys

import pytest
from codebleu import calc_codebleu

from cpu_time import least_seconds
from multitask_rl_rewards.codebleu_score import LANGUAGES, compute_codebleu

ADD = "def add(a, b):\n    c = a + b\n    return c\n"


@pytest.mark.parametrize("program", [ADD, "return x", "return len(set(string.lower()))"])
def test_identical_programs_score_one(program):
    assert compute_codebleu(program, program)["codebleu"] == pytest.approx(1.0)


def test_parts_equal_the_package_where_it_is_right():
    candidate = "def plus(x, y):\n    z = x + y\n    print(z)\n    return z\n"
    ours, theirs = compute_codebleu(ADD, candidate), calc_codebleu([ADD], [candidate], lang="python")
    assert ours["ngram"] == pytest.approx(theirs["ngram_match_score"])
    assert ours["weighted_ngram"] == pytest.approx(theirs["weighted_ngram_match_score"])
    assert ours["syntax"] == pytest.approx(theirs["syntax_match_score"])
    assert ours["dataflow"] == pytest.approx(theirs["dataflow_match_score"])
    assert ours["codebleu"] == pytest.approx(theirs["codebleu"])


def test_data_flow_that_does_not_match_earns_nothing():
    ours = compute_codebleu(ADD, "print('hello')\n")
    assert ours["dataflow"] == 0.0
    assert calc_codebleu([ADD], ["print('hello')\n"], lang="python")["codebleu"] > ours["codebleu"] + 0.2


def test_reference_without_data_flow_leaves_that_part_out():
    ours = compute_codebleu("print('hello')\n", "print('hello')\n")
    assert "dataflow" not in ours
    assert ours["codebleu"] == pytest.approx((ours["ngram"] + ours["weighted_ngram"] + ours["syntax"]) / 3)


@pytest.mark.parametrize("candidate", ["", "   ", "x" * 20_001, "x = 1\n" * 4000])
def test_empty_and_huge_candidates_score_zero(candidate):
    assert compute_codebleu(ADD, candidate)["codebleu"] == 0.0


@pytest.mark.parametrize(
    "candidate",
    [
        "(" * 3000,
        "[" * 1000 + "]" * 1000,
        "x=" * 3000,
        "\x00\ud800\n",
        "if 1:\n" * 300,
        "'" * 9999,
        "lambda:" * 900,
        "f(" * 9999,
        "-" * 19999,
        "not " * 4999 + "x",
    ],
    ids=range(10),
)
def test_hostile_candidates_score_low_and_fast(candidate):
    assert 0.0 <= compute_codebleu(ADD, candidate)["codebleu"] < 0.5
    assert least_seconds(compute_codebleu, ADD, candidate, tries=2) < 5.0


def test_values_do_not_depend_on_the_hash_seed():
    first = (
        "def f(q, r, s):\n  for i in q:\n    if i: x = r\n    else: x = s + q\n    r = x\n  return x + r\n"
    )
    other = (
        "def f(m, n, o):\n  for j in m:\n    if j: y = o + m\n    else: y = n\n    n = y\n  return n + y\n"
    )
    program = (
        "from multitask_rl_rewards.codebleu_score import compute_codebleu\n"
        f"print(compute_codebleu({first!r}, {other!r})['codebleu'])"
    )
    values = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(values) == 1


PROGRAMS = {
    "java": (
        "class A { int f(int a, int b) { int c = a + b; return c; } }",
        "class A { int g(int x) { return x; } }",
    ),
    "javascript": ("function f(a, b) { let c = a + b; return c; }", "function g(x) { return x * 2; }"),
    "go": (
        "package m\nfunc f(a int, b int) int { c := a + b; return c }",
        "package m\nfunc g(x int) int { return x }",
    ),
    "c": ("int f(int a, int b) { int c = a + b; return c; }", "int g(int x) { return x * 2; }"),
    "cpp": ("int f(int a, int b) { int c = a + b; return c; }", "int g(int x) { return x * 2; }"),
    "c_sharp": (
        "class A { int F(int a, int b) { int c = a + b; return c; } }",
        "class A { int G(int x) { return x; } }",
    ),
    "ruby": ("def f(a, b)\n  c = a + b\n  c\nend", "def g(x)\n  x * 2\nend"),
    "rust": ("fn f(a: i32, b: i32) -> i32 { let c = a + b; c }", "fn g(x: i32) -> i32 { x * 2 }"),
    "php": ("<?php function f($a, $b) { $c = $a + $b; return $c; }", "<?php function g($x) { return $x; }"),
}


def test_there_is_a_program_in_each_language():
    assert {"python", *PROGRAMS} == set(LANGUAGES)


@pytest.mark.parametrize("language", sorted(PROGRAMS))
def test_each_language_has_its_own_grammar(language):
    pytest.importorskip(f"tree_sitter_{language}")
    reference, other = PROGRAMS[language]
    same = compute_codebleu(reference, reference, language)
    assert same == dict.fromkeys(("codebleu", "ngram", "weighted_ngram", "syntax", "dataflow"), 1.0)
    assert 0.0 < compute_codebleu(reference, other, language)["codebleu"] < 0.6
    assert compute_codebleu(reference, "I cannot do that.", language)["codebleu"] < 0.05
