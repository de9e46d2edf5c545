"""State of a run under a task's new name."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .records import Answer
from .settings import GuardRules, Settings, Task

SAME = (Tensor, Answer, Settings, Task, GuardRules)


def renamed(found: Any, names: Mapping[str, str]) -> Any:
    """Return ``found`` with every former name of a task replaced: alone, before ``/``, or in that of a head.

    Objects are changed themselves.
    """
    if isinstance(found, str):
        head = "critic." if found.startswith("critic.") else ""
        for old, new in names.items():
            rest = found.removeprefix(head).removeprefix(old)
            if found == head + old + rest and rest[:1] in ("", "." if head else "/"):
                return head + new + rest
        return found
    if isinstance(found, Mapping):
        pairs = {renamed(key, names): renamed(value, names) for key, value in found.items()}
        return Counter(pairs) if isinstance(found, Counter) else pairs
    if isinstance(found, (list, tuple, set, deque)):
        return type(found)(renamed(value, names) for value in found)
    if hasattr(found, "__dict__") and not isinstance(found, SAME):
        for key, value in vars(found).items():
            object.__setattr__(found, key, renamed(value, names))
    return found
