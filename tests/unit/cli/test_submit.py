"""Recipes for clusters: what ``submit`` runs, and what the batch scripts do with the tools of a cluster."""

import os
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from multitask_rl.cli import main
from multitask_rl.cli.submit import build_commands
from multitask_rl.errors import ConfigError

RECIPES = Path(__file__).parents[3] / "examples" / "clusters"
TOOLS = {
    "scontrol": '[ "$1" = show ] && printf "node1\\nnode2\\nnode3\\n"; exit 0',
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
    "hostname": "echo 192.0.2.1 10.0.0.1",
    "ray": '[ "$1" = start ] && exec sleep 60; exit 0',
    "multitask-rl": 'trap "echo saved >> $LOG; exit 143" TERM; touch $STARTED; [ -n "$ENDS" ] && exit $ENDS\n'
    "sleep 60 & wait",
}
"""What stands for each tool; all write their arguments to a log first."""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Put tools that log their arguments on the PATH; return the log."""
    log = tmp_path / "log"
    for name, does in TOOLS.items():
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/bash\necho {name} "$@" RAY_ADDRESS=$RAY_ADDRESS >> $LOG\n{does}\n')
        tool.chmod(0o755)
    values = {"LOG": log, "STARTED": tmp_path / "started", "SLURM_JOB_ID": 7, "SLURM_CPUS_PER_TASK": 4}
    values |= {"SLURM_GPUS_PER_NODE": 2, "SLURM_JOB_NODELIST": "node[1-3]", "ENDS": ""}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize("recipe", ["slurm-one-node.sbatch", "slurm-several-nodes.sbatch"])
def test_a_job_that_slurm_ends_saves_and_comes_back(recipe, cluster, tmp_path):
    job = subprocess.Popen(["bash", RECIPES / recipe, "seed=3"], start_new_session=True)
    try:
        until, num_nodes = time.monotonic() + 20, 3 if "several" in recipe else 0
        while time.monotonic() < until:  # nodes start beside the training
            time.sleep(0.1)
            if (tmp_path / "started").exists() and cluster.read_text().count("\nray start") == num_nodes:
                break
        job.send_signal(signal.SIGTERM)  # as Slurm does, to the batch script alone
        assert job.wait(timeout=20) == 0
    finally:
        os.killpg(job.pid, signal.SIGKILL)
    calls = cluster.read_text().splitlines()
    (trained,) = [call for call in calls if call.startswith("multitask-rl train")]
    assert "seed=3" in trained
    assert calls.index("saved") < calls.index(next(c for c in calls if c.startswith("scontrol requeue 7")))
    if "several" in recipe:
        nodes = [call for call in calls if call.startswith("ray start")]
        # they run beside each other, so they may be logged in any order
        heads = [node for node in nodes if "--head --node-ip-address=192.0.2.1 --port=20007" in node]
        joining = [node for node in nodes if "start --address=192.0.2.1:20007" in node]
        assert (len(heads), len(joining), len(nodes)) == (1, 2, 3)
        assert all("--num-cpus=4 --num-gpus=2" in node for node in nodes)
        assert trained.endswith("RAY_ADDRESS=192.0.2.1:20007")


@pytest.mark.parametrize("recipe", ["slurm-one-node.sbatch", "slurm-several-nodes.sbatch"])
def test_a_run_that_ends_ends_the_job_with_its_exit_code(recipe, cluster, monkeypatch):
    monkeypatch.setenv("ENDS", "3")
    job = subprocess.run(["bash", RECIPES / recipe], start_new_session=True, timeout=30, check=False)
    assert job.returncode == 3
    assert "requeue" not in cluster.read_text()


def test_each_recipe_becomes_the_commands_of_its_cluster(capsys):
    sbatch = RECIPES / "slurm-one-node.sbatch"
    assert main(["submit", "--dry-run", str(sbatch), "seed=3"]) == 0
    assert main(["submit", str(sbatch), "--dry-run", "seed=3"]) == 0
    assert capsys.readouterr().out == f"sbatch {sbatch} seed=3\n" * 2
    ((command,), manifest) = build_commands(RECIPES / "kuberay.yaml", ["tasks.math.weight=2", "note=a b"])
    assert command == ["kubectl", "create", "-f", "-"]
    entrypoint = yaml.safe_load(manifest)["spec"]["entrypoint"]
    assert entrypoint.endswith("output_dir=/shared/runs/kuberay tasks.math.weight=2 'note=a b'")
    up = RECIPES / "ray-up.yaml"
    commands, _ = build_commands(up, ["seed=3"])
    assert commands == [
        ["ray", "up", "--yes", str(up)],
        ["ray", "exec", str(up), "RAY_ADDRESS=auto multitask-rl train executor=ray seed=3"],
    ]


@pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_ray_accepts_the_recipe_of_its_launcher():
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((RECIPES / "ray-up.yaml").read_text()))
    validate_config(config)
    assert config["max_workers"] == 2


@pytest.mark.parametrize(
    ("name", "text", "overrides", "said"),
    [
        ("a.yaml", "kind: Pod", [], "is no recipe"),
        ("a.yaml", "a: [", [], "is no YAML"),
        (
            "a.yaml",
            "{kind: RayJob, spec: {entrypoint: python x.py}}",
            [],
            "must begin with `multitask-rl train`",
        ),
        ("a.sbatch", "#!/bin/bash", ["seed"], "'seed' is no key=value argument"),
        ("", "", [], "cannot be read"),
    ],
)
def test_what_is_no_recipe_is_refused(tmp_path, name, text, overrides, said):
    if name:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        build_commands(tmp_path / name, overrides)


def test_a_tool_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", str(RECIPES / "slurm-one-node.sbatch")]) == 2
    assert "sbatch is not on this machine's PATH" in capsys.readouterr().err
