"""``multitask-rl compare RUN RUN...``: arms of runs against each other, with intervals and verdicts.

Runs whose configurations differ in the seed alone are one **arm**. The arm of the first run is the base. A
directory without a run of its own stands for the runs in it: a sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from multitask_rl.cli.tables import (
    effects_table,
    number,
    open_run,
    parse_common,
    ruled,
    task_table,
    write,
    write_page,
)
from multitask_rl.config.run import RunConfig, dotted, merged
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.errors import ConfigError
from multitask_rl.lazy import without_collector
from multitask_rl.report.comparison_page import render_comparison_page
from multitask_rl.report.differences import (
    IGNORED,
    IGNORED_OF_TASKS,
    Pair,
    are_alike,
    difference_rows,
    measure_the_same,
    share_prompts,
)
from multitask_rl.statistics.intervals import mean_of
from multitask_rl.statistics.seeds import mean_of_arm
from multitask_rl.tracking.reading import Evaluation, RunRecord, former_names
from multitask_rl.tracking.spending import COSTS, Spending, read_spending

_MOST_KEYS = 3
"""Most configuration keys with a column in the table of arms."""
_MOST_NAME = 60
_MOST_VALUE = 60
"""Longest value of a configuration key in a table; a longer one has a line of its own."""
_MOST_TABLES = 4
"""Most comparisons printed as tables of their own; with more, only the table of arms is printed."""


def main_compare(argv: Sequence[str]) -> int:
    """Run ``compare``; 0 whatever the verdicts are.

    Raises:
        ConfigError: fewer than two runs can be read, or no other run shares a task with the base.
    """
    parser = argparse.ArgumentParser(
        prog="multitask-rl compare",
        description="Compare runs: difference, interval and verdict per task. Runs that differ in the seed "
        "alone count as one arm.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="output directory, directory of a sweep, or mlflow:<run id>"
    )
    parser.add_argument("--step", type=int, help="evaluation to compare (default: each run's last)")
    parser.add_argument(
        "--level",
        type=float,
        help="level whose cost to reach is told (default: the first arm's last, per task)",
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="KEY",
        help="configuration that makes no arm, such as 'tasks.*.dataset'; may be repeated",
    )
    parser.add_argument(
        "--each-run", action="store_true", help="each run is an arm, also those of other seeds"
    )
    options = parse_common(parser, argv)
    with without_collector(), contextlib.ExitStack() as stack:
        runs, left_out = _read_all(options.runs, options.tracking_uri, stack)
        arms = group_runs(runs, left_out, each_run=options.each_run, ignore=options.ignore)
        if sum(len(arm.runs) for arm in arms) < 2:
            reasons = "".join(f"; {run}: {reason}" for run, reason in left_out.items())
            raise ConfigError(
                f"compare needs two runs, and there is one: {arms[0].runs[0].name}{reasons}; "
                "`multitask-rl report RUN` shows one"
            )
        # one thread waits for the bytes of a record while the other searches those of another
        with ThreadPoolExecutor(2) as pool:
            reading = [
                [
                    pool.submit(
                        read_spending,
                        run.directory / "metrics.jsonl",
                        arm.tasks if options.html else [],
                        former_names(run.config),
                    )
                    for run in arm.runs
                ]
                for arm in arms
            ]
            spendings = [[run.result() for run in own] for own in reading]
        lacking = [] if options.step is None else _without_step(arms, options.step)
        result = compare(arms, options.step)
        result["notes"] += lacking
        result |= costs(arms, spendings, options.step, options.level)
        result["left_out"] = left_out
        if options.html:
            runs_of_arms = [arm.runs for arm in arms]
            write_page(options, render_comparison_page(result, runs_of_arms, spendings, options.level))
    write(result, options.json, lambda: render_result(result))
    return 0


@dataclass(kw_only=True, slots=True)
class Arm:
    """Runs whose configurations differ in the seed alone, in the order of their seeds."""

    runs: list[RunRecord]
    name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value, without keys that do not tell arms apart."""

    @property
    def seeds(self) -> list[Any]:
        """The seed of each run; None = not recorded."""
        return [run.config.get("seed") for run in self.runs]

    @property
    def tasks(self) -> list[str]:
        """Tasks that a run of the arm has evaluated."""
        return list(dict.fromkeys(task for run in self.runs for task in run.evaluations))

    def runs_with(self, task: str) -> list[RunRecord]:
        """Return the runs that have evaluated ``task``."""
        return [run for run in self.runs if task in run.evaluations]

    def evaluations(self, task: str, step: int | None) -> list[Evaluation]:
        """Return the evaluation of each run that has the task, at ``step`` (None = its last).

        Raises:
            ConfigError: a run has none at this step.
        """
        chosen = []
        for run in self.runs_with(task):
            found = [e for e in run.evaluations[task] if step in (None, e.step)]
            if not found:
                steps = ", ".join(str(evaluation.step) for evaluation in run.evaluations[task])
                raise ConfigError(f"{run.name} has no evaluation of {task!r} at step {step}; it has: {steps}")
            chosen.append(found[-1] if step is None else found[0])
        return chosen

    def is_crossed(self, task: str, chosen: Sequence[Evaluation]) -> bool:
        """Whether all runs were evaluated on the same prompts."""
        runs = self.runs_with(task)
        return all(
            share_prompts(runs[0], run, chosen[0], own) for run, own in zip(runs[1:], chosen[1:], strict=True)
        )


def _without_step(arms: Sequence[Arm], step: int) -> list[str]:
    """Take from each run the tasks that it did not evaluate at ``step``; return notes on them.

    A run that evaluated none at this step keeps all.
    """
    notes = []
    for run in (run for arm in arms for run in arm.runs):
        kept = {task: own for task, own in run.evaluations.items() if any(step == e.step for e in own)}
        if kept and len(kept) < len(run.evaluations):
            lacking = ", ".join(task for task in run.evaluations if task not in kept)
            notes.append(f"{run.name} has no evaluation at step {step} of {lacking}")
            run.evaluations = kept
    return notes


def _read_all(
    names: Sequence[str], tracking_uri: str, stack: contextlib.ExitStack
) -> tuple[list[RunRecord], dict[str, str]]:
    """Return the runs that can be read, and why others cannot.

    Raises:
        ConfigError: none can be read.
    """
    runs: list[RunRecord] = []
    left_out: dict[str, str] = {}
    known: dict[str, str] = {}
    for name in (run for given in names for run in _expanded(given)):
        place = name if name.startswith("mlflow:") else str(Path(name).resolve())
        if place in known:
            left_out.setdefault(name, "given twice" if name == known[place] else f"is {known[place]}")
            continue
        known[place] = name
        try:
            runs.append(stack.enter_context(open_run(name, tracking_uri, whole=False)))
        except ConfigError as error:
            left_out[name] = str(error).removeprefix(f"{name} ")
    if not runs:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    return runs, left_out


def _expanded(name: str) -> list[str]:
    """Return the runs that a name stands for: itself, or the runs in a directory of a sweep."""
    path = Path(name)
    marks = ("evaluations.jsonl", "config.yaml", "metrics.jsonl")
    if name.startswith("mlflow:") or not path.is_dir() or any((path / mark).exists() for mark in marks):
        return [name]
    found = [child for child in path.iterdir() if any((child / mark).is_file() for mark in marks)]
    found.sort(key=lambda child: (not child.name.isdigit(), child.name.zfill(9), child.name))
    return [str(child) for child in found] or [name]


def group_runs(
    runs: Sequence[RunRecord],
    left_out: dict[str, str] | None = None,
    *,
    each_run: bool = False,
    ignore: Sequence[str] = (),
) -> list[Arm]:
    """Return the arms in the order of their first runs; copies of a run go to ``left_out``.

    A run is an arm of its own if it has no recorded configuration. So is a run that has the configuration and
    the seed of another run, but other evaluations: code, data or hardware differ.
    """
    left_out = {} if left_out is None else left_out
    arms: list[Arm] = []
    defaults = _recorded(RunConfig()), _recorded(TaskSpec(name=""))
    entries = {"rewards": _recorded(RewardSpec(plugin="")), "constraints": _recorded(ConstraintSpec())}
    for run in runs:
        settings = {
            key: value
            for key, value in dotted(_with_defaults(run.config, *defaults, entries))
            if not (
                key == "seed"
                or key.startswith(IGNORED)
                or key.endswith(IGNORED_OF_TASKS)
                or any(fnmatch(key, pattern) or fnmatch(key, f"{pattern}.*") for pattern in ignore)
            )
        }
        place = next(
            (arm for arm in arms if run.config and arm.runs[0].config and arm.settings == settings), None
        )
        twins = (
            [] if place is None else [r for r in place.runs if r.config.get("seed") == run.config.get("seed")]
        )
        twin = next((twin for twin in twins if _is_copy(twin, run)), None)
        if place is not None and twin is not None:
            longer, shorter = (run, twin) if _last_step(run) > _last_step(twin) else (twin, run)
            place.runs[place.runs.index(twin)] = longer
            left_out[shorter.name] = (
                f"the same run as {longer.name}: configuration, seed and evaluations are equal"
            )
        elif place is None or twins or each_run:
            arms.append(Arm(runs=[run], settings=settings))
        else:
            place.runs.append(run)
    for arm in arms:
        arm.runs.sort(
            key=lambda run: (
                not isinstance(run.config.get("seed"), int),
                str(run.config.get("seed")).zfill(20),
            )
        )
        tasks = {key.split(".")[1] for key in arm.settings if key.startswith("tasks.")}
        arm.settings |= {f"tasks.{task}": "present" for task in tasks}
    _name(arms)
    return arms


def _with_defaults(
    config: Mapping[str, Any],
    of_run: Mapping[str, Any],
    of_task: Mapping[str, Any],
    of_entries: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a recorded configuration, with today's default for each key that its version did not have.

    So runs from before and after an update do not differ by new keys. ``of_entries``: those of a reward and
    of a constraint.
    """
    if not config:
        return {}
    filled = merged(of_run, config)
    tasks = config.get("tasks")
    if isinstance(tasks, Mapping) and all(isinstance(task, Mapping) for task in tasks.values()):
        filled["tasks"] = {name: merged(of_task, {"name": name, **task}) for name, task in tasks.items()}
        for task in filled["tasks"].values():
            for key, of_entry in of_entries.items():
                if isinstance(task[key], list):
                    task[key] = [merged(of_entry, e) if isinstance(e, Mapping) else e for e in task[key]]
    return filled


def _recorded(settings: RunConfig | TaskSpec | RewardSpec | ConstraintSpec) -> dict[str, Any]:
    """Return all keys as a run records them: as JSON data."""
    recorded: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return recorded


def _is_copy(one: RunRecord, other: RunRecord) -> bool:
    """Whether one run's evaluations begin with the other's."""
    if set(one.evaluations) != set(other.evaluations):
        return False
    histories = ((one.evaluations[task], other.evaluations[task]) for task in one.evaluations)
    return all(
        (a.step, a.metric, str(a.values)) == (b.step, b.metric, str(b.values))
        for pair in histories
        for a, b in zip(*pair, strict=False)
    )


def _last_step(run: RunRecord) -> int:
    return max(history[-1].step for history in run.evaluations.values())


def differing(arms: Sequence[Arm]) -> list[str]:
    """Return the keys of configuration whose values differ between arms.

    A task that an arm lacks is one key, ``tasks.<name>``.
    """
    keys = dict.fromkeys(key for arm in arms for key in arm.settings)
    found = [key for key in keys if any(arm.settings.get(key) != arms[0].settings.get(key) for arm in arms)]
    lacking = tuple(f"{key}." for key in found if key.startswith("tasks.") and key.count(".") == 1)
    return [key for key in found if not key.startswith(lacking)]


def _name(arms: Sequence[Arm]) -> None:
    """Name arms: a run by its name, several by their directory or else by the settings that differ."""
    keys = differing(arms)
    short = {key: key.rpartition(".")[2] for key in keys}
    short = {key: name if list(short.values()).count(name) == 1 else key for key, name in short.items()}
    places = [_common_place([run.name for run in arm.runs]) for arm in arms]
    said = [", ".join(f"{short[key]}={_plain(arm.settings.get(key))}" for key in keys) for arm in arms]

    def is_own(arm: Arm, place: str) -> bool:
        others = [run.name for other in arms if other is not arm for run in other.runs]
        is_number = len(arm.runs) == 1 and Path(place).name.isdigit()  # in the directory of a sweep
        return bool(place) and not is_number and not any(Path(name).is_relative_to(place) for name in others)

    if all(map(is_own, arms, places)):
        names = places
    elif keys and max(map(len, said)) <= _MOST_NAME:
        names = said
    else:
        names = [arm.runs[0].name for arm in arms]
    for arm, name in zip(arms, names, strict=True):
        arm.name = name if names.count(name) == 1 else arm.runs[0].name


def _common_place(names: Sequence[str]) -> str:
    """Return the directory that holds all runs, or the one run; empty if there is none."""
    if len(names) == 1:
        return names[0]
    if len({Path(name).is_absolute() for name in names}) > 1 or any(
        name.startswith("mlflow:") for name in names
    ):
        return ""
    return os.path.commonpath(names)


def _plain(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def compare(arms: Sequence[Arm], step: int | None = None) -> dict[str, Any]:
    """Return levels of all arms, and a comparison of each other arm with the first.

    Raises:
        ConfigError: no other arm shares a task with the first, or a run lacks the evaluation at ``step``.
    """
    base, *others = arms
    pairs: dict[tuple[int, str], Pair] = {}
    notes: list[str] = []
    for index, other in enumerate(others):
        apart: dict[str, list[str]] = {}
        for task in (task for task in base.tasks if task in other.tasks):
            pair = _pair(task, base, base.evaluations(task, step), other, other.evaluations(task, step))
            first, second = pair.first[0], pair.second[0]
            if not are_alike(*pair.first, *pair.second):
                if first.metric != second.metric:
                    why = (
                        f"is judged by {first.metric!r} in {base.name} and by {second.metric!r} in "
                        f"{other.name}: compare runs with the same primary_metric"
                    )
                elif first.direction is not second.direction:
                    why = (
                        f"has another direction of {first.metric!r} in {base.name} than in {other.name}: "
                        "compare runs with the same higher_is_better"
                    )
                else:
                    of_both = ((base, pair.first), (other, pair.second))
                    mixed = [f"within {arm.name}" for arm, own in of_both if not are_alike(*own)]
                    why = (
                        f"has not one definition of {first.metric!r} "
                        f"{mixed[0] if mixed else f'in {base.name} and {other.name}'} (rewards, weights, "
                        "penalties, environment or teacher), so its values are not compared; "
                        "'multitask-rl eval' judges both models by one tasks file"
                    )
                notes.append(f"task {task!r} {why}")
                continue
            pairs[index, task] = pair
            both = f"{base.name} and {other.name}"
            if pair.paired_seeds and not pair.crossed:
                why = f"seeds of {both} differ in held-out prompts, so runs are paired by seed, not prompts"
            else:
                why = f"{both} were evaluated on different held-out prompts, so values are not paired"
            if not pair.paired:
                apart.setdefault(why, []).append(task)
        for reason, tasks in apart.items():
            named = "all tasks" if len(tasks) == len(other.tasks) > 1 else ", ".join(tasks)
            notes.append(f"{reason}: {named}")
    if others and not pairs:
        told = notes or [
            f"{base.name} and {other.name} share no task: {', '.join(base.tasks)} against "
            f"{', '.join(other.tasks)}"
            for other in others
        ]
        raise ConfigError("; ".join(told))
    rows = difference_rows(pairs)
    return {
        "arms": [_arm(arm, step) for arm in arms],
        "keys": {key: [arm.settings.get(key) for arm in arms] for key in differing(arms)},
        "comparisons": [
            {
                "base": base.name,
                "other": other.name,
                "tasks": {task: row for (at, task), row in rows.items() if at == index},
                "only_in_one": sorted(set(base.tasks) ^ set(other.tasks)),
                "config": {
                    key: [base.settings.get(key), other.settings.get(key)]
                    for key in sorted(differing([base, other]))
                },
            }
            for index, other in enumerate(others)
        ],
        "effects": _effects(arms, step),
        "dominates": _dominances(arms, step),
        "num_verdicts": sum(not math.isnan(row["p_value"]) for row in rows.values()),
        "notes": [*_notes(arms, step), *dict.fromkeys(notes)],
    }


def costs(
    arms: Sequence[Arm],
    spendings: Sequence[Sequence[Spending]],
    step: int | None,
    level: float | None,
) -> dict[str, Any]:
    """Return what each arm spent in total, and what it spent until it reached a level.

    ``level`` None = per task, the mean of the first arm at ``step`` (None = its last). A run reaches it with
    the first evaluation whose mean is as good. Numbers are means over the runs that have them.
    """
    levels, base = {}, dict[str, Evaluation]()
    for task in arms[0].tasks:
        chosen = arms[0].evaluations(task, step)
        base[task] = chosen[0]
        means = [e.mean for e in chosen if math.isfinite(e.mean)]
        levels[task] = mean_of(means) if level is None else level
    spent: list[dict[str, float]] = []
    reached: list[dict[str, Any]] = []
    notes: list[str] = []
    for arm, of_runs in zip(arms, spendings, strict=True):
        spent.append(_mean_costs([spending.total for spending in of_runs]))
        reached.append({})
        for task, goal in levels.items():
            found, sign = [], base[task].direction.sign
            for run, spending in zip(arm.runs, of_runs, strict=True):
                # a run may have another primary metric, now or before a resume
                own = [e for e in run.evaluations.get(task, ()) if are_alike(e, base[task])]
                if own:
                    as_good = (e.step for e in own if sign * e.mean >= sign * goal)
                    found.append(next(map(spending.at, as_good), None))
            there = [at for at in found if at is not None]
            reached[-1][task] = {"reached": len(there), "runs": len(found), **_mean_costs(there)}
        for run, spending in zip(arm.runs, of_runs, strict=True):
            planned, made = run.config.get("max_steps"), spending.steps[-1] if spending.steps else 0
            if isinstance(planned, int) and made < planned:
                notes.append(f"{run.name} has made {made} of {planned} steps")
            if not spending.is_whole and spending.steps:
                begins = f"{run.name} begins at step {spending.steps[0] - 1}"
                notes.append(f"{begins}: what was spent before it is not known, so its costs are not told")
    return {"costs": spent, "levels": levels, "reached": reached, "unfinished": notes}


def _mean_costs(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(own[key] for own in found) / len(found) if found else math.nan for key in COSTS}


def _pair(
    task: str, base: Arm, first: Sequence[Evaluation], other: Arm, second: Sequence[Evaluation]
) -> Pair:
    """Return evaluations of ``task`` as a pair: of two arms, or of one arm at two times."""
    crossed = base.is_crossed(task, first) and other.is_crossed(task, second)
    runs = base.runs_with(task), other.runs_with(task)
    seeds = [[run.config.get("seed") for run in own] for own in runs]
    have_same_seeds = base is other or (seeds[0] == seeds[1] and None not in seeds[0])
    return Pair(
        first,
        second,
        paired=crossed and share_prompts(runs[0][0], runs[1][0], first[0], second[0]),
        paired_seeds=len(first) > 1 and have_same_seeds,
        crossed=crossed,
    )


def _effects(arms: Sequence[Arm], step: int | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Return trained task -> task -> its last evaluation against its first comparable one.

    Empty unless each arm trains on exactly one task, and no two on the same.
    """
    trained = [_trained(arm.runs[0].config) for arm in arms]
    if len(arms) < 2 or any(len(own) != 1 for own in trained) or len({own[0] for own in trained}) < len(arms):
        return {}
    pairs: dict[tuple[str, str], Pair] = {}
    for arm, (name,) in zip(arms, trained, strict=True):
        for task in arm.tasks:
            last = arm.evaluations(task, step)
            histories = (run.evaluations[task] for run in arm.runs_with(task))
            first = [
                next(e for e in history if measure_the_same(e, end))
                for history, end in zip(histories, last, strict=True)
            ]
            if all(start is not end for start, end in zip(first, last, strict=True)):
                pairs[name, task] = _pair(task, arm, first, arm, last)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for (name, task), row in difference_rows(pairs).items():
        found.setdefault(name, {})[task] = row
    return found


def _trained(config: Mapping[str, Any]) -> list[str]:
    """Return the tasks that a run of this configuration trains on."""
    specs = config.get("tasks")
    named = specs.items() if isinstance(specs, Mapping) else ()
    return [
        name
        for name, spec in named
        if isinstance(spec, Mapping)
        and not spec.get("evaluation_only")
        and (spec.get("weight") != 0 or spec.get("min_share"))
    ]


def _dominances(arms: Sequence[Arm], step: int | None) -> dict[str, list[str]]:
    """Return arm -> arms that it dominates: no task's mean is worse, one is better (Pareto).

    Only tasks count that all arms have with the same metric and definition.
    """
    tasks = [
        task
        for task in arms[0].tasks
        if all(task in arm.tasks for arm in arms)
        and are_alike(*(e for arm in arms for e in arm.evaluations(task, step)))
    ]
    points = []
    for arm in arms:
        chosen = [arm.evaluations(task, step) for task in tasks]
        points.append([own[0].direction.sign * mean_of([e.mean for e in own]) for own in chosen])
    return {
        arm.name: [
            other.name
            for other, theirs in zip(arms, points, strict=True)
            if own != theirs and all(a >= b for a, b in zip(own, theirs, strict=True))
        ]
        for arm, own in zip(arms, points, strict=True)
    }


def _arm(arm: Arm, step: int | None) -> dict[str, Any]:
    """Return runs and levels of an arm."""
    levels = {}
    for task in arm.tasks:
        chosen = arm.evaluations(task, step)
        mean, low, high = mean_of_arm([e.values for e in chosen], crossed=arm.is_crossed(task, chosen))
        own = [e.mean for e in chosen]
        kind = {"metric": chosen[0].metric, "steps": [e.step for e in chosen]}
        levels[task] = {**kind, "mean": mean, "low": low, "high": high, "of_runs": own}
    return {"name": arm.name, "runs": [run.name for run in arm.runs], "seeds": arm.seeds, "tasks": levels}


def _notes(arms: Sequence[Arm], step: int | None) -> list[str]:
    """Return notes on the runs for readers of the table."""
    runs = [run for arm in arms for run in arm.runs]
    found = []
    last = {run.name: _last_step(run) for run in runs}
    if step is None and len(set(last.values())) > 1:
        steps = [{e.step for history in run.evaluations.values() for e in history} for run in runs]
        common = set.intersection(*steps)
        hint = f"; --step {max(common)} is the last evaluation that all have" if common else ""
        short = [f"{name} {at}" for name, at in last.items() if at < max(last.values())]
        told = ", ".join(short[:5]) + (f" and {len(short) - 5} more" if len(short) > 5 else "")
        found.append(f"last evaluations are of different steps: {max(last.values())}, but of {told}{hint}")
    for run in runs:
        ends = ((task, history[-1].step) for task, history in run.evaluations.items())
        ended = [(task, at) for task, at in ends if at < last[run.name]]
        if step is None and ended:
            told = ", ".join(f"{task} (step {at})" for task, at in ended[:5])
            found.append(f"{run.name} ended at step {last[run.name]}, and evaluated only before: {told}")
    for arm in arms:
        if not arm.runs[0].config:
            found.append(f"{arm.name}: no configuration was recorded, so the run is an arm of its own")
    is_mixed = len({len(arm.runs) > 1 for arm in arms}) > 1
    if is_mixed:
        found.append("where an arm has one run, the interval is that of other prompts, not of other seeds")
    return found


def render_result(result: Mapping[str, Any]) -> str:
    """Return the tables of ``compare``."""
    arms, comparisons = result["arms"], result["comparisons"]
    parts = []
    if len(arms) != 2:
        parts.append(_arms_table(result))
    if not comparisons:
        parts.append(
            f"one arm: these runs differ in the seed alone ({', '.join(map(str, arms[0]['seeds']))}), so "
            "there is nothing to compare it with; --each-run compares the runs"
        )
    sizes = {arm["name"]: arm["runs"] for arm in arms}
    if len(comparisons) <= _MOST_TABLES:
        parts += [render_comparison(own, result["num_verdicts"], sizes) for own in comparisons]
    else:
        parts.append(
            f"verdicts against {arms[0]['name']}: at 5 % over all {result['num_verdicts']} together (Holm)"
        )
        parts.append("differences with intervals: --html FILE, --json")
    if comparisons and all(len(arm["runs"]) == 1 for arm in arms):
        parts.append(
            "note: every arm has one run: intervals and verdicts are for other prompts and the same seed"
        )
    if result["effects"]:
        parts.append(
            "training on one task (row) changed a held-out result (column) from first to last evaluation:\n"
            f"{effects_table(result['effects'], 'delta')}\n"
            "+ better, - worse at 5 % over the whole matrix (Holm); intervals: each 95 % by itself"
        )
    parts.append(_cost_tables(result))
    if len(result["levels"]) > 1 and len(arms) <= _MOST_TABLES:
        parts += [
            f"{arm} dominates {', '.join(own)}: in every task that all have with one definition its mean is "
            "as good or better; verdicts are above"
            for arm, own in result["dominates"].items()
            if own
        ]
    parts += [f"note: {note}" for note in (*result["notes"], *result["unfinished"])]
    parts += [f"left out: {run}: {reason}" for run, reason in result["left_out"].items()]
    return "\n\n".join(parts)


def _arms_table(result: Mapping[str, Any]) -> str:
    """Return a row per arm: what makes it, its runs, its level in each task with the verdict."""
    tasks = list(dict.fromkeys(task for arm in result["arms"] for task in arm["tasks"]))
    keys = list(result["keys"])[:_MOST_KEYS]
    table = [["arm", *keys, "runs", *tasks]]
    marks = {"better": "+", "worse": "-"}
    for index, arm in enumerate(result["arms"]):
        rows = result["comparisons"][index - 1]["tasks"] if index else {}
        cells = []
        for task in tasks:
            own = arm["tasks"].get(task)
            mark = marks.get(rows[task]["verdict"], " ") if task in rows else " "
            cells.append(f"{number(own['mean'])} {mark}" if own else "-  ")
        settings = [_plain(result["keys"][key][index]) for key in keys]
        table.append([arm["name"], *settings, str(len(arm["runs"])), *cells])
    note = "\n+ better, - worse than the first arm" if result["comparisons"] else ""
    return ruled(table) + note


def _cost_tables(result: Mapping[str, Any]) -> str:
    """Return what each arm has spent, and the samples until it reached the level of each task."""
    arms = list(zip(result["arms"], result["costs"], result["reached"], strict=True))
    table = [["spent by each run", *COSTS]]
    table += [[arm["name"], *(_amount(spent[key]) for key in COSTS)] for arm, spent, _ in arms]
    until = [["samples until", "level", *(arm["name"] for arm, *_ in arms)]]
    for task, level in result["levels"].items():
        cells = []
        for _, _, reached in arms:
            own = reached[task]
            part = "" if own["reached"] == own["runs"] else f" ({own['reached']} of {own['runs']} runs)"
            without = "not reached" if own["runs"] else "-"
            cells.append(_amount(own["samples"]) + part if own["reached"] else without)
        until.append([task, number(level), *cells])
    return f"{ruled(table)}\n\n{ruled(until)}"


def _amount(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def render_comparison(
    result: Mapping[str, Any], num_verdicts: int = 0, runs: Mapping[str, Sequence[str]] | None = None
) -> str:
    """Return the table of one comparison; ``num_verdicts``: verdicts corrected together, if more than its."""
    counts = dict.fromkeys(("better", "worse", "not told apart", "unknown"), 0)
    for row in result["tasks"].values():
        counts[row["verdict"]] += 1
    names = []
    for side in ("base", "other"):
        own = (runs or {}).get(result[side], [])
        more = f" ({len(own)} runs: {', '.join(own)})" if len(own) > 1 else ""
        names.append(f"{side + ':':6} {result[side]}{more}")
    parts = [
        "\n".join(names),
        task_table(result["tasks"], ("base", "other"), num_verdicts),
        "other against base: " + ", ".join(f"{count} {word}" for word, count in counts.items() if count),
    ]
    if result["only_in_one"]:
        parts.append("tasks in only one of them: " + ", ".join(result["only_in_one"]))
    if result["config"]:
        rows = [[key, *map(_plain, pair)] for key, pair in result["config"].items()]
        short = [row for row in rows if max(map(len, row)) <= _MOST_VALUE]
        table = [ruled([["configuration", "base", "other"], *short])] if short else []
        long = [row for row in rows if max(map(len, row)) > _MOST_VALUE]
        table += [f"{key}\n  base:  {a}\n  other: {b}" for key, a, b in long]
        parts.append("\n".join(table))
    elif result["config"] is not None:
        parts.append("the configurations do not differ (seeds are not compared)")
    return "\n\n".join(parts)
