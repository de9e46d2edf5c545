"""Several learner ranks against one process: seconds per update, and memory with sequences in parts.

    python benchmarks/ranks.py --json benchmarks/results/ranks.json

*Samples*: 32 ragged groups of 8 (prompts of 8 to 160 tokens, answers up to 128) shared out over the ranks.
*Parts*: one long sample, of which each rank computes a part (``batch.context_ranks``). The sides take turns
in one run: one process with one thread, one process with as many threads as ranks, the ranks with one thread
each. Memory is what a process has more than before the update, at its highest, from ``/proc`` (Linux).
*Weights*: a larger actor and few samples, every rank with a copy of the weights, a part (sharded) or a part
of every layer (tensor). Memory is what the last rank takes for it, less what one with a tiny actor takes;
``start_mib`` is the most that it took before the first update.
*Trainer*: the same for rank 0 of sharded ranks: what this process has more than before it loaded the actor,
after updates, and at most while it reads all weights one by one, as an engine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sides.workload import ACTORS, CHARS, KINDS, make_actor
from speed import machine

from multitask_rl.algorithms.grpo import GRPO
from multitask_rl.config.run import BatchConfig, ModelConfig, RunConfig, TrainingConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.errors import is_installed
from multitask_rl.models.actor import load_actor
from multitask_rl.records import Prompt, Rollout, SamplingParams, Scored, TrainSample
from multitask_rl.training.backend import CreditedSample, LearnerTask, TrainingBackend
from multitask_rl.training.backends.build import LocalRank
from multitask_rl.training.backends.deepspeed import DeepSpeedBackend
from multitask_rl.training.backends.in_process import InProcess
from multitask_rl.training.backends.rank_group import RankGroup
from multitask_rl.training.backends.sharded import Shards
from multitask_rl.training.critic import Critic
from multitask_rl.training.learner import Learner
from multitask_rl.training.runner import ModelRunner

ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actor", choices=list(ACTORS), default="6.3M")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096, help="of the long sample, half of them answer")
    parser.add_argument(
        "--larger", choices=list(ACTORS), default="52M", help="actor whose weights are shared out"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if ALLOCATOR not in os.environ:  # read by the C library when a process starts: freed memory goes back
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, ALLOCATOR: "262144"})
    with tempfile.TemporaryDirectory() as folder:
        make_actor(Path(folder), args.actor, 0)
        result = {
            "settings": {k: v for k, v in vars(args).items() if k != "json"},
            "samples": compare(folder, ragged_groups(), args, context=1),
            "parts": compare(folder, one_long_sample(args.tokens), args, context=args.ranks),
            "machine": machine(),
        }
        result["weights"] = compare_weights(folder, ragged_groups()[:8], args)
        result["trainer"] = weigh_trainer(f"{folder}/larger", ragged_groups()[:8], args)
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)


def compare(
    folder: str, samples: list[CreditedSample], args: argparse.Namespace, *, context: int
) -> dict[str, Any]:
    """Return seconds and MiB of each side and how many times faster the ranks are."""
    sides = {"one thread": (1, 1), "threads": (1, args.ranks), "ranks": (args.ranks, 1)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, list[float]] = {name: [] for name in sides}
    numbers: list[dict[str, float]] = []
    learners = {name: build(folder, ranks, context) for name, (ranks, _) in sides.items()}
    try:
        for turn in range(args.rounds + 1):
            for name, (_, threads) in sides.items():
                learner, processes = learners[name]
                torch.set_num_threads(threads)
                before = [begin_peak(pid) for pid in processes]
                began = time.perf_counter()
                report = learner.update(samples, shares={"t": 1.0}, step=turn)
                taken = time.perf_counter() - began
                if turn:  # the first warms up
                    seconds[name].append(taken)
                    peaks = [peak(pid) - start for pid, start in zip(processes, before, strict=True)]
                    memory[name].append(max(peaks))
                    if name == "ranks":
                        numbers.append(report.metrics)
    finally:
        for learner, _ in learners.values():
            learner.backend.close()
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": median,
        "peak_mib": {name: statistics.median(values) for name, values in memory.items()},
        "ratios": {f"ranks/{n}": median[n] / median["ranks"] for n in ("one thread", "threads")},
        "communication_s": statistics.median(n["ranks/communication_s"] for n in numbers),
        "waits_s": statistics.median(max(v for k, v in n.items() if k.endswith("waits_s")) for n in numbers),
    }


def compare_weights(folder: str, samples: list[CreditedSample], args: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of an update and MiB of the last rank, with copies of the weights and with parts."""
    sides: dict[str, dict[str, Any]] = {
        "copies": {},
        "parts": {"sharded": True},
        "layers": {"sharded": True, "tensor": args.ranks},
    }
    if is_installed("deepspeed"):
        sides |= {"zero2": {"stage": 2}, "zero3": {"stage": 3}}
    make_actor(Path(folder) / "tiny", "tiny", 0)
    empty = weigh(f"{folder}/tiny", samples[:1], args)
    make_actor(Path(folder) / "larger", args.larger, 0)
    figures = {name: weigh(f"{folder}/larger", samples, args, **options) for name, options in sides.items()}
    for figure in figures.values():
        figure["start_mib"] -= empty["start_mib"]
        for key in ("at_rest_mib", "highest_mib"):
            figure[key] -= empty["at_rest_mib"]
    ratios = {
        f"copies/{side}": {key: figures["copies"][key] / value for key, value in figures[side].items()}
        for side in list(sides)[1:]
    }
    return {"actor": args.larger, "samples": len(samples), **figures, **ratios}


def weigh(
    folder: str, samples: list[CreditedSample], args: argparse.Namespace, **options: Any
) -> dict[str, float]:
    """Return seconds of an update, and MiB of the last rank after it, at its highest and at the start."""
    learner, processes = build(folder, args.ranks, 1, **options)
    rank, figures = processes[-1], []
    start = peak(rank)
    torch.set_num_threads(1)
    try:
        for turn in range(args.rounds // 2 + 2):
            begin_peak(rank)
            began = time.perf_counter()
            learner.update(samples, shares={"t": 1.0}, step=turn)
            taken = time.perf_counter() - began
            figures.append((taken, read_status(rank, "VmRSS"), peak(rank)))
    finally:
        learner.backend.close()
    # the first update makes the optimizer's state
    middle = [statistics.median(column) for column in zip(*figures[1:], strict=True)]
    return dict(zip(("seconds", "at_rest_mib", "highest_mib"), middle, strict=True)) | {"start_mib": start}


def weigh_trainer(folder: str, samples: list[CreditedSample], args: argparse.Namespace) -> dict[str, float]:
    """Return MiB of rank 0 of sharded ranks, at rest and while an engine reads the weights, and seconds."""
    own = os.getpid()
    before = begin_peak(own)
    learner, _ = build(folder, args.ranks, 1, sharded=True)
    actor = learner.backend.runner.actor
    torch.set_num_threads(1)
    try:
        for turn in range(2):
            learner.update(samples, shares={"t": 1.0}, step=turn)
        at_rest = begin_peak(own)
        began = time.perf_counter()
        num_bytes = sum(weight.nbytes for weight in actor.state_dict().values())
        return {
            "weights_mib": num_bytes / 2**20,
            "seconds_to_read": time.perf_counter() - began,
            "at_rest_mib": at_rest - before,
            "more_while_read_mib": peak(own) - at_rest,
        }
    finally:
        learner.backend.close()


def build(
    folder: str, num_ranks: int, context: int, *, sharded: bool = False, tensor: int = 1, stage: int = 0
) -> tuple[Learner, list[int]]:
    """Return a learner and the processes it computes in; ``stage``: of DeepSpeed's ZeRO."""
    actor = load_actor(ModelConfig(name_or_path=folder), "cpu")
    cut = f" sharded tensor={tensor}" if sharded else ""
    parts = context if num_ranks > 1 else 1
    config = RunConfig(
        device_map={"actor": f"cpu:0-{num_ranks - 1}{cut}"},
        batch=BatchConfig(layout="bucketed" if context > 1 else "auto", context_ranks=parts),
        training=TrainingConfig(backend_config={"stage": stage} if stage else {}),
    )
    task = LearnerTask(spec=TaskSpec(name="t"), algorithm=GRPO(GRPO.Config()))
    main = InProcess(ModelRunner(actor, Critic(), config), {"t": task}, config)
    backend: TrainingBackend = main
    processes = [os.getpid()]
    if num_ranks > 1:

        def launch(where: dict[str, Any]) -> LocalRank:
            rank = LocalRank(where)
            processes.append(rank.pid)
            return rank

        group: Any = DeepSpeedBackend.group if stage else RankGroup
        backend = group(
            main,
            config,
            launch,
            devices=[("cpu", "cpu")] * num_ranks,
            num_threads=1,
            shards=Shards if sharded else None,
        )
    return Learner(backend, {"t": task}, config), processes


def ragged_groups() -> list[CreditedSample]:
    """Return 32 groups of 8 with answers of natural length."""
    rng = random.Random(0)
    lengths = [list(KINDS.values())[i % len(KINDS)] for i in range(32)]
    return [
        credited(rng, ids, min(128, 1 + int(rng.expovariate(1 / 50))))
        for ids in ([rng.randrange(4, len(CHARS)) for _ in range(length)] for length in lengths)
        for _ in range(8)
    ]


def one_long_sample(tokens: int) -> list[CreditedSample]:
    """Return one sample, half prompt and half answer."""
    rng = random.Random(0)
    return [credited(rng, [rng.randrange(4, len(CHARS)) for _ in range(tokens - tokens // 2)], tokens // 2)]


def credited(rng: random.Random, prompt: list[int], length: int) -> CreditedSample:
    """Return a sample with a random answer and credit."""
    response = [rng.randrange(4, len(CHARS)) for _ in range(length)]
    asked = Prompt(task="t", prompt_id="", draw=0, row={}, text="", prompt_ids=prompt)
    rollout = Rollout(
        prompt=asked,
        sample=0,
        response_ids=response,
        rollout_logprobs=[-4.0] * length,
        sampling=SamplingParams(max_new_tokens=length),
    )
    sample = TrainSample(
        scored=Scored(rollout=rollout, reward=0.0),
        prompt_ids=prompt,
        response_ids=response,
        rollout_logprobs=rollout.rollout_logprobs,
    )
    return CreditedSample(sample=sample, advantages=torch.full((length,), rng.gauss(0.0, 1.0)))


def begin_peak(pid: int) -> float:
    """Begin a new peak of the process; return what it has now, in MiB."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return read_status(pid, "VmRSS")


def peak(pid: int) -> float:
    """Return the most memory the process had since, in MiB."""
    return read_status(pid, "VmHWM")


def read_status(pid: int, key: str) -> float:
    """Return a line of the process's status, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
