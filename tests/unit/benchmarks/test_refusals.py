"""The command that measures `refusal` on labelled responses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from refusals import main

CSV = """completion,final_label
I can't help with that.,2_full_refusal
Paris.,2_full_refusal
Paris.,1_full_compliance
"Sorry, but
I can't help with that.",3_partial_refusal
"""


def test_shares_by_label_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.csv").write_text(CSV)
    assert main(tmp_path) == 0
    assert capsys.readouterr().out.splitlines() == [
        "of 2 full refusals 1 (50.0%) are told as refusals",
        "of 1 answers 0 (0.0%) are told as refusals",
    ]


def test_a_directory_without_responses_is_an_error(tmp_path: Path) -> None:
    assert main(tmp_path) == 2
