"""The cost model of docs/scale.md: bytes that a step sends, and seconds of a step on 1 to 1,024 GPUs.

    python docs/simulate_scale.py

``traffic`` is checked against measurements by ``benchmarks/traffic.py``. The seconds are arithmetic: bytes
and operations divided by what the machine moves and computes. No GPU was measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained, and on how much."""

    parameters: float
    weight_bytes: int = 2
    """Per parameter: 2 = bfloat16, 4 = float32."""
    samples: float
    """Drawn in a step."""
    learned: float
    """Those that are learned from."""
    tokens: float
    """Per sample, prompt and response."""
    ranks: int = 1
    engines: int = 1
    stored: float = 0.0
    """Samples of a step that are stored in ``rollouts.jsonl``."""
    tasks: int = 1
    adapters: float = 0
    """Their parameters (LoRA); 0 = all weights travel."""
    adapted: int = 0
    """Layers that have adapters."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One GPU of a node of eight, its network, and the processor that the trainer runs on."""

    flops: float = 989e12
    """Dense bfloat16 operations per second (H100)."""
    used: float = 0.4
    """Part of them that training reaches."""
    memory: float = 3.35e12
    """Bytes per second from the GPU's memory."""
    network: float = 50e9
    """Bytes per second and direction of a GPU's network card (400 Gbit/s); the trainer uses one card."""
    copy: float = 5e9
    """Bytes per second at which the trainer copies weights to the host and into Ray's object store."""
    node: int = 8
    sample_s: float = 1.0e-3
    """Processor seconds of the trainer per sample: messages, statistics, advantages, records."""
    task_s: float = 10e-6
    """Processor seconds of the trainer per task and step: shares, quotas, controllers."""


# bytes of a message: of each sample, and of each of its tokens (measured by benchmarks/traffic.py)
RANK = (436.0, 10.3)
REWARD = (135.0, 5.0)
STORED = (537.0, 17.9)
ENGINE = (0.0, 11.4)
LAYER = 2100.0
"""Bytes of a layer of adapters, without its numbers."""


def traffic(run: Run) -> dict[str, float]:
    """Return the bytes of a step, by line of the table in docs/scale.md."""

    def messages(cost: tuple[float, float], samples: float) -> float:
        return samples * (cost[0] + cost[1] * run.tokens)

    others = (run.ranks - 1) / run.ranks
    is_shared = run.ranks > 1
    return {
        "collectives": run.parameters * (4.0 * run.ranks + run.weight_bytes) * is_shared,
        "weights": ((run.adapters or run.parameters) * run.weight_bytes + LAYER * run.adapted) * run.engines,
        "samples to ranks": messages(RANK, run.learned * others),
        "samples from engines": messages(ENGINE, run.samples),
        "rewards": messages(REWARD, run.samples),
        "stored rollouts": messages(STORED, run.stored),
    }


def seconds(run: Run, machine: Machine, *, response: float) -> dict[str, float]:
    """Return the seconds of the parts of a step that follow each other.

    ``response`` is the length of the longest response. Ranks and engines have different GPUs.
    """
    weights = run.parameters * run.weight_bytes
    compute = machine.flops * machine.used
    nodes = -(-run.engines // machine.node)
    sent = traffic(run)
    per_engine = run.samples * run.tokens / run.engines
    return {
        # each token reads all weights; many samples at once are bound by arithmetic
        "sampling": max(response * weights / machine.memory, per_engine * 2 * run.parameters / compute),
        "learning": run.learned * run.tokens * 6 * run.parameters / (run.ranks * compute),
        # float32 gradients out and weights back, in rings
        "gradients": run.parameters * (4 + run.weight_bytes) / machine.network * (run.ranks > 1),
        # one process copies them out; each node fetches them once from its card
        "weights": weights / machine.copy + weights * nodes / machine.network,
        "messages": (sent["samples to ranks"] + sent["samples from engines"] + sent["rewards"]) / 1e9,
        "trainer": run.samples * machine.sample_s + run.tasks * machine.task_s,
    }


def main() -> None:
    """Print tables: 7 billion parameters, 32 samples of 2,048 tokens a GPU, half of the GPUs are engines."""
    names = list(seconds(Run(parameters=1, samples=1, learned=1, tokens=1), Machine(), response=1))
    for tasks in (1, 100):
        rows = [["GPUs", *names, "step", "busy"]]
        for gpus in (8, 32, 128, 256, 512, 1024):
            size = {"samples": 32 * gpus, "learned": 32 * gpus, "tokens": 2048}
            run = Run(parameters=7e9, **size, ranks=gpus // 2, engines=gpus // 2, tasks=tasks)
            parts = seconds(run, Machine(), response=4096)
            step = sum(parts.values())
            busy = (parts["sampling"] + parts["learning"]) / step
            rows.append([f"{gpus:,}", *(f"{x:.1f}" for x in [*parts.values(), step]), f"{busy:.0%}"])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|--:" * len(rows[0]) + "|")
        table = "\n".join(lines)
        sys.stdout.write(f"{tasks} task{'s' * (tasks > 1)}: seconds of a step\n\n{table}\n\n")


if __name__ == "__main__":
    main()
