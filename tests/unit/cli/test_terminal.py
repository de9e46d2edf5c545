"""What a terminal shows beside results: lines of the log, a hub that cannot be reached."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from multitask_rl.cli import main
from multitask_rl.cli.train import TerminalFormatter


def test_a_hub_that_does_not_answer_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    hub = logging.getLogger("huggingface_hub.utils._http")
    for number in range(3):
        hub.warning("'[Errno -2] Name or service not known' thrown while requesting HEAD https://hub/x")
        hub.warning("Retrying in %ds [Retry %d/5].", 2**number, number)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "HF_HUB_OFFLINE=1" in told[0]


def test_a_line_of_the_log_has_no_time_and_module() -> None:
    lines = [
        TerminalFormatter().format(logging.LogRecord("module", level, "", 0, "loading %s", ("it",), None))
        for level in (logging.INFO, logging.WARNING)
    ]
    assert lines == ["loading it", "warning: loading it"]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("return Evaluations({}, {'copy': row})", 0),
        ("raise Terminated(signal.SIGINT)", 130),
        ("raise Terminated(signal.SIGHUP)", 129),
        ("raise GuardStop('worse')", 3),
    ],
)
def test_a_run_ends_with_its_own_status_where_no_one_reads_it(end: str, status: int, tmp_path: Path) -> None:
    """As in ``train 2>&1 | tee log``, where Ctrl-C ends ``tee``, too, and in a terminal that was closed."""
    script = f"""
import contextlib, signal, sys
import multitask_rl.cli.train as train
from multitask_rl.boundary.interrupts import Terminated
from multitask_rl.errors import GuardStop

class Evaluations(dict):
    def __init__(self, values, changes):
        self.changes = changes

class Run:
    def train(self):
        with contextlib.suppress(OSError):
            print("step 1")
        row = dict(metric="reward", steps=[None, None])
        {end}

train._trainer = lambda config: Run()
from multitask_rl.cli import main
sys.stdin.read()  # until the readers have gone
sys.exit(main(["train"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin
    assert process.stdout
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_any_command_without_leftovers(number: signal.Signals, tmp_path: Path) -> None:
    """``bench``, ``eval`` and ``doctor`` put models into temporary directories."""
    script = """
import signal, sys, tempfile, time
import multitask_rl.cli.bench as bench

def main(arguments):
    with tempfile.TemporaryDirectory(dir="."):
        print("ready", flush=True)
        time.sleep(60)

bench.main = main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from multitask_rl.cli import main
sys.exit(main(["bench"]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert told.decode().splitlines()[-1] == f"interrupted by {number.name}"
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_without_a_letter_shows_its_number(tmp_path: Path) -> None:
    script = """
import sys
import multitask_rl.cli.bench as bench
bench.main = lambda arguments: print("k\\u00fcrze")
from multitask_rl.cli import main
sys.exit(main(["bench"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "k\\xfcrze\n", "")
