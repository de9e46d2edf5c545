"""The page of compared runs: ``multitask-rl compare RUN RUN... --html FILE``."""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from multitask_rl.boundary.printable import counted
from multitask_rl.records import Direction
from multitask_rl.report.differences import are_alike
from multitask_rl.report.samples import clipped, deflated
from multitask_rl.report.shell import render_shell, rounded
from multitask_rl.statistics.seeds import mean_of_arm
from multitask_rl.tracking.jsonl import whole_records
from multitask_rl.tracking.reading import Evaluation, RunRecord
from multitask_rl.tracking.spending import COSTS, Spending

_MOST_POINTS = 120
"""Of a curve of training rewards; of longer ones each point is the mean of a block of steps."""
_MOST_PROMPTS = 300
_MOST_ANSWERS = 3
"""Most answers of one arm to one prompt: the newest ones."""
_MOST_CHARACTERS = 6_000
"""Most characters of one prompt or answer."""
_TEXT_BYTES = 12_000_000
"""Most bytes of all prompts and answers before compression."""
_RECORD_BYTES = 200_000_000
"""Read of all runs' stored samples together, the newest of each; at most a twelfth of it of one run."""
_Spent = Callable[[int], dict[str, float]]
"""``Spending.at`` of a run."""
_HEAD = re.compile(rb'"step": ?(\d+), ?"task": ?("(?:[^"\\]|\\.)*"), ?"prompt_id": ?("(?:[^"\\]|\\.)*")')


def render_comparison_page(
    result: Mapping[str, Any],
    runs: Sequence[Sequence[RunRecord]],
    spendings: Sequence[Sequence[Spending]],
    level: float | None,
) -> str:
    """Return the page of what ``compare`` found; ``runs`` and ``spendings`` are those of each arm.

    Raises:
        ConfigError: a record cannot be read.
    """
    short = _short([arm["name"] for arm in result["arms"]])
    arms = [{**arm, "name": short[arm["name"]]} for arm in result["arms"]]
    comparisons = [
        {**one, "base": short[one["base"]], "other": short[one["other"]]} for one in result["comparisons"]
    ]
    dominates = {short[arm]: [short[other] for other in own] for arm, own in result["dominates"].items()}
    tasks = list(dict.fromkeys(task for arm in arms for task in arm["tasks"]))
    verdicts = [row["verdict"] for one in result["comparisons"] for row in one["tasks"].values()]
    num_runs = sum(len(arm["runs"]) for arm in arms)
    name = arms[0]["name"] if len(arms) == 1 else f"{arms[0]['name']} and {len(arms) - 1} more"
    lower = [
        task
        for task in tasks
        if any(
            e.direction is Direction.lower
            for own in runs
            for run in own
            for e in run.evaluations.get(task, ())[:1]
        )
    ]
    if len(arms) == 2:
        name = f"{arms[0]['name']} against {arms[1]['name']}"
    # what a run has spent until a step is the same for every task
    spent = [[cache(spending.at) for spending in own] for own in spendings]
    data = {
        "name": name,
        "subtitle": ", ".join(
            counted(number, word)
            for number, word in ((len(arms), "arm"), (num_runs, "run"), (len(tasks), "task"))
        ),
        "arms": arms,
        "tasks": tasks,
        "lower": lower,
        "tiles": [
            ["arms", len(arms), "runs that differ in more than the seed"],
            ["runs", num_runs, f"{len(result['left_out'])} left out" if result["left_out"] else ""],
            ["better", verdicts.count("better"), f"of {len(verdicts)} verdicts"],
            ["worse", verdicts.count("worse"), f"{verdicts.count('not told apart')} not told apart"],
        ],
        "notes": [*result["notes"], *result["unfinished"]],
        "left_out": list(result["left_out"].items()),
        "result": {
            **{key: result[key] for key in ("keys", "num_verdicts", "levels", "reached", "costs", "effects")},
            "comparisons": comparisons,
            "dominates": dominates,
        },
        "level_is": "the last level of the first arm" if level is None else f"the level {level:g}",
        "curves": [_held_out(task, runs, spent) for task in tasks],
        "rewards": [chart for task in tasks if (chart := _rewards(task, arms, spendings))],
        "stored": _side_by_side(runs),
    }
    return render_shell(name, "compare.js", data)


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return the names of arms without the directory that holds all of them."""
    is_path = all("/" in name and "=" not in name and ":" not in name for name in names)
    if not is_path or len(names) < 2 or len({Path(name).is_absolute() for name in names}) > 1:
        return {name: name for name in names}
    common = os.path.commonpath([os.path.dirname(name) for name in names])
    return {name: os.path.relpath(name, common) if common else name for name in names}


def _held_out(
    task: str, runs: Sequence[Sequence[RunRecord]], spent: Sequence[Sequence[_Spent]]
) -> dict[str, Any]:
    """Return the held-out curve of a task: per arm mean, interval and costs at each step; None = has none."""
    histories = [run.evaluations[task] for own in runs for run in own if run.evaluations.get(task)]
    if not histories:
        return {"task": task, "metric": "", "arms": [None] * len(runs)}
    present, found = histories[0][-1], list[dict[str, Any] | None]()
    for own, spent_by in zip(runs, spent, strict=True):
        at: dict[int, list[tuple[Evaluation, _Spent]]] = {}
        for run, until in zip(own, spent_by, strict=True):
            for evaluation in run.evaluations.get(task, ()):
                if are_alike(evaluation, present):
                    at.setdefault(evaluation.step, []).append((evaluation, until))
        if not at:
            found.append(None)
            continue
        curve: dict[str, Any] = {"steps": sorted(at), "y": [], "low": [], "high": [], "spent": {}}
        for step in curve["steps"]:
            evaluations = [evaluation for evaluation, _ in at[step]]
            crossed = len({(e.prompts, len(e.values)) for e in evaluations}) == 1
            ends = mean_of_arm([e.values for e in evaluations], crossed=crossed)
            if len(evaluations) == 1 and math.isnan(ends[1]):  # all values are equal
                half = 1.96 * evaluations[0].error
                ends = ends[0], ends[0] - half, ends[0] + half
            for key, value in zip(("y", "low", "high"), ends, strict=True):
                curve[key].append(rounded(value))
        spent_at = [[until(step) for _, until in at[step]] for step in curve["steps"]]
        for cost in COSTS[1:]:
            curve["spent"][cost] = [
                rounded(math.fsum(own[cost] for own in runs_of) / len(runs_of)) for runs_of in spent_at
            ]
        found.append(curve)
    return {"task": task, "metric": present.metric, "arms": found}


def _rewards(
    task: str, arms: Sequence[Mapping[str, Any]], spendings: Sequence[Sequence[Spending]]
) -> dict[str, Any] | None:
    """Return the chart of a task's training reward; None without one."""
    own = [[s.rewards[task] for s in spent if task in s.rewards] for spent in spendings]
    last = max((step for runs in own for run in runs for step in run), default=0)
    if not last:
        return None
    width = math.ceil(last / _MOST_POINTS)
    lines, xs = [], range(width, last + width, width)
    for arm, runs in zip(arms, own, strict=True):
        if not runs:
            continue
        blocks: list[list[list[float]]] = [[[] for _ in runs] for _ in xs]
        for index, run in enumerate(runs):
            for step, value in run.items():
                blocks[(step - 1) // width][index].append(value)
        means = [[math.fsum(values) / len(values) for values in block if values] for block in blocks]
        line = {"name": arm["name"], "y": [rounded(math.fsum(m) / len(m)) if m else None for m in means]}
        if len(runs) > 1:
            line["low"], line["high"] = (
                [rounded(end(m)) if m else None for m in means] for end in (min, max)
            )
        lines.append(line)
    note = "mean reward of the step's slots" + (f"; blocks of {width} steps" if width > 1 else "")
    return {"id": f"reward-{task}", "title": task, "note": note, "x": list(xs), "lines": lines}


def _side_by_side(runs: Sequence[Sequence[RunRecord]]) -> dict[str, Any]:
    """Return prompts that stored samples of two arms or more answer, deflated, the most shared ones first."""
    files = sum(len(own) for own in runs)
    most = min(_RECORD_BYTES // 12, _RECORD_BYTES // files)
    places: dict[tuple[bytes, bytes], dict[int, list[tuple[int, int, int, int]]]] = {}
    is_cut = False
    for arm, own in enumerate(runs):
        for number, run in enumerate(own):
            path = run.directory / "rollouts.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as stream:
                offset = max(0, path.stat().st_size - most)
                is_cut = is_cut or offset > 0
                stream.seek(offset)
                if offset:
                    offset += len(stream.readline())
                for line in stream:
                    head = _HEAD.match(line, 1)
                    if head and line.endswith(b"\n"):
                        place = (int(head[1]), number, offset, len(line))
                        places.setdefault((head[2], head[3]), {}).setdefault(arm, []).append(place)
                    offset += len(line)
    shared = [(key, own) for key, own in places.items() if len(own) > 1]
    if not shared:
        why = (
            "No run stored a sample (tracking.store_rollouts)."
            if not places
            else (
                "One arm." if len(runs) == 1 else "No prompt was answered by two arms in the stored samples."
            )
        )
        return {"number": 0, "why": why, "texts": "", "note": ""}
    shared.sort(key=lambda item: (-len(item[1]), -max(step for own in item[1].values() for step, *_ in own)))
    found: list[dict[str, Any]] = []
    size = 0
    for _, of_arms in shared[:_MOST_PROMPTS]:
        answers: list[list[dict[str, Any]]] = [[] for _ in runs]
        first: dict[str, Any] = {}
        for arm, found_at in of_arms.items():
            for step, number, offset, length in sorted(found_at, reverse=True)[:_MOST_ANSWERS]:
                run = runs[arm][number]
                sample = _line(run.directory / "rollouts.jsonl", offset, length)
                first = first or sample
                answers[arm].append({"step": step, "seed": run.config.get("seed"), **_answer(sample)})
        rewards = [
            math.fsum(known) / len(known)
            for own_answers in answers
            if (known := [a["reward"] for a in own_answers if a["reward"] is not None])
        ]
        row = first.get("row")
        row = row if isinstance(row, dict) else {}
        reference = row.get("reference", row.get("answer", ""))
        found.append(
            {
                "task": str(first.get("task", "?")),
                "id": str(first.get("prompt_id", "?")),
                "prompt": clipped(str(first.get("prompt", "")), _MOST_CHARACTERS),
                "reference": clipped(
                    reference if isinstance(reference, str) else json.dumps(reference), 2_000
                ),
                "step": max(answer["step"] for own_answers in answers for answer in own_answers),
                "apart": rounded((max(rewards) - min(rewards)) / 2) if len(rewards) > 1 else None,
                "answers": answers,
            }
        )
        size += len(found[-1]["prompt"]) + sum(len(a["response"]) for own in answers for a in own)
        if size > _TEXT_BYTES:
            break
    note = "Of each run the newest stored samples were read. " if is_cut else ""
    if len(found) < len(shared):
        note += f"{len(shared) - len(found)} more are in the records alone."
    texts = base64.b64encode(deflated(found)).decode()
    return {"number": len(found), "why": "", "texts": texts, "note": note}


def _line(path: Path, offset: int, length: int) -> dict[str, Any]:
    with path.open("rb") as stream:
        stream.seek(offset)
        return next(whole_records([stream.read(length)]), {})


def _answer(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of one stored sample."""
    reward, failure = line.get("reward"), line.get("failure")
    marks = {
        "refused": line.get("rejected"),
        "failed": failure,
        "cut": line.get("finish_reason") == "length",
    }
    return {
        "reward": rounded(float(reward)) if isinstance(reward, int | float) else None,
        "marks": [name for name, is_so in marks.items() if is_so],
        "response": clipped(str(line.get("response", "")), _MOST_CHARACTERS),
    }
