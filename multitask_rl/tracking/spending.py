"""What a run has spent up to each step, and its training rewards, read quickly from ``metrics.jsonl``.

A line of twenty tasks has 30 kB, of which a comparison needs a hundred bytes. So lines are searched for the
names of metrics and not parsed.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from multitask_rl.errors import path_errors

COSTS = ("steps", "samples", "tokens", "seconds")
_SECONDS, _STEP = b'"time/step_s"', b'"step"'
_RATES = {"samples": b'"time/samples_per_s"', "tokens": b'"time/tokens_per_s"'}
_NUMBER = re.compile(rb"\s*:\s*(-?[0-9][0-9.eE+-]*)")
_MOST_LINES = 240
"""Lines that the rewards are read from, at most."""
_AT_ONCE = 2**20
"""Bytes, at first; a longer line takes twice as many."""


@dataclass(kw_only=True, slots=True)
class Spending:
    """What a run has spent; steps that a rollback undid count, steps that a resume repeats count once."""

    steps: list[int] = field(default_factory=list)
    """The steps made, in order, without those that a rollback undid."""
    lines: list[int] = field(default_factory=list)
    """Of each of ``steps``, the index of its line in the lists of ``spent``, which hold undone steps too."""
    spent: dict[str, list[float]] = field(default_factory=dict)
    """``seconds``, ``samples``, ``tokens`` -> sum up to each line; NaN from the first line that lacks it."""
    rewards: dict[str, dict[int, float]] = field(default_factory=dict)
    """Task -> step -> ``reward_mean``, of the steps taken."""

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


def read_spending(path: Path, tasks: Sequence[str], former: Mapping[str, str] | None = None) -> Spending:
    """Read the costs of every step from ``metrics.jsonl``, and the mean rewards of ``tasks``.

    ``former``: former name -> name of a task that a resume has renamed. Rewards are read from at most
    ``_MOST_LINES`` lines at equal distances. A line without a step number or ``time/step_s`` is skipped. If a
    line lacks a rate, that cost is NaN from this line on. A missing file gives an empty result.
    """
    found = Spending()
    if not path.exists():
        return found
    lines: list[tuple[int, int, int]] = []  # place and length in the file, index, of each of the steps
    each: dict[str, list[float]] = {"seconds": [], **{key: [] for key in _RATES}}
    names = {f'"task/{task}/reward_mean"'.encode(): task for task in tasks}
    names |= {f'"task/{a}/reward_mean"'.encode(): b for a, b in (former or {}).items() if b in tasks}
    with path_errors("the record", path, "the output directory of a run"), path.open("rb", 0) as stream:
        for data, begin, end, place in _lines(stream):
            seconds = _number(data, data.rfind(_SECONDS, begin, end), _SECONDS)
            step = _number(data, data.find(_STEP, begin, min(begin + 64, end)), _STEP)
            if not math.isnan(seconds) and not math.isnan(step):
                while found.steps and found.steps[-1] >= step:  # the run went back: it undid these
                    found.steps.pop()
                    lines.pop()
                found.steps.append(int(step))
                lines.append((place, end - begin, len(each["seconds"])))
                each["seconds"].append(seconds)
                for key, name in _RATES.items():
                    each[key].append(_number(data, data.rfind(name, begin, end), name) * seconds)
        found.lines = [index for *_, index in lines]
        found.spent = {key: list(itertools.accumulate(own)) for key, own in each.items()}
        stride = max(1, math.ceil(len(lines) / _MOST_LINES))
        taken = list(zip(found.steps, lines, strict=True))[::stride] if names else []
        for step, (place, length, _) in taken:
            line = os.pread(stream.fileno(), length, place)
            at = 0
            for name, task in names.items():  # mostly in the order of the line, so that it is searched once
                where = line.find(name, at)
                where = where if where >= 0 else line.find(name, 0, at)
                at = max(at, where)
                value = _number(line, where, name)
                if not math.isnan(value):
                    found.rewards.setdefault(task, {})[step] = value
    return found


def _lines(stream: io.RawIOBase) -> Iterator[tuple[bytearray, int, int, int]]:
    """Yield of each whole line the bytes that hold it, its begin and end in them, and its place in the file.

    The bytes hold a line until the next one is asked for. Python's own lines are copies, and take four times
    as long to read.
    """
    data, kept, place = bytearray(_AT_ONCE), 0, 0
    while count := stream.readinto(memoryview(data)[kept:]):
        filled, begin = kept + count, 0
        while (end := data.find(b"\n", begin, filled)) >= 0:
            yield data, begin, end, place + begin
            begin = end + 1
        kept = filled - begin
        place += begin
        data[:kept] = data[begin:filled]
        if kept == len(data):
            data.extend(bytes(len(data)))


def _number(line: bytes | bytearray, place: int, name: bytes) -> float:
    """Return the number behind ``name``, at ``place`` of a line of JSON (-1: nowhere); NaN without one."""
    found = _NUMBER.match(line, place + len(name)) if place >= 0 else None
    try:
        return float(found[1]) if found else math.nan
    except ValueError:
        return math.nan
