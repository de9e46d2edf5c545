"""The pages on rewards: files are written, Python runs, commands are executed, in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CLI = "import sys; from multitask_rl.cli import main; sys.exit(main())"


@pytest.mark.parametrize("page", ["write-a-reward.md", "bring-your-reward.md"])
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
                program, *arguments = shlex.split(line)
                assert program == "multitask-rl", line
                run([sys.executable, "-c", CLI, *arguments], tmp_path)


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
