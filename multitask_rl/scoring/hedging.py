"""Size of a lane's calls, and the items that are sent again when a call stalls."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from multitask_rl.scoring.items import Call, Item

__all__ = ["GROW_AFTER_S", "STALL_S", "call_size", "held_up", "is_out_of_patience", "next_size"]

ONE_BY_ONE_CALL_S = 0.05
BATCH_CALL_S = 5.0
GROW_AFTER_S = 0.1
STALL_S = 0.4


def call_size(most: int, mean_s: float, limit: float, *, one_by_one: bool) -> int:
    """Return how many items make a call of the length aimed at.

    Args:
        most: the largest call the plugin takes.
        mean_s: seconds per item so far; 0 = not known.
        limit: seconds for one item.
        one_by_one: the plugin is only a loop; nothing is gained by larger calls.
    """
    if not mean_s:
        return 1 if one_by_one else most
    target = ONE_BY_ONE_CALL_S if one_by_one else min(BATCH_CALL_S, limit / 8)  # well within patience
    return max(1, min(most, int(target / mean_s)))


def next_size(queue: deque[Item], now: float, most: int) -> int:
    """Rotate ``queue`` until its first item may go; return how many from there make the next call."""
    for _ in range(len(queue)):
        if queue[0].ready_at <= now:
            break
        queue.rotate(-1)
    else:
        return 0
    size = 1
    while not queue[0].alone and size < min(most, len(queue)):
        item = queue[size]
        if item.alone or item.ready_at > now:
            break
        size += 1
    return size


def is_out_of_patience(call: Call, now: float, limit: float) -> bool:
    """Return whether ``call`` has been silent so long that the plugin may be down."""
    return now - call.began > max(STALL_S, limit / 4)


def held_up(call: Call, now: float, queued: Collection[int], *, limit: float, waits: bool) -> list[Item]:
    """Return the items of a stalled ``call`` that are due to be sent again, each alone.

    Items behind the current one are sent at once. Of a batch, one item is sent first, to show that the plugin
    answers; when the patience is over, all are sent, because the item that hangs is not known.

    Args:
        call: its items do not depend on each other.
        now: ``time.monotonic()``.
        queued: ids of the items that wait already.
        limit: seconds for one item.
        waits: the plugin waits for others: a second request costs money, not time.
    """
    if len(call.items) < 2 or call.hedged:
        return []
    is_late = now - call.began > limit if waits else is_out_of_patience(call, now, limit)
    if call.each or is_late:
        call.hedged = True
        current = call.current()[: call.each]
        due = [item for item in call.open() if item not in current and (call.each or not item.alone)]
    else:
        due = call.open()[: not any(item.alone for item in call.items)]
    return [item for item in due if id(item) not in queued]
