"""Calls that all learner ranks carry out together, and how long they waited for each other in them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from multitask_rl.errors import MultitaskRLError, TrainingError
from multitask_rl.training.backend import Span
from multitask_rl.training.backends.rank_connections import RankConnections
from multitask_rl.training.backends.ranks import Ranks, Traffic
from multitask_rl.training.backends.replica import Done

__all__ = ["RankCalls"]


class RankCalls:
    """Rank 0's calls of the other ranks.

    Args:
        connections: to them.
        ranks: this process's place among them.
        num_threads: of torch in each rank on a CPU; 0 = torch's choice.
    """

    def __init__(self, connections: RankConnections, ranks: Ranks, num_threads: int) -> None:
        self._connections, self._ranks, self._num_threads = connections, ranks, num_threads
        self._is_busy = False
        self._numbers: dict[str, float] = {}
        self._spans: list[tuple[str, Span]] = []
        ranks.before_sum = self._wait_for_all

    def call(
        self, method: Callable[..., Any], work: Mapping[int, tuple[Any, ...]], own: Callable[[], Any]
    ) -> tuple[Any, list[Any]]:
        """Let every rank do its part at the same time; return this rank's result and those of the others.

        Args:
            method: of ``Replica``.
            work: its arguments, by rank; none where none are given.
            own: does this rank's part.

        Raises:
            MultitaskRLError: what a rank failed with, by its type; TrainingError if it died.
        """
        self._connections.arrived = {}
        with self.at_work():
            for rank in range(1, self._ranks.size):
                self._connections.send(rank, (method, work.get(rank, ())))
            try:
                result = own()
            except MultitaskRLError:
                raise
            except RuntimeError:
                # a collective that broke: a rank that failed or died says more about it
                self._connections.collect("done", method.__name__, until=time.monotonic() + 5.0)
                raise
            answers: dict[int, Done] = self._connections.collect("done", method.__name__)
        self._count(answers)
        return result, [answers[rank].result for rank in sorted(answers)]

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let nothing else be asked of the ranks meanwhile; after an error, nothing ever again."""
        if self._is_busy:
            raise TrainingError(
                "the samples of the last call of the engine have to be fetched to the end first"
            )
        self._is_busy = True
        threads = torch.get_num_threads()
        try:
            if self._num_threads:
                torch.set_num_threads(self._num_threads)
            yield
        except GeneratorExit:  # the rest is not wanted
            raise
        except BaseException as error:
            self._connections.give_up(repr(error))
            raise
        finally:
            self._is_busy = False
            torch.set_num_threads(threads)

    def note(self, began: float) -> None:
        """Note how long each rank computed since ``began`` and waited for the last."""
        arrived = self._connections.arrived
        last = max(arrived, key=lambda rank: arrived[rank])
        for rank, at in sorted(arrived.items()):
            self._spans.append((f"rank{rank}", (began, at)))
            self._add(f"{rank}/busy_s", at - began)
            self._add(f"{rank}/waits_s", arrived[last] - at)
        self._spans.append((f"wait/rank{last}", (min(arrived.values()), arrived[last])))
        self._spans.append(("gradient_sum", (arrived[last], self._ranks.summed_at)))

    def report(self) -> tuple[dict[str, float], list[tuple[str, Span]]]:
        """Return metrics and spans since the last call."""
        numbers, self._numbers = self._numbers, {}
        spans, self._spans = self._spans, []
        return numbers, spans

    def _wait_for_all(self) -> None:
        """Wait until every rank is ready for the sum of gradients."""
        self._connections.arrived[0] = time.monotonic()
        self._connections.collect("arrived", "step")

    def _count(self, answers: Mapping[int, Done]) -> None:
        own, self._ranks.traffic = self._ranks.traffic, Traffic()
        for traffic in [own, *(answer.traffic for answer in answers.values())]:
            self._add("sent_mb", traffic.num_bytes / 2**20)
        self._add("communication_s", own.seconds)

    def _add(self, name: str, value: float) -> None:
        self._numbers[f"ranks/{name}"] = self._numbers.get(f"ranks/{name}", 0.0) + value
