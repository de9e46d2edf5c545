"""``ast.parse`` that is safe in several threads.

In CPython before 3.11.8 and 3.12.2 all threads share the recursion depth of ``ast.parse``. If the garbage
collector switches to another thread that also parses, valid source raises ``SystemError``
(python/cpython#106905). Rewards parse in several threads, so all parsing goes through this function.
"""

from __future__ import annotations

import ast
from typing import Literal, overload

_ATTEMPTS = 16


@overload
def parse_python(source: str, mode: Literal["exec"] = "exec") -> ast.Module: ...


@overload
def parse_python(source: str, mode: Literal["eval"]) -> ast.Expression: ...


def parse_python(source: str, mode: str = "exec") -> ast.AST:
    """Do what ``ast.parse(source, mode=mode)`` does, safely in several threads."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return ast.parse(source, mode=mode)
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return ast.parse(source, mode=mode)
