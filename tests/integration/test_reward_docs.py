"""The pages for authors: files are written, Python runs, commands are executed, in order.

A page has one interpreter for all its commands, as importing torch for each would take most of the time, and
a fresh one after an installation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from model_builders import build_actor

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ["write-a-reward.md", "bring-your-reward.md", "write-a-task.md", "constraints.md", "flow.md"]
SHELL = """
import json, os, runpy, sys, traceback
from multitask_rl.cli import main
for line in sys.stdin:
    program, arguments = json.loads(line)
    try:
        status = main(arguments) if program == "multitask-rl" else runpy.run_path(*arguments) and 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os.write(int(sys.argv[1]), b"%d\\n" % status)
"""
"""Runs what it is told on stdin and answers with exit codes on a descriptor of its own."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


class Shell:
    """A folder and an interpreter in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, program: str, arguments: list[str]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([program, arguments]) + "\n")
        self._process.stdin.flush()
        status = self._answers.readline().strip()
        assert status == "0", f"{program} {arguments}: {status}\n{(self.folder / 'output.txt').read_text()}"

    def _start(self) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(self.folder / "site")}
        reading, writing = os.pipe()
        with (self.folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", SHELL, str(writing)],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writing],
                text=True,
            )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate(timeout=30)
            self._answers.close()
            assert self._process.returncode == 0
            self._process = None


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_works(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    script = ""
    with contextlib.closing(Shell(tmp_path)) as shell:
        for language, file, text in blocks:
            if file:
                (tmp_path / file).write_text(text)
            elif language == "python":
                script += text
                (tmp_path / "example_on_the_page.py").write_text(script)
                if '"MODEL"' in text:
                    build_actor().save(tmp_path / "MODEL")
                shell.run("python", ["example_on_the_page.py"])
            elif language == "bash":
                for line in text.splitlines():
                    command(line, shell)


def command(line: str, shell: Shell) -> None:
    program, *arguments = shlex.split(line)
    if line == "pip install .":
        shell.close()  # the next command finds what was installed
        target = str(shell.folder / "site")
        done = subprocess.run(
            [*PIP, "install", *OFFLINE, "--target", target, "."],
            cwd=shell.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return
    assert program == "multitask-rl", line
    if "puzzles.yaml" in line and importlib.util.find_spec("reasoning_gym") is None:
        return
    if "train" in arguments and not (shell.folder / "MODEL").exists():
        build_actor().save(shell.folder / "MODEL")
    shell.run(program, arguments)


def test_a_reward_reaches_a_running_training_in_four_commands_and_ten_lines() -> None:
    text = (DOCS / "write-a-task.md").read_text(encoding="utf-8")
    section = text.partition("## From an empty directory")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    commands = [line for language, _, text in blocks if language == "bash" for line in text.splitlines()]
    written = [line for _, file, text in blocks if file for line in text.splitlines()]
    assert len(commands) <= 4
    assert len(written) <= 10
    assert any(line.startswith("multitask-rl train ") for line in commands)
