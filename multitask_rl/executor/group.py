"""Several Ray actors that each hold one object (extra ``ray``).

Every 30 s the log names the actors that are waited for. A dead actor is reported, not raised: only the caller
knows which calls to repeat. One that does not answer within the limit of a call is killed: it is dead too.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import math
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import multitask_rl.plugins  # noqa: F401 - an actor unpickles what plugin files define
from multitask_rl.errors import ConfigError, EngineError, MultitaskRLError, require_extra
from multitask_rl.lazy import without_collector

_LOG = logging.getLogger(__name__)
_REPORT_EVERY_S = 30.0
_ROOM_WITHIN_S = 10.0
_GPUS_WITHIN_S = 60.0
"""Ray allows a process as long to start."""
_LOOK_EVERY_S = 1.0
_MOST_GPUS = 64
"""Most GPUs of one machine."""
_ENDS_WITHIN_S = 3.0
"""Seconds for Ray's processes to end after an interrupted start; the next start removes what is left."""
_LOCK = "multitask_rl.lock"
_MOST_CHARACTERS = 30
"""Longest path of the directory that holds a cluster's own: a socket's path has at most 107 bytes."""


@dataclass(slots=True)
class ActorCall:
    """A call to an actor that has not returned."""

    index: int
    """Index of the actor."""
    method: str
    limit_s: float = math.inf
    """An actor that has not answered after so many seconds of waiting is killed."""
    is_fatal: bool = False
    """If the method raises, the actor is killed, and the error is the cause of its death."""
    silent_s: float = 0.0
    looked_at: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Add the seconds since the last look to ``silent_s``, at most 2: this process may have paused."""
        now = time.monotonic()
        self.silent_s += min(now - self.looked_at, 2 * _LOOK_EVERY_S)
        self.looked_at = now


def _check_room(what: str, demand: Mapping[str, float]) -> None:
    """Raise a ConfigError when the cluster has no room; Ray itself would wait without an end."""
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


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray's start and end replace: a run must save before it ends."""
    handler = signal.getsignal(signal.SIGTERM)
    is_own = callable(handler) and threading.current_thread() is threading.main_thread()
    came = False
    try:
        yield
    except SystemExit as error:
        came = error.code == signal.SIGTERM  # what Ray's handler raises
        raise
    finally:
        if is_own:
            signal.signal(signal.SIGTERM, handler)
            if came:
                signal.raise_signal(signal.SIGTERM)


class _Session:
    """A directory for a Ray cluster that this process starts; Ray would leave its logs there.

    A lock in it is held while this process lives. Directories beside it whose process was killed are removed.
    """

    def __init__(self) -> None:
        parent = os.environ.get("RAY_TMPDIR", "")
        if not parent:
            parent = os.environ.get("TMPDIR") or "/tmp"
            parent = parent if len(parent) <= _MOST_CHARACTERS else "/tmp"
        parent = os.path.abspath(parent)
        try:
            os.makedirs(parent, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix="ray_", dir=parent))
        except OSError as error:
            raise ConfigError(
                f"Ray keeps sockets and logs in a directory below {parent}, and none can be made there "
                f"({error.strerror}); set RAY_TMPDIR to a directory on this machine that can be written"
            ) from error
        # once more after Ray's own functions at exit, which end the processes of an interrupted start
        atexit.register(_remove_session, self.path)
        new = self.path / f"{_LOCK}.new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)  # a lock that others see is held
        _remove_dead_sessions(self.path.parent)

    def remove(self) -> None:
        """Remove the directory of the stopped cluster, and those that could not be removed at its start."""
        os.close(self._lock)
        until = time.monotonic() + _ENDS_WITHIN_S
        while _is_named_by_process(self.path) and time.monotonic() < until:
            time.sleep(0.1)
        _remove_session(self.path)
        _remove_dead_sessions(self.path.parent)


def _remove_dead_sessions(parent: Path) -> None:
    """Remove the directories below ``parent`` whose lock no process holds."""
    for lock in parent.glob(f"ray_*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_session(lock.parent)


def _remove_session(directory: Path) -> None:
    """Remove the directory. If a process may still write there, its lock stays, and a later run removes it.

    An agent of Ray that was starting when its cluster died creates the directory again, without the lock.
    """
    # before what is left is listed: a process that ends in between has written all it will
    is_used = _is_named_by_process(directory)
    with contextlib.suppress(OSError):
        for child in directory.iterdir():
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child, ignore_errors=True)
            elif child.name != _LOCK:
                child.unlink(missing_ok=True)
        if not is_used and {child.name for child in directory.iterdir()} <= {_LOCK}:
            shutil.rmtree(directory, ignore_errors=True)


def _is_named_by_process(directory: Path) -> bool:
    """Whether the command line of a process names ``directory``; False without ``/proc`` (not Linux).

    Ray's processes name it; an agent of Ray takes another title when it has made its directories.
    """
    name = os.fsencode(directory)
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if name in command.read_bytes():
                return True
    return False


def _check_node() -> None:
    """Raise an EngineError when the Ray node of this process is dead: no actor can start there."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and not node["Alive"] for node in ray.nodes()):
        raise EngineError(
            "the Ray node of this machine is dead: its raylet ended, usually because memory ran out, and "
            "no actor can start there any more. The last checkpoint is intact: start the run again. If the "
            "cluster is your own (RAY_ADDRESS), first start it again with ray stop and ray start"
        )


class _Host:
    """The Ray actor: holds one object, made at the first call, and calls its methods.

    ``make`` is unpickled at the first call: its imports must not delay the placement of the actor.
    """

    def __init__(self, make: bytes, index: int, begin: Sequence[tuple[str, tuple[Any, ...]]] = ()) -> None:
        self._make, self._index = make, index
        self._lock = threading.Lock()
        self._object: Any = None
        for method, arguments in begin:
            self.call(method, *arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call ``method``, whose name may have dots (``pool.score``)."""
        with self._lock:
            if self._object is None:
                with without_collector():
                    self._object = pickle.loads(self._make)(self._index)
        return attrgetter(method)(self._object)(*arguments)


class _Gpu:
    def ids(self) -> list[str]:
        import ray

        return [str(name) for name in ray.get_gpu_ids()]


def hold_gpus(devices: Iterable[str]) -> Callable[[], None]:
    """Reserve the GPUs of this process in Ray; return a function that frees them.

    Ray does not know which GPUs this process uses. So an actor takes each free GPU of this node, and the
    actors on GPUs that are not in ``devices`` (torch's names; CPUs are ignored) end again.

    Raises:
        ConfigError: Ray does not give one of the GPUs: it is lent to other work.
        MissingExtraError, EngineError: as of ``ActorGroup``.
    """
    indices = sorted({int(name.partition(":")[2] or 0) for name in devices if name.startswith("cuda")})
    if not indices:
        return lambda: None
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    own = {visible[index] if visible else str(index): f"cuda:{index}" for index in indices}
    group = ActorGroup(
        "GPU of this process", lambda _: _Gpu(), _MOST_GPUS, num_cpus=0, num_gpus=1, started=0, is_here=True
    )
    try:
        import ray

        node = ray.get_runtime_context().get_node_id()
        resources = next(one["Resources"] for one in ray.nodes() if one["NodeID"] == node)
        waiting = set(range(min(_MOST_GPUS, int(resources.get("GPU", 0)))))
        if not waiting:
            group.close()  # Ray lends none of this machine
            return lambda: None
        for index in waiting:
            group.replace(index)
        held: dict[int, str] = {}
        until = time.monotonic() + _GPUS_WITHIN_S
        while waiting and not own.keys() <= set(held.values()) and time.monotonic() < until:
            placed = {index: () for index in waiting if group.is_placed(index)}
            for index, (name,) in group.call("ids", placed)[0].items():
                held[index] = name
            waiting -= placed.keys()
            time.sleep(0.1)
        for index in waiting | {index for index, name in held.items() if name not in own}:
            group.kill(index)
        if lent := [own[name] for name in own if name not in held.values()]:
            raise ConfigError(
                f"Ray has not given {', '.join(lent)} of this machine within {_GPUS_WITHIN_S:g} s: it has "
                "lent them to other work (name other GPUs in device_map, or stop that work), or this machine "
                "is too busy to start a process (start the run again)"
            )
    except BaseException:
        group.close()
        raise
    return group.close


class ActorGroup:
    """``size`` actors that each hold an object made by ``make(index)``.

    They live in the running cluster (``RAY_ADDRESS``), or in one that is started on this machine, where they
    reserve no CPUs. With ``is_here`` they live on the node of this process. The first ``started`` of them
    (default: all) are started at once, the others by ``replace``.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: the cluster has no room.
        EngineError: Ray does not start.
    """

    _num_groups: ClassVar[int] = 0
    _owns_cluster: ClassVar[bool] = False
    """The first group of this process started the cluster; the last one stops it."""
    _session: ClassVar[_Session | None] = None
    """Directory of the cluster, if this process started it."""

    def __init__(
        self,
        name: str,
        make: Callable[[int], Any],
        size: int,
        *,
        num_cpus: float,
        num_gpus: float,
        max_concurrency: int = 1,
        started: int | None = None,
        is_here: bool = False,
    ) -> None:
        require_extra("ray", "ray", "executor=ray needs Ray", ", or take executor=local")
        import ray

        if ActorGroup._num_groups == 0:
            ActorGroup._owns_cluster = not ray.is_initialized()
            if ActorGroup._owns_cluster:
                try:
                    self._start_cluster()
                except BaseException:
                    self._stop_cluster()
                    raise
        ActorGroup._num_groups += 1
        self._is_closed = False
        self.name = name
        self._make: bytes = ray.cloudpickle.dumps(make)
        self._actors: list[Any] = [None] * size
        self._placed: dict[int, Any] = {}
        """Index -> Ray's reference that is ready when the actor's process runs."""
        self.causes: dict[int, str] = {}
        """Index -> what Ray says of the actor's last death; the newest last."""
        if ActorGroup._session is not None:
            num_cpus = 0.0  # all parts share the cores of this machine, as they do without Ray
        number = size if started is None else min(started, size)
        try:
            _check_room(f"{number} x {name}", {"CPU": number * num_cpus, "GPU": number * num_gpus})
            takes: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
            takes["max_concurrency"] = max_concurrency
            if is_here:
                node = ray.get_runtime_context().get_node_id()
                strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                takes["scheduling_strategy"] = strategy
            self._host = ray.remote(**takes)(_Host)
            for index in range(number):
                self.replace(index)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def replace(self, index: int, begin: Sequence[tuple[str, tuple[Any, ...]]] = ()) -> None:
        """Start the actor ``index``; kill it first if it exists.

        It makes the calls in ``begin`` before any other; if one of them fails, the actor is dead. If the
        cluster has no room, the actor starts when there is some.
        """
        self.kill(index)
        self._actors[index] = self._host.remote(self._make, index, begin)
        self._placed[index] = self._actors[index].__ray_ready__.remote()

    def kill(self, index: int) -> None:
        """End the actor ``index``; Ray ends a process that does not answer within some seconds by SIGKILL."""
        import ray

        if self._actors[index] is not None:
            ray.kill(self._actors[index])

    def is_placed(self, index: int) -> bool:
        """Return whether the cluster had room for the actor ``index``, dead or alive."""
        import ray

        return bool(ray.wait([self._placed[index]], timeout=0)[0])

    def call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> tuple[dict[int, Any], list[int]]:
        """Call ``method`` on several actors at once, with ``arguments`` by index; raises as ``first``.

        Returns:
            The results by index, and the indices of the actors that died.
        """
        calls = {
            self.submit(index, method, *given): ActorCall(index, method) for index, given in arguments.items()
        }
        results: dict[int, Any] = {}
        dead: list[int] = []
        while calls:
            index, result, has_died = self.first(calls)
            if has_died:
                dead.append(index)
            else:
                results[index] = result
        return results, sorted(dead)

    def submit(self, index: int, method: str, *arguments: Any) -> Any:
        """Call ``method`` on the actor ``index``; return a reference for ``first``."""
        return self._actors[index].call.remote(method, *arguments)

    def first(self, calls: MutableMapping[Any, ActorCall]) -> tuple[int, Any, bool]:
        """Wait until one of ``calls`` is done, and remove it from ``calls``.

        Returns:
            The index of the actor, the result, and whether the actor died instead.

        Raises:
            MultitaskRLError: the method raised it, and the call is not fatal; it keeps its type.
            EngineError: the method raised another error, or the Ray node of this process is dead.
        """
        while not (found := self.poll(calls, _REPORT_EVERY_S)):
            pass
        reference, result, has_died = found
        return calls.pop(reference).index, result, has_died

    def poll(self, calls: Mapping[Any, ActorCall], within: float) -> tuple[Any, Any, bool] | None:
        """Return (reference, result, whether the actor died) of a call that is done; None after ``within`` s.

        ``calls`` is not changed.
        """
        import ray

        until = time.monotonic() + within
        while True:
            left = max(0.0, min(until - time.monotonic(), _LOOK_EVERY_S))
            done = ray.wait(list(calls), num_returns=1, timeout=left)[0]
            for reference, call in calls.items():
                was_told = call.silent_s // _REPORT_EVERY_S
                call.look()
                if call.silent_s >= call.limit_s and not ray.wait([reference], timeout=0)[0]:
                    cause = f"it did not answer for {call.silent_s:.0f} s ({call.method}) and was killed"
                    self._note_death(call.index, cause)
                    self.kill(call.index)
                    return reference, None, True
                if not done and call.silent_s // _REPORT_EVERY_S > was_told:
                    _check_node()
                    told = self.name, call.index, call.method, call.silent_s
                    _LOG.warning("waiting for %s %d in %s for %.0f s", *told)
            if done:
                return done[0], *self._result(done[0], calls[done[0]])
            if time.monotonic() >= until:
                return None

    def _note_death(self, index: int, cause: str) -> None:
        _LOG.warning("%s %d died: %s", self.name, index, cause)
        self.causes.pop(index, None)
        self.causes[index] = cause

    def _result(self, reference: Any, call: ActorCall) -> tuple[Any, bool]:
        """Return the result of a call that has returned, and whether the actor died instead."""
        import ray

        try:
            return ray.get(reference), False
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            _LOG.debug("%s", error)
            # without the indented lines: ids, and the frames of a traceback
            own = (line for line in str(error).splitlines() if line and not line[0].isspace())
            self._note_death(call.index, " ".join(own))
            _check_node()
            return None, True
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if call.is_fatal:
                self._note_death(call.index, f"{type(cause).__name__}: {cause}")
                self.kill(call.index)
                return None, True
            if isinstance(cause, MultitaskRLError):
                # Ray raises a subclass that it makes; our first class in its bases is the one that was raised
                for own_class in type(cause).__mro__:
                    is_own = own_class.__module__ == MultitaskRLError.__module__
                    if is_own and issubclass(own_class, MultitaskRLError):
                        raise own_class(str(cause)) from error
            raise EngineError(f"a Ray actor failed: {type(cause).__name__}: {cause}") from error

    def close(self) -> None:
        """Kill the actors; the last group also stops a cluster that this process started. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for index in range(len(self._actors)):
                self.kill(index)
        finally:
            ActorGroup._num_groups -= 1
            if ActorGroup._num_groups == 0 and ActorGroup._owns_cluster:
                self._stop_cluster()

    @staticmethod
    def _start_cluster() -> None:
        import ray

        # without an address Ray would join a cluster that another process started here
        where: dict[str, Any] = {"address": os.environ.get("RAY_ADDRESS", "local")}
        if "RAY_ADDRESS" not in os.environ:
            ActorGroup._session = _Session()
            # Ray's 15 would leave actors 3 % of a CPU that another process uses; the trainer waits for them
            os.environ.setdefault("RAY_worker_niceness", "0")
            where |= {"include_dashboard": False, "_temp_dir": str(ActorGroup._session.path)}
        else:  # a cluster asks for a token if the user of `ray start` has one; `ray.init` here sends none
            with contextlib.suppress(ImportError):
                from ray._private.authentication import authentication_token_setup as tokens

                tokens.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        try:
            with _keeping_sigterm():
                ray.init(**where, logging_level=logging.WARNING, log_to_driver=False)
        except Exception as error:
            advice = (
                "On a machine with much other work its own limit of 30 s can be too short: start the same "
                "command again"
            )
            if "AuthenticationError" in "".join(traceback.format_exception(error)):
                advice = (
                    "The cluster asks for another token than this process has: give the one of its head node "
                    "(`ray get-auth-token` there) in RAY_AUTH_TOKEN, with RAY_AUTH_MODE=token"
                )
            raise EngineError(
                f"Ray does not start (address {where['address']!r}): {error} {advice}"
            ) from error

    @staticmethod
    def _stop_cluster() -> None:
        import ray

        with _keeping_sigterm():
            ray.shutdown()
        if ActorGroup._session is not None:
            ActorGroup._session.remove()
            ActorGroup._session = None
