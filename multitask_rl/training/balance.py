"""Divides samples among learner ranks, and requests among engines, so that all end at about the same time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from multitask_rl.rollout.base import GenerationRequest, most_tokens


def share_out(costs: Sequence[float], number: int) -> list[list[int]]:
    """Split the positions of ``costs`` into ``number`` ascending lists, so that their sums are about equal.

    Greedy: in descending order of cost, each position goes to the list with the smallest sum. The largest sum
    is at most 4/3 of the smallest possible one (Graham 1969).

    >>> share_out([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(number)]
    loads = [0.0] * number
    for position in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        index = loads.index(min(loads))
        shares[index].append(position)
        loads[index] += costs[position]
    return [sorted(share) for share in shares]


def deal(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], number: int, hidden_size: int
) -> list[list[int]]:
    """Return the positions of samples for each of ``number`` ranks, of about equal cost, in ascending order.

    Samples of one prompt stay together, because a prompt is computed once for all of them. A group that costs
    more than a rank's fair share is halved. ``hidden_size`` weighs attention against the other layers.
    """
    if number == 1:
        return [list(range(len(prompts)))]

    def cost(group: list[int]) -> float:
        start = len(prompts[group[0]])
        total = start * (1.0 + start / (12.0 * hidden_size))
        for i in group:
            own = len(responses[i])
            # keys: the prompt and, on average, half the response
            total += own * (1.0 + (2.0 * start + own) / (12.0 * hidden_size))
        return total

    groups: dict[tuple[int, ...], list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt), []).append(i)
    waiting = list(groups.values())
    fair = sum(map(cost, waiting)) / number
    whole: list[list[int]] = []
    while waiting:
        group = waiting.pop()
        if len(group) > 1 and cost(group) > fair:
            waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
        else:
            whole.append(group)
    shares = share_out([cost(group) for group in whole], number)
    return [sorted(i for position in share for i in whole[position]) for share in shares]


class Homes:
    """Which of several engines samples a request: a turn goes where the turns before it were sampled."""

    def __init__(self) -> None:
        self._homes: dict[int, int] = {}
        """Conversation -> engine that keeps its keys and values."""

    def __bool__(self) -> bool:
        """Whether any conversation is assigned to an engine."""
        return bool(self._homes)

    def deal(self, requests: Sequence[GenerationRequest], engines: Collection[int]) -> dict[int, list[int]]:
        """Return engine -> positions of its requests, ascending; engines without a request are left out.

        A request goes to the engine of its conversation. Requests without one in ``engines`` are split so
        that the sums of their tokens (``most_tokens``) are about equal.
        """
        known = [next((self._homes[c] for c in r.conversations if c in self._homes), None) for r in requests]
        new = [i for i, home in enumerate(known) if home not in engines]
        dealt = share_out([most_tokens(requests[i]) for i in new], len(engines))
        shares = {engine: [new[i] for i in share] for engine, share in zip(engines, dealt, strict=True)}
        for i, home in enumerate(known):
            if home is not None and home in engines:
                shares[home].append(i)
        for home, share in shares.items():
            for i in share:
                self._homes.update(dict.fromkeys(requests[i].conversations, home))
        return {engine: sorted(share) for engine, share in shares.items() if share}

    def retain(self, conversations: Collection[int]) -> None:
        """Forget all but ``conversations``."""
        self._homes = {c: home for c, home in self._homes.items() if c in conversations}

    def leave(self, engine: int) -> None:
        """Forget the conversations assigned to ``engine``, which has ended."""
        self._homes = {c: home for c, home in self._homes.items() if home != engine}
