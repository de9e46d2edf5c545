"""A run on real rows: gsm8k with math_answer, mbpp with code_evaluator, hh_pref with rm_hf."""

import gzip
import json
import math
import os
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from multitask_rl.config.run import BatchConfig, EvalConfig, RolloutConfig
from multitask_rl.data.readers import read_file
from run_builders import lines, run_config, train, weights_hash

DATA = Path(os.environ.get("MULTITASK_RL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"real data sets are not at {DATA} (MULTITASK_RL_DATA)"),
]

TASKS = """
tasks:
  gsm8k:
    type: grpo
    dataset: {data}/gsm8k_train.jsonl
    prompt: "Question: {{prompt}}\\nAnswer:"
    rewards: [math_answer]
  mbpp:
    type: reward_conditioned
    dataset: {data}/mbpp.jsonl
    prompt: "{{prompt}}\\n"
    reward_model: code_evaluator
    reward_config: {{evaluator: codebleu, timeout: 10}}
    algorithm_config: {{quantiles: 4}}
    sampling: {{max_new_tokens: 40}}
  hh_pref:
    type: ppo
    dataset: {data}/hh_pref_train.jsonl.gz
    reward_model: rm_hf
    reward_config: {{model_name: {rm}, device: cpu}}
    kl: {{coefficient: 0.05}}
"""


def build_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 600 tokens fitted to the prompts' text."""
    files = [read_file(str(DATA / name)) for name in ("gsm8k_train.jsonl", "mbpp.jsonl")]
    texts = [rows[i]["prompt"] for rows in files for i in range(200)]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=600, special_tokens=["<pad>", "<eos>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("real")
    tokenizer = build_tokenizer(directory)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        num_labels=1,
    )
    torch.manual_seed(0)
    for name, architecture in (("actor", Qwen2ForCausalLM), ("rm", Qwen2ForSequenceClassification)):
        architecture(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    for name, every in (("gsm8k_train.jsonl", 10), ("mbpp.jsonl", 1), ("hh_pref_train.jsonl.gz", 20)):
        open_file = gzip.open if name.endswith(".gz") else open
        with open_file(DATA / name, "rb") as whole, open_file(directory / name, "wb") as thinned:
            thinned.writelines(whole.readlines()[::every])
    for name, data in (("tasks", directory), ("whole", DATA)):
        (directory / f"{name}.yaml").write_text(TASKS.format(data=data, rm=directory / "rm"))
    return directory


def config_of(directory: Path, output: str, steps: int, tasks: str = "tasks.yaml"):
    return run_config(
        directory,
        output,
        steps,
        tasks_file=str(directory / tasks),
        rollout=RolloutConfig(max_new_tokens=24),
        batch=BatchConfig(prompts_per_step=9, group_size=4, tokens_per_microbatch=4096),
        eval=EvalConfig(every=0, num_prompts=6),
    )


def test_real_rows_are_trained_on_token_exactly_and_the_run_resumes(prepared):
    """Every tenth or twentieth row of the long files, which are read in a fraction of the time."""
    whole = train(config_of(prepared, "whole", 2))
    rows = [json.loads(line) for line in (prepared / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/grad_norm" in row or "train/learning_rate" in row]
    assert len(steps) == 2
    for task in ("gsm8k", "mbpp", "hh_pref"):
        sampled = [row for row in steps if row[f"task/{task}/share_sampled"] > 0]
        assert sampled  # nine prompts need not hold every task in every step
        for row in sampled:
            assert math.isfinite(row[f"task/{task}/reward_mean"])
            assert row[f"task/{task}/failure_rate"] == 0.0
    for row in steps:
        assert math.isfinite(row["task/hh_pref/kl"])
        assert math.isfinite(row["train/grad_norm"])
        assert row["task/hh_pref/mismatch_max"] < 1e-4
    rollouts = [json.loads(line) for line in (prepared / "whole" / "rollouts.jsonl").read_text().splitlines()]
    assert {r["task"] for r in rollouts} == {"gsm8k", "mbpp", "hh_pref"}
    assert any("tests" in str(r["breakdown"]) or "codebleu" in str(r["breakdown"]) for r in rollouts)

    train(config_of(prepared, "parts", 1))
    resumed = train(config_of(prepared, "parts", 2))
    assert weights_hash(resumed) == weights_hash(whole)
    assert lines(prepared / "parts", "rollouts.jsonl") == lines(prepared / "whole", "rollouts.jsonl")


def test_training_never_sees_a_row_of_a_test_split(prepared):
    from multitask_rl.run.plan import plan_run

    plan = plan_run(config_of(prepared, "plan", 1, "whole.yaml"))
    for name in ("gsm8k", "mbpp", "hh_pref"):
        train_rows, held_out = plan.rows[name]
        assert all(row.get("split") == "train" for row in train_rows)
        train_ids = {row["id"] for row in train_rows}
        assert not train_ids & {row["id"] for row in held_out}
