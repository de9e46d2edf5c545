"""What `multitask-rl doctor FILE` foretells, beside what a run measures: memory, disk, seconds of a step.

    python benchmarks/estimate.py --json benchmarks/results/estimate.json

Models of random weights that rarely end a response, with rewards by chance, so that every sample is trained
and as long as it may be. Each case runs in a process of its own: memory is the highest resident size less the
size before the model loads. Seconds are those of the process on one thread, which other programs of the
machine do not change.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speed import machine
from transformers import Qwen2Config, Qwen2ForCausalLM

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
from multitask_rl.run import estimate
from multitask_rl.run.plan import plan_run
from multitask_rl.run.profiling import memory_report
from multitask_rl.trainer import Trainer

SHAPES = {"1M": (128, 4, 1024), "21M": (384, 8, 8192), "72M": (640, 10, 16384)}
"""Name -> width, layers, vocabulary."""
CASES: dict[str, dict[str, Any]] = {
    "1M": {},
    "21M": {},
    "21M, KL": {"kl": {"coefficient": 0.01}},
    "21M, checkpointing": {"gradient_checkpointing": True},
    "21M, bfloat16": {"dtype": "bfloat16"},
    "21M, adapters": {"rank": 8},
    "72M": {},
}
STEPS = 4


def main() -> None:
    """Run every case and write what was foretold and measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", choices=CASES, help="this one alone, in this process")
    parser.add_argument("--new-tokens", type=int, default=96)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(args.case, args.new_tokens)))
        return
    cases = {}
    for name in CASES:
        command = [sys.executable, __file__, "--case", name, "--new-tokens", str(args.new_tokens)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        cases[name] = json.loads(done.stdout.splitlines()[-1])
        ratios = {k: f"{v['foretold'] / v['measured']:.2f}" for k, v in cases[name].items()}
        print(f"{name}: foretold / measured {ratios}", flush=True)
    if args.json:
        text = json.dumps({"new_tokens": args.new_tokens, "cases": cases, "machine": machine()}, indent=1)
        args.json.write_text(text + "\n")


def run_case(name: str, new_tokens: int) -> dict[str, dict[str, float]]:
    """Return what was foretold and measured: bytes of memory and disk, seconds of a step."""
    own = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory / "actor", *SHAPES[name.partition(",")[0]])
        rng = random.Random(0)
        rows = [{"prompt": "".join(rng.choices("abcdefgh", k=24))} for _ in range(64)]
        (directory / "rewards.py").write_text(
            "import random\n\n\ndef chance(response):\n    return random.random()\n"
        )
        task = {"dataset": rows, "rewards": [f"{directory / 'rewards.py'}:chance"], "kl": own.get("kl", {})}
        (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        task["dataset"] = str(directory / "rows.jsonl")
        lora = replace(ModelConfig().lora, rank=own.get("rank", 0))
        model = {k: v for k, v in own.items() if k in ("gradient_checkpointing", "dtype")}
        config = RunConfig(
            tasks={"count": task},
            output_dir=str(directory / "run"),
            max_steps=STEPS,
            num_threads=1,
            model=ModelConfig(name_or_path=str(directory / "actor"), lora=lora, **model),
            batch=BatchConfig(prompts_per_step=4, group_size=8),
            rollout=RolloutConfig(max_new_tokens=new_tokens),
            eval=EvalConfig(every=0, num_prompts=4),
            guard=GuardConfig(enabled=False),
            checkpoint=CheckpointConfig(every=1, keep=2),
            tracking=TrackingConfig(trackers=["jsonl"]),
        )
        plan = plan_run(config)
        shape = estimate.read_shape(config.model)
        work = estimate.step_workload(plan, tokenizer())
        foretold = {
            "memory": estimate.estimate_memory(plan, shape, work)["peak"],
            "disk": estimate.estimate_disk(
                plan, shape.parameters, shape.trainable, work.prompt_tokens + work.new_tokens
            )["total"],
            "step_s": sum(estimate.measure_step(plan, shape, work, time.process_time).values()),
        }
        before = memory_report([], 0)["rss_mb"]
        seconds: list[float] = []
        with Trainer.from_config(config) as trainer:
            for _ in range(STEPS):
                if seconds:
                    trainer.parts.supervisor.inspect()
                began = time.process_time()
                trainer.train_step()
                seconds.append(time.process_time() - began)
            trainer.parts.supervisor.inspect(last=True)
        kept = estimate.num_checkpoints(config)
        sizes = [
            sum(f.stat().st_size for f in p.rglob("*")) for p in (directory / "run/checkpoints").iterdir()
        ]
        other = sum(f.stat().st_size for f in (directory / "run").rglob("*") if "checkpoints" not in f.parts)
        measured = {
            "memory": (memory_report([], 0)["rss_peak_mb"] - before) * 2**20,
            "disk": max(sizes) * (kept + 1) + other,
            "step_s": min(seconds[1:]),
        }
    return {key: {"foretold": foretold[key], "measured": measured[key]} for key in foretold}


def write_model(directory: Path, width: int, layers: int, vocabulary: int) -> None:
    """Write a model of random weights and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer().save_pretrained(directory)


def tokenizer() -> Any:
    """Return a tokenizer of single letters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    main()
