"""What every claim shares: arms times seeds in processes, results that can be recomputed, tables.

A claim is a set of *arms* (ways to do it) run on the same *seeds*. Everything an arm measures for a seed is
one flat ``{metric: number}``; tables and intervals are derived from nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice, product
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from multitask_rl.statistics.intervals import Difference, compare_means

Metrics = dict[str, float]
"""What one arm measured for one seed; NaN = did not happen (a level never reached)."""

Arms = Mapping[str, Mapping[str, Sequence[float]]]
"""arm -> metric -> one value per seed, in the order of ``seeds``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line asked for."""

    seeds: Sequence[int]
    steps: int
    """Training steps of a run; the claim's own number unless given."""
    directory: Path
    """Prepared models, data, runs, finished results."""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to do it. ``settings`` is JSON-able and all that tells it from the others."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim: its arms, how one is run, how the results read."""

    name: str
    statement: str
    """What is claimed, with the numbers that must hold."""
    steps: int
    arms: Sequence[Arm]
    run: Callable[[Arm, int, Options], Metrics]
    """(arm, seed, options) -> metrics. A module-level function: it runs in a process of its own."""
    render: Callable[[Arms], str]
    """Arms' results -> the table with its intervals and verdicts, as Markdown."""
    runs_per_process: int | None = 1
    """Runs after which a worker process is replaced; None = never (importing torch costs as much as a short
    run)."""
    prepare: Callable[[Options], object] | None = None
    """Once before the arms (trained models into the cache)."""


def run_claim(claim: Claim, options: Options, *, arms: Sequence[str], processes: int) -> dict[str, Any]:
    """Run what is not yet done and return the result as it is written to ``results/<claim>.json``.

    Every finished (arm, seed) is kept below ``options.directory`` under a hash of what determines it, so that
    an interrupted claim goes on where it was. The first run that fails ends the claim: runs under way are
    kept, and none begins. With 0 ``processes`` nothing is run: the result has the arms of which a seed has
    finished, and NaN for the other seeds.
    """
    chosen = [arm for arm in claim.arms if not arms or arm.name in arms]
    if not processes:
        chosen = [arm for arm in chosen if any(_load(claim, arm, s, options) for s in options.seeds)]
    elif claim.prepare is not None:
        claim.prepare(options)
    jobs = [(arm, seed) for seed in options.seeds for arm in chosen]
    done = {(arm.name, seed): _load(claim, arm, seed, options) for arm, seed in jobs}
    waiting = [(arm, seed) for arm, seed in jobs if processes and done[arm.name, seed] is None]
    context, most = get_context("spawn"), claim.runs_per_process
    with ProcessPoolExecutor(
        max(1, processes), context, initializer=_end_with_parent, max_tasks_per_child=most
    ) as pool:
        left, number, failed = iter(waiting), 0, list[BaseException]()
        under_way: dict[Future[Metrics], tuple[Arm, int]] = {}
        while True:
            if not failed:
                # a pool also begins what waits in its queue, and cannot cancel it once a process was killed
                for arm, seed in islice(left, processes - len(under_way)):
                    under_way[pool.submit(claim.run, arm, seed, options)] = arm, seed
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                arm, seed = under_way.pop(future)
                number += 1
                if (error := future.exception()) is not None:
                    failed.append(error)
                    told = f"failed: {error!r}; the claim ends with the runs under way"
                else:
                    metrics = done[arm.name, seed] = future.result()
                    _store(claim, arm, seed, options, metrics)
                    told = ", ".join(f"{k} {v:.3f}" for k, v in list(metrics.items())[:6])
                print(f"[{number}/{len(waiting)}] {arm.name} seed {seed}: {told}", file=sys.stderr)
    if failed:
        raise failed[0]
    values: dict[str, dict[str, list[float]]] = {}
    for arm in chosen:
        rows = [done[arm.name, seed] or {} for seed in options.seeds]
        keys = dict.fromkeys(key for row in rows for key in row)
        values[arm.name] = {key: [row.get(key, math.nan) for row in rows] for key in keys}
    return {
        "claim": claim.name,
        "statement": claim.statement,
        "config": {
            "steps": options.steps,
            "arms": {arm.name: dict(arm.settings) for arm in chosen},
            **options.extra,
        },
        "seeds": list(options.seeds),
        "commit": _commit(),
        "machine": _machine(),
        "arms": values,
    }


def difference(arms: Arms, base: str, other: str, metric: str) -> Difference:
    """Return ``other - base`` of a metric, paired by seed."""
    return compare_means(arms[base][metric], arms[other][metric], paired=True)


def differences_of_files(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return the differences of every arm of ``now`` to every arm of ``before``, paired by common seeds.

    Both are documents of ``run_claim``.
    """
    seeds = [seed for seed in now["seeds"] if seed in before["seeds"]]
    places = [[document["seeds"].index(seed) for seed in seeds] for document in (before, now)]
    rows = []
    for old, new in product(before["arms"], now["arms"]):
        cells = []
        for metric in ("worst", "mean", "auc_worst", "auc_mean"):
            values = [before["arms"][old].get(metric), now["arms"][new].get(metric)]
            if None in values:
                cells.append("-")
                continue
            of_seeds = [[own[i] for i in found] for own, found in zip(values, places, strict=True)]
            cells.append(with_interval(compare_means(*of_seeds, paired=True)))
        rows.append([f"{old} of the other file -> {new}", *cells])
    return table([f"{len(seeds)} seeds", "worst", "mean", "auc_worst", "auc_mean"], rows)


def with_interval(found: Difference) -> str:
    """Return the difference and its interval, as text; without the interval where there is none."""
    if math.isnan(found.low):  # one seed, or no difference at all
        return f"{found.delta:+.3f}"
    return f"{found.delta:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values; NaN without any."""
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def dump_numbers(document: Any, indent: int | None = None) -> str:
    """Return JSON; a number that is not finite becomes null, as JSON has no other word for it."""

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(own) for key, own in value.items()}
        if isinstance(value, list | tuple):
            return [clean(own) for own in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(clean(document), indent=indent)


def load_numbers(text: str) -> Any:
    """Return what ``dump_numbers`` wrote; null in an object or list is NaN."""

    def restore(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: restore(own) for key, own in value.items()}
        if isinstance(value, list):
            return [restore(own) for own in value]
        return math.nan if value is None else value

    return restore(json.loads(text))


def _key(claim: Claim, arm: Arm, options: Options) -> str:
    settings = {"arm": dict(arm.settings), "steps": options.steps, "extra": dict(options.extra)}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _file(claim: Claim, arm: Arm, seed: int, options: Options) -> Path:
    return options.directory / claim.name / f"{arm.name}-{_key(claim, arm, options)}" / f"{seed}.json"


def _end_with_parent() -> None:
    """Start a thread that ends this process when its parent has ended, instead of minutes later."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _load(claim: Claim, arm: Arm, seed: int, options: Options) -> Metrics | None:
    file = _file(claim, arm, seed, options)
    return load_numbers(file.read_text(encoding="utf-8")) if file.is_file() else None


def _store(claim: Claim, arm: Arm, seed: int, options: Options, metrics: Metrics) -> None:
    file = _file(claim, arm, seed, options)
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".part")
    aside.write_text(dump_numbers(metrics) + "\n", encoding="utf-8")
    os.replace(aside, file)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _machine() -> dict[str, Any]:
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}
