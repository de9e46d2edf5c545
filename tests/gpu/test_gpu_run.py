"""The whole run on a CUDA device; skipped where there is none."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from run_builders import run_config, train, write_run

from multitask_rl.config.run import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "largest_gap"), [("float32", 1e-3), ("bfloat16", 0.2)])
def test_engine_and_trainer_agree_on_the_device(tmp_path, dtype, largest_gap):
    write_run(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), dtype=dtype)
    trainer = train(run_config(tmp_path, "out", 3, model=model))
    assert trainer.actor.device.type == "cuda"
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["task/copy/mismatch_max"] for row in rows if "task/copy/mismatch_max" in row]
    assert gaps
    assert max(gaps) < largest_gap


def test_a_resumed_run_on_the_device_continues(tmp_path):
    write_run(tmp_path)
    train(run_config(tmp_path, "parts", 2))
    resumed = train(run_config(tmp_path, "parts", 4))
    assert resumed.step == 4
    assert weights_are_finite(resumed)


def weights_are_finite(trainer) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in trainer.actor.model.parameters())
