"""Which of the judged-good checkpoints a rollback returns to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multitask_rl.guard.decision import CheckpointInfo

__all__ = ["choose_target"]


def choose_target(
    good: Sequence[CheckpointInfo], seen: Sequence[tuple[int, float, float]], *, fell_after: int
) -> CheckpointInfo | None:
    """Return the newest checkpoint from before the fall at which the fallen metric still was at its height.

    "Judged good" bounds the level from below only: an evaluation on the way down may pass by itself. A
    checkpoint's level is therefore the mean of its evaluation and the ones next to it, and it has to be
    within a standard error of the best such level among the candidates. One that is not a standard error
    above the present value is no candidate: the run has learnt more since than it has lost.

    Args:
        good: candidates, judged good and in reach.
        seen: (step, value, standard error) of the fallen metric at every evaluation, the present one last;
            higher is better.
        fell_after: step after which the fall began, as far as the screen can tell; candidates up to it are
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
