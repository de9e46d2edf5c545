"""One step of training at 32k tokens, then the learner's memory by slice: prints one line of JSON."""

import json
import random
import sys
import uuid
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TrackingConfig,
)
from multitask_rl.models.actor import checkpoint_layers
from multitask_rl.records import SamplingParams
from multitask_rl.trainer import Trainer
from multitask_rl.training import forward
from multitask_rl.training.microbatch import build_microbatches

TOKENS = 32_768
MEASURED = 16_384
"""Response tokens whose logits are measured."""
VOCABULARY = 2048
"""Of the model whose logits are measured; the one that is trained knows the characters only."""
CHARACTERS = "0123456789abcdef-\":,{} \nEJOMKVSNxtrachevluospndigtywbmf.[]'qjkz"
TASKS = """
tasks:
  kv:
    type: grpo
    dataset: kv.jsonl
    eval_dataset: kv.jsonl
    rewards: [{plugin: rewards.py:characters}]
"""
REWARD = """
def characters(response, reference):
    return sum(map(ord, response)) / 1000  # of two responses one is higher
"""


def write_rows(file: Path, number: int) -> None:
    """Write rows as those of ``longcontext_kv``: JSON of random keys and values, one key asked for."""
    rng = random.Random(0)

    def name() -> str:
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))

    lines = []
    for i in range(number):
        pairs = [(name(), name()) for _ in range(TOKENS // 82)]
        key, value = rng.choice(pairs)
        data = "{" + ",\n ".join(f'"{k}": "{v}"' for k, v in pairs) + "}"
        prompt = f'Extract the value of the key.\n\nJSON data:\n{data}\n\nKey: "{key}"\nvalue:'
        lines.append(json.dumps({"id": i, "prompt": prompt, "reference": value}))
    file.write_text("\n".join(lines) + "\n")


def write_actor(directory: Path, size: int = 0) -> None:
    """Save a model of one layer whose tokens are characters, and more up to ``size``."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    for c in CHARACTERS:
        vocabulary.setdefault(c, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=size or len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def train(directory: Path) -> dict[str, float]:
    """Make one step; return its numbers and how far the weights moved."""
    (directory / "rewards.py").write_text(REWARD)
    (directory / "tasks.yaml").write_text(TASKS)
    write_rows(directory / "kv.jsonl", 1)
    write_actor(directory / "actor")
    config = RunConfig(
        tasks_file=str(directory / "tasks.yaml"),
        output_dir=str(directory / "run"),
        max_steps=1,
        num_threads=2,  # as many as heads: attention of one would not be cut up
        model=ModelConfig(
            name_or_path=str(directory / "actor"),
            gradient_checkpointing=True,
            rope_scaling={"type": "yarn", "factor": 8.0},
        ),
        rollout=RolloutConfig(max_prompt_tokens=TOKENS + 1000, max_new_tokens=8),
        batch=BatchConfig(prompts_per_step=1, group_size=2, tokens_per_microbatch=40_000, refill_rounds=0),
        guard=GuardConfig(enabled=False),
        eval=EvalConfig(every=0, num_prompts=1),
        checkpoint=CheckpointConfig(every=0),
        tracking=TrackingConfig(trackers=["jsonl"], store_rollouts=-1),
    )
    trainer = Trainer.from_config(config)
    trainer._open()
    before = [p.detach().clone() for p in trainer.actor.model.parameters()]
    start = reset_peak()
    report = trainer.train_step()
    peak = peak_mib() - start
    moved = sum(
        float((a - b).detach().abs().sum())
        for a, b in zip(before, trainer.actor.model.parameters(), strict=True)
    )
    trainer.close()
    return {
        "prompt_tokens": min(len(s.rollout.prompt.prompt_ids) for s in report.kept),
        "moved": moved,
        "train_mib": peak,
        "grad_norm": report.train["grad_norm"],
    }


def reset_peak() -> float:
    """Forget the most memory this process has had; return what it has now, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mib()


def peak_mib() -> float:
    """Return the most memory this process has had since ``reset_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def learn(directory: Path, slice_cells: int, tokens: int = MEASURED, kept_bytes: int = 0) -> None:
    """Compute log-probabilities of so many response tokens and their gradient.

    In sixteen samples: what grows with the slice is the logits, and attention would take most of the time.
    """
    forward.SLICE_CELLS, forward.KEPT_BYTES = slice_cells, kept_bytes
    forward.BLOCK_CELLS = 2**18  # 1 MiB, less than any slice
    model = Qwen2ForCausalLM.from_pretrained(directory)
    checkpoint_layers(model)
    responses = [[3 + (7 * i + k) % 60 for i in range(tokens // 16)] for k in range(16)]
    (batch,) = build_microbatches(
        [[5, 6, 7]] * 16, responses, max_tokens=2 * tokens, layout="bucketed", pad_token_id=0
    )
    out = forward.forward_tokens(model, batch, [SamplingParams()] * 16)
    out.logprobs.sum().backward()


def main() -> None:
    """Train, then learn with slices of the given MiB, in ascending order."""
    directory, kept = Path(sys.argv[1]), forward.KEPT_BYTES
    result: dict[str, object] = train(directory)
    torch.set_num_threads(2)
    slices = [int(x) for x in sys.argv[2:]]
    write_actor(directory / "wide", VOCABULARY)
    peaks = {}
    learn(directory / "wide", slices[0] * 2**18, MEASURED // 4)  # libraries take their own share once
    for size in slices:
        start = reset_peak()
        learn(directory / "wide", size * 2**18)
        peaks[size] = peak_mib() - start
    start = reset_peak()
    learn(directory / "wide", slices[0] * 2**18, kept_bytes=kept)
    result["kept_mib"] = kept / 2**20
    result["with_kept_mib"] = peak_mib() - start
    print(json.dumps({**result, "peaks_mib": peaks, "all_logits_mib": MEASURED * VOCABULARY * 4 / 2**20}))


if __name__ == "__main__":
    main()
