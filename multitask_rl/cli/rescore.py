"""``rescore RUN``: score a run's stored rollouts again with its rewards as they are now, without the actor.

For changing a reward: what would it have said of the answers the run gave? Rewards are compared one by one,
before weights and penalties.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from multitask_rl.config.build import build_dataclass
from multitask_rl.config.located_yaml import Where
from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.errors import ConfigError, DataError
from multitask_rl.records import Score, Scored
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.tracking.lines import dump_line, rollout_from_dict, scored_to_dict

__all__ = ["main"]

_CHUNK = 256


def main(arguments: list[str]) -> int:
    """Score again, print old and new means per task and reward, and write the new records if asked."""
    parser = argparse.ArgumentParser(prog="multitask-rl rescore", description=__doc__)
    parser.add_argument("run", type=Path, help="output directory of the run")
    parser.add_argument("--tasks", help="tasks file to score with (default: the run's tasks)")
    parser.add_argument("--output", type=Path, help="write the new records here, as JSON lines")
    options = parser.parse_args(arguments)
    config = _run_config(options.run)
    specs = load_tasks(options.tasks) if options.tasks else _tasks_of(options.run, config)
    lines = list(_stored(options.run / "rollouts.jsonl"))
    kept = [line for line in lines if line["task"] in specs]
    if not kept:
        stored = ", ".join(sorted({str(line["task"]) for line in lines}))
        raise DataError(
            f"{options.run}: no rollout of the tasks {', '.join(specs)} is stored "
            f"(stored: {stored or 'none'})"
        )
    scoring = build_dataclass(
        ScoringConfig, config.get("scoring") or {}, Where(str(options.run), ("scoring",))
    )
    needed = {name: specs[name] for name in dict.fromkeys(line["task"] for line in kept)}
    pool = RewardPool(needed, scoring, seed=int(config.get("seed") or 0), devices={})
    pool.start()
    try:
        scored = [s for chunk in _chunks(kept) for s in pool.score([rollout_from_dict(x) for x in chunk])]
    finally:
        pool.close()
    if options.output is not None:
        text = "".join(dump_line(scored_to_dict(s, x["step"])) for s, x in zip(scored, kept, strict=True))
        options.output.write_text(text, encoding="utf-8")
    print(_table(kept, scored))
    if len(kept) < len(lines):
        print(f"{len(lines) - len(kept)} rollouts of tasks that are not in the tasks file were left out")
    return 0


def _run_config(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    if not path.is_file():
        return {}
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}


def _tasks_of(run: Path, config: dict[str, Any]) -> dict[str, TaskSpec]:
    """Return the tasks as the run resolved them."""
    tasks = config.get("tasks")
    if not isinstance(tasks, dict) or not tasks:
        raise ConfigError(
            f"{run}: config.yaml with the run's tasks is missing; give a tasks file with --tasks"
        )
    where = Where(str(run / "config.yaml"), ("tasks",))
    return {name: build_dataclass(TaskSpec, spec, where.at(name)) for name, spec in tasks.items()}


def _stored(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the stored rollouts that were scored; rejected attempts and a torn last line are left out."""
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: the run stored no rollouts (tracking.trackers without jsonl, or "
            f"tracking.store_rollouts=0), or {str(path.parent)!r} is no output directory of a run"
        )
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n") and (record := json.loads(line))["breakdown"]:
                yield record


def _chunks(lines: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    for begin in range(0, len(lines), _CHUNK):
        yield lines[begin : begin + _CHUNK]


def _table(old: Sequence[dict[str, Any]], new: Sequence[Scored]) -> str:
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for before, after in zip(old, new, strict=True):
        for name, result in after.breakdown.items():
            was = before["breakdown"].get(name, {}).get("value")
            now = result.value if isinstance(result, Score) else math.nan
            pairs.setdefault((before["task"], name), []).append((math.nan if was is None else was, now))
    width = max(4, *(len(f"{task}/{name}") for task, name in pairs))
    lines = [f"{'reward':<{width}}  {'n':>6} {'before':>9} {'now':>9} {'changed':>8} {'failed now':>10}"]
    for (task, name), values in pairs.items():
        both = [(a, b) for a, b in values if math.isfinite(a) and math.isfinite(b)]
        changed = sum(not math.isclose(a, b, abs_tol=1e-9) for a, b in both)
        failed = sum(not math.isfinite(b) for _, b in values)
        means = [_mean([pair[i] for pair in values]) for i in (0, 1)]
        lines.append(
            f"{f'{task}/{name}':<{width}}  {len(values):>6} {means[0]:>9.4f} {means[1]:>9.4f} "
            f"{changed:>8} {failed:>10}"
        )
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
