"""What a run has spent up to each step, and its training rewards, read quickly from ``metrics.jsonl``.

A line of twenty tasks has 30 kB, of which a comparison needs a hundred bytes. So lines are searched for the
names of metrics and not parsed.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multitask_rl.errors import path_errors

COSTS = ("steps", "samples", "tokens", "seconds")
_SECONDS, _STEP = b'"time/step_s"', b'"step"'
_RATES = {"samples": b'"time/samples_per_s"', "tokens": b'"time/tokens_per_s"'}
_NUMBER = re.compile(rb"\s*:\s*(-?[0-9][0-9.eE+-]*)")
_ALL, _ONE = 2**20, 2**16
"""Bytes read at once, of the whole file and at a place. Lines of twenty tasks are longer than Python's
buffer, with which reading takes five times as long."""


@dataclass(kw_only=True, slots=True)
class Spending:
    """What a run has spent; steps that a rollback undid count, steps that a resume repeats count once."""

    steps: list[int] = field(default_factory=list)
    """The steps made, each once, in order."""
    lines: list[int] = field(default_factory=list)
    """Of each step, the number of its last line: after a rollback a run makes steps again."""
    spent: dict[str, list[float]] = field(default_factory=dict)
    """``seconds``, ``samples``, ``tokens`` -> sum up to each line; NaN where the run recorded none."""
    rewards: dict[str, dict[int, float]] = field(default_factory=dict)
    """Task -> step -> ``reward_mean``, of the lines taken."""

    def at(self, step: int) -> dict[str, float]:
        """Return what was spent until the run had made ``step`` steps, with what rollbacks before undid."""
        if step > 0 and not self.is_whole:
            return {**dict.fromkeys(COSTS, math.nan), "steps": float(step)}
        place = bisect_right(self.steps, step)
        index = self.lines[place - 1] if place else None
        spent = {key: own[index] if index is not None else 0.0 for key, own in self.spent.items()}
        made = float(index + 1) if index is not None else 0.0
        return {**dict.fromkeys(COSTS, math.nan), "steps": made, **spent}

    @property
    def is_whole(self) -> bool:
        """Whether the lines begin with the run: those of a fork begin behind the steps that it took over."""
        return bool(self.steps) and self.steps[0] <= 1

    @property
    def total(self) -> dict[str, float]:
        """Everything that the run has spent; without steps nothing is known."""
        if not self.steps:
            return dict.fromkeys(COSTS, math.nan)
        if not self.is_whole:
            return self.at(self.steps[-1])
        spent = {key: own[-1] for key, own in self.spent.items()}
        return {**spent, "steps": float(len(self.spent["seconds"]))}


def read_spending(path: Path, tasks: Sequence[str], most_lines: int = 400) -> Spending:
    """Read the costs of every step from ``metrics.jsonl``, and the mean rewards of ``tasks``.

    Rewards are read from at most ``most_lines`` lines at equal distances. A line without a step number or
    ``time/step_s`` is skipped. If a line lacks a rate, that cost is NaN from this line on. A missing file
    gives an empty result.
    """
    found = Spending()
    if not path.exists():
        return found
    lines: list[tuple[int, int]] = []
    last: dict[int, int] = {}
    each: dict[str, list[float]] = {"seconds": [], **{key: [] for key in _RATES}}
    with (
        path_errors("the record", path, "the output directory of a run"),
        path.open("rb", buffering=_ALL) as stream,
        path.open("rb", buffering=_ONE) as places,
    ):
        offset = 0
        for line in stream:
            seconds = _number(line, line.rfind(_SECONDS), _SECONDS)
            step = _number(line, line.find(_STEP, 0, 64), _STEP)
            if not math.isnan(seconds) and not math.isnan(step):
                last[int(step)] = len(lines)
                lines.append((offset, int(step)))
                each["seconds"].append(seconds)
                for key, name in _RATES.items():
                    each[key].append(_number(line, line.rfind(name), name) * seconds)
            offset += len(line)
        found.steps = sorted(last)
        found.lines = [last[step] for step in found.steps]
        found.spent = {key: list(itertools.accumulate(own)) for key, own in each.items()}
        names = {task: f'"task/{task}/reward_mean"'.encode() for task in tasks}
        for offset, step in lines[:: max(1, math.ceil(len(lines) / most_lines))] if names else ():
            places.seek(offset)
            line = places.readline()
            at = 0
            for task, name in names.items():  # in the order of the line, so that it is searched once
                place = line.find(name, at)
                place = place if place >= 0 else line.find(name, 0, at)
                at = max(at, place)
                value = _number(line, place, name)
                if not math.isnan(value):
                    found.rewards.setdefault(task, {})[step] = value
    return found


def _number(line: bytes, place: int, name: bytes) -> float:
    """Return the number behind ``name``, at ``place`` of a line of JSON (-1: nowhere); NaN without one."""
    found = _NUMBER.match(line, place + len(name)) if place >= 0 else None
    try:
        return float(found[1]) if found else math.nan
    except ValueError:
        return math.nan
