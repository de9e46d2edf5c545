"""Score the stored rollouts of a run again, without a model, and compare old and new scores.

The default scores with the run's rewards as installed now; --reward scores every task with another reward.
Each reward is compared alone, before weights and penalties.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.stats import rankdata

from multitask_rl.boundary.printable import aligned, counted, one_line, printable, redacted_keys
from multitask_rl.config.run import RECORD, ScoringConfig, as_given
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where, load_yaml
from multitask_rl.config.schema.ranges import suggest, unknown_name
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.config.trust import TRUST, refuse_code, refuse_code_in
from multitask_rl.errors import ConfigError, DataError, check_output_file
from multitask_rl.records import Failure, Score, Scored
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.tracking.jsonl import dump_line, rollout_from_dict, scored_to_dict
from multitask_rl.tracking.reading import former_names, read_lines

_CHUNK = 256
_WHOLE = "reward"
"""The task's whole reward, as in ``primary_metric``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far two rewards agree about the responses that both scored."""

    pearson: float
    """Correlation of the values; NaN for fewer than two responses, or where one side is constant."""
    spearman: float
    """Correlation of the ranks."""
    both_high: int
    only_before: int
    only_now: int
    both_low: int
    borders: tuple[float, float]
    """The least value that counts as high, before and now."""


def agreement(before: Sequence[float], now: Sequence[float], *, threshold: float | None = None) -> Agreement:
    """Compare the finite values [N] of two rewards, response by response.

    ``threshold`` is the least value that counts as high. Without it, it is 0.5 if all values of a side lie in
    [0, 1], else the middle between the smallest and the largest of that side.
    """
    borders = []
    for values in (before, now):
        low, high = min(values, default=0.0), max(values, default=1.0)
        middle = 0.5 if low >= 0.0 and high <= 1.0 else (low + high) / 2
        borders.append(middle if threshold is None else threshold)
    counts = Counter((x >= borders[0], y >= borders[1]) for x, y in zip(before, now, strict=True))
    return Agreement(
        pearson=pearson(before, now),
        spearman=pearson(rankdata(before), rankdata(now)),
        both_high=counts[True, True],
        only_before=counts[True, False],
        only_now=counts[False, True],
        both_low=counts[False, False],
        borders=(borders[0], borders[1]),
    )


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the linear correlation; NaN for fewer than two values or a constant side."""
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return math.nan


def main(arguments: list[str]) -> int:
    """Score again, print means and agreement per task and reward, and write the new records if asked."""
    options = _parser().parse_args(arguments)
    check_output_file("--output", options.output)
    path = options.run / "rollouts.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: the run stored no rollouts (tracking.trackers without jsonl, or "
            f"tracking.store_rollouts=0), or {str(path.parent)!r} is no output directory of a run"
        )
    record = options.run / RECORD
    loaded = load_yaml(record)[0] if record.is_file() else {}
    config: dict[str, Any] = loaded if isinstance(loaded, dict) else {}
    if options.tasks and not options.trust:
        refuse_code_in(options.tasks, is_only_read=True)
    specs = load_tasks(options.tasks) if options.tasks else _recorded_tasks(record, config)
    # attempts that a constraint rejected have no scores
    names = former_names(config)
    lines = [
        {**line, "task": names.get(line["task"], line["task"])}
        for line in read_lines(path, _readable)
        if line["breakdown"]
    ]
    specs = _selected(specs, lines, options)
    if not options.trust:
        named = [(f"tasks.{name}.rewards", r.plugin) for name, spec in specs.items() for r in spec.rewards]
        refuse_code(options.tasks or record, [pair for pair in named if pair[1] != options.reward])
    if missing := [*redacted_keys({name: [r.config for r in spec.rewards] for name, spec in specs.items()})]:
        raise ConfigError(
            f"{options.run}: tasks.{missing[0]}: the run recorded it without its secret; give the tasks file "
            "with --tasks, or the configuration with --reward NAME --config JSON"
        )
    kept = [line for line in lines if line["task"] in specs]
    known = {name for line in kept for name in line["breakdown"]} | {_WHOLE}
    if options.against and options.against not in known:
        raise ConfigError(
            f"--against: the run stored no reward {options.against!r}{suggest(options.against, known)} "
            f"(stored: {', '.join(sorted(known))})"
        )
    scored = _score(specs, kept, config, str(options.run))
    if options.output is not None:
        text = "".join(dump_line(scored_to_dict(s, x["step"])) for s, x in zip(scored, kept, strict=True))
        options.output.write_text(text, encoding="utf-8")
    print(printable(_tables(kept, scored, options.against, options.threshold)))
    shown: set[str] = set()
    for name, result in (pair for s in scored for pair in s.breakdown.items()):
        if isinstance(result, Failure) and name not in shown:
            shown.add(name)
            print(one_line(f"first failure of {name}: {result.kind.name}: {result.message}"))
    if len(kept) < len(lines):
        print(f"left out: {counted(len(lines) - len(kept), 'rollout')} of other tasks")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="multitask-rl rescore", description=__doc__)
    parser.add_argument("run", type=Path, help="output directory of the run")
    parser.add_argument("--reward", help="score with this reward: a name, file.py:function, trl:..., ...")
    parser.add_argument(
        "--config", type=json.loads, default=None, help="configuration of that reward, as JSON"
    )
    parser.add_argument(
        "--against", default="", help=f"old reward to compare with (default: same name, else {_WHOLE!r})"
    )
    parser.add_argument("--task", action="append", help="only this task (repeatable)")
    parser.add_argument("--threshold", type=float, help="values from here on count as high")
    parser.add_argument("--tasks", help="tasks file to score with (default: the run's tasks)")
    parser.add_argument(
        TRUST, action="store_true", help="allow code named by a run outside the working directory"
    )
    parser.add_argument("--output", type=Path, help="write the new records to this file, as JSON lines")
    return parser


def _selected(
    specs: Mapping[str, TaskSpec], lines: Sequence[Mapping[str, Any]], options: argparse.Namespace
) -> dict[str, TaskSpec]:
    """Return the tasks to score, with the rewards to score by and without constraints."""
    for name in options.task or ():
        if name not in specs:
            raise ConfigError(f"--task: {unknown_name('task', name, specs)}")
    wanted, reward, config = list(options.task or specs), options.reward, options.config
    stored = dict.fromkeys(str(line["task"]) for line in lines)
    chosen = {}
    for name in stored:
        if name not in wanted or not (specs[name].rewards or reward):
            continue
        spec = replace(specs[name], constraints=[])
        if reward is not None:
            # a reward that the task has keeps its configuration
            own = next((r for r in spec.rewards if reward in (r.name, r.plugin)), None)
            own = own or RewardSpec(plugin=reward)
            own = replace(own, weight=1.0, config=own.config if config is None else config)
            spec = replace(spec, rewards=[own], source="--reward")
        chosen[name] = spec
    if not chosen:
        raise DataError(
            f"{options.run}: no scored rollout of the tasks {', '.join(wanted)} is stored "
            f"(stored: {', '.join(sorted(stored)) or 'none'})"
        )
    return chosen


def _score(
    specs: Mapping[str, TaskSpec], lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any], run: str
) -> list[Scored]:
    given = config.get("scoring") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{run}: config.yaml: scoring: expected a mapping, got {given!r}")
    scoring = build_dataclass(ScoringConfig, given, Where(run, ("scoring",)))
    # a reward on trial may fail on every response: that is a result, not a reason to stop
    scoring = replace(scoring, max_failure_rate=1.0)
    with RewardPool(specs, scoring, seed=int(config.get("seed") or 0), devices={}) as pool:
        chunks = (lines[begin : begin + _CHUNK] for begin in range(0, len(lines), _CHUNK))
        return [s for chunk in chunks for s in pool.score([rollout_from_dict(x) for x in chunk])]


def _recorded_tasks(record: Path, config: Mapping[str, Any]) -> dict[str, TaskSpec]:
    tasks = config.get("tasks")
    if not isinstance(tasks, dict) or not tasks:
        raise ConfigError(
            f"{record.parent}: {RECORD} with the run's tasks is missing; give a tasks file with --tasks"
        )
    where = Where(str(record), ("tasks",))
    specs = {}
    for name, spec in tasks.items():
        if not isinstance(spec, dict):
            raise ConfigError(f"{where.at(name)}: expected a mapping, got {spec!r}")
        specs[name] = build_dataclass(TaskSpec, {**as_given(spec), "name": name}, where.at(name))
    return specs


def _readable(line: dict[str, Any]) -> dict[str, Any]:
    """Return ``line``; raise here, where the place is known, if a value cannot be read later."""
    rollout_from_dict(line)
    float(line["reward"] or 0.0), int(line["step"])
    for result in line["breakdown"].values():
        float(result.get("value") or 0.0)
    return line


def _tables(
    old: Sequence[Mapping[str, Any]], new: Sequence[Scored], against: str, threshold: float | None
) -> str:
    """Return the tables of means and of agreement, a line per task and reward."""
    pairs: dict[str, list[tuple[float, float, bool]]] = {}  # label -> before, now, failed now
    for before, after in zip(old, new, strict=True):
        for name, result in after.breakdown.items():
            other = against or (name if name in before["breakdown"] else _WHOLE)
            was = before["reward"] if other == _WHOLE else before["breakdown"].get(other, {}).get("value")
            now = result.value if isinstance(result, Score) else math.nan
            label = f"{before['task']}/{name}" + ("" if other == name else f" : {other}")
            pair = (math.nan if was is None else float(was), now, isinstance(result, Failure))
            pairs.setdefault(label, []).append(pair)
    means = [["reward", "n", "before", "now", "changed", "failed now"]]
    head = ["agreement", "n", "pearson", "spearman", "both high", "only before", "only now", "both low"]
    agreements = [[*head, "high from"]]
    for label, values in pairs.items():
        both = [(a, b) for a, b, _ in values if math.isfinite(a) and math.isfinite(b)]
        changed = sum(not math.isclose(a, b, abs_tol=1e-9) for a, b in both)
        finite = ([v[side] for v in values if math.isfinite(v[side])] for side in (0, 1))
        shown = (f"{sum(own) / len(own) if own else math.nan:.4f}" for own in finite)
        means.append([label, f"{len(values)}", *shown, f"{changed}", f"{sum(v[2] for v in values)}"])
        found = agreement([a for a, _ in both], [b for _, b in both], threshold=threshold)
        counts = (found.both_high, found.only_before, found.only_now, found.both_low)
        borders = " / ".join(f"{b:g}" for b in dict.fromkeys(found.borders))
        correlations = (f"{r:.3f}" if math.isfinite(r) else "-" for r in (found.pearson, found.spearman))
        agreements.append([label, f"{len(both)}", *correlations, *map(str, counts), borders])
    return "\n".join([*aligned(means), "", *aligned(agreements)])
