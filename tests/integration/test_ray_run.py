"""The same run on Ray: same seed, same weights, same rollouts as in process."""

from importlib.util import find_spec

import pytest
from run_builders import lines, run_config, train, weights_hash, write_run

from multitask_rl.config.run import ParallelConfig, RayConfig

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
]


def test_a_run_on_ray_equals_the_run_in_process(tmp_path):
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    write_run(tmp_path)
    ranks = ParallelConfig(num_ranks=2)
    local = train(run_config(tmp_path, "local", 2, parallel=ranks))
    try:
        settings = {"executor": "ray", "ray": RayConfig(num_engines=1), "parallel": ranks}
        remote = train(run_config(tmp_path, "ray", 2, **settings))
    finally:
        ray.shutdown()
    assert weights_hash(remote) == weights_hash(local)
    for name in ("rollouts.jsonl", "evaluations.jsonl"):
        assert lines(tmp_path / "ray", name) == lines(tmp_path / "local", name)
