from __future__ import annotations

import doctest

import pytest

from multitask_rl_rewards import code_blocks
from multitask_rl_rewards.code_blocks import complete_program, defines, extract_code, parses

PROMPT = 'from typing import List\n\n\ndef add(a: int, b: int) -> int:\n    """ Add.\n    """\n'


def test_examples_in_docstrings_hold():
    assert doctest.testmod(code_blocks).failed == 0


def test_last_block_that_defines_the_entry_point_is_taken():
    first, better = "```python\ndef f(): return 1\n```", "```py\ndef f(): return 2\n```"
    response = f"{first}\nbetter:\n{better}\nuse:\n```python\nprint(f())\n```"
    assert extract_code(response, entry_point="f").code == "def f(): return 2\n"
    assert extract_code(response).code == "def f(): return 2\n\n\nprint(f())\n"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("", ""),
        ("  \n ", ""),
        ("x = 1", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("~~~python\nx = 1\n~~~", "x = 1\n"),
        ("1. so:\n   ```python\n   x = 1\n   ```", "x = 1\n"),
        ("```text\nhello\n```", ""),
        ("```python\n\n```", ""),
        ("<think>```python\nx = 0\n```</think>```python\nx = 1\n```", "x = 1\n"),
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),
        ("```py3\nx = 1\n```", "x = 1\n"),
        ("```python\r\nx = 1\r\n```\r\nDone.", "x = 1\n"),
        ("```python\nx = 1\n````\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints:\n```\nYES\n```", "x = 1\n"),
        ("```\nx = 0\n```\n```\nx = 1\n```", "x = 1\n"),
    ],
)
def test_fences_in_all_shapes(response, code):
    assert extract_code(response).code == code


HELPER, SOLUTION = "def twice(x):\n    return 2 * x\n", "def f(x):\n    return twice(x)\n"


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([HELPER, SOLUTION], f"{HELPER}\n\n{SOLUTION}"),
        ([HELPER, SOLUTION, "print(f(1))\n"], f"{HELPER}\n\n{SOLUTION}"),
        (["import math\n", "y = 1\n", "def f(x):\n    return math.sqrt(x)\n"], None),
        (["import math\n", "def twice(x):\n    return math.sqrt(x)\n", SOLUTION], None),
        ([SOLUTION.replace("twice", "abs"), "def f(x):\n    return x\n"], "def f(x):\n    return x\n"),
        (["def print(x): pass\n", "def f(x):\n    print(x)\n"], "def f(x):\n    print(x)\n"),
        (["twice = (\n", SOLUTION], SOLUTION),
        ([HELPER, "def f(x) return twice(x)\n"], "def f(x) return twice(x)\n"),
    ],
)
def test_earlier_blocks_are_joined_where_the_program_uses_what_they_define(codes, expected):
    """None: all blocks but the one of which nothing is used."""
    expected = expected or "\n\n".join(code for code in codes if code != "y = 1\n")
    response = "\nthen\n".join(f"```python\n{code}```" for code in codes)
    assert extract_code(response, entry_point="f").code == expected


def test_thoughts_are_left_to_the_caller():
    assert extract_code("```python\nx = 1\n```\n</think>").code == "x = 1\n"


def test_other_language_is_taken_when_asked_for():
    response = "```js\nlet x = 1\n```\n```python\nx = 1\n```"
    assert extract_code(response, "javascript").code == "let x = 1\n"


def test_defines_reads_the_outermost_level_only():
    assert defines("def f(x):\n    pass", "f")
    assert defines("class f:\n    pass", "f")
    assert defines("f = lambda x: x", "f")
    assert not defines("    def f(x): pass", "f")
    assert not defines("f == 1", "f")
    assert not defines("def f2(): pass", "f")
    assert not defines("def f(): pass", "")


@pytest.mark.parametrize(
    "code",
    [
        "    return a + b\n",
        "return a + b",
        "def add(a, b):\n    return a + b\n",
        "from __future__ import annotations\ndef add(a, b): return a + b",
    ],
)
def test_body_or_whole_function_completes_the_prompt(code):
    program = complete_program(code, PROMPT, "add")
    assert parses(program)
    namespace: dict[str, object] = {}
    exec(program, namespace)  # code of this file
    assert namespace["add"](1, 2) == 3


def test_prompt_in_words_is_no_beginning_of_a_program():
    assert complete_program("x = 1", "Write a function add.", "add") == "x = 1"


@pytest.mark.parametrize("code", ["def", "(" * 5000, "\x00", "Sure, here it is:"])
def test_what_is_no_python_does_not_parse(code):
    assert not parses(code)
