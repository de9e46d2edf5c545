"""The source archive and the wheel made of it hold what a run needs, and run from an empty directory."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TASKS = """\
tasks:
  sums:
    dataset: rows.jsonl
    rewards: [exact_match]
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's files: sources -> sdist -> wheel."""
    made = tmp_path_factory.mktemp("package")
    source = made / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("multitask_rl", "tasks", "rewards"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)

    def build(what: str, where: Path) -> Path:
        code = f"import setuptools.build_meta as b; b.build_{what}({str(made)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=where, check=True, capture_output=True)
        return next(made.glob("*.tar.gz" if what == "sdist" else "*.whl"))

    shutil.unpack_archive(build("sdist", source), made / "unpacked")
    wheel = build("wheel", next((made / "unpacked").iterdir()))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(made / "installed")
    return made / "installed"


def test_the_wheel_holds_every_module_and_configuration(installed: Path) -> None:
    for root in (ROOT, ROOT / "tasks", ROOT / "rewards"):
        for package in root.glob("multitask_rl*/"):
            for path in package.rglob("*"):
                if (
                    path.suffix in (".py", ".yaml", ".txt", ".typed", ".html", ".css", ".js")
                    or path.name == "LICENSE"
                ):
                    assert (installed / path.relative_to(root)).is_file(), path


def test_the_description_of_the_wheel_has_no_link_that_leads_nowhere(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    text = metadata.read_text(encoding="utf-8")
    assert "# multitask-rl" in text
    assert re.findall(r"\]\((?!https?://|#)[^)]+\)", text) == []
    code = (ROOT / "setup.py").read_text(encoding="utf-8").split("settings = ")[0]
    names: dict[str, Any] = {"__file__": str(ROOT / "setup.py")}
    exec(code, names)
    told = names["description"]("[a](docs/a.md) ![b](b.png) [c](https://c)", "https://x/y")
    assert told == "[a](https://x/y/blob/main/docs/a.md) ![b](https://x/y/raw/main/b.png) [c](https://c)"


def test_the_wheel_runs_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "reference": "2"}\n' * 4)
    code = "import sys, multitask_rl.cli as c; print(c.__file__); sys.exit(c.main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-c", code, "tasks", "validate", "--quick", "tasks.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert str(installed) in run.stdout
    assert "sums" in run.stdout
