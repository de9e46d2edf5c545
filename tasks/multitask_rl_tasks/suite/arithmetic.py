"""Addition of two-digit numbers, the sum written from its last digit (each digit then needs one carry)."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from multitask_rl_tasks.suite.base import Row, SuiteTask


class Arithmetic(SuiteTask):
    """Prompts like ``A37+58=``; the answer is the sum with its digits reversed, ``59`` for 95."""

    name: ClassVar[str] = "arithmetic"
    max_new_tokens: ClassVar[int] = 6

    def sample(self, stream: random.Random) -> Row:
        """Draw two numbers from 10 to 99."""
        a, b = stream.randrange(10, 100), stream.randrange(10, 100)
        return {"task": self.name, "prompt": f"A{a}+{b}=", "reference": str(a + b)[::-1]}

    def answer(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return the reversed sum."""
        return str(row["reference"])

    def corrupt(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return a sum that misses by one or by ten."""
        return str(int(row["reference"][::-1]) + stream.choice((-10, -1, 1, 10)))[::-1]
