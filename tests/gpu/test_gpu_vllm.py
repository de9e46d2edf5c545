"""vLLM on a CUDA device with its workers in other processes: they read the trainer's weights by handle."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from multitask_rl.rollout.vllm.engine import VLLMEngine
from vllm_builders import distance, small_model, small_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def test_weights_on_the_device_reach_a_worker_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    model = small_model(tie=True).cuda()
    model.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    engine = VLLMEngine(tmp_path, config={"kv_cache_memory_bytes": 64 * 2**20, "enforce_eager": True}, seed=0)
    try:
        weights = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
        for version in range(1, 4):
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.05 + 0.01 * number)
            engine.update_weights(weights, version)
            assert distance(engine, model, [4, 9, 12, 7, 30, 22]) <= 1e-2
        assert engine._loader.is_proven
        assert engine._loader._shared is not None
        assert engine._loader._shared.by_handles
    finally:
        engine.close()
