"""Fuzz what a user or a file can hand to the project: every outcome is valid, or one paragraph.

    python benchmarks/fuzz.py --n 10000 --seed 1 --json benchmarks/results/fuzz.json
    python benchmarks/fuzz.py --n 2000 --kind rows --kind overrides
    python benchmarks/fuzz.py --replay 1:417:rows       # one case again, with its traceback and its files

Kinds:

    tasks       tasks files as structure
    bytes       tasks files as bytes
    rows        .jsonl, .jsonl.gz, .json and .parquet
    overrides   the command line
    plugins     their configuration
    templates   of prompts
    record      what a run left behind, read by eval, rescore, report and compare
    checkpoint  state.json with its right hash, and manifest.json

A crash, a hang over 5 s and memory over 1 GiB are failures; of each sort the first is made smaller and
printed with what replays it. Exit code 1 if there is one. Cases run in forked processes. The time that a case
waits for a processor does not count. A case that is late without computing for 5 s is played again alone, up
to twice: it hangs if it is late each time. ``--json`` writes the counts to a file.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from fuzzing.actions import Outcome, make_run, read_checkpoint, run_case
from fuzzing.cases import KINDS, Case, make_case
from fuzzing.pool import HANG_S, Pool

MINIMISING_S = 5.0
"""Time spent on making one failing case smaller."""


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=1000, help="number of cases (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases (default 0)")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; may be given again")
    parser.add_argument("--processes", type=int, default=2, help="processes at once (default 2)")
    parser.add_argument("--replay", default="", metavar="SEED:INDEX:KIND", help="one case again")
    parser.add_argument("--json", type=Path, help="write the counts here, too")
    options = parser.parse_args(arguments)
    kinds = options.kind or list(KINDS)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        directory = Path(folder).resolve()
        if options.replay:
            return _replay(options.replay, directory)
        run = _run(directory) if "checkpoint" in kinds else None
        return _campaign(options.n, options.seed, kinds, options.processes, directory, run, options.json)


def _run(directory: Path) -> Path:
    (directory / "base").mkdir()
    return make_run(directory / "base")


def _campaign(
    number: int,
    seed: int,
    kinds: list[str],
    processes: int,
    directory: Path,
    run: Path | None,
    file: Path | None,
) -> int:
    import pyarrow.parquet  # noqa: F401 - imported once, before the fork

    import multitask_rl.run.plan  # noqa: F401

    checkpoint = {} if run is None else read_checkpoint(run)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures: dict[tuple[str, str], list[int]] = {}
    first: dict[tuple[str, str], Outcome] = {}
    began = time.monotonic()

    def make(index: int) -> Case:
        return make_case(seed, index, kinds[index % len(kinds)], checkpoint)

    pool = Pool(processes, directory, run)
    try:
        for index, outcome in pool.map(make, number):
            kind = kinds[index % len(kinds)]
            counts[kind, outcome.verdict] += 1
            if outcome.verdict == "crash":
                failures.setdefault((kind, outcome.signature), []).append(index)
                first.setdefault((kind, outcome.signature), outcome)
        took, late = time.monotonic() - began, list(pool.late)
        for (kind, signature), indices in sorted(failures.items(), key=lambda item: -len(item[1])):
            print(
                f"\n{kind}: {signature}: {len(indices)} times; "
                f"replay with --replay {seed}:{min(indices)}:{kind}"
            )
            print(_indent(first[kind, signature].text[-1500:]))
            print(_indent(_show(_smaller(make(min(indices)), signature, pool))))
    finally:
        pool.close()
    print(f"\n{number} cases of seed {seed} in {took:.0f} s:")
    verdicts = ("valid", "refused", "crash")
    table = {kind: {verdict: counts[kind, verdict] for verdict in verdicts} for kind in kinds}
    for kind, row in table.items():
        print(f"  {kind}: {', '.join(f'{n} {verdict}' for verdict, n in row.items())}")
    if file is not None:
        result = {"cases": number, "seed": seed, "seconds": round(took), "kinds": table}
        result["played again"] = [f"{seed}:{index}:{kinds[index % len(kinds)]}" for index in late]
        result["failures"] = {f"{kind}: {name}": len(found) for (kind, name), found in failures.items()}
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    hung = sum(len(found) for (_, name), found in failures.items() if name.startswith("hang"))
    print(f"{len(late)} cases over {HANG_S:g} s played again alone, {hung} hangs")
    print(f"{sum(map(len, failures.values()))} failures of {len(failures)} sorts")
    return 1 if failures else 0


def _smaller(case: Case, signature: str, pool: Pool) -> Case:
    """Return the smallest case found that fails the same way, by leaving pieces of what was changed out."""
    until = time.monotonic() + MINIMISING_S
    data = (
        case.files[case.mutated]
        if case.mutated
        else b"\n".join(a.encode("utf-8", "surrogateescape") for a in case.arguments)
    )
    size = len(data) // 2
    while size >= 1 and time.monotonic() < until:
        starts = list(range(0, len(data), size))
        found = False
        for start in reversed(starts):
            candidate = data[:start] + data[start + size :]
            _, outcome = next(iter(pool.map([_with(case, candidate)], 1)))
            if outcome.signature == signature:
                data, found = candidate, True
            if time.monotonic() > until:
                break
        size = size if found and size > 1 else size // 2
    return _with(case, data)


def _with(case: Case, data: bytes) -> Case:
    if case.mutated:
        return replace(case, files={**case.files, case.mutated: data})
    return replace(case, arguments=[a.decode("utf-8", "surrogateescape") for a in data.split(b"\n")])


def _show(case: Case) -> str:
    data = case.files[case.mutated] if case.mutated else None
    text = f"multitask-rl {' '.join(map(ascii, case.arguments))}"
    if data is not None:
        text += f"\n{case.mutated} ({len(data)} bytes): {data[:1500]!r}"
    return text


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _replay(name: str, directory: Path) -> int:
    seed, index, kind = name.split(":")
    run = _run(directory) if kind == "checkpoint" else None
    checkpoint = {} if run is None else read_checkpoint(run)
    case = make_case(int(seed), int(index), kind, checkpoint)
    print(_show(case))
    outcome = run_case(case, directory / "room" / "a" / "b", run)
    text = outcome.text if outcome.verdict == "crash" else ascii(outcome.text)
    print(f"{outcome.verdict}: {outcome.signature}\n{text}")
    return int(outcome.verdict == "crash")


if __name__ == "__main__":
    sys.exit(main())
