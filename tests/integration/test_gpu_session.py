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
    code = "import subprocess, time; print('begun'); subprocess.run(['sleep', '300'])"
    for limit in (1.0, 20.0):  # a busy machine may need more than a second until it has begun
        began = time.monotonic()
        hung = outcome(code, limit=limit)
        assert hung.state == "timed out"
        assert time.monotonic() - began < limit + 29.0
        if hung.last_lines:
            break
    assert hung.last_lines == "begun"
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


def test_a_warning_of_another_build_is_told_and_fails_no_test(tmp_path, session):
    file = tmp_path / "test_it.py"
    file.write_text(
        "import pytest, warnings\n\n@pytest.mark.gpu\ndef test_it():\n    warnings.warn('of another build')\n"
    )
    (part,) = (part for part in session.parts(tmp_path, tiny=False) if part.name == "tests")
    options = part.command[: part.command.index(session.ENGINES)]
    command = [*options, "-c", str(ROOT / "pyproject.toml"), str(file)]
    assert session.run_part(session.Part("t", 1, command), tmp_path, 60.0).state == "passed"
    assert "of another build" in (tmp_path / "t.log").read_text()


def test_each_engine_of_vllm_that_needs_its_process_alone_has_one(tmp_path, session):
    """vLLM's memory for sleep serves one engine of a process; the first one's settings stay."""
    parts = [part for part in session.parts(tmp_path, tiny=False) if "pytest" in part.command]
    chosen = [[a for a in part.command if a.startswith("tests/")] for part in parts if part.needs == "vllm"]
    assert len(chosen) == 5
    for (name,) in chosen:
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


def test_the_example_may_ask_the_hub_where_there_is_one(tmp_path, session, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    command = [sys.executable, "-c", "import os; print(os.environ['HF_HUB_OFFLINE'])"]
    assert session.run_part(session.Part("t", 1, command), tmp_path, 60.0).last_lines == "0"


def test_all_sides_of_a_figure_make_the_steps_that_the_device_has_memory_for(tmp_path, session):
    """TRL takes all 256 answers of the other workloads in one pass: 20 GB of logits of 152k words."""
    large = [part for part in session.parts(tmp_path, tiny=False) if "0.5B" in part.command]
    assert [part.name for part in large] == ["trl"]
    assert large[0].command[large[0].command.index("--workload") + 1] == "long"


def test_a_package_that_is_missing_is_named_before_anything_runs(tmp_path, session, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_session.py", "--tiny", "--directory", str(tmp_path / "out")])
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks")])
    with pytest.raises(SystemExit):
        session.main()
    assert "has no multitask-rl, pytest" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
