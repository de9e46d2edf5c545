"""What training on one task changed in others, from the evaluations of one run.

Between two evaluations each task had a share of the prompts trained on, and each held-out result changed. The
effects of tasks are told apart only as far as their shares moved independently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import special

from multitask_rl.report.differences import measure_the_same, share_prompts
from multitask_rl.statistics.intervals import NOT_TOLD_APART, compare_means, holm, student_tails
from multitask_rl.tracking.reading import Evaluation, RunRecord

_MOST_INTERVALS = 12
"""Rows of the table; of more evaluations each row joins several."""
_MOST_CONDITION = 1e8
"""Condition number of the shares above which they count as collinear."""
_FEWEST_DEGREES = 3
"""Of freedom. Student's intervals of one are four times as wide as those of three."""


def influence(run: RunRecord) -> dict[str, Any]:
    """Return shares and changes per interval between evaluations, and effects of tasks on tasks.

    An evaluation counts if it has the metric and the definition of the last one of its task.

    ``intervals``: each task's share of the groups trained on, and its held-out change with a 95 % interval,
    paired by prompt. ``effects``: see ``_effects``. ``reason``: why there are no effects.
    """
    steps = sorted({e.step for history in run.evaluations.values() for e in history})
    by_step = {
        task: {e.step: e for e in history if measure_the_same(e, history[-1])}
        for task, history in run.evaluations.items()
    }
    stride = math.ceil((len(steps) - 1) / _MOST_INTERVALS) or 1
    shown = [*steps[:-1:stride], *steps[-1:]]
    intervals = []
    for first, last in pairwise(shown):
        changes = {}
        for task, own in by_step.items():
            pair = _ends(own, first, last)
            if pair is not None:
                paired = share_prompts(run, run, *pair)
                found = compare_means(pair[0].values, pair[1].values, paired=paired)
                changes[task] = {"delta": found.delta, "low": found.low, "high": found.high}
        intervals.append({"steps": [first, last], "shares": _shares(run, first, last), "changes": changes})
    effects, reason = _effects(run, by_step, steps)
    return {"intervals": intervals, "effects": effects, "reason": reason}


def _ends(by_step: Mapping[int, Evaluation], first: int, last: int) -> tuple[Evaluation, Evaluation] | None:
    """Return a task's evaluations at both steps if they have the same metric and definition."""
    start, end = by_step.get(first), by_step.get(last)
    if start is None or end is None or not measure_the_same(start, end):
        return None
    return start, end


def _shares(run: RunRecord, first: int, last: int) -> dict[str, float]:
    """Return the mean share of each trained task over the steps ``first + 1`` to ``last``."""
    sums = {
        task: math.fsum(share for step, share in own.items() if first < step <= last)
        for task, own in run.shares.items()
        if any(own.values())
    }
    total = math.fsum(sums.values())
    return {task: own / total if total else math.nan for task, own in sums.items()}


def _effects(
    run: RunRecord, by_step: Mapping[str, Mapping[int, Evaluation]], steps: Sequence[int]
) -> tuple[list[dict[str, Any]], str]:
    """Return the effect of each trained task on each task, or why there is none.

    Least squares over the intervals between evaluations, per changed task::

        change = sum over trained tasks (effect * share * length) + trend * (time - mean time) * length

    ``length`` is in mean intervals. So an effect is the change in an interval of mean length, in the middle
    of the run, with prompts of that task alone. The trend takes up that learning slows whatever the shares
    are. Intervals are Student's. They are too wide, because two neighbouring changes share an evaluation and
    its noise. Verdicts are corrected for their number (Holm).
    """
    intervals = list(pairwise(steps))
    shares = [_shares(run, *ends) for ends in intervals]
    trained = list(dict.fromkeys(task for own in shares for task in own))
    if len(trained) < 2:
        return [], "one task was trained, so all changes are its own" if trained else ""
    lengths = np.diff(np.array(steps, dtype=float))
    middles = (np.array(steps[1:]) + np.array(steps[:-1])) / 2
    time = (middles - middles.mean()) / (float(np.ptp(middles)) or 1.0)
    columns = [[own.get(task, 0.0) for own in shares] for task in trained]
    design = np.nan_to_num(np.array([*columns, time])).T * (lengths / lengths.mean())[:, None]
    found: list[dict[str, Any]] = []
    reasons: dict[str, list[str]] = {}
    for task, evaluations in by_step.items():
        pairs = [_ends(evaluations, *ends) for ends in intervals]
        # between other prompts the change is not of training
        pairs = [pair if pair is None or share_prompts(run, run, *pair) else None for pair in pairs]
        rows = [at for at, pair in enumerate(pairs) if pair is not None]
        y = np.array([pair[1].mean - pair[0].mean for pair in pairs if pair is not None])
        x = design[rows][np.isfinite(y)]
        y = y[np.isfinite(y)]
        degrees = len(y) - x.shape[1]
        if degrees < _FEWEST_DEGREES:
            needed = x.shape[1] + _FEWEST_DEGREES
            reason = f"{needed} intervals between evaluations are needed, there are {len(y)}"
            reasons.setdefault(reason, []).append(task)
            continue
        if np.linalg.cond(x) > _MOST_CONDITION:
            reasons.setdefault("the shares of the tasks moved together or not at all", []).append(task)
            continue
        fitted, *_ = np.linalg.lstsq(x, y, rcond=None)
        error = np.sqrt(((y - x @ fitted) ** 2).sum() / degrees * np.diag(np.linalg.inv(x.T @ x)))
        half = error * float(special.stdtrit(degrees, 0.975))
        is_better = run.evaluations[task][-1].direction.sign
        for at, name in enumerate(trained):
            effect, width = float(fitted[at]), float(half[at])
            p_value = student_tails(effect / float(error[at]), degrees) if error[at] > 0 else math.nan
            own = {"trained": name, "task": task, "sign": is_better, "p_value": p_value}
            found.append({**own, "effect": effect, "low": effect - width, "high": effect + width})
    for row, p_value in zip(found, holm([row["p_value"] for row in found]), strict=True):
        sign = row.pop("sign")
        verdict = "unknown" if math.isnan(p_value) else NOT_TOLD_APART
        if p_value < 0.05:
            verdict = "better" if sign * row["effect"] > 0 else "worse"
        row |= {"p_value": p_value, "verdict": verdict}
    told = [
        reason if len(tasks) == len(by_step) else f"of {', '.join(tasks)}: {reason}"
        for reason, tasks in reasons.items()
    ]
    return found, "; ".join(told)


def turnover(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Return per task the shares of prompts that the last evaluation solves and the first did not, and back.

    Pairs by prompt: the last evaluation, and the first one of the same prompts, metric and definition. A
    prompt is solved if its value reaches the task's ``solved_at``; without one, values have to be all 0 or 1.
    Other tasks have no row, nor have tasks with several responses per prompt, of which ``pass@k`` tells how
    many solve it.
    """
    specs = run.config.get("tasks")
    found = {}
    for task, history in run.evaluations.items():
        last = history[-1]
        alike = [e for e in history[:-1] if measure_the_same(e, last) and share_prompts(run, run, e, last)]
        if not alike or not alike[0].samples == last.samples == 1:
            continue
        first = alike[0]
        spec = specs.get(task) if isinstance(specs, Mapping) else None
        at = spec.get("solved_at") if isinstance(spec, Mapping) else None
        pairs = [
            (a, b)
            for a, b in zip(first.values, last.values, strict=True)
            if math.isfinite(a) and math.isfinite(b)
        ]
        if not isinstance(at, int | float) and not {value for pair in pairs for value in pair} <= {0.0, 1.0}:
            continue
        sign = last.direction.sign
        # as ``pass@k`` does it: a sum of weighted rewards may lack the last digit
        least = sign * (float(at) if isinstance(at, int | float) else max(0, sign)) - 1e-9
        solved = [(sign * a >= least, sign * b >= least) for a, b in pairs]
        number = len(solved)
        if number:
            found[task] = {
                "n": number,
                "kept": sum(a and b for a, b in solved) / number,
                "lost": sum(a and not b for a, b in solved) / number,
                "gained": sum(b and not a for a, b in solved) / number,
            }
    return found
