"""Sorting four to six digits: hard for a tiny model, so most groups start without any correct sample."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from multitask_rl_tasks.suite.base import Row, SuiteTask


class Sort(SuiteTask):
    """Prompts like ``S40417>``; the answer is the sorted digits, ``01447``."""

    name: ClassVar[str] = "sort"
    max_new_tokens: ClassVar[int] = 9

    def sample(self, stream: random.Random) -> Row:
        """Draw four to six digits."""
        digits = [stream.choice("0123456789") for _ in range(stream.randint(4, 6))]
        return {"task": self.name, "prompt": f"S{''.join(digits)}>", "reference": "".join(sorted(digits))}

    def answer(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return the sorted digits."""
        return str(row["reference"])

    def corrupt(self, row: Mapping[str, Any], stream: random.Random) -> str:
        """Return the sorted digits with two different ones exchanged, or one changed if all are equal."""
        digits = list(row["reference"])
        if digits[0] == digits[-1]:
            digits[0] = str((int(digits[0]) + 1) % 10)
            return "".join(digits)
        i = stream.choice([i for i in range(len(digits) - 1) if digits[i] != digits[i + 1]])
        digits[i], digits[i + 1] = digits[i + 1], digits[i]
        return "".join(digits)
