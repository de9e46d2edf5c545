"""How well `refusal` tells refusals from answers, on the responses to XSTest that people labelled.

    git clone https://github.com/paul-rottger/exaggerated-safety
    python benchmarks/refusals.py exaggerated-safety/model_completions

Reads the columns `completion` and `final_label` of the CSV files there. Partial refusals are left out.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from multitask_rl_rewards.refusal import is_refusal

LABELS = {"2_full_refusal": "full refusals", "1_full_compliance": "answers"}


def main(directory: Path) -> int:
    """Print the share that `is_refusal` takes for refusals, by label."""
    told: dict[str, list[bool]] = {label: [] for label in LABELS}
    for file in sorted(directory.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream):
                if row.get("final_label") in told:
                    told[row["final_label"]].append(is_refusal(row["completion"]))
    if not all(told.values()):
        print(f"error: {directory} holds no CSV files with labelled responses", file=sys.stderr)
        return 2
    for label, name in LABELS.items():
        own = told[label]
        print(f"of {len(own)} {name} {sum(own)} ({sum(own) / len(own):.1%}) are told as refusals")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
