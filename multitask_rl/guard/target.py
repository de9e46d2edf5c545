"""Choice of the checkpoint that a rollback restores."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multitask_rl.guard.decision import CheckpointInfo

__all__ = ["choose_target"]


def choose_target(
    good: Sequence[CheckpointInfo], seen: Sequence[tuple[int, float, float]], *, fell_after: int
) -> CheckpointInfo | None:
    """Return the newest candidate at which the fallen metric was still near its best level; None = none.

    An evaluation during the fall may still be judged good. A checkpoint's level is therefore the mean of its
    evaluation and the evaluations before and after it. The level must be within one standard error of the
    best candidate's level, and more than one standard error above the current value.

    Args:
        good: candidates: judged good and at most ``rollback_steps`` back.
        seen: (step, value, standard error) of the fallen metric at every evaluation, the current one last;
            higher is better.
        fell_after: the detector's estimate of the step after which the fall began; candidates up to it are
            preferred.

    >>> infos = [CheckpointInfo(step=step, judged_good=True) for step in (10, 20, 30)]
    >>> seen = [(10, 0.6, 0.03), (20, 0.6, 0.03), (30, 0.56, 0.03), (40, 0.3, 0.03)]
    >>> choose_target(infos, seen, fell_after=30).step
    20
    """
    levels = {}
    for i, (step, _, _) in enumerate(seen):
        near = [value for _, value, _ in seen[max(0, i - 1) : i + 2]]
        levels[step] = math.fsum(near) / len(near)
    if any(c.step in levels for c in good):
        _, value, error = seen[-1]
        good = [c for c in good if levels.get(c.step, -math.inf) > value + error]
    candidates = [c for c in good if c.step <= fell_after] or list(good)
    known = [c for c in candidates if c.step in levels]
    if known:
        lowest = max(levels[c.step] for c in known) - seen[-1][2]
        candidates = [c for c in known if levels[c.step] >= lowest]
    return max(candidates, key=lambda c: c.step, default=None)
