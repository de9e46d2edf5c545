from pathlib import Path

import pytest

from multitask_rl.boundary.printable import shown_path


def test_a_path_below_the_working_directory_is_shown_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert shown_path(tmp_path / "gone" / "runs" / "x") == "runs/x"
    assert shown_path("runs/x") == "runs/x"
    assert shown_path(tmp_path / "x") == str(tmp_path / "x")
    (tmp_path / "gone").rmdir()
    assert shown_path(tmp_path / "x") == str(tmp_path / "x")
