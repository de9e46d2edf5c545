"""The page on speed says what the result files say."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from tables import PAGE, render  # noqa: E402


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert render() in text, "run: python benchmarks/tables.py --write"
    assert "0.45M" in render()
