"""A run over several Ray nodes on this machine, which leave and join: it ends as in one process."""

import contextlib
import json
import time
from importlib.util import find_spec

import pytest
import torch

from multitask_rl.config.run import RayConfig
from multitask_rl.errors import EngineError
from multitask_rl.records import Scored
from multitask_rl.step.flow import Stage
from multitask_rl.trainer import Trainer
from run_builders import lines, run_config, train, write_run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]


@pytest.fixture
def cluster(monkeypatch):
    """Nodes may be added; this process has one without room."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_initial_delay_ms", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "300")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    # none of the services that nothing here asks: each imports Ray for seconds
    bare = {"no_monitor": True, "include_dashboard": False, "include_log_monitor": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **bare})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)  # each replica takes a whole CPU
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def assert_same(local, remote, directory):
    tokens = [
        [json.loads(line)["response_ids"] for line in lines(directory / run, "rollouts.jsonl")]
        for run in ("local", "ray")
    ]
    assert tokens[0] == tokens[1]
    theirs = remote.actor.model.state_dict()
    for name, own in local.actor.model.state_dict().items():
        assert torch.equal(own, theirs[name]), name


class AtStep(Stage):
    """Calls what belongs to the step, when the first samples of the step have rewards."""

    name = "at_step"
    consumes = produces = Scored

    def __init__(self, trainer, actions):
        self.trainer = trainer
        self.actions = actions

    def process(self, items: list[Scored]) -> list[Scored]:
        self.actions.pop(self.trainer.step, lambda: None)()  # a step has several parts, a slow one more
        return items


def remove(cluster, node):
    """Kill ``node``; return when its death is known."""
    import ray

    number = sum(node["Alive"] for node in ray.nodes())
    cluster.remove_node(node, allow_graceful=False)
    # its workers outlive it by a second, in which a fast machine would end the run
    while sum(node["Alive"] for node in ray.nodes()) >= number:
        time.sleep(0.1)


def test_replicas_join_and_leave_and_a_run_without_any_ends_and_goes_on_later(tmp_path, cluster):
    import ray

    write_run(tmp_path)
    local = train(run_config(tmp_path, "local", 8))
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    settings = RayConfig(num_engines=2, min_engines=1, room_timeout_s=20.0)
    config = run_config(tmp_path, "ray", 8, executor="ray", ray=settings)
    remote = Trainer.from_config(config)  # its reward pool takes the node
    engine = lambda: remote.parts.engine  # noqa: E731
    added = [cluster.add_node(num_cpus=1)]  # room for one replica

    def grow():
        added.append(cluster.add_node(num_cpus=1))
        loading = [r for r, call in engine()._joining.items() if call.method == "load"]
        assert ray.wait(loading, timeout=120)[0], "the missing replica loads on the new node"

    def shrink():
        assert len(engine()._ready) == 2
        remove(cluster, added.pop())
        with contextlib.suppress(ray.exceptions.RayActorError):
            for _ in range(100):  # its process may outlive it
                ray.get(engine()._group.submit(1, "retain", []), timeout=30)
                time.sleep(0.1)

    def leave_none():
        while added:
            remove(cluster, added.pop())

    remote.insert_stage(AtStep(remote, {0: grow, 1: shrink, 2: grow, 3: leave_none}), after="rewards")
    with pytest.raises(
        EngineError, match=r"no rollout replica is left.* within 20 s .* the same command again"
    ):
        remote.train()
    events = [json.loads(line) for line in (tmp_path / "ray" / "events.jsonl").read_text().splitlines()]
    told = [
        (event["step"], event["kind"], event["reason"])
        for event in events
        if event["source"] == "engine" and event["kind"] != "late"  # on a busy machine
    ]
    found = [(step, kind) for step, kind, _ in told if step < 3]  # step 3 has no replica
    assert found == [(0, "joined"), (1, "lost"), (2, "joined")], told
    assert "rollout replica 1 has joined, 2 of 2 are at work" in told[0][2]
    assert "rollout replica 1 is lost, 1 of 2 are at work: The actor died" in told[1][2]
    cluster.add_node(num_cpus=1)
    assert_same(local, train(config), tmp_path)
