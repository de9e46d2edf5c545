from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from multitask_rl.records import Score
from multitask_rl_rewards import text
from multitask_rl_rewards.ifeval import IFEval
from multitask_rl_rewards.text import answer_of, strip_thinking, value_of
from reward_builders import rollout


def test_examples_in_docstrings_hold():
    assert doctest.testmod(text).failed == 0


def test_an_empty_cell_is_told_from_a_missing_column():
    empty, missing = (value_of(row, "gold", "judge") for row in ({"gold": None}, {"text": "x"}))
    assert empty.message == "the row's 'gold' is empty (null)"
    assert missing.message == "row has no 'gold'; its columns: text"


@pytest.mark.parametrize(
    ("response", "prompt", "answer"),
    [
        ("4", "q", "4"),
        ("<think>3?</think>4", "q", "4"),
        (" <think>3?</think>4", "q<think>", "4"),
        ("3?</think>4", "q<think>\n", "4"),
        ("3?", "q<think>\n", "3?"),
        ("3?</think>4", "q<think>\nLet me see: ", "4"),
        ("3?</think>4", "q<think>\n</think>\nSo: ", "3?</think>4"),
        ("<think>3?", "q", ""),
        ("4", "q<think>\n\n</think>\n\n", "4"),
        ("a, b</think>4", "q", "a, b</think>4"),
        ("<think>x</think>a, b</think>4", "q", "a, b</think>4"),
        ("a, b<think></think>4", "q", "a, b4"),
        ("a<think>b, c", "q", "a<think>b, c"),
        ("<think>x</think>\n<think>b, c", "q", ""),
        ("<think>x</think>a<think>b, c", "q", "a<think>b, c"),
    ],
)
def test_the_prompt_says_whether_thoughts_are_open(response, prompt, answer):
    assert answer_of(rollout(response, prompt)) == answer


def test_thoughts_that_a_limit_cut_leave_no_answer():
    for reason, answer in (("length", ""), ("flagged", ""), ("stop", "3?")):
        for prompt in ("q<think>\n", "q<think>\nLet me see: "):
            assert answer_of(replace(rollout("3?", prompt), finish_reason=reason)) == answer


@pytest.mark.parametrize(("reply", "answer"), [("3?</think>4", "4"), ("<think>3?</think>4", "4"), ("4", "4")])
def test_without_a_prompt_the_end_of_thoughts_is_enough(reply, answer):
    assert strip_thinking(reply) == answer


def test_a_lone_end_of_thoughts_hides_nothing_from_a_reward():
    tests = [{"instruction_id": "punctuation:no_comma", "kwargs": {}}]
    (result,) = IFEval().score([rollout("A, long, text. </think>ok", tests=tests)])
    assert result == Score(value=0.0, components={"all": 0.0})
