"""The same run on Ray: same seed, same weights, same rollouts as in process."""

from importlib.util import find_spec

import pytest

from multitask_rl.config.run import RayConfig
from run_builders import TASKS, lines, run_config, train, weights_hash, write_run

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


def test_a_run_on_ray_equals_the_run_in_process(tmp_path):
    import ray

    write_run(tmp_path, STREAMING)
    local = train(run_config(tmp_path, "local", 2))
    try:
        remote = train(run_config(tmp_path, "ray", 2, executor="ray", ray=RayConfig(num_engines=1)))
    finally:
        ray.shutdown()
    assert any('"flagged"' in row for row in lines(tmp_path / "ray", "rollouts.jsonl"))
    assert weights_hash(remote) == weights_hash(local)
    assert lines(tmp_path / "ray", "rollouts.jsonl") == lines(tmp_path / "local", "rollouts.jsonl")
