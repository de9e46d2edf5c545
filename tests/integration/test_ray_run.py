"""The same run on Ray: same seed, same weights, same rollouts as in process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from multitask_rl.boundary.interrupts import Terminated, stopping_on_signals
from multitask_rl.config.run import RayConfig, RolloutConfig
from multitask_rl.errors import EngineError
from multitask_rl.executor.group import ActorGroup
from run_builders import (
    ECHO,
    ECHO_WORLD,
    TASKS,
    assert_episodes_keep_their_limits,
    build_tokenizer,
    lines,
    run_config,
    train,
    weights_hash,
    write_run,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]


# one constraint looks at responses while the replica generates them
STREAMING = TASKS.replace("mode: reject, max_attempts: 3", "mode: lagrangian, limit: 0.1, stream_every: 2")
assert STREAMING != TASKS


def test_a_run_on_ray_equals_the_run_in_process_and_leaves_nothing_of_ray(tmp_path, monkeypatch):
    import ray

    sessions = Path(tempfile.mkdtemp(dir="/tmp"))  # short: sockets lie in it
    monkeypatch.setenv("RAY_TMPDIR", str(sessions))
    for name, lock in (("killed", "multitask_rl.lock"), ("of_another_program", "raylet.log")):
        (sessions / f"ray_{name}" / "session_1" / "logs").mkdir(parents=True)
        (sessions / f"ray_{name}" / lock).touch()
    write_run(tmp_path, STREAMING + ECHO + "    max_response_tokens: 6\n")
    (tmp_path / "worlds.py").write_text(ECHO_WORLD)
    settings = {"rollout": RolloutConfig(max_new_tokens=4, lockstep=True)}
    told = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    local = train(run_config(tmp_path, "local", 2, **settings))
    try:
        remote = train(
            run_config(tmp_path, "ray", 2, executor="ray", ray=RayConfig(num_engines=1), **settings)
        )
        left = sorted(path.name for path in sessions.iterdir())
        assert signal.getsignal(signal.SIGTERM).__module__ == __name__
        os.kill(os.getpid(), signal.SIGTERM)  # what Slurm sends: the run must get it, not Ray
        assert told == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()
        shutil.rmtree(sessions)
    assert left == ["ray_of_another_program"]
    assert any('"flagged"' in row for row in lines(tmp_path / "ray", "rollouts.jsonl"))
    assert weights_hash(remote) == weights_hash(local)
    same = [lines(tmp_path / name, "rollouts.jsonl") for name in ("local", "ray")]
    assert same[0] == same[1]
    rows = [json.loads(line) for line in (tmp_path / "ray" / "rollouts.jsonl").read_text().splitlines()]
    assert_episodes_keep_their_limits([row for row in rows if row["task"] == "echo"], build_tokenizer())


DRIVER = """
from multitask_rl.executor.group import ActorGroup
ActorGroup("pool", lambda index: [], 1, num_cpus=1, num_gpus=0.0).close()
print("joined")
"""


def test_a_cluster_that_asks_for_a_token_is_joined_with_it_and_refuses_by_name_without(tmp_path):
    home, other, folder = tmp_path / "home", tmp_path / "other", tempfile.mkdtemp(dir="/tmp")
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("a" * 64)  # an earlier `ray.init()` of this user left it
    other.mkdir()
    with socket.socket() as one, socket.socket() as another:
        one.bind(("127.0.0.1", 0))
        another.bind(("127.0.0.1", 0))
        port, client_port = one.getsockname()[1], another.getsockname()[1]
    mode = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    start = [Path(sys.executable).parent / "ray", "start", "--head", "--num-cpus=2", "--block"]
    start += [f"--port={port}", f"--ray-client-server-port={client_port}"]
    start += ["--include-dashboard=false", "--disable-usage-stats"]
    cluster = subprocess.Popen(
        start,
        env={**mode, "HOME": str(home), "RAY_TMPDIR": folder},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        found = {}
        for place in (home, other):
            environment = {**mode, "HOME": str(place), "RAY_ADDRESS": f"127.0.0.1:{port}"}
            command = [sys.executable, "-W", "ignore", "-c", DRIVER]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=120
            )
            found[place] = done.stdout + done.stderr
    finally:
        os.killpg(cluster.pid, signal.SIGKILL)
        cluster.wait()
        shutil.rmtree(folder, ignore_errors=True)
    assert "joined" in found[home], found[home]
    assert "joined" not in found[other]
    assert "asks for another token" in found[other]
    assert "RAY_AUTH_TOKEN" in found[other]


def test_actors_get_as_much_of_a_busy_cpu_as_the_trainer_that_waits_for_them(tmp_path, monkeypatch):
    sessions = tempfile.mkdtemp(dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", sessions)
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    try:
        # on the cluster of this machine alone parts share the cores: none waits for more than there are
        group = ActorGroup("replica", lambda _: os, 1, num_cpus=2.0 * os.cpu_count(), num_gpus=0.0)
        other = ActorGroup("pool", lambda _: os, 0, num_cpus=0.0, num_gpus=0.0)
        other.close()
        other.close()  # counts once: the cluster ends with the last group
        niceness, dead = group.call("getpriority", {0: (os.PRIO_PROCESS, 0)})
        group.close()
    finally:
        shutil.rmtree(sessions)
    assert (niceness, dead) == ({0: os.getpriority(os.PRIO_PROCESS, 0)}, [])


@pytest.mark.parametrize(
    ("raised", "seen"),
    [(KeyboardInterrupt("stop"), KeyboardInterrupt), (Exception("timed out"), EngineError)],
)
def test_a_start_that_fails_is_an_error_of_the_run_and_leaves_nothing(tmp_path, monkeypatch, raised, seen):
    import ray

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(_temp_dir=tmp_path / "ray", **_):
        (Path(_temp_dir) / "session_1" / "logs").mkdir(parents=True)
        raise raised

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(seen, match=str(raised)):
        ActorGroup("rank", lambda index: index, 1, num_cpus=1.0, num_gpus=0.0)
    assert list(tmp_path.iterdir()) == []


def test_sigterm_while_ray_starts_stops_the_run_as_at_any_other_time(tmp_path, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))  # as Ray does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    with stopping_on_signals(), pytest.raises(Terminated):
        ActorGroup("rank", lambda index: index, 1, num_cpus=1.0, num_gpus=0.0)
