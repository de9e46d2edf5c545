import gzip
import json

import pytest

from multitask_rl.config.run import EvalConfig
from multitask_rl.errors import ConfigError
from run_builders import run_config, train, write_run

ONE_TASK = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}
"""


def test_a_profiled_run_leaves_a_trace_of_some_steps_and_a_memory_report(tmp_path):
    write_run(tmp_path, ONE_TASK)
    config = run_config(tmp_path, "out", 4, profile="torch", eval=EvalConfig(every=0, num_prompts=1))
    trainer = train(config)
    with gzip.open(tmp_path / "out/profile/trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any(name.startswith("aten::") for name in names)
    assert {"ProfilerStep#2", "ProfilerStep#3"} <= names
    assert "ProfilerStep#1" not in names, "the profiler warms up in the second step"
    memory = json.loads((tmp_path / "out/profile/memory.json").read_text())
    weights = sum(p.numel() * 4 for p in trainer.actor.model.parameters()) / 2**20
    assert memory["weights_mb"] == pytest.approx(weights)
    assert memory["optimizer_mb"] == pytest.approx(2 * weights, rel=0.01)
    assert memory["rss_peak_mb"] >= memory["rss_mb"] * 0.99 > 0


def test_an_unknown_profiler_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="profile must be one of '', torch, got 'cuda'"):
        run_config(tmp_path, "out", 1, profile="cuda")
