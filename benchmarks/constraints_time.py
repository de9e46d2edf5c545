r"""What constraints cost a step: the reference's tasks file, and a slow constraint of one task.

    python benchmarks/constraints_time.py --part reference --block 2 --max-new-tokens 256 \
        --json benchmarks/results/constraints_reference_256.json
    python benchmarks/constraints_time.py --part slow --json benchmarks/results/constraints_slow.json

``reference``: ``configs/reference_tasks.yaml`` with tiny models in place of the large ones. Two runs of it
take turns: one whose judge explains the violations that it stores, one without (``max_new_tokens: 0``).
``slow``: two tasks, of which one has a constraint that waits. Runs without and with the wait take turns:
synchronous, overlapped, and overlapped with a quorum. ``others_scored_s`` is the time from the end of the
rollout to the last score of the other task; ``late_groups`` are those of the task with the slow constraint.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from pipeline import Run, ratio, take_turns
from speed import machine
from workload import make_actor, prompts

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
    TrackingConfig,
)
from multitask_rl.trainer import Trainer
from multitask_rl_rewards.guard_templates import HAZARDS

REFERENCE = Path(__file__).parents[1] / "configs" / "reference_tasks.yaml"
JUDGES = """
import asyncio, time
from multitask_rl.scoring.shapes import with_traits


@with_traits(batch_size=4096, timeout_s=60, deterministic=False)
async def waits(response, delay=0.0):
    await asyncio.sleep(delay)
    return 0.0


def length(response):
    time.sleep(0.002)
    return len(response) / 100
"""


def make_judges(folder: Path) -> dict[str, str]:
    """Write a generative guard and a reward model of 0.2M parameters; return their directories by name."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    backend = ByteLevelBPETokenizer()
    words = [
        *HAZARDS,
        "Task: check if there is unsafe content in the conversation, Agent, User, safe, unsafe",
    ]
    backend.train_from_iterator(
        [str(w) for w in words] * 3, vocab_size=1000, special_tokens=["<pad>", "<eos>"]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend._tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=4096, num_labels=1,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    places = {"guard": folder / "Llama-Guard-3-8B", "reward": folder / "reward"}
    for name, kind in (("guard", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(shape).save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    return {name: str(place) for name, place in places.items()}


def build(
    folder: Path, actor: Path, tasks: list[dict[str, Any]], args: argparse.Namespace, **how: Any
) -> Run:
    """Return a run of ``tasks``; ``how``: its ``name``, ``staleness`` and ``quorum``."""
    folder.mkdir(parents=True)
    (folder / "judges.py").write_text(JUDGES)
    (folder / "tasks.yaml").write_text(json.dumps({"tasks": tasks}))
    config = RunConfig(
        tasks_file=str(folder / "tasks.yaml"),
        output_dir=str(folder / "run"),
        num_threads=1,
        max_steps=1_000_000,
        model=ModelConfig(name_or_path=str(actor)),
        rollout=RolloutConfig(max_new_tokens=args.max_new_tokens, max_staleness=how["staleness"]),
        batch=BatchConfig(
            prompts_per_step=args.prompts,
            group_size=args.group,
            refill_rounds=0,
            quorum=how.get("quorum", 1.0),
        ),
        scheduler=SchedulerConfig(policy="uniform"),
        guard=GuardConfig(enabled=False),
        eval=EvalConfig(every=0, num_prompts=1),
        checkpoint=CheckpointConfig(every=args.block),
        tracking=TrackingConfig(trackers=["jsonl"]),
    )
    return Run(how["name"], Trainer.from_config(config), folder, args.prompts * args.group)


def lines(run: Run, name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of the run."""
    return [json.loads(line) for line in (run.folder / "run" / name).read_text().splitlines()]


def measure_reference(folder: Path, actor: Path, args: argparse.Namespace) -> dict[str, Any]:
    """With and without explanations."""
    places = make_judges(folder)
    rng = random.Random(args.seed)
    texts = prompts(600, args.seed, "mixed")
    rows = {
        "preference_alignment": [{"prompt": text} for text in texts],
        "code_generation": [{"prompt": t, "reference": "def f(x):\n    return x + 1\n"} for t in texts],
        "fact_checking": [{"prompt": t, "evidence": rng.choice(texts)} for t in texts],
    }
    for name, own in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    runs = []
    for tokens in (0, None):
        tasks = yaml.safe_load(REFERENCE.read_text())["tasks"]
        for task in tasks:
            task["dataset"] = task["eval_dataset"] = str(folder / f"{task['name']}.jsonl")
            if task["name"] == "preference_alignment":
                task["reward_config"] = {"model_name": places["reward"], "device": "cpu"}
            if task["name"] == "fact_checking":
                task["constraint_config"] |= {"model_name": places["guard"], "device": "cpu"}
                if tokens is not None:
                    task["constraint_config"]["max_new_tokens"] = tokens
        name = "explained" if tokens is None else "without"
        runs.append(build(folder / name, actor, tasks, args, name=name, staleness=0))
    take_turns(runs, args.block, args.turns)
    explanations = [
        verdict["reason"].partition(": ")[2]
        for row in lines(runs[1], "rollouts.jsonl")
        for verdict in row["verdicts"].values()
        if verdict["violated"]
    ]
    metrics = lines(runs[1], "metrics.jsonl")
    judged = [row["task/fact_checking/rejection_rate"] for row in metrics if "train/learning_rate" in row]
    steps = max(row["step"] for row in metrics)
    return {
        **{run.name: run.figures(args.block) for run in runs},
        "step_time_explained_to_without": ratio([runs[1].blocks], runs[0].blocks),
        "rejection_rate": round(statistics.mean(judged), 3),
        "explanations_per_step": round(sum(map(bool, explanations)) / steps, 2),
    }


def measure_slow(folder: Path, actor: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The constraint of one task waits; the other task has a constraint that does not."""
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in prompts(600, args.seed, "mixed"))
    )
    data = {"dataset": str(folder / "rows.jsonl"), "eval_dataset": str(folder / "rows.jsonl")}
    result = {}
    for staleness, quorum in ((0, 1.0), (1, 1.0), (2, 0.5)):
        runs = []
        for delay in (0.0, *args.delays):
            tasks = [
                {
                    "name": name,
                    **data,
                    "rewards": ["judges.py:length"],
                    "constraints": [
                        {"plugin": "judges.py:waits", "mode": "penalty", "config": {"delay": own}}
                    ],
                }
                for name, own in (("slow", delay), ("other", 0.0))
            ]
            place = folder / f"slow-{staleness}-{delay:g}"
            runs.append(
                build(place, actor, tasks, args, name=f"{delay:g} s", staleness=staleness, quorum=quorum)
            )
        take_turns(runs, args.block, args.turns)
        result[f"max_staleness {staleness}, quorum {quorum:g}"] = {
            run.name: {
                "step_s": float(f"{statistics.median(run.blocks) / args.block:.3g}"),
                "step_time_to_0_s": ratio([run.blocks], runs[0].blocks),
                "others_scored_s": others_scored(run),
                "late_groups": {
                    what: sum(row.get(f"task/slow/{what}", 0.0) for row in lines(run, "metrics.jsonl"))
                    for what in ("carried_over", "dropped_stale")
                },
            }
            for run in runs
        }
    return result


def others_scored(run: Run) -> float:
    """Return the median time from the end of a step's rollout to the last score of ``other``."""
    ends: dict[int, dict[str, float]] = {}
    for line in lines(run, "timeline.jsonl"):
        if line["stage"] == "rollout" or (line["stage"] == "rewards" and line["task"] == "other"):
            ends.setdefault(line["step"], {})[line["stage"]] = line["end"]
    return round(statistics.median(e["rewards"] - e["rollout"] for e in ends.values() if len(e) == 2), 3)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["reference", "slow"], required=True)
    parser.add_argument("--actor", default="0.45M")
    parser.add_argument("--prompts", type=int, default=12, help="per step")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--delays", type=float, nargs="+", default=[1.0], help="seconds")
    parser.add_argument("--block", type=int, default=3, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    measure = {"reference": measure_reference, "slow": measure_slow}[args.part]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_actor(folder / "actor", args.actor, args.seed)
        result = {
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "figures": measure(folder, folder / "actor", args),
            "machine": machine(),
        }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
