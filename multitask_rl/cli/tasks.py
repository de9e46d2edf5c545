"""Check a tasks file, print its tasks, or print its JSON schema. No model is loaded."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from multitask_rl.boundary.printable import aligned, counted, one_line, printable, shown_path
from multitask_rl.config.editor_schemas import run_schema, tasks_schema
from multitask_rl.config.run import EvalConfig, ScoringConfig
from multitask_rl.config.schema.build import build_dataclass
from multitask_rl.config.schema.located_yaml import Where, parse_yaml
from multitask_rl.config.task import TaskSpec
from multitask_rl.config.tasks_file import fill_weights, load_tasks
from multitask_rl.config.trust import TRUST, refuse_code_in
from multitask_rl.constraints.satisfaction import constraint_warnings
from multitask_rl.contracts import PluginTraits
from multitask_rl.data.pooled_stream import check_curriculum
from multitask_rl.data.readers import GeneratedRows, Row, StreamedRows
from multitask_rl.data.render import check_split
from multitask_rl.data.rows import load_both, row_id
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.base import StepResult
from multitask_rl.environments.pool import WorldPool
from multitask_rl.errors import ConfigError, MultitaskRLError, UnavailableError, raise_all
from multitask_rl.plugins import ALGORITHMS, load_plugin
from multitask_rl.records import Failure
from multitask_rl.run.learnable import check_learnable, learnable_warnings
from multitask_rl.scoring.adapt import find_plugin
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing import make_rollout


def main(arguments: list[str]) -> int:
    """Run ``tasks validate``, ``tasks show`` or ``tasks schema``."""
    parser = argparse.ArgumentParser(prog="multitask-rl tasks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="validate | show | schema")
    for name, text in (
        ("validate", "check keys, plugins and every row; score one row per task, play one turn of its world"),
        ("show", "print share, data, rewards and constraints of each task"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("file", help="the tasks file")
        command.add_argument("overrides", nargs="*", default=[], help="tasks.NAME.KEY=VALUE ...")
        if name == "validate":
            command.add_argument("--quick", action="store_true", help="build no plugin and score no row")
        command.add_argument(
            TRUST, action="store_true", help="run code that a file outside the working directory names"
        )
        if name == "show":
            command.add_argument("--json", action="store_true", help="print every key, defaults included")
    text = "print the JSON schema of a tasks file, for editors"
    schema = commands.add_parser("schema", help=text, description=text)
    schema.add_argument("--run", action="store_true", help="of a run's configuration instead")
    options = parser.parse_args(arguments)
    if options.command == "schema":
        print(json.dumps(run_schema() if options.run else tasks_schema(), indent=2))
        return 0
    if not options.trust:
        refuse_code_in(options.file, is_only_read=options.command == "show")
    specs = load_tasks(options.file, _overrides(options.overrides))
    if options.command == "show":
        plain = {name: dataclasses.asdict(spec) for name, spec in specs.items()}
        print(json.dumps(plain, indent=2, default=str) if options.json else printable(_table(specs)))
        return 0
    warnings, notes, errors = list[str](), dict[str, str](), list[MultitaskRLError]()
    first: dict[str, Row] = {}
    gaps: dict[str, dict[str, tuple[int, Row]]] = {}
    for name, spec in specs.items():
        try:
            notes[name] = _check(spec, warnings, first, gaps)
        except MultitaskRLError as error:
            errors.append(error)
    raise_all(errors)
    if not options.quick:
        warnings += _try(specs, first) or _try_gaps(specs, gaps)
    print(f"{options.file}: {'1 task is' if len(specs) == 1 else f'{len(specs)} tasks are'} valid")
    for name, note in notes.items():
        print(printable(f"  {name}: {note}"))
    for warning in warnings:
        print(f"warning: {one_line(warning)}")
    return 0


def _overrides(arguments: list[str]) -> dict[str, Any]:
    """Read ``tasks.math.weight=2`` as ``{"math": {"weight": 2}}``."""
    result: dict[str, Any] = {}
    for argument in arguments:
        path, equals, text = argument.removeprefix("tasks.").partition("=")
        keys = path.split(".")
        if not equals or len(keys) < 2 or not all(keys):
            raise ConfigError(f"override {argument!r}: expected tasks.NAME.KEY=VALUE")
        level = result
        for key in keys[:-1]:
            level = level.setdefault(key, {})
            if not isinstance(level, dict):
                raise ConfigError(f"override {argument!r}: {key!r} was given a value before, {level!r}")
        level[keys[-1]], _ = parse_yaml(text, f"override {argument!r}")
    return result


def _check(
    spec: TaskSpec, warnings: list[str], first: dict[str, Row], gaps: dict[str, dict[str, tuple[int, Row]]]
) -> str:
    """Check plugin configuration and data of one task; return a note on it.

    Adds its warnings to ``warnings``, its first row to ``first`` and its gaps to ``gaps``. A gap is a column
    that the first row fills and other rows leave null or "": column -> (number of these rows, one of them).
    """
    where = spec.where
    algorithm = load_plugin(ALGORITHMS, spec.type, expects="loss", where=f"{spec.where}.type")
    keys = Where(path=(f"{where}.algorithm_config",))
    config = build_dataclass(algorithm.Config, spec.algorithm_config, keys)
    check_learnable(spec, algorithm(config), spec.group_size)
    warnings += [f"{where}: {text}" for text in learnable_warnings(spec, algorithm(config))]
    needs, parameters = dict[str, str](), dict[str, str]()
    traits: dict[str, PluginTraits] = {}
    rewards = [("reward", i, r.plugin, r.config) for i, r in enumerate(spec.rewards)]
    constraints = [
        ("constraint", i, c.plugin, c.config) for i, c in enumerate(spec.constraints) if c.mode != "grammar"
    ]
    for kind, index, plugin, config in rewards + constraints:
        place = f"{where}.{kind}s[{index}]"
        source = find_plugin(kind, plugin, place)
        reader = f"{kind} {shown_path(plugin)!r}"
        parameters |= dict.fromkeys(source.check(config), reader)
        needs |= dict.fromkeys(source.traits.needs, reader)
        is_trained = kind == "reward" and spec.rewards[index].weight and not spec.evaluation_only
        has_range = kind == "reward" and spec.rewards[index].range is not None
        if is_trained and not has_range and not math.isfinite(source.traits.high - source.traits.low):
            warnings.append(
                f"{place}: {plugin} declares no range, so the scheduler estimates the scale of the task's "
                "levels from the rewards that responses earn; if you know the range, give the reward "
                "'range: [LOW, HIGH]', or declare low and high in the plugin (with_traits or PluginTraits)"
            )
        if kind == "constraint":
            traits[spec.constraints[index].name] = source.traits
    if spec.environment:
        WorldSpec.of_task(spec).check_config()
    if spec.teacher and not (Path(spec.teacher).is_dir() or _is_cached(spec.teacher)):
        warnings.append(
            f"{where}.teacher: {spec.teacher!r} is neither a directory on this machine nor in the cache of "
            "the hub; train loads it from the hub, or refuses it"
        )
    if not spec.dataset:
        warnings += [f"{where}: {text}" for text in constraint_warnings(spec, traits, None)]
        return f"{spec.type}; no data set here (to be given in Python or with tasks.{spec.name}.dataset=...)"
    train, held_out = load_both(spec)
    misleads = check_split(spec, train, held_out, needs=needs, parameters=parameters)
    check_curriculum(spec, train)
    first[spec.name] = start = (held_out if spec.evaluation_only else train)[0]
    columns = [c for c in start if c not in ("id", "split", "task") and not _is_nothing(start[c])]
    gaps[spec.name] = found = dict[str, tuple[int, Row]]()
    for own in (train, held_out):
        for row in () if isinstance(own, GeneratedRows) else own:
            for column in columns:
                if _is_nothing(row.get(column)):
                    count, example = found.get(column, (0, row))
                    found[column] = count + 1, example
    if misleads:
        warnings.append(f"{where}: {misleads}")
    num_prompts = min(len(held_out), EvalConfig().num_prompts)
    warnings += [f"{where}: {text}" for text in constraint_warnings(spec, traits, num_prompts)]
    rows = (
        "streamed training rows" if isinstance(train, StreamedRows) else counted(len(train), "training row")
    )
    return f"{spec.type}; {rows}, {counted(len(held_out), 'held-out row')}"


def _is_cached(model: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:  # a path
        return False


def _try(specs: Mapping[str, TaskSpec], first: Mapping[str, Row]) -> list[str]:
    """Build every environment, reward and constraint where training builds them, and try the ``first`` rows.

    Return a warning per plugin whose model or device this machine lacks: the file may be meant for another.
    """
    _play_a_turn({name: spec for name, spec in specs.items() if spec.environment}, first)
    try:
        return _score_a_row(specs, first)
    except UnavailableError:
        warnings = []
        for name, spec in specs.items():
            alone = [dataclasses.replace(spec, rewards=[own], constraints=[]) for own in spec.rewards]
            alone += [dataclasses.replace(spec, rewards=[], constraints=[own]) for own in spec.judged]
            for part in alone:
                try:
                    _score_a_row({name: part}, first)
                except UnavailableError as error:
                    # an error of the constructor names the place, one of the warm-up does not
                    said = f": tasks.{name}" in f": {error}"
                    where = "" if said else f"{spec.where}: "
                    warnings.append(f"{where}{error} train refuses it on this machine.")
        return warnings


def _play_a_turn(specs: Mapping[str, TaskSpec], first: Mapping[str, Row]) -> None:
    """Begin an episode of each task on its first row, give one answer, and end it if its world is done."""
    pool = WorldPool({name: WorldSpec.of_task(spec) for name, spec in specs.items()}, num_workers=1)
    with contextlib.closing(pool):
        for name, spec in specs.items():
            pool.check(name)
            if name not in first:
                continue
            row = first[name]
            ticket = pool.open(name, row)
            answer = _answer_to(row)
            for what in ("on the first row", f"on the answer {answer!r} to the first row", "at the end"):
                told: list[Any] = []
                while not told:
                    told = [own for _, own in pool.poll(spec.turn_timeout_s)]
                if isinstance(told[0], Failure):
                    raise ConfigError(
                        f"{spec.where}.environment: {spec.environment!r} fails {what} "
                        f"({told[0].kind.value}: {told[0].message}); --quick validates without opening it"
                    )
                if what == "on the first row":
                    pool.step(ticket, {"role": "assistant", "content": answer})
                elif isinstance(told[0], StepResult) and told[0].done:
                    pool.finish(ticket)
                else:
                    break


def _answer_to(row: Mapping[str, Any]) -> str:
    """Return what a model might say: the row's reference, if it is a text."""
    reference = row.get("reference")
    return reference if isinstance(reference, str) else "4"


def _score_a_row(specs: Mapping[str, TaskSpec], first: Mapping[str, Row]) -> list[str]:
    """Score and judge two answers to each row; return a warning per task to which no reward applies.

    Two, because a batch function that gives one result for any batch does not show with one.
    """
    tried = [(name, first[name]) for name in specs if name in first]
    rollouts = [make_rollout(_answer_to(row), task=name, row=row) for name, row in tried]
    rollouts += [make_rollout("no", task=name, row=row) for name, row in tried]
    scoring = ScoringConfig(num_workers=1, retries=0, max_failure_rate=1.0)
    with RewardPool(specs, scoring, seed=0, devices={}) as pool:
        found: list[tuple[str, Mapping[str, object]]]
        scored = pool.score(rollouts)
        found = [(s.rollout.prompt.task, s.breakdown) for s in scored]
        found += [(r.prompt.task, v) for r, v in zip(rollouts, pool.judge(rollouts), strict=True)]
    for name, results in found:
        for plugin, result in results.items():
            if isinstance(result, Failure):
                raise ConfigError(
                    f"{specs[name].where}: {plugin!r} fails on the first row "
                    f"({result.kind.value}: {result.message}); --quick validates without calling it"
                )
    # the answer to a world's prompt is no episode, which the world would have scored
    of_first = scored[: len(tried)]
    unscored = [s for s in of_first if s.failure is not None and not specs[s.rollout.task].environment]
    return [
        f"{specs[s.rollout.task].where}: none of its rewards applies to the first row: "
        f"{', '.join(s.breakdown)} returned None for the answer {_answer_to(s.rollout.row)!r}. Such a "
        "response counts as failed; return a number, 0 for a wrong answer, or leave out rows that no reward "
        "is for"
        for s in unscored
    ]


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _try_gaps(specs: Mapping[str, TaskSpec], gaps: Mapping[str, Mapping[str, tuple[int, Row]]]) -> list[str]:
    """Score one row of each gap (see ``_check``); return a warning for each reward that fails on it."""
    tried = [
        (name, column, number, row)
        for name, by_column in gaps.items()
        for column, (number, row) in by_column.items()
        if specs[name].rewards and not specs[name].environment
    ]
    if not tried:
        return []
    scoring = ScoringConfig(num_workers=1, retries=0, max_failure_rate=1.0)
    with RewardPool({name: specs[name] for name, *_ in tried}, scoring, seed=0, devices={}) as pool:
        scored = pool.score([make_rollout("4", task=name, row=row) for name, _, _, row in tried])
    return [
        f"{specs[name].where}: {plugin!r} fails on row {row_id(row)!r}, which has nothing in {column!r} "
        f"({result.kind.value}: {result.message}); rows with nothing there: {number}; fill or remove them"
        for (name, column, number, row), record in zip(tried, scored, strict=True)
        for plugin, result in record.breakdown.items()
        if isinstance(result, Failure)
    ]


def _table(specs: Mapping[str, TaskSpec]) -> str:
    trained = {name: spec.weight for name, spec in specs.items() if not spec.evaluation_only}
    shares = fill_weights(list(trained), trained) if trained else {}
    rows = [("task", "type", "share", "data", "rewards", "constraints")]
    for name, spec in specs.items():
        share = f"{shares[name]:.3f}" if name in shares else "eval only"
        rewards = ", ".join(f"{r.name} x {r.weight:g}" for r in spec.rewards) or "-"
        constraints = ", ".join(f"{c.name} ({c.mode})" for c in spec.constraints) or "-"
        rows.append((name, spec.type, share, spec.dataset or "-", rewards, constraints))
    return "\n".join(aligned(rows, num_text=6))
