"""Where learner ranks run: processes of this machine, or Ray actors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from multitask_rl.errors import TrainingError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.training.backends.replica import serve

__all__ = ["LocalRank", "RayRanks"]

_BOOT = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from multitask_rl.training.backends import replica; "
)
_END_WITHIN_S = 5.0


class LocalRank:
    """A learner rank as a process of this machine: a clean interpreter, never forked.

    Args:
        where: arguments of ``replica.serve``.
    """

    def __init__(self, where: dict[str, Any]) -> None:
        # -P: a file of the working directory named like a standard module must not be imported in its place
        command = [sys.executable, "-P", "-c", _BOOT + "replica.main()", json.dumps(sys.path)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=2, text=True, start_new_session=True
        )
        if self._process.stdin is None:
            raise AssertionError("a pipe was asked for")
        # not on the command line, where every user of the machine could read the token
        with self._process.stdin as line:
            line.write(json.dumps(where) + "\n")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def ended(self) -> str:
        """Return how it ended; empty while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def kill(self) -> None:
        """End it: nothing that it holds is needed. Idempotent."""
        self._process.kill()
        self._process.wait()


class RayRanks:
    """Starts learner ranks as Ray actors (extra ``ray``).

    Args:
        num_helpers: ranks beside the trainer's.
        num_cpus: of each, and the threads torch uses in it.
        num_gpus: of each.

    Raises:
        MissingExtraError, ConfigError: see ``ActorGroup``.
    """

    def __init__(self, num_helpers: int, *, num_cpus: float = 1.0, num_gpus: float = 0.0) -> None:
        self._group: ActorGroup | None = ActorGroup(
            "learner rank", _make_rank, num_helpers, num_cpus=num_cpus, num_gpus=num_gpus
        )
        self._calls: list[Any] = []

    @property
    def host(self) -> str:
        """The address by which the cluster's machines reach this process."""
        import ray

        return str(ray.util.get_node_ip_address())

    def __call__(self, where: dict[str, Any]) -> _RayRank:
        """Start the rank ``where["rank"]``."""
        if self._group is None:
            raise TrainingError("the learner ranks are closed")
        self._calls.append(self._group.submit(where["rank"] - 1, "serve", where))
        return _RayRank(self, self._calls[-1])

    def close(self) -> None:
        """Stop the actors; those whose connection is closed end by themselves. Idempotent."""
        import ray

        if self._group is not None:
            if self._calls:
                ray.wait(self._calls, num_returns=len(self._calls), timeout=_END_WITHIN_S)
            self._group.close()
            self._group = None


class _RayRank:
    """A started rank."""

    def __init__(self, ranks: RayRanks, call: Any) -> None:
        self._ranks = ranks
        self._call = call

    def ended(self) -> str:
        import ray

        if not ray.wait([self._call], timeout=0)[0]:
            return ""
        try:
            ray.get(self._call)
        except ray.exceptions.RayError as error:
            return f"died: {error}"
        return "ended"

    def kill(self) -> None:
        self._ranks.close()


class _Rank:
    """In the Ray actor."""

    def serve(self, where: dict[str, Any]) -> None:
        if not serve(**where):
            os._exit(1)  # its connections end with it, and with them the waiting of the others


def _make_rank(index: int) -> _Rank:
    return _Rank()
