"""``python -m tests.reference --n 2000 --seed 1``: compare so many random cases with the reference.

Exits 1 where a case differs, or where more than 3 % of them hold a decision too close to call: what follows
it is not compared, and a check that leaves out much finds little.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from transformers.utils import logging as transformers_logging

from reference.cases import draw_case
from reference.compare import compare

MOST_TOO_CLOSE = 0.03


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=300, help="combinations")
    parser.add_argument("--seed", type=int, default=1, help="of the first; the others follow")
    parser.add_argument("--show", type=int, default=6, help="differences shown of each")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    began, wrong, steps, too_close = time.monotonic(), 0, 0, 0
    for seed in range(chosen.seed, chosen.seed + chosen.n):
        case = draw_case(seed)
        try:
            result = compare(case)
            found, steps, too_close = result.problems, steps + result.compared, too_close + result.too_close
        except Exception:  # noqa: BLE001 - a crash is a disagreement, the others are still compared
            found = [traceback.format_exc()]
        if found:
            wrong += 1
            print(f"seed {seed} ({', '.join(t.type for t in case.settings.tasks)})")
            for line in found[: chosen.show]:
                print(f"  {line}")
            print(f"  {case.describe()}")
    seconds = time.monotonic() - began
    details = f"{steps} steps, {too_close} cases too close to call, {seconds:.0f} s"
    print(f"{chosen.n - wrong} of {chosen.n} agree ({details})")
    is_too_close = too_close > MOST_TOO_CLOSE * chosen.n
    if is_too_close:
        print(f"more than {MOST_TOO_CLOSE:.0%} of the cases are too close to call: too little was compared")
    return int(wrong > 0 or is_too_close)


if __name__ == "__main__":
    sys.exit(main())
