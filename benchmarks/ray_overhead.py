"""What ``executor=ray`` adds to a step of 256 rollouts: ratios of seconds and of CPU time with intervals.

    python benchmarks/ray_overhead.py --pairs 12 --json benchmarks/results/ray_overhead.json

Two processes train the same run, one with ``executor=local``, one with ``executor=ray`` (one engine and one
reward pool in Ray actors, in a cluster of its own). They make their steps in turn, never together, in an
order that changes from pair to pair, so that other work on the machine meets both. A ratio is Ray / local of
a pair. Printed are the median and its 95 % interval (order statistics). CPU time is that of all processes of
a side: the trainer, its reward workers and everything of Ray, daemons included. Both must draw the same
tokens.

The step is the mixed one of ``speed.py``: four tasks, prompts of 8 to 160 tokens, responses of up to 128.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paired import median_interval
from speed import WARMUP, Side, machine
from workload import ACTORS, GROUP, PROMPTS, make_actor

from multitask_rl.sandbox.cgroups import descendants

EXECUTORS = ("local", "ray")
REST_S = 10.0
"""After the last step nothing is asked for: what a side takes then, it takes beside every step too."""


def cpu_seconds(root: int) -> float:
    """Return the CPU seconds so far of the process ``root`` and all below it, ended ones too."""
    ticks = 0
    for process in (root, *descendants(root)):
        with contextlib.suppress(OSError):  # it has just ended: its parent has its time
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(size: str, pairs: int, seed: int) -> dict[str, Any]:
    """Return the figures with the actor ``size``."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "actor"
        make_actor(model, size, seed)
        arguments = ["--workload", "mixed", "--model", str(model), "--seed", str(seed)]
        arguments += ["--steps", str(pairs + WARMUP)]
        sides = {
            name: Side(name, sys.executable, "ours.py", [*arguments, "--executor", name], 1)
            for name in EXECUTORS
        }
        try:
            for turn in range(WARMUP + pairs):
                for name in EXECUTORS if turn % 2 else reversed(EXECUTORS):
                    before = cpu_seconds(sides[name].process_id)
                    step = sides[name].step()
                    step["cpu_s"] = cpu_seconds(sides[name].process_id) - before
                    sides[name].steps.append(step)
            before_rest = {name: cpu_seconds(side.process_id) for name, side in sides.items()}
            time.sleep(REST_S)
            rest = {name: cpu_seconds(side.process_id) - before_rest[name] for name, side in sides.items()}
        finally:
            for side in sides.values():
                side.close()
    local, ray = (sides[name].steps for name in EXECUTORS)
    if [step["new_tokens"] for step in local] != [step["new_tokens"] for step in ray]:
        raise SystemExit(f"{size}: the two runs are not the same")
    del local[:WARMUP], ray[:WARMUP]
    row: dict[str, Any] = {"rollouts": PROMPTS * GROUP, "pairs": pairs}
    for key in ("step_s", "cpu_s", "gen_s", "reward_s", "train_s", "weights_s"):
        row[key] = {n: round(statistics.median(s[key] for s in sides[n].steps), 4) for n in EXECUTORS}
    row["cpu_per_second_of_rest"] = {name: round(cpu / REST_S, 4) for name, cpu in rest.items()}
    for kind in ("cpu", "step"):
        ratios = [r[f"{kind}_s"] / own[f"{kind}_s"] for own, r in zip(local, ray, strict=True)]
        row[f"{kind}_ratio"] = [round(value, 4) for value in median_interval(ratios)]
    return row


def main() -> None:
    """Measure, print a line per case, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", choices=list(ACTORS), nargs="+", default=["tiny", "0.45M"])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {}
    for size in args.actors:
        rows[size] = row = measure(size, args.pairs, args.seed)
        ratios = "; ".join(
            f"{word} {{:.3f}} ({{:.3f}} to {{:.3f}})".format(*row[f"{kind}_ratio"])
            for word, kind in (("CPU", "cpu"), ("seconds", "step"))
        )
        seconds = ", ".join(f"{row['step_s'][n]:.3f} s {n}" for n in EXECUTORS)
        sys.stdout.write(f"{size:6} Ray / local: {ratios}; a step: {seconds}\n")
        sys.stdout.flush()
    if args.json:
        cores = len(os.sched_getaffinity(0))
        args.json.write_text(
            json.dumps({"actors": rows, "cores_used": cores, "machine": machine()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
