"""Small Python functions from a specification, as HumanEval has them: the response goes on with the body.

The actor reads ``Cdbl,add3;`` and answers ``return ((x*2)+3)``. The row's ``prompt`` is the beginning of the
program, to which ``code_evaluator`` joins the response: a real function, run against hidden asserts in the
sandbox, its CodeBLEU taken against the reference. (Not named ``code.py``: run as a script it would shadow the
standard library's ``code``.)
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from multitask_rl_tasks.suite.base import Row, SuiteTask

STUB = 'def f(x):\n    """{spec}"""\n'
"""The beginning of the program."""

TEMPLATES = {
    "dbl": "({x}*2)",
    "sqr": "({x}**2)",
    "cub": "({x}**3)",
    "add": "({x}+{k})",
    "sub": "({x}-{k})",
    "mul": "({x}*{k})",
    "div": "({x}//{k})",
    "mod": "({x}%{k})",
}
CONSTANTS = range(2, 10)
INPUTS = (-7, -3, -1, 0, 2, 5, 8)
"""The hidden tests' arguments."""

Step = tuple[str, int | None]


class Code(SuiteTask):
    """``Cdbl,add3;`` -> ``return ((x*2)+3)``: one or two operations, applied from left to right."""

    name: ClassVar[str] = "code"
    max_new_tokens: ClassVar[int] = 26
    template: ClassVar[str] = "C{spec};"

    def sample(self, stream: random.Random) -> Row:
        """Draw one or two operations; the row carries the reference and its hidden tests."""
        steps = [self._step(stream) for _ in range(stream.randint(1, 2))]
        spec = ",".join(operation + ("" if k is None else str(k)) for operation, k in steps)
        expression = self._expression(steps)
        return {
            "task": self.name,
            "prompt": STUB.format(spec=spec),
            "spec": spec,
            "reference": f"return {expression}",
            "tests": [f"assert f({x}) == {y}" for x, y in _evaluate(expression, INPUTS)],
            "entry_point": "f",
        }

    def answer(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return the reference."""
        return str(row["reference"])

    def corrupt(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return a program that forgets its last operation or, 3 in 10, has a wrong one."""
        steps: list[Step] = [
            (part[:3], int(part[3:]) if part[3:] else None) for part in str(row["spec"]).split(",")
        ]
        if stream.random() < 0.7:
            return f"return {self._expression(steps[:-1])}"
        i = stream.randrange(len(steps))
        steps[i] = next(step for step in iter(lambda: self._step(stream), None) if step != steps[i])
        return f"return {self._expression(steps)}"

    @staticmethod
    def _step(stream: random.Random) -> Step:
        operation = stream.choice(list(TEMPLATES))
        return operation, stream.choice(CONSTANTS) if "{k}" in TEMPLATES[operation] else None

    @staticmethod
    def _expression(steps: list[Step]) -> str:
        expression = "x"
        for operation, k in steps:
            expression = TEMPLATES[operation].format(x=expression, k=k)
        return expression


def _evaluate(expression: str, inputs: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (x, value) of an expression this module wrote itself (never of a response)."""
    code = compile(expression, "<reference>", "eval")
    for x in inputs:
        yield x, int(eval(code, {"__builtins__": {}}, {"x": x}))
