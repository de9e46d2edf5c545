"""Sampling by all learner ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multitask_rl.rollout.base import Ended, GenerationRequest, most_tokens
from multitask_rl.training.backends.balance import share_out
from multitask_rl.training.backends.calls import RankCalls
from multitask_rl.training.backends.rank_connections import RankLines

__all__ = ["spread_samples"]


def spread_samples(
    calls: RankCalls,
    lines: RankLines,
    size: int,
    requests: Sequence[GenerationRequest],
    own: Callable[[Sequence[GenerationRequest]], Iterator[list[Ended]]],
) -> Iterator[list[Ended]]:
    """Yield the samples of ``requests`` as they end, everybody at some of them (``rollout.base.stream``).

    Args:
        calls: of the other ranks.
        lines: to them.
        size: number of ranks.
        requests: those with a ``watch`` stay in this process.
        own: this process's engine.
    """
    free = [i for i, request in enumerate(requests) if request.watch is None]
    shares = share_out([most_tokens(requests[i]) for i in free], size)
    indices = [[free[position] for position in share] for share in shares]
    indices[0] = sorted({*range(len(requests))} - {i for share in indices[1:] for i in share})
    busy: set[int] = set()
    with calls.at_work():
        try:
            for rank in range(1, size):
                if indices[rank]:
                    lines.send(rank, ("sample", ([requests[i] for i in indices[rank]],)))
                    busy.add(rank)
            for ended in own([requests[i] for i in indices[0]]):
                yield [(indices[0][i], j, generation) for i, j, generation in ended]
                while busy and (message := lines.receive("sampling", sorted(busy), time.monotonic())):
                    yield _ended(message, indices, busy)
            while busy and (message := lines.receive("sampling", sorted(busy))):
                yield _ended(message, indices, busy)
        except GeneratorExit:
            while busy and (message := lines.receive("sampling", sorted(busy))):
                _ended(message, indices, busy)  # nobody wants the rest, but the next call a quiet line
            raise


def _ended(message: tuple[int, str, Any], indices: Sequence[Sequence[int]], busy: set[int]) -> list[Ended]:
    """Return what a rank's message tells of samples; a rank that is done is busy no more."""
    rank, kind, content = message
    if kind == "done":
        busy.discard(rank)
        return []
    return [(indices[rank][i], j, generation) for i, j, generation in content]
