"""A run over three Ray nodes on this machine: one is killed, the run goes on and ends as in one process."""

import json
import time
from importlib.util import find_spec

import pytest
import torch

from multitask_rl.config.run import RayConfig
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


def test_a_run_goes_on_when_one_node_joins_and_another_dies(tmp_path, monkeypatch, caplog):
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_health_check_initial_delay_ms", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "300")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    write_run(tmp_path)
    local = train(run_config(tmp_path, "local", 4))
    # this process has a node without room; of the others one holds the replica, one the reward pool
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        first, _ = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

        class ChangeNodes(Stage):
            name = "change_nodes"
            consumes = produces = Scored
            num_steps = 0

            def process(self, items: list[Scored]) -> list[Scored]:
                self.num_steps += 1
                if self.num_steps == 2:
                    cluster.add_node(num_cpus=1)
                    cluster.remove_node(first, allow_graceful=False)
                    # its workers outlive it by a second, in which a fast machine would end the run
                    while sum(node["Alive"] for node in ray.nodes()) > 3:
                        time.sleep(0.1)
                return items

        remote = Trainer.from_config(run_config(tmp_path, "ray", 4, executor="ray", ray=RayConfig()))
        remote.insert_stage(ChangeNodes(), after="rewards")
        remote.train()
        assert sum(node["Alive"] for node in ray.nodes()) == 3
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert "rollout replica 0 died" in caplog.text or "reward pool 0 died" in caplog.text
    tokens = [
        [json.loads(line)["response_ids"] for line in lines(tmp_path / run, "rollouts.jsonl")]
        for run in ("local", "ray")
    ]
    assert tokens[0] == tokens[1]
    theirs = remote.actor.model.state_dict()
    for name, own in local.actor.model.state_dict().items():
        # the samples that are repeated share a batch with others
        assert torch.allclose(own, theirs[name], atol=1e-4), name
