"""Learner ranks on two CUDA devices; skipped where there are fewer."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from multitask_rl.config.run import BatchConfig, ModelConfig
from run_builders import run_config, train, write_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("context", [1, 2])
def test_two_devices_learn_what_one_learns(tmp_path, context):
    write_run(tmp_path)
    settings = {"model": ModelConfig(name_or_path=str(tmp_path / "actor"), dtype="float32")}
    one = train(run_config(tmp_path, "one", 2, device_map={"actor": "cuda:0"}, **settings))
    settings["batch"] = BatchConfig(prompts_per_step=12, group_size=4, context_ranks=context)
    two = train(run_config(tmp_path, "two", 2, device_map={"actor": "cuda:0-1"}, **settings))
    expected = dict(one.actor.model.named_parameters())
    for name, found in two.actor.model.named_parameters():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-4)
