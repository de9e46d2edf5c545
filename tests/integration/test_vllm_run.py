"""A run of several tasks whose rollouts come from vLLM, weights pushed after every update."""

import json

import pytest
from run_builders import TASKS, run_config, train, write_run

pytest.importorskip("vllm")

from model_builders import build_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.rollout.vllm import VLLMEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def test_four_tasks_train_with_vllm_and_the_engine_follows_the_actor(tmp_path):
    import torch

    write_run(tmp_path, TASKS)
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "wide_actor")
    tokenizer.save_pretrained(tmp_path / "wide_actor")
    trainer = train(
        run_config(
            tmp_path,
            "out",
            3,
            model=ModelConfig(name_or_path=str(tmp_path / "wide_actor")),
            rollout=RolloutConfig(engine="vllm", max_new_tokens=4, engine_config={"max_num_seqs": 16}),
        )
    )
    assert isinstance(trainer._engine, VLLMEngine)
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/learning_rate" in row]
    assert len(steps) == 3
    # were the engine one update behind, the gap at this learning rate would be a hundred times larger
    assert all(row["task/copy/mismatch_max"] < 1e-4 for row in steps if "task/copy/mismatch_max" in row)
    assert any("task/copy/mismatch_max" in row for row in steps[1:])
    rollouts = [json.loads(line) for line in (tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()]
    assert {r["policy_version"] for r in rollouts if r["step"] == 3} == {2}
