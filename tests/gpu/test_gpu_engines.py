"""The contract of the engines on a CUDA device."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from multitask_rl.rollout.hf import HFEngine
from multitask_rl.rollout.vllm.engine import VLLMEngine
from multitask_rl.testing.engine import assert_engine_contract
from vllm_builders import EOS, small_model, small_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("tie", [True, False])
def test_hf_keeps_the_contract(tie: bool) -> None:
    model, tokenizer = small_model(tie, layers=1).cuda(), small_tokenizer()
    engine = HFEngine(
        model,
        eos_token_ids=[EOS],
        pad_token_id=0,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
    )
    assert_engine_contract(engine, model, tokenizer, tolerance=1e-3)


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm")
def test_vllm_keeps_the_contract(tmp_path: Path) -> None:
    model, tokenizer = small_model(tie=True).cuda(), small_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    engine = VLLMEngine(tmp_path, config={"kv_cache_memory_bytes": 64 * 2**20}, seed=0)
    try:
        # its attention multiplies float32 as TF32
        assert_engine_contract(engine, model, tokenizer, tolerance=1e-2)
        assert engine._loader.is_proven
    finally:
        engine.close()
