"""A pretrained chat model: tokens per second of sampling, and of a whole training step.

    python benchmarks/chat_speed.py --model runs/smollm2/cache/SmolLM2-135M-Instruct --json sampling.json
    python benchmarks/chat_speed.py --engines ours-step-float32 trl-step-float32 --steps 3 --json step.json
    DATA=runs/smollm2/prepared/data     # of ``make real``
    python benchmarks/chat_speed.py --group 8 --rows $DATA/{math,instructions,safety,extraction}.jsonl

Sampling compares our engine with ``model.generate``, vLLM and ``products``, the matrix products of decoding
alone, which no engine can leave out: the limit of this machine. A step compares our trainer with TRL's
``GRPOTrainer`` and with ``products-step``, the matrix products of a step alone. Every side is a process of
its own with the same prompts, lengths and temperature. The sides take turns. The first round of a turn does
not count: a side that has waited for others is slower then, and no training run waits so. A ratio is the
median over the turns of our tokens per second over those of the other side: per second of processor time
with one thread, since other work on the machine hardly changes it; by the clock with more (``--threads 2``,
on a quiet machine), since threads that wait for each other spend processor time. A side that is not
installed is left out with a message.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from speed import Side, machine, trl_python

SCRIPTS = {"ours-step": "chat_step.py", "trl-step": "chat_trl.py"}
"""Sides of a whole step; ``chat.py`` serves the others."""
ENGINES = ["ours-float32", "ours-bfloat16", "generate-float32", "generate-bfloat16", "vllm-bfloat16"]
HELP = (
    f"{' '.join(ENGINES)} products-float32; of a whole step {' '.join(SCRIPTS)}, each with -float32 or "
    "-bfloat16, products-step-float32"
)
WARMUP = 1


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="runs/smollm2/cache/SmolLM2-135M-Instruct", help="directory")
    parser.add_argument("--engines", nargs="+", default=ENGINES, metavar="ENGINE", help=HELP)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument(
        "--rows", nargs="*", type=Path, default=[], metavar="FILE", help="JSON lines with the prompts"
    )
    parser.add_argument("--group", type=int, default=4, help="answers to each")
    parser.add_argument("--new-tokens", type=int, default=64, help="at most, of an answer")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sides: dict[str, Side] = {}
    sizes = {"prompts": args.prompts, "group": args.group, "new-tokens": args.new_tokens}
    given = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    given += ["--model", str(Path(args.model).resolve()), "--threads", str(args.threads)]
    given += ["--steps", str(WARMUP + 2 * args.steps)]
    if args.rows:
        given += ["--rows", *(str(file.resolve()) for file in args.rows)]
    for engine in args.engines:
        kind = engine.rpartition("-")[0]
        python = trl_python() if kind == "trl-step" else sys.executable
        if python is None:
            continue
        script = SCRIPTS.get(kind, "chat.py")
        side = Side(engine, python, script, ["--engine", engine, *given], args.threads)
        try:
            for _ in range(WARMUP):
                side.step()
        except SystemExit as error:
            sys.stderr.write(f"{engine} is left out: {error}\n")
        else:
            sides[engine] = side
    waited: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    try:
        for turn in range(args.steps):
            order = list(sides.values())
            for side in order if turn % 2 else reversed(order):
                waited[side.name].append(side.step())
                side.steps.append(side.step())
    finally:
        for side in sides.values():
            side.close()

    def rates(steps: list[dict[str, float]], clock: str) -> list[float]:
        return [step["new_tokens"] / step[clock] for step in steps]

    clock = "cpu_s" if args.threads == 1 else "step_s"
    ratios: dict[str, dict[str, float]] = {}
    for name, side in sides.items():
        if name.startswith("ours"):
            for other in sides.values():
                if other is not side:
                    pairs = zip(rates(side.steps, clock), rates(other.steps, clock), strict=True)
                    found = statistics.median(mine / its for mine, its in pairs)
                    ratios.setdefault(name, {})[other.name] = round(found, 3)
    result: dict[str, Any] = {
        "settings": {
            **sizes,
            "rows": [file.name for file in args.rows],
            "threads": args.threads,
            "clock of the ratios": clock,
            "steps": args.steps,
            "model": Path(args.model).name,
        },
        "tokens_per_s": {
            name: {
                **{
                    each: round(statistics.median(rates(side.steps, each)), 1) for each in ("cpu_s", "step_s")
                },
                "cpu_s after a wait": round(statistics.median(rates(waited[name], "cpu_s")), 1),
            }
            for name, side in sides.items()
        },
        "peak_mib": {name: round(max(s["peak_rss_mib"] for s in side.steps)) for name, side in sides.items()},
        "ratios": ratios,
        "machine": machine(),
    }
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
