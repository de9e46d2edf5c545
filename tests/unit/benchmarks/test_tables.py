"""The pages and plots on speed say what the result files say."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import plots  # noqa: E402
from tables import BEGIN, END, EXAMPLE, FIGURES, PAGE, README, RESULTS, chat_example, headline, render  # noqa: E402


@pytest.mark.parametrize(
    ("page", "text"),
    [(PAGE, render()), (README, headline()), (EXAMPLE, chat_example())],
    ids=["page", "readme", "example"],
)
def test_what_stands_between_the_marks_is_computed_from_the_results(page: Path, text: str) -> None:
    written = page.read_text(encoding="utf-8")
    assert f"{BEGIN}\n{text}\n{END}" in written, "run: python benchmarks/tables.py --write"


def test_the_tables_name_every_kind_of_result() -> None:
    text = render()
    kinds = ("0.45M", "TRL", "model.generate", "10 s", "4096", "learner ranks", "vLLM alone", "resident")
    for part in (*kinds, "checkpointing"):
        assert part in text


def test_the_plots_are_those_of_the_results(tmp_path: Path) -> None:
    locked = (ROOT / "requirements" / "demo.txt").read_text()
    if f"matplotlib=={mpl.__version__}\n" not in locked:
        pytest.skip("another matplotlib than the locked one writes other bytes")
    plots.write(RESULTS, tmp_path)
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(drawn) == {f"{name}.svg" for name in plots.PLOTS}
    for name, image in drawn.items():
        assert image == (FIGURES / name).read_bytes(), "run: python benchmarks/tables.py --write"
        assert f"figures/{name}" in PAGE.read_text(encoding="utf-8")
