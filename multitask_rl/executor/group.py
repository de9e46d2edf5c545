"""Several Ray actors that each hold one object, called together (extra ``ray``).

Nothing waits silently: every 30 s the log names the actors that are waited for. Dead actors are reported, not
raised: the caller knows what to repeat.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from multitask_rl.errors import ConfigError, EngineError, MissingExtraError, MultitaskRLError

__all__ = ["ActorGroup", "connect"]

_LOG = logging.getLogger(__name__)
_REPORT_EVERY_S = 30.0
_ROOM_WITHIN_S = 10.0


def connect() -> bool:
    """Join the running cluster (``RAY_ADDRESS``) or start one on this machine; True if this call did.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    if find_spec("ray") is None:
        raise MissingExtraError(
            "executor=ray needs Ray, which is not installed: pip install 'multitask-rl[ray]', or take "
            "executor=local."
        )
    import ray

    if ray.is_initialized():
        return False
    ray.init(
        address=os.environ.get("RAY_ADDRESS"),
        include_dashboard=False if "RAY_ADDRESS" not in os.environ else None,
        logging_level=logging.WARNING,
        log_to_driver=False,
    )
    return True


class _Cluster:
    """The connection that all groups of this process share."""

    def __init__(self) -> None:
        self._num_users = 0
        self._is_ours = False

    def enter(self) -> None:
        if self._num_users == 0:
            self._is_ours = connect()
        self._num_users += 1

    def leave(self) -> None:
        self._num_users -= 1
        if self._num_users == 0 and self._is_ours:
            import ray

            ray.shutdown()


_CLUSTER = _Cluster()


def _check_room(what: str, demand: Mapping[str, float]) -> None:
    """Raise a ConfigError when the cluster has no room; Ray itself would wait for it without an end."""
    import ray

    deadline = time.monotonic() + _ROOM_WITHIN_S
    while True:
        free = ray.available_resources()
        missing = {kind: number for kind, number in demand.items() if free.get(kind, 0.0) < number}
        if not missing:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)  # an actor just killed gives its share back a moment later
    total = ray.cluster_resources()
    details = "; ".join(
        f"{number:g} {kind} asked for, {free.get(kind, 0.0):g} free of {total.get(kind, 0.0):g}"
        for kind, number in missing.items()
    )
    raise ConfigError(
        f"the Ray cluster has no room for {what}: {details}. Lower ray.num_engines, ray.gpus_per_engine, "
        "ray.num_reward_pools or the ranks in device_map.actor, stop what else runs there, or add "
        "nodes before the run."
    )


def _check_node() -> None:
    """Raise an EngineError when the Ray node of this process is dead: what is started there never starts."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes()):
        raise EngineError(
            "the Ray node of this machine is dead: its raylet ended, for want of memory as a rule, and "
            "nothing can be started there any more. The last checkpoint is intact; start the cluster again "
            "(ray stop, ray start; nothing where the run starts its own), then the run"
        )


class _Host:
    """The Ray actor: holds one object and calls its methods."""

    def __init__(
        self, make: Callable[[int], Any], index: int, begin: Sequence[tuple[str, tuple[Any, ...]]] = ()
    ) -> None:
        self._object = make(index)
        for method, arguments in begin:
            self.call(method, *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call ``method``, whose name may have dots (``pool.score``)."""
        return attrgetter(method)(self._object)(*arguments)


class ActorGroup:
    """``size`` actors that each hold an object made by ``make(index)``."""

    def __init__(
        self,
        name: str,
        make: Callable[[int], Any],
        size: int,
        *,
        num_cpus: float,
        num_gpus: float,
        max_concurrency: int = 1,
    ) -> None:
        _CLUSTER.enter()
        import ray

        try:
            _check_room(f"{size} x {name}", {"CPU": size * num_cpus, "GPU": size * num_gpus})
        except BaseException:
            _CLUSTER.leave()
            raise
        self.name = name
        self._make = make
        self._host = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_concurrency=max_concurrency)(_Host)
        self._actors = [self._host.remote(make, index) for index in range(size)]

    def __len__(self) -> int:
        return len(self._actors)

    def replace(self, index: int, begin: Sequence[tuple[str, tuple[Any, ...]]] = ()) -> None:
        """Start the actor ``index`` afresh; no other call reaches it before those in ``begin`` returned.

        If one of them fails, the actor is dead.
        """
        import ray

        ray.kill(self._actors[index])
        self._actors[index] = self._host.remote(self._make, index, begin)

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> tuple[dict[int, Any], list[int]]:
        """Call ``method`` on the named actors at once; return the results and the indices of those that died.

        Raises:
            MultitaskRLError: what the method raised, with its type.
            EngineError: the Ray node of this process is dead.
        """
        import ray

        refs = {self._actors[index].call.remote(method, *args): index for index, args in arguments.items()}
        results: dict[int, Any] = {}
        dead: list[int] = []
        pending, began = list(refs), time.monotonic()
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=_REPORT_EVERY_S)
            for ref in done:
                try:
                    results[refs[ref]] = ray.get(ref)
                except ray.exceptions.RayActorError as error:
                    _LOG.warning("%s %d died: %s", self.name, refs[ref], error)
                    dead.append(refs[ref])
                except ray.exceptions.RayTaskError as error:
                    raise _original(error) from error
            if pending:
                _check_node()
                waiting = ", ".join(str(refs[ref]) for ref in pending)
                seconds = time.monotonic() - began
                _LOG.warning("waiting for %s %s in %s for %.0f s", self.name, waiting, method, seconds)
        if dead:
            _check_node()
        return results, sorted(dead)

    def submit(self, index: int, method: str, *arguments: Any) -> Any:
        """Call ``method`` on the actor ``index``; return a reference for ``first``."""
        return self._actors[index].call.remote(method, *arguments)

    def first(self, calls: Mapping[Any, int]) -> tuple[Any, Any]:
        """Wait for one of ``calls`` (reference -> index of the actor); return it and its result.

        Returns:
            The reference, and None in place of the result if the actor died.

        Raises:
            MultitaskRLError: what the method raised, with its type.
            EngineError: the Ray node of this process is dead.
        """
        import ray

        began = time.monotonic()
        while not (done := ray.wait(list(calls), num_returns=1, timeout=_REPORT_EVERY_S)[0]):
            _check_node()
            waiting = ", ".join(str(index) for index in sorted(calls.values()))
            _LOG.warning("waiting for %s %s for %.0f s", self.name, waiting, time.monotonic() - began)
        try:
            return done[0], ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            _LOG.warning("%s %d died: %s", self.name, calls[done[0]], error)
            _check_node()
            return done[0], None
        except ray.exceptions.RayTaskError as error:
            raise _original(error) from error

    def close(self) -> None:
        """Kill the actors; the last group also stops a cluster that was started here."""
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        _CLUSTER.leave()


def _original(error: Any) -> MultitaskRLError:
    """Return the error as its own type where it is one of ours."""
    cause = error.cause
    if isinstance(cause, MultitaskRLError):
        # Ray hands back a subclass of its own making; the first class of ours is the one that was raised
        for own in type(cause).__mro__:
            if own.__module__ == MultitaskRLError.__module__ and issubclass(own, MultitaskRLError):
                return own(str(cause))
    return EngineError(f"a Ray actor failed: {type(cause).__name__}: {cause}")
