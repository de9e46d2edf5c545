"""``make gpu``: parts that fail, hang or skip lose nothing of the others."""

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def session(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_session

    return gpu_session


def test_parts_end_as_they_end_and_keep_what_they_printed(tmp_path, session, new_children):
    def outcome(code, limit=20.0):
        return session.run_part(session.Part("one", 1, [sys.executable, "-c", code]), tmp_path, limit)

    assert outcome("print('fine')").state == "passed"
    failed = outcome("print('half', flush=True); raise SystemExit('no device')")
    assert (failed.state, failed.exit_code, failed.last_lines) == ("failed", 1, "half\nno device")
    began = time.monotonic()
    code = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '300'])"
    hung = outcome(code, limit=1.0)
    assert (hung.state, hung.last_lines) == ("timed out", "begun")
    assert time.monotonic() - began < 30.0
    assert new_children() == []


def test_every_part_calls_files_that_exist(tmp_path, session):
    for tiny in (False, True):
        found = session.parts(tmp_path, tiny=tiny)
        files = [a for part in found for a in part.command if a.endswith(".py")]
        assert len(files) > 6
        assert [a for a in files if not (ROOT / a).exists()] == []


def test_tests_that_all_skip_have_not_passed(tmp_path, session):
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.skip(reason='no device')\ndef test_it():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path / "test_it.py")]
    assert session.run_part(session.Part("t", 1, command), tmp_path, 60.0).state.startswith("skipped")
