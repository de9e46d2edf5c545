"""What tables and plots share: the files of ``benchmarks/results``, and the order in which they are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def read(file: Path) -> dict[str, Any]:
    """Return the result in ``file``, a JSON object."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def sort_steps(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return results of ``speed.py`` in the order in which they are shown."""
    return sorted(results, key=lambda r: (r["workload"], r["actor"], r["dtype"] != "float32", *compiled(r)))


def compiled(result: dict[str, Any]) -> list[str]:
    """Return the word that a compiled run adds to its actor's name, as a list of one or none."""
    return ["compiled"] if result.get("compile") else []


def by_delay(results: Iterable[dict[str, Any]]) -> dict[float, dict[str, Any]]:
    """Return the figures of ``pipeline.py --part rewards`` of all files by the seconds that rewards take."""
    merged = {float(name.split()[0]): own for r in results for name, own in r["figures"].items()}
    return dict(sorted(merged.items()))
