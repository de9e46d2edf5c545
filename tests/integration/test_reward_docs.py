"""The pages for authors, and the notebooks: files are written, Python runs, commands are executed, in order.

Every command has a process of its own, forked from one that has imported everything: importing torch for each
would take most of the time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from model_builders import build_actor

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = [
    "write-a-reward.md",
    "bring-your-reward.md",
    "bring-your-environment.md",
    "write-an-environment.md",
    "write-a-task.md",
    "write-a-plugin.md",
    "resume-and-fork.md",
    "constraints.md",
    "flow.md",
    "python.md",
    "coming-from-trl.md",
    "coming-from-verl.md",
    "coming-from-openrlhf.md",
]
NOTEBOOKS = sorted((DOCS.parent / "examples" / "notebooks").glob("*.ipynb"))
SHELL = """
import json, os, runpy, sys, traceback
import datasets, mlflow.store.tracking.sqlalchemy_store, multitask_rl.trainer
from multitask_rl.cli import main
for line in sys.stdin:
    folder, program, arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(folder)
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path.insert(1, "site")
            status = main(arguments) if program == "multitask-rl" else runpy.run_path(*arguments) and 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
"""
"""Imports everything once, runs each command it is told in a fork of itself and answers the exit code."""
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


Shell = Callable[[Path, str, list[str]], None]


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SHELL],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(folder: Path, program: str, arguments: list[str]) -> None:
            print(json.dumps([str(folder), program, arguments]), file=process.stdin, flush=True)
            status = process.stdout.readline().strip()
            assert status == "0", f"{program} {arguments}: {status}\n{(folder / 'output.txt').read_text()}"

        yield run
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_works(page: str, tmp_path: Path, shell: Shell) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    script = ""
    for language, file, text in blocks:
        if file:
            (tmp_path / file).write_text(text)
        elif language == "python":
            script += text
            (tmp_path / "example_on_the_page.py").write_text(script)
            if '"MODEL"' in text:
                build_actor().save(tmp_path / "MODEL")
            shell(tmp_path, "python", ["example_on_the_page.py"])
        elif language == "bash":
            for line in text.replace("\\\n", "").splitlines():
                command(line, tmp_path, shell)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs(notebook: Path, tmp_path: Path, shell: Shell) -> None:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    cells = document["cells"]
    assert (document["nbformat"], document["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert [cell for cell in cells if cell.get("outputs")] == []
    assert cells[0]["cell_type"] == "markdown"
    for module in notebook.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    short = "import os\n\nos.environ['MULTITASK_RL_MAX_STEPS'] = '4'"
    (tmp_path / "notebook.py").write_text("\n\n".join([short, *code]))
    shell(tmp_path, "python", ["notebook.py"])


def command(line: str, folder: Path, shell: Shell) -> None:
    program, *arguments = shlex.split(line)
    if line == "pip install .":
        done = subprocess.run(
            [*PIP, "install", *OFFLINE, "--target", str(folder / "site"), "."],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return
    assert program == "multitask-rl", line
    if "puzzles.yaml" in line and importlib.util.find_spec("reasoning_gym") is None:
        return
    if "train" in arguments and not (folder / "MODEL").exists():
        build_actor().save(folder / "MODEL")
    shell(folder, program, arguments)


def test_a_reward_reaches_a_running_training_in_four_commands_and_ten_lines() -> None:
    text = (DOCS / "write-a-task.md").read_text(encoding="utf-8")
    section = text.partition("## From an empty directory")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    commands = [line for language, _, text in blocks if language == "bash" for line in text.splitlines()]
    written = [line for _, file, text in blocks if file for line in text.splitlines()]
    assert len(commands) <= 4
    assert len(written) <= 10
    assert any(line.startswith("multitask-rl train ") for line in commands)
