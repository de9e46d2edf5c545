"""Score the stored rollouts of a run again, without a model, and compare old and new scores.

The default scores with the run's own rewards as installed now. --reward scores every task with another
reward. Each reward is compared by itself, before weights and penalties.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from multitask_rl.boundary.printable import one_line, printable
from multitask_rl.boundary.redaction import redacted_keys
from multitask_rl.cli.agreement import agreement
from multitask_rl.config.run import ScoringConfig, as_given
from multitask_rl.config.schema.build import build_dataclass, suggest
from multitask_rl.config.schema.located_yaml import Where, load_yaml
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.config.tasks_file import load_tasks
from multitask_rl.config.trust import TRUST, refuse_code
from multitask_rl.errors import ConfigError, DataError, check_output_file
from multitask_rl.records import Failure, Score, Scored
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.tracking.lines import dump_line, rollout_from_dict, scored_to_dict
from multitask_rl.tracking.reading import read_lines

__all__ = ["main"]

_CHUNK = 256
_WHOLE = "reward"
"""Stands for the task's whole reward, as in ``primary_metric``."""

Pairs: TypeAlias = dict[str, list[tuple[float, float, bool]]]
"""``task/reward`` -> (before, now, failed now) of each response; NaN where there is no value."""


def main(arguments: list[str]) -> int:
    """Score again, print means and agreement per task and reward, and write the new records if asked."""
    options = _parser().parse_args(arguments)
    check_output_file("--output", options.output)
    config = _run_config(options.run)
    specs = load_tasks(options.tasks) if options.tasks else _tasks_of(options.run, config)
    lines = list(_stored(options.run / "rollouts.jsonl"))
    specs = _selected(specs, lines, options)
    if not options.trust:
        refuse_code(options.tasks or options.run / "config.yaml", _named(specs, options.reward))
    if missing := [*redacted_keys({name: [r.config for r in spec.rewards] for name, spec in specs.items()})]:
        raise ConfigError(
            f"{options.run}: tasks.{missing[0]}: the run recorded it without its secret; give the tasks file "
            "with --tasks, or the configuration with --reward NAME --config JSON"
        )
    kept = [line for line in lines if line["task"] in specs]
    _check_against(kept, options.against)
    scored = _score(specs, kept, config, str(options.run))
    if options.output is not None:
        text = "".join(dump_line(scored_to_dict(s, x["step"])) for s, x in zip(scored, kept, strict=True))
        options.output.write_text(text, encoding="utf-8")
    pairs = _pairs(kept, scored, options.against)
    print(printable(f"{_means(pairs)}\n\n{_agreements(pairs, options.threshold)}"))
    _print_failures(scored)
    if len(kept) < len(lines):
        print(f"{len(lines) - len(kept)} rollouts of other tasks were left out")
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
    """Return the tasks to score, with the rewards to score by and no constraints: none is asked."""
    for name in options.task or ():
        if name not in specs:
            raise ConfigError(
                f"--task: unknown task {name!r}{suggest(name, specs)} (tasks: {', '.join(specs)})"
            )
    wanted = list(options.task or specs)
    stored = dict.fromkeys(str(line["task"]) for line in lines)
    chosen = {
        name: _with_reward(specs[name], options.reward, options.config)
        for name in stored
        if name in wanted and (specs[name].rewards or options.reward)
    }
    if not chosen:
        raise DataError(
            f"{options.run}: no rollout of the tasks {', '.join(wanted)} is stored "
            f"(stored: {', '.join(sorted(stored)) or 'none'})"
        )
    return {name: replace(spec, constraints=[]) for name, spec in chosen.items()}


def _named(specs: Mapping[str, TaskSpec], given: str | None) -> Iterator[tuple[str, str]]:
    """Yield the rewards that the run's file names; the one of ``--reward`` is the user's."""
    for name, spec in specs.items():
        yield from ((f"tasks.{name}.rewards", r.plugin) for r in spec.rewards if r.plugin != given)


def _with_reward(spec: TaskSpec, reward: str | None, config: Mapping[str, Any] | None) -> TaskSpec:
    """Put ``reward`` in the place of the task's rewards; one the task has keeps its configuration."""
    if reward is None:
        return spec
    own = next((r for r in spec.rewards if reward in (r.name, r.plugin)), None)
    chosen = own or RewardSpec(plugin=reward, name=reward.rsplit(":", 1)[-1].replace(".", "_"))
    chosen = replace(chosen, weight=1.0, config=chosen.config if config is None else config)
    return replace(spec, rewards=[chosen], source="--reward")


def _score(
    specs: Mapping[str, TaskSpec], lines: Sequence[Mapping[str, Any]], config: Mapping[str, Any], run: str
) -> list[Scored]:
    given = config.get("scoring") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{run}: config.yaml: scoring: expected a mapping, got {given!r}")
    scoring = build_dataclass(ScoringConfig, given, Where(run, ("scoring",)))
    # a reward on trial may fail on everything: that is a finding, not a reason to stop
    scoring = replace(scoring, max_failure_rate=1.0)
    pool = RewardPool(specs, scoring, seed=int(config.get("seed") or 0), devices={})
    pool.start()
    try:
        return [s for chunk in _chunks(lines) for s in pool.score([rollout_from_dict(x) for x in chunk])]
    finally:
        pool.close()


def _run_config(run: Path) -> dict[str, Any]:
    path = run / "config.yaml"
    if not path.is_file():
        return {}
    loaded, _ = load_yaml(path)
    return loaded if isinstance(loaded, dict) else {}


def _tasks_of(run: Path, config: dict[str, Any]) -> dict[str, TaskSpec]:
    """Return the tasks as the run resolved them."""
    tasks = config.get("tasks")
    if not isinstance(tasks, dict) or not tasks:
        raise ConfigError(
            f"{run}: config.yaml with the run's tasks is missing; give a tasks file with --tasks"
        )
    where = Where(str(run / "config.yaml"), ("tasks",))
    for name, spec in tasks.items():
        if not isinstance(spec, dict):
            raise ConfigError(f"{where.at(name)}: expected a mapping, got {spec!r}")
    return {
        name: build_dataclass(TaskSpec, {**as_given(spec), "name": name}, where.at(name))
        for name, spec in tasks.items()
    }


def _stored(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the stored rollouts that were scored; rejected attempts and a torn last line are left out."""
    if not path.is_file():
        raise ConfigError(
            f"{path} does not exist: the run stored no rollouts (tracking.trackers without jsonl, or "
            f"tracking.store_rollouts=0), or {str(path.parent)!r} is no output directory of a run"
        )
    yield from (line for line in read_lines(path, _readable) if line["breakdown"])


def _readable(line: dict[str, Any]) -> dict[str, Any]:
    """Return ``line`` if all that is read of it later can be."""
    rollout_from_dict(line)
    float(line["reward"] or 0.0), int(line["step"])
    for result in line["breakdown"].values():
        float(result.get("value") or 0.0)
    return line


def _chunks(lines: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    for begin in range(0, len(lines), _CHUNK):
        yield lines[begin : begin + _CHUNK]


def _check_against(old: Sequence[Mapping[str, Any]], against: str) -> None:
    known = {name for line in old for name in line["breakdown"]} | {_WHOLE}
    if against and against not in known:
        raise ConfigError(
            f"--against: the run stored no reward {against!r}{suggest(against, known)} "
            f"(stored: {', '.join(sorted(known))})"
        )


def _pairs(old: Sequence[Mapping[str, Any]], new: Sequence[Scored], against: str) -> Pairs:
    """Pair what was scored with what is scored now."""
    pairs: Pairs = {}
    for before, after in zip(old, new, strict=True):
        for name, result in after.breakdown.items():
            other = against or (name if name in before["breakdown"] else _WHOLE)
            was = before["reward"] if other == _WHOLE else before["breakdown"].get(other, {}).get("value")
            now = result.value if isinstance(result, Score) else math.nan
            label = f"{before['task']}/{name}" + ("" if other == name else f" : {other}")
            pair = (math.nan if was is None else float(was), now, isinstance(result, Failure))
            pairs.setdefault(label, []).append(pair)
    return pairs


def _means(pairs: Pairs) -> str:
    rows: list[Sequence[str]] = [("reward", "n", "before", "now", "changed", "failed now")]
    for label, values in pairs.items():
        changed = sum(not math.isclose(a, b, abs_tol=1e-9) for a, b in _both(values))
        means = (f"{_mean([v[i] for v in values]):.4f}" for i in (0, 1))
        rows.append((label, f"{len(values)}", *means, f"{changed}", f"{sum(v[2] for v in values)}"))
    return _aligned(rows)


def _agreements(pairs: Pairs, threshold: float | None) -> str:
    """Say how far old and new agree; "high" is from the border on."""
    header = ("agreement", "n", "pearson", "spearman", "both high", "only before", "only now", "both low")
    rows: list[Sequence[str]] = [(*header, "high from")]
    for label, values in pairs.items():
        both = _both(values)
        found = agreement([a for a, _ in both], [b for _, b in both], threshold=threshold)
        counts = (found.both_high, found.only_before, found.only_now, found.both_low)
        borders = " / ".join(f"{b:g}" for b in dict.fromkeys(found.borders))
        correlations = (f"{r:.3f}" if math.isfinite(r) else "-" for r in (found.pearson, found.spearman))
        rows.append((label, f"{found.count}", *correlations, *map(str, counts), borders))
    return _aligned(rows)


def _print_failures(scored: Sequence[Scored]) -> None:
    """Print the first failure of each reward, so that a column of failures is explained."""
    shown: set[str] = set()
    for record in scored:
        for name, result in record.breakdown.items():
            if isinstance(result, Failure) and name not in shown:
                shown.add(name)
                print(one_line(f"first failure of {name}: {result.kind.name}: {result.message}"))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


def _both(values: Sequence[tuple[float, float, bool]]) -> list[tuple[float, float]]:
    return [(a, b) for a, b, _ in values if math.isfinite(a) and math.isfinite(b)]


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
