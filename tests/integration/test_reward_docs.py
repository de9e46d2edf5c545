"""The pages for authors, and the notebooks: files are written, Python and commands run, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from forked import run_forked
from model_builders import build_actor
from multitask_rl.config.run import TrackingConfig
from multitask_rl.plugins import TRACKERS, load_plugin

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
    "ranks.md",
    "python.md",
    "sandbox.md",
    "coming-from-trl.md",
    "coming-from-verl.md",
    "coming-from-roll.md",
    "coming-from-openrlhf.md",
]
NOTEBOOKS = sorted((DOCS.parent / "examples" / "notebooks").glob("*.ipynb"))
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def shell(folder: Path, program: str, arguments: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder / "site")}
    module = ["-m", "multitask_rl"] if program == "multitask-rl" else []
    done = run_forked(*module, *arguments, cwd=folder, env=environment)
    assert done.returncode == 0, f"{program} {arguments}: {done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_works(page: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert blocks
    script, has_run = "", True
    # the Python of a page is one script; it runs before the commands behind it, and at the end
    for language, file, text in [*blocks, ("end", "", "")]:
        if file:
            (tmp_path / file).write_text(text)
        elif language == "python":
            script, has_run = script + text, False
        elif language in ("bash", "end"):
            if not has_run:
                (tmp_path / "example_on_the_page.py").write_text(script)
                if '"MODEL"' in script:
                    build_actor().save(tmp_path / "MODEL")
                shell(tmp_path, "python", ["example_on_the_page.py"])
                has_run = True
            for line in text.replace("\\\n", "").splitlines():
                command(line, tmp_path)


def test_the_tracker_of_the_page_writes_a_line_per_step(tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / "write-a-plugin.md").read_text(encoding="utf-8"))
    (tmp_path / "steps.py").write_text(next(text for _, file, text in blocks if file == "steps.py"))
    tracker = load_plugin(TRACKERS, f"{tmp_path / 'steps.py'}:Steps")(tmp_path, TrackingConfig(), None)
    for step in (1, 2):
        tracker.log_metrics({"macro/reward_mean": 0.5, "time/step_s": 1.0}, step)
        tracker.log_metrics({"eval/score": 0.5}, step)
        tracker.log_metrics({"guard/judged_good": 1.0}, step)
    assert (tmp_path / "steps.txt").read_text() == "1 0.5\n2 0.5\n"


def test_every_page_with_python_is_run() -> None:
    pages = {page.name for page in DOCS.glob("*.md") if "```python" in page.read_text(encoding="utf-8")}
    elsewhere = {"index.md"}  # tests/test_docs.py has its reward
    assert pages - {*PAGES, *elsewhere} == set()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    cells = document["cells"]
    assert (document["nbformat"], document["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert cells[0]["cell_type"] == "markdown"
    for module in notebook.parent.glob("*.py"):
        (tmp_path / module.name).write_text(module.read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    short = "import os\n\nos.environ['MULTITASK_RL_MAX_STEPS'] = '1'"
    (tmp_path / "notebook.py").write_text("\n\n".join([short, *code]))
    shell(tmp_path, "python", ["notebook.py"])


def test_notebooks_hold_what_they_show() -> None:
    told = "run `make notebooks`"
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 300_000
    kinds = set[str]()
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r"/(?:work|home|tmp|root|usr)/|site-packages|\d+ s:|tokens/s|\d left", text) == []
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), told
        assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
        for cell in cells:
            source = "".join(cell["source"])
            if "print(" in source or ".train()" in source or ".plot(" in source:
                assert cell["outputs"], f"{path.name}: {told}"
            kinds |= {kind for output in cell["outputs"] for kind in output.get("data", ())}
    assert {"text/html", "image/png"} <= kinds, "tables and pictures"


def command(line: str, folder: Path) -> None:
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
    if "puzzles.yaml" in line:  # test_reasoning_gym.py, which imports the package anyway, validates the file
        return
    if "train" in arguments and not (folder / "MODEL").exists():
        build_actor().save(folder / "MODEL")
    if arguments[0] == "train":  # MLflow takes seconds of each run, and no page reads its store
        arguments.append("tracking.trackers=[console,jsonl]")
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
