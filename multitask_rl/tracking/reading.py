"""A run as its output directory tells it: evaluations, configuration, weights, events."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from multitask_rl.config.schema.located_yaml import load_yaml
from multitask_rl.errors import ConfigError, path_errors
from multitask_rl.records import Direction
from multitask_rl.tracking.jsonl import load_line
from multitask_rl.tracking.timeline import summarise

logger = logging.getLogger(__name__)
T = TypeVar("T")
_EVENT = {"source": str, "kind": str, "reason": str, "step": int}
_SPAN = {"stage": str, "task": str, "start": float, "end": float}
_MADE = "time/step_s"
"""Metric of the lines of ``metrics.jsonl`` that a training step wrote, and of no others."""


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """One line of ``evaluations.jsonl``."""

    step: int
    task: str
    metric: str
    values: list[float]
    """[n] per held-out prompt, in their order; NaN = failed to score."""
    direction: Direction
    prompts: str
    """Identity of the held-out prompts; empty if the run wrote none."""
    definitions: Mapping[str, str] = field(default_factory=dict)
    """Hashes of what metrics are computed from (``TaskEvaluation.definitions``); empty = not known."""
    samples: int = 1
    """Responses per prompt."""
    error: float = math.nan
    """Standard error of the mean as the run computed it, above 0 for a rate without a success; NaN = none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Further finite numbers."""

    @property
    def mean(self) -> float:
        """Mean of the prompts that could be scored, between their least and largest; NaN without one."""
        found = self.values
        if math.isnan(total := math.fsum(found)):
            found = [value for value in found if math.isfinite(value)]
            total = math.fsum(found)
        return min(max(total / len(found), min(found)), max(found)) if found else math.nan


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """The records of one run."""

    name: str
    config: dict[str, Any]
    evaluations: dict[str, list[Evaluation]]
    """By task, in order of steps, without evaluations that a resume or a rollback undid."""
    weights: dict[str, dict[int, float]] = field(default_factory=dict)
    """task -> step -> weight."""
    shares: dict[str, dict[int, float]] = field(default_factory=dict)
    """task -> step -> share of the groups that gave a gradient."""
    events: list[dict[str, Any]] = field(default_factory=list)
    directory: Path = Path()
    """Where the records are."""
    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    """Stage -> ``busy`` and ``waited``, shares of the steps' time (see ``timeline.summarise``)."""


def read_run(directory: Path, name: str = "", *, whole: bool = True) -> RunRecord:
    """Read the output directory of a run; ConfigError if it is none, or holds no evaluation yet.

    Without ``whole``: evaluations and configuration alone, which are a small part of the records.
    """
    if not (directory / "evaluations.jsonl").is_file():
        allowed = "give the run's output_dir, or mlflow:<run id> with --tracking-uri"
        if not directory.exists():
            raise ConfigError(f"{directory} does not exist; {allowed}")
        if any((directory / name).is_file() for name in ("config.yaml", "machine.json", "train.log")):
            raise ConfigError(
                f"{directory} holds no evaluations.jsonl: the run has not evaluated yet, or ended before it "
                "did"
            )
        runs = sorted(path.parent.name for path in directory.glob("*/evaluations.jsonl"))
        above = [path for path in directory.parents if (path / "evaluations.jsonl").is_file()]
        more = f" and {len(runs) - 5} more" if len(runs) > 5 else ""
        raise ConfigError(
            f"{directory} holds no evaluations.jsonl, so it is not the output directory of a run; "
            + (f"it holds the runs {', '.join(runs[:5])}{more}; " if runs else "")
            + (f"it is in the run {above[0]}; " if above else "")
            + allowed
        )
    config_path = directory / "config.yaml"
    config = load_yaml(config_path)[0] if config_path.is_file() else {}
    config = config if isinstance(config, dict) else {}
    names = former_names(config)

    def typed(types: Mapping[str, Callable[[Any], Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return lambda line: {**line, **{key: as_type(line[key]) for key, as_type in types.items()}}

    def task_numbers(line: Mapping[str, Any]) -> dict[str, float]:
        ends = ("/weight", "/share_trained")
        own = {k: v for k, v in line.items() if k.startswith("task/") and k.endswith(ends) and v is not None}
        made = {_MADE: 1.0} if _MADE in line else {}
        return {"step": int(line["step"]), **made, **{key: float(value) for key, value in own.items()}}

    evaluations: dict[str, list[Evaluation]] = {}
    for evaluation in read_lines(directory / "evaluations.jsonl", lambda line: _evaluation(line, names)):
        history = evaluations.setdefault(evaluation.task, [])
        while history and history[-1].step >= evaluation.step:  # the run went back: it undid these
            history.pop()
        history.append(evaluation)
    if not evaluations:
        raise ConfigError(f"{directory / 'evaluations.jsonl'} is empty: the run has evaluated nothing yet")
    if not whole:
        return RunRecord(
            name=name or str(directory), config=config, evaluations=evaluations, directory=directory
        )
    numbers: dict[str, dict[str, dict[int, float]]] = {"weight": {}, "share_trained": {}}
    for step, row in join_lines(read_lines(directory / "metrics.jsonl", task_numbers), names).items():
        for parts, value in ((key.split("/"), value) for key, value in row.items()):
            if len(parts) == 3:
                numbers[parts[2]].setdefault(parts[1], {})[step] = value
    return RunRecord(
        name=name or str(directory),
        config=config,
        evaluations=evaluations,
        directory=directory,
        weights=numbers["weight"],
        shares=numbers["share_trained"],
        events=list(read_lines(directory / "events.jsonl", typed(_EVENT))),
        stages=summarise(
            {**line, "task": names.get(line["task"], line["task"])}
            for line in read_lines(directory / "timeline.jsonl", typed(_SPAN))
        ),
    )


def read_lines(path: Path, convert: Callable[[dict[str, Any]], T]) -> Iterator[T]:
    """Yield what ``convert`` makes of the whole lines of a JSONL file that a run wrote, if it exists.

    A line that is no JSON, as a crash leaves one, is left out with a warning.

    Raises:
        ConfigError: names the line that is no object, or that ``convert`` cannot read.
    """
    if not path.exists():
        return
    allowed = "the output directory of a run whose records can be read"
    with path_errors("the record", path, allowed), path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = load_line(line)
            except (ValueError, RecursionError) as error:
                tell_left_out(f"{path}:{number}", str(error))
                continue
            if not isinstance(record, dict):
                raise ConfigError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
            try:
                converted = convert(record)
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                told = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise ConfigError(
                    f"{path}:{number}: not a line as a run writes it: {told}; restore the file, or take the "
                    "line out"
                ) from error
            yield converted


@cache  # a page reads some files twice, and ``watch`` again and again
def tell_left_out(where: str, why: str) -> None:
    """Warn, once, that the record at ``where`` is left out."""
    logger.warning("%s: not a line of JSON (%s); it is left out", where, why)


def join_lines(
    lines: Iterable[Mapping[str, float]], former: Mapping[str, str]
) -> dict[int, dict[str, float]]:
    """Return step -> its numbers, from lines of ``metrics.jsonl`` in their order.

    An evaluation, the guard and a step write one line each. Steps that a rollback undid are left out. Tasks
    have the names that ``former`` (``former_names``) gives them.
    """
    rows: dict[int, dict[str, float]] = {}
    newest = 0
    for line in lines:
        step = int(line["step"])
        if _MADE in line:
            if step <= newest:  # the run went back
                for undone in [at for at in rows if at >= step]:
                    del rows[undone]
            newest = step
        rows.setdefault(step, {}).update(
            {_present_name(key, former): value for key, value in line.items()} if former else line
        )
    return rows


def _present_name(key: str, former: Mapping[str, str]) -> str:
    """Return the metric ``key`` with the present names of its tasks; ``task/a/cosine/b`` has two."""
    parts = key.split("/")
    if parts[0] == "task":
        for at in (1, 3) if parts[2:3] == ["cosine"] else (1,):
            parts[at] = former.get(parts[at], parts[at])
    return "/".join(parts)


def former_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return former name -> name of the tasks that a resume renamed."""
    specs = config.get("tasks")
    named = specs if isinstance(specs, Mapping) else {}
    former: dict[str, str] = {}
    for name, spec in named.items():
        if isinstance(spec, Mapping):
            names = (*(spec.get("former_names") or ()), spec.get("renamed_from") or "")
            former |= {str(old): name for old in names}
    return {old: name for old, name in former.items() if old and old not in named}


def _evaluation(line: Mapping[str, Any], names: Mapping[str, str]) -> Evaluation:
    task = names.get(str(line["task"]), str(line["task"]))
    if "direction" not in line:
        raise ConfigError(
            f"the evaluation of task {task!r} at step {line.get('step')} does not say which way its metric "
            "gets better: it was written by another version; read it with that one"
        )
    values = line["values"]
    try:
        is_plain = type(values) is list and math.isfinite(math.fsum(values))
    except (TypeError, ValueError, OverflowError):
        is_plain = False
    if not is_plain:
        values = [math.nan if value is None else float(value) for value in values]
        values = [value if math.isfinite(value) else math.nan for value in values]
    return Evaluation(
        step=int(line["step"]),
        task=task,
        metric=str(line["metric"]),
        values=values,
        direction=Direction(line["direction"]),
        error=math.nan if line.get("error") is None else float(line["error"]),
        prompts=str(line.get("prompts", "")),
        definitions={str(k): str(v) for k, v in line.get("definitions", {}).items()},
        samples=int(line.get("samples", 1)),
        metrics={k: float(v["mean"]) for k, v in line.get("metrics", {}).items() if v["mean"] is not None},
    )
