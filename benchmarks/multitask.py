"""The claims about training several abilities at once, each an experiment with seeds and intervals.

    python benchmarks/multitask.py scheduler --seeds 10 --json benchmarks/results/scheduler.json

Prints a table, writes the JSON and, beside it, the table as Markdown. An interrupted claim goes on where it
was: every finished (arm, seed) is kept under ``--directory``.
"""

from __future__ import annotations

import argparse
import importlib
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads slow models of this size
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from claims.base import Claim, Options, differences_of_files, dump_numbers, load_numbers, run_claim

CLAIMS = {
    "scheduler": "claims.scheduler",
    "static_search": "claims.static_search",
    "shares": "claims.shares",
    "algorithms": "claims.algorithms",
    "transfer": "claims.transfer",
    "gradients": "claims.gradients",
    "constraints": "claims.constraints",
    "guard": "claims.guard",
    "overoptimisation": "claims.overoptimisation",
    "turns": "claims.turns",
    "smollm2": "claims.smollm2",
    "smollm2_guard": "claims.smollm2_guard",
    "smollm2_static": "claims.smollm2_static",
    "smollm2_long": "claims.smollm2_long",
    "smollm2_mixture": "claims.smollm2_mixture",
    "razor": "claims.razor",
}
"""Name on the command line -> module with ``CLAIM``."""


def main() -> None:
    """Run one claim."""
    args = _parse()
    claim: Claim = importlib.import_module(CLAIMS[args.claim]).CLAIM
    if args.render:
        document = load_numbers(args.render.read_text(encoding="utf-8"))
        if args.against:
            print(differences_of_files(document, load_numbers(args.against.read_text(encoding="utf-8"))))
        else:
            print(claim.render(document["arms"]))
        return
    options = Options(
        seeds=range(args.first_seed, args.first_seed + args.seeds),
        steps=args.steps or claim.steps,
        directory=args.directory.resolve(),
    )
    result = run_claim(claim, options, arms=args.arms, processes=args.processes)
    rendered = claim.render(result["arms"])
    print(f"{claim.statement}\n\n{rendered}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(dump_numbers(result, indent=1) + "\n", encoding="utf-8")
        heading = f"# {claim.name}\n\n{claim.statement}\n\n"
        footer = f"\n\n{len(result['seeds'])} seeds, {options.steps} steps, commit {result['commit']}.\n"
        args.json.with_suffix(".md").write_text(heading + rendered + footer, encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("claim", choices=CLAIMS)
    parser.add_argument("--seeds", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--first-seed", type=int, default=0, help="settings were tuned on seeds from 100 on")
    parser.add_argument("--steps", type=int, default=0, help="training steps (default: the claim's)")
    parser.add_argument("--arms", nargs="*", default=[], help="only these")
    parser.add_argument(
        "--processes",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at once; 0 = only the table of what has finished",
    )
    parser.add_argument("--directory", type=Path, default=Path("runs/claims"), help="models, data, results")
    parser.add_argument("--json", type=Path, help="result file; the table goes beside it as .md")
    parser.add_argument("--render", type=Path, help="only print the table of this result file")
    parser.add_argument(
        "--against", type=Path, help="print the differences of --render's file to this one instead"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
