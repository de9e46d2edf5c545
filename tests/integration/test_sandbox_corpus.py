"""Hostile programs: our own corpus always, the larger one where it lies beside the checkout."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

import pytest

from multitask_rl.cli import main as command_line
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.corpus import (
    CorpusFinding,
    HostChecks,
    ProgramChecks,
    load_manifest,
    main,
    repeat_noise,
    run_corpus,
)
from multitask_rl.sandbox.pool import NamespaceSandbox

ROOT = Path(__file__).parents[2]
OWN = ROOT / "tests/fixtures/sandbox_corpus/manifest.json"
ATTACKS = Path(os.environ.get("MULTITASK_RL_ATTACKS", ROOT.parent / "shared/attacks")) / "manifest.json"
SYSTEM_PYTHON = Path("/usr/bin") / f"python{sys.version_info.major}.{sys.version_info.minor}"

needs_attacks = pytest.mark.skipif(not ATTACKS.exists(), reason=f"no corpus at {ATTACKS}")


def different(findings):
    return {finding.name: finding.problems for finding in findings if finding.problems}


def test_the_own_corpus_ends_as_its_manifest_says():
    findings = run_corpus(load_manifest(OWN), workers=2)
    assert different(findings) == {}
    assert len(findings) > 100


def test_a_difference_is_printed_and_exits_with_1(tmp_path, capsys):
    (tmp_path / "p.py").write_text("print('ESCAPED')")
    (tmp_path / "manifest.json").write_text(
        '{"default_limits": {}, "programs": [{"name": "p", "file": "p.py", "task": {"type": "script"},'
        ' "expect": {"verdict_any_of": ["completed"], "stdout_must_not_contain": ["ESCAPED"]}}]}'
    )
    assert main([str(tmp_path / "manifest.json"), "--json", str(tmp_path / "out.json")]) == 1
    assert "p: stdout holds 'ESCAPED'" in capsys.readouterr().out
    assert '"name": "p"' in (tmp_path / "out.json").read_text()


@pytest.mark.parametrize(
    ("content", "told"), [(None, "does not exist; give"), ("{}", "is not a corpus manifest")]
)
def test_a_manifest_that_is_none_exits_with_2(tmp_path, capsys, content, told):
    manifest = tmp_path / "manifest.json"
    if content is not None:
        manifest.write_text(content, encoding="utf-8")
    assert command_line(["sandbox", "corpus", str(manifest)]) == 2
    assert told in capsys.readouterr().err


MUCH = "host_mem_delta_mb:200: 300 MiB"


@pytest.mark.parametrize(
    ("tries", "problems", "note"),
    [
        ([[]], (), ""),
        ([[MUCH], [], []], (), f"once in 3 tries: {MUCH}"),
        ([[MUCH], [], [MUCH]], (MUCH,), ""),
        ([[MUCH], [MUCH], []], (MUCH,), ""),
        ([[MUCH], ["stdout holds 'ESCAPED'"], [MUCH]], ("stdout holds 'ESCAPED'",), ""),
        ([["stdout holds 'ESCAPED'"]], ("stdout holds 'ESCAPED'",), ""),
    ],
)
def test_a_finding_that_others_may_have_caused_counts_when_it_is_found_again(tries, problems, note):
    left = [CorpusFinding(name="p", verdict="", pass_fraction=0, wall_s=0, problems=tuple(t)) for t in tries]
    finding = repeat_noise(lambda: left.pop(0))
    assert (finding.problems, finding.note, left) == (problems, note, [])


def test_the_cell_of_a_new_worker_is_no_leftover(tmp_path):
    sources = {"nap": "import time\ntime.sleep(2)", "numpy": "import numpy", "last": "print(1)"}
    programs = []
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        wanted = {"verdict_any_of": ["completed", "killed"], "host_checks": ["no_leftover_procs"]}
        programs.append({"name": name, "file": f"{name}.py", "task": {"type": "script"}, "expect": wanted})
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps({"default_limits": {}, "programs": programs}))
    done = threading.Event()

    def kill_the_napper_s_keeper():
        while not done.wait(0.05):
            for child in descendants(os.getpid()):
                with contextlib.suppress(OSError, ValueError):  # one that sleeps below no keeper is a bait
                    if "nanosleep" in Path(f"/proc/{child}/wchan").read_text():
                        os.kill(min(p for p in descendants(os.getpid()) if child in descendants(p)), 9)
                        return

    killer = threading.Thread(target=kill_the_napper_s_keeper)
    killer.start()
    try:
        findings = run_corpus(load_manifest(manifest))
    finally:
        done.set()
        killer.join()
    assert different(findings) == {"nap": ("worker_alive: the worker had to be replaced",)}


def test_a_second_run_waits_until_the_first_has_taken_its_baits_away():
    """Both name one directory and the same addresses: the second would empty the canary directory."""
    order = []

    def run_too():
        with HostChecks() as host:
            order.append("second")
            assert host.victim.poll() is None

    second = threading.Thread(target=run_too)
    with HostChecks() as first, NamespaceSandbox(workers=1) as sandbox:
        checked = ProgramChecks(first, sandbox, ["canary_dir_unchanged", "victim_alive"])
        second.start()
        second.join(timeout=0.5)
        assert checked.problems() == []
        order.append("first")
    second.join(timeout=60)
    assert order == ["first", "second"]


@pytest.mark.parametrize("level", ["bwrap", "landlock"])
def test_nothing_of_the_own_corpus_escapes_a_weaker_level(level):
    if level == "bwrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    findings = run_corpus(load_manifest(OWN), level=level, workers=2)
    # no process namespace: getppid names a process, though none that can be signalled; no file can be written
    known = {"escape_signals", "left_1_set", "left_tmp_1", "resource_disk"} if level == "landlock" else set()
    assert {n: p for n, p in different(findings).items() if n not in known} == {}
    assert not any("ESCAPED" in finding.stdout for finding in findings)


@needs_attacks
@pytest.mark.realdata
@pytest.mark.slow
def test_the_attack_corpus_ends_as_its_manifest_says():
    assert different(run_corpus(load_manifest(ATTACKS), workers=4)) == {}


@needs_attacks
@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_the_attack_corpus_as_an_ordinary_user_in_another_order():
    # the interpreter of this environment may lie under root's home; the system's is open to everybody
    python = SYSTEM_PYTHON if SYSTEM_PYTHON.exists() else Path(sys.executable)
    done = subprocess.run(
        [
            *("setpriv", "--reuid=1001", "--regid=1001", "--clear-groups", str(python)),
            *("-m", "multitask_rl.sandbox.corpus", str(ATTACKS), "--workers", "4", "--seed", "2"),
        ],
        capture_output=True,
        text=True,
        cwd="/",
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"{ROOT}:{sysconfig.get_path('purelib')}",
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
