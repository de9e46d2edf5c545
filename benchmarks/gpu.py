"""The figures of a GPU by one command; with ``--device cpu`` the same on a CPU.

    python benchmarks/gpu.py                                          # Qwen2-0.5B's shape, about half an hour
    python benchmarks/gpu.py --device cpu --actor tiny --workload uniform --steps 1 --peer none --engines hf

Whole steps against TRL and the bare loop in turns (tokens/s, share of the device's peak, memory), once per
rollout engine (with the time of a weight update), and the busy shares of an overlapped run. What was measured
is kept with the machine's description; ``tables.py`` shows it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from speed import PEERS, machine
from workload import ACTORS, WORKLOADS

HERE = Path(__file__).parent


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    common = ["--actor", args.actor, "--device", args.device, "--dtype", args.dtype]
    common += ["--threads", str(args.threads), "--seed", str(args.seed)]
    steps = ["--workload", args.workload, "--steps", str(args.steps)]
    if args.peak_tflops:
        steps += ["--peak-tflops", str(args.peak_tflops)]
    result: dict[str, Any] = {"steps": [], "overlap": {}, "machine": machine(args.device)}
    args.json.parent.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        """Write what was measured so far: a later figure may fail, or the time may end."""
        args.json.write_text(json.dumps(result, indent=1) + "\n")

    for number, engine in enumerate(args.engines):
        # the peer samples by its own means: once is enough
        peer = args.peer if number == 0 else "none"
        result["steps"].append(measure("speed.py", [*common, *steps, "--engine", engine, "--peer", peer]))
        keep()
        overlapped = ["--part", "rewards", "--engine", engine, "--block", str(args.block), "--turns", "1"]
        overlapped += ["--max-new-tokens", str(args.overlap_tokens), "--delays", *map(str, args.delays)]
        result["overlap"][engine] = measure("pipeline.py", [*common, *overlapped])["figures"]
        keep()
    sys.stdout.write(args.json.read_text())


def measure(script: str, arguments: list[str]) -> dict[str, Any]:
    """Run another benchmark in a process of its own, which gives the device back; return its result."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / script), *arguments, "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(file.read_text())
    return result


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    engines = ["hf", "vllm"] if importlib.util.find_spec("vllm") else ["hf"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--actor", choices=list(ACTORS), default="0.5B")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="by autocast")
    parser.add_argument("--workload", choices=WORKLOADS, default="long")
    parser.add_argument("--engines", nargs="+", default=engines, help="rollout.engine; default: those there")
    parser.add_argument("--peer", choices=["none", *PEERS], default="trl")
    parser.add_argument("--peak-tflops", type=float, help="of the device; some are known: flops.py")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0], help="of rewards, seconds")
    parser.add_argument("--block", type=int, default=8, help="overlapped steps between drained pipelines")
    parser.add_argument("--overlap-tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gpu.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
