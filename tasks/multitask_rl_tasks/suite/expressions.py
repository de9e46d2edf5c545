"""The ``code`` task judged in process: arithmetic expressions of ``x`` are evaluated, nothing is executed.

For experiments of many thousand steps. A response outside the small grammar earns nothing, so the sandbox
(`code_evaluator`) and this judge agree on every program the task can ask for.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.contracts import PluginTraits
from multitask_rl.records import Rollout

OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
MAX_EXPONENT = 6
MAX_VALUE = 10**9
"""Beyond, an expression counts as wrong: a tower of powers must not cost time."""


class ExpressionTests:
    """Share of the row's hidden tests ``assert f(x) == y`` that ``return <expression>`` passes: all or none.

    All, not each: an expression that is right on some inputs is a wrong program.
    """

    traits: ClassVar[PluginTraits] = PluginTraits(low=0.0, high=1.0, needs=("tests",), isolate=False)

    def __init__(self) -> None:
        self._parsed: dict[str, list[tuple[int, int]]] = {}

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Return 1 for each response that is right on every input, else 0."""
        return [float(self._passes(r.response, r.row)) for r in rollouts]

    def _passes(self, response: str, row: Mapping[str, Any]) -> bool:
        body = response.removeprefix("return ")
        if body == response:
            return False
        try:
            tree = parse_python(body, mode="eval").body
            return all(evaluate_expression(tree, x) == y for x, y in self._tests(row))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return False

    def _tests(self, row: Mapping[str, Any]) -> list[tuple[int, int]]:
        key = str(row["spec"])
        if key not in self._parsed:
            pairs = [test.removeprefix("assert f(").split(") == ") for test in row["tests"]]
            self._parsed[key] = [(int(x), int(y)) for x, y in pairs]
        return self._parsed[key]


def evaluate_expression(node: ast.expr, x: int) -> int:
    """Return the value of an arithmetic expression at ``x``.

    Raises:
        ValueError: anything but integers, ``x``, the sign and six operators; or a huge value on the way.
        ZeroDivisionError: a division by zero.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate_expression(node.left, x), evaluate_expression(node.right, x)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= MAX_EXPONENT:
            raise ValueError(f"exponent {right} outside 0..{MAX_EXPONENT}")
        value = OPERATORS[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -evaluate_expression(node.operand, x)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name) and node.id == "x":
        value = x
    else:
        raise ValueError(f"{type(node).__name__} is not part of the task's grammar")
    if abs(value) > MAX_VALUE:
        raise ValueError(f"a value beyond {MAX_VALUE}")
    return value
