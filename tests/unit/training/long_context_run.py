"""One update on 32k tokens of ``long_context_kv`` rows in a process of its own; prints peaks of memory.

Run by ``test_long_context.py``. Peaks only ever rise, so the runs come in ascending order of what they need.
"""

from __future__ import annotations

import json
import resource

import torch
from model_builders import build_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.config.run import BatchConfig, ModelConfig, RunConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.records import Prompt, Rollout, Scored, TrainSample
from multitask_rl.training import forward
from multitask_rl.training.actor import Actor
from multitask_rl.training.credit import CreditedSample, LearnerTask
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner
from multitask_rl_tasks.long_context_kv import LongContextKV

TOKENS = 2**15
PROMPT = 256


def characters() -> list[int]:
    """Return the characters of a row as token ids: the object is what the model is to say."""
    task = LongContextKV(LongContextKV.Config(num_keys=450, num_rows=1))
    (row,) = task._raw("train")
    ids = [2 + ord(character) % 94 for character in row["prompt"][:TOKENS]]
    assert len(ids) == TOKENS
    return ids


def update(vocabulary: int, slice_cells: int) -> dict[str, float]:
    """Make one update and return the process's peak so far (MiB) and the update's numbers."""
    forward.SLICE_CELLS = slice_cells
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    actor = Actor(Qwen2ForCausalLM(config).eval(), build_tokenizer(), ModelConfig())
    run = RunConfig(batch=BatchConfig(tokens_per_microbatch=TOKENS))
    task = LearnerTask(spec=TaskSpec(name="kv"), algorithm=GRPO(GRPO.Config()))
    learner = Learner(ModelRunner(actor, Critic(), run), {"kv": task}, run)
    ids = characters()
    prompt = Prompt(task="kv", prompt_id="kv/0", draw=0, row={}, text="", prompt_ids=ids[:PROMPT])
    rollout = Rollout(prompt=prompt, sample=0, response_ids=ids[PROMPT:], rollout_logprobs=[])
    sample = TrainSample(
        scored=Scored(rollout=rollout, reward=1.0),
        prompt_ids=ids[:PROMPT],
        response_ids=ids[PROMPT:],
        rollout_logprobs=[],
    )
    credited = CreditedSample(sample=sample, advantages=torch.ones(TOKENS - PROMPT))
    report = learner.update([credited], shares={"kv": 1.0}, step=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"peak": peak, "grad_norm": report.metrics["grad_norm"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = [update(2048, 2**20), update(4096, 2**20), update(2048, 2**25)]
    print(json.dumps({"start": start, "runs": found}))
