"""Child processes of a process, from /proc."""

from __future__ import annotations

import contextlib
from pathlib import Path


def descendants(root: int) -> set[int]:
    """Return the process ids below ``root``."""
    children: dict[int, list[int]] = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(directory.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found
