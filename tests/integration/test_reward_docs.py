"""The pages for authors: files are written, Python runs, commands are executed, in order."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "training"))

from model_builders import build_actor

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PAGES = ["write-a-reward.md", "bring-your-reward.md", "write-a-task.md", "constraints.md"]
CLI = "import sys; from multitask_rl.cli import main; sys.exit(main())"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_works(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    script = ""
    for language, file, text in blocks:
        if file:
            (tmp_path / file).write_text(text)
        elif language == "python":
            script += text
            (tmp_path / "example_on_the_page.py").write_text(script)
            run([sys.executable, "example_on_the_page.py"], tmp_path)
        elif language == "bash":
            for line in text.splitlines():
                command(line, tmp_path)


def command(line: str, folder: Path) -> None:
    program, *arguments = shlex.split(line)
    if line == "pip install .":
        run([*PIP, "install", *OFFLINE, "--target", str(folder / "site"), "."], folder)
        return
    assert program == "multitask-rl", line
    if "puzzles.yaml" in line and importlib.util.find_spec("reasoning_gym") is None:
        return
    if "train" in arguments and not (folder / "MODEL").exists():
        build_actor().save(folder / "MODEL")
    run([sys.executable, "-c", CLI, *arguments], folder)


def test_a_reward_reaches_a_running_training_in_four_commands_and_ten_lines() -> None:
    text = (DOCS / "write-a-task.md").read_text(encoding="utf-8")
    section = text.partition("## From an empty directory")[2].partition("\n## ")[0]
    blocks = BLOCK.findall(section)
    commands = [line for language, _, text in blocks if language == "bash" for line in text.splitlines()]
    written = [line for _, file, text in blocks if file for line in text.splitlines()]
    assert len(commands) <= 4
    assert len(written) <= 10
    assert any(line.startswith("multitask-rl train ") for line in commands)


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder / "site")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
