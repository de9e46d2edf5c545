"""What is published: versions agree, release notes come from the changelog, workflows call what exists."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

from release_notes import notes  # noqa: E402

CHANGELOG = (
    "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-01-01\n\n- The first.\n\n## [0.0.9]\n\n- Before.\n"
)


@pytest.fixture
def project(tmp_path):
    for name in ("pyproject.toml", "CITATION.cff"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def test_release_notes_are_the_section_of_the_version(project):
    assert notes("0.1.0", project) == "- The first.\n"


def test_a_release_of_another_version_is_refused(project):
    with pytest.raises(SystemExit, match=r"the tag says 0\.2\.0, pyproject\.toml 0\.1\.0"):
        notes("0.2.0", project)
    (project / "CHANGELOG.md").write_text(CHANGELOG.replace("- The first.\n", ""))
    with pytest.raises(SystemExit, match="no section"):
        notes("0.1.0", project)


def test_workflows_and_image_call_what_exists():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
    assert len(texts) == 2
    jobs = [job for text in texts for job in yaml.safe_load(text)["jobs"].values()]
    commands = "\n".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
    commands += (ROOT / "Dockerfile").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(?:- run: )?make (\w+)$", commands, re.MULTILINE)
    assert {"test", "demo", "site", "browser"} <= set(targets)
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    files = set(re.findall(r"\b(?:docs|requirements)/[\w.-]+", commands))
    assert len(files) > 3
    assert [name for name in files if not (ROOT / name).exists()] == []
    stages = re.findall(r"^FROM \S+ AS (\w+)$", commands, re.MULTILINE)
    assert set(re.findall(r"--target (\w+)", commands)) <= set(stages)


def test_the_notes_are_made_before_any_package_is_installed():
    tree = ast.parse((ROOT / "docs" / "release_notes.py").read_text(encoding="utf-8"))
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    names += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(names) <= sys.stdlib_module_names


def test_the_image_installs_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r'"\.\[([\w,-]+)\]"', (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    assert set(named.split(",")) <= extras.keys()


def test_issue_forms_have_what_github_asks_for():
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) >= 3
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        assert all(part["attributes"]["label"] for part in form["body"])
        ids = [part["id"] for part in form["body"]]
        assert len(ids) == len(set(ids))
