"""A plugin of every kind is one file and its entry-point line: all of them in one tiny run."""

import importlib
import json
import sys
import tomllib

import pytest

from multitask_rl.config.run import (
    BatchConfig,
    EvalConfig,
    GuardConfig,
    RolloutConfig,
    SchedulerConfig,
    TrackingConfig,
    TrainingConfig,
)
from multitask_rl.plugins import GROUPS, list_plugins
from multitask_rl.sandbox import Program, open_sandbox
from multitask_rl.testing.check import check_plugin
from multitask_rl.testing.scaffold import KINDS, scaffold
from multitask_rl.trainer import Trainer
from run_builders import run_config, write_run

RUN = """
tasks:
  sums:
    dataset: plugin:own_task
    type: own_algorithm
    rewards: [own_reward]
    constraints: [{plugin: own_constraint, mode: penalty}]
  by_module:
    dataset: plugin:multitask_rl_own_task:own_task
    type: multitask_rl_own_algorithm:own_algorithm
    environment: own_environment
    max_turns: 2
    rewards: [environment]
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A distribution with a plugin of every kind, as an installer leaves it."""
    folder = tmp_path_factory.mktemp("own")
    entries: dict[str, dict[str, str]] = {}
    for kind in KINDS:
        project = scaffold(kind, f"own_{kind}", folder)
        declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]["entry-points"]
        entries.update(declared)
        (module,) = project.glob("*.py")
        module.rename(folder / module.name)
    info = folder / "own_plugins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugins\nVersion: 1.0\n")
    lines = [f"[{g}]\n" + "".join(f"{n} = {v}\n" for n, v in own.items()) for g, own in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


def test_every_kind_has_one(site):
    own = {i.group for i in list_plugins() if i.distribution == "own-plugins"}
    assert own == set(GROUPS)


@pytest.mark.parametrize("kind", list(KINDS)[2:])
def test_what_the_scaffold_writes_keeps_its_contract(site, kind):
    report = check_plugin(f"own_{kind}")
    assert report.kind == kind
    assert report.passed, report.text()


def test_a_run_uses_each(site, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    write_run(tmp_path, RUN)
    config = run_config(
        tmp_path,
        "run",
        2,
        rollout=RolloutConfig(engine="own_engine", max_new_tokens=2),
        batch=BatchConfig(prompts_per_step=6, group_size=2),
        eval=EvalConfig(every=2, num_prompts=4),
        scheduler=SchedulerConfig(policy="own_scheduler"),
        guard=GuardConfig(plugin="own_guard"),
        training=TrainingConfig(backend="own_backend"),
        tracking=TrackingConfig(trackers=["own_tracker", "jsonl"]),
    )
    with Trainer.from_config(config) as trainer:
        trainer.train()
        assert trainer.step == 2
        assert type(trainer.guard).__name__ == "own_guard"
        assert trainer.scheduler.policy_name == "own_scheduler"
        assert type(trainer.parts.engine).__name__ == "own_engine"
        assert type(trainer.parts.learner.backend).__name__ == "own_backend"
    means = (tmp_path / "run" / "own_tracker.csv").read_text().splitlines()
    assert {line.rpartition(",")[0] for line in means} >= {
        f"{step},{task}" for step in (1, 2) for task in ("sums", "by_module")
    }
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert {"own_reward"} == {name for row in rows if row["task"] == "sums" for name in row["breakdown"]}
    worlds = [row for row in rows if row["task"] == "by_module"]
    assert {row["reward"] for row in worlds if row["turns"]} == {1.0}, "it called no tool"
    with open_sandbox("own_sandbox", workers=1, max_characters=8) as sandbox:
        outcomes = sandbox.map([Program(source="print(1)"), Program(source="print(10)")])
    assert [(o.stdout_text, o.message) for o in outcomes] == [("1\n", ""), ("", "the program is too long")]
