"""A plugin distribution of somebody else: built as a wheel, installed into a fresh place, used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forked import run_forked
from multitask_rl.testing.scaffold import scaffold
from run_builders import write_run

EXAMPLE = Path(__file__).parents[1] / "fixtures" / "example_plugin"

RUN = """
import json, sys
from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.plugins import REWARDS, list_plugins
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing import make_rollout

listed = [(i.name, i.distribution, i.version) for i in list_plugins(REWARDS) if "example" in i.distribution]
imported_by_listing = "multitask_rl_example" in sys.modules
spec = TaskSpec(
    name="t",
    rewards=[
        RewardSpec(plugin="vowels", config={"vowels": "a"}),
        RewardSpec(plugin="example_add", weight=2.0),
    ],
    constraints=[ConstraintSpec(plugin="no_shouting")],
)
rollouts = [make_rollout(text, task="t", row={"a": 2, "b": 3}) for text in ("5", "abab", "NO")]
with RewardPool({"t": spec}, ScoringConfig(), seed=0, devices={}) as pool:
    rewards = [s.reward for s in pool.score(rollouts)]
    violated = [v["no_shouting"].violated for v in pool.judge(rollouts)]
print(json.dumps([listed, imported_by_listing, rewards, violated]))
"""


def run(*command: str, path: Path | None = None, cwd: Path | None = None) -> str:
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NEW = "import sys; from multitask_rl.cli.plugins import main; sys.exit(main(sys.argv[1:]))"
CHECK = """
import contextlib, io, json, sys
from multitask_rl.cli.plugins import main

found = []
for arguments in json.loads(sys.argv[1]):
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        code = main(["check", *arguments])
    found.append([code, told.getvalue()])
print(json.dumps(found))
"""
CHECKED = (
    ["no_shouting"],
    ["example_add", "--row", '{"a": 2, "b": 3}', "--gold", "5"],
    ["vowels", "--gold", "aa"],
    ["my_reward"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build wheels of a foreign and of a new project and install them, without a network, into ``site``."""
    folder = tmp_path_factory.mktemp("foreign")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "multitask_rl_example.py"):
        (source / name).write_bytes((EXAMPLE / name).read_bytes())
    run(sys.executable, "-c", NEW, "new", "reward", "my_reward", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    projects = str(source), str(folder / "my_reward")
    run(*pip, "--no-build-isolation", "--target", str(folder / "site"), *projects)
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Path:
    return folder / "site"


@pytest.fixture(scope="module")
def checks(site: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of ``plugins check``, by the plugin."""
    told = run(sys.executable, "-c", CHECK, json.dumps(CHECKED), path=site, cwd=site.parent)
    return {arguments[0]: found for arguments, found in zip(CHECKED, json.loads(told), strict=True)}


def test_a_foreign_distribution_is_found_checked_and_used(site: Path, tmp_path: Path) -> None:
    listed, imported, rewards, violated = json.loads(run(sys.executable, "-c", RUN, path=site, cwd=tmp_path))
    assert listed == [
        ["example_add", "multitask-rl-example-plugin", "0.3.0"],
        ["vowels", "multitask-rl-example-plugin", "0.3.0"],
    ]
    assert not imported
    assert rewards == [2.0, 0.5, 0.0]
    assert violated == [False, False, True]


TASKS = """
tasks:
  copy:
    dataset: copy.jsonl
    rewards:
      - {plugin: vowels, config: {vowels: "abc"}}
    constraints: [{plugin: no_shouting, mode: penalty}]
"""


def test_a_training_run_uses_it(site: Path, tmp_path: Path) -> None:
    write_run(tmp_path, TASKS)
    settings = "model.name_or_path=actor output_dir=run max_steps=2 num_threads=1 rollout.max_new_tokens=4"
    small = "batch.prompts_per_step=4 batch.group_size=4 scoring.num_workers=1 tracking.trackers=[jsonl]"
    arguments = ["train", "tasks_file=tasks.yaml", *settings.split(), *small.split()]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = run_forked("-m", "multitask_rl", *arguments, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    stored = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert stored
    for line in stored:
        letters = [c for c in line["response"] if c.isalpha()]
        expected = sum(c in "abc" for c in letters) / max(1, len(letters))
        assert line["breakdown"]["vowels"]["value"] == pytest.approx(expected)
        assert line["verdicts"]["no_shouting"]["violated"] is False


def test_its_plugins_keep_the_contract(checks: dict[str, tuple[int, str]]) -> None:
    for plugin in ("no_shouting", "example_add"):
        code, report = checks[plugin]
        assert code == 0, report
        assert "FAIL" not in report
        assert "works in a worker process" in report


def test_a_reward_that_can_be_hacked_is_told_so(checks: dict[str, tuple[int, str]]) -> None:
    code, report = checks["vowels"]
    assert code != 0
    assert "the full score: full score for: endless" in report


def test_an_empty_directory_becomes_a_checked_reward_in_four_commands(
    folder: Path, site: Path, checks: dict[str, tuple[int, str]]
) -> None:
    """``new`` and the installation are above."""
    project = folder / "my_reward"
    assert "passed" in run(sys.executable, "-m", "pytest", "-q", "tests", path=site, cwd=project)
    code, report = checks["my_reward"]
    assert code == 0, report
    assert "all " in report


def test_a_new_constraint_passes_its_own_tests(tmp_path: Path) -> None:
    project = scaffold("constraint", "my_limit", tmp_path)
    assert "1 passed" in run(sys.executable, "-m", "pytest", "-q", "tests", path=project, cwd=project)
