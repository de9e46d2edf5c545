"""The whole run on a CUDA device; skipped where there is none."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "sides"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from workload import make_actor

from multitask_rl.config.run import EvalConfig, ModelConfig, OptimizerConfig, RolloutConfig
from run_builders import run_config, train, write_run

ONE_TASK = "tasks:\n  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right]}\n"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("settings", "largest_gap"),
    [
        ({"dtype": "float32"}, 1e-3),
        ({"dtype": "bfloat16"}, 0.2),
        ({"dtype": "float32", "autocast": True}, 0.2),
        ({"dtype": "float32", "activation_offload": True}, 1e-3),
    ],
)
def test_engine_and_trainer_agree_on_the_device_and_the_run_resumes(tmp_path, settings, largest_gap):
    write_run(tmp_path)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), **settings)
    looks = EvalConfig(every=2, num_prompts=2)
    train(run_config(tmp_path, "out", 1, model=model, eval=looks))
    trainer = train(run_config(tmp_path, "out", 2, model=model, eval=looks))
    assert trainer.step == 2
    assert trainer.actor.device.type == "cuda"
    assert all(bool(torch.isfinite(p).all()) for p in trainer.actor.model.parameters())
    rows = rows_of_steps(tmp_path)
    gaps = [row["task/copy/mismatch_max"] for row in rows if "task/copy/mismatch_max" in row]
    assert gaps
    assert max(gaps) < largest_gap
    assert all(row["memory/peak_mb"] > 0 for row in rows)


def test_an_optimizer_in_host_memory_makes_the_steps_of_one_on_the_device(tmp_path):
    write_run(tmp_path, ONE_TASK)
    model = ModelConfig(name_or_path=str(tmp_path / "actor"), dtype="float32")
    found = {}
    for moments in ("float32", "host"):
        optimizer = OptimizerConfig(learning_rate=1e-3, moments=moments)
        settings = {"optimizer": optimizer, "model": model, "eval": EvalConfig(every=2, num_prompts=2)}
        train(run_config(tmp_path, moments, 1, **settings))
        trainer = train(run_config(tmp_path, moments, 2, **settings))  # resumed
        found[moments] = dict(trainer.actor.model.named_parameters())
    for name, weight in found["host"].items():
        assert weight.device.type == "cuda"
        torch.testing.assert_close(weight, found["float32"][name], rtol=1e-3, atol=1e-4)


@pytest.mark.vllm
@pytest.mark.parametrize("sleep_level", [0, 1, 2])
def test_vllm_on_the_device_follows_the_actor(tmp_path, sleep_level):
    if not pytest.importorskip("vllm.platforms").current_platform.is_cuda():
        pytest.skip("this build of vLLM is not for CUDA")
    write_run(tmp_path, ONE_TASK)
    make_actor(tmp_path / "wide_actor", "0.8M", 0)  # heads as wide as vLLM's kernels want them
    engine = {"dtype": "float32", "gpu_memory_utilization": 0.1, "sleep_level": sleep_level}
    trainer = train(
        run_config(
            tmp_path,
            "out",
            3,
            model=ModelConfig(name_or_path=str(tmp_path / "wide_actor"), dtype="float32"),
            rollout=RolloutConfig(engine="vllm", max_new_tokens=4, engine_config=engine),
        )
    )
    assert trainer.actor.device.type == "cuda"
    rows = rows_of_steps(tmp_path)
    gaps = [row["task/copy/mismatch_max"] for row in rows if "task/copy/mismatch_max" in row]
    assert len(gaps) > 1
    # were the engine one update behind, the gap at this learning rate would be a hundred times larger
    assert max(gaps) < 1e-3


def rows_of_steps(directory):
    rows = [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/learning_rate" in row]
