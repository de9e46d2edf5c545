"""The trainer's side of one keeper process: start by exec, programs and outcomes as messages."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multitask_rl.boundary.python_source import parse_python
from multitask_rl.errors import SandboxError
from multitask_rl.sandbox import base
from multitask_rl.sandbox.cell import linux
from multitask_rl.sandbox.cell.codec import CodecError, Encoder
from multitask_rl.sandbox.cell.trainer import IDENTITY, MAX_FRAME, Inbox, pack_frame
from multitask_rl.sandbox.cell.wire import LONGEST_WAIT
from multitask_rl.sandbox.cgroups import CellCgroup, descendants

LEVELS = ("namespaces", "bwrap", "landlock")
"""Isolation levels, strongest first."""
_START_TIMEOUT_S = 30.0
_SEND_TIMEOUT_S = 60
_GRACE_S = 20.0
_SENT_AHEAD = 1 << 16
"""Bytes that a keeper may have unread: less than a socket holds, so that sending does not wait."""
_PROBE = base.Program(source="print(6 * 7)")
_limits = functools.lru_cache(maxsize=64)(asdict)


class WorkerLostError(RuntimeError):
    """The keeper or its cell died, or the keeper is silent."""


@dataclass(slots=True)
class _Frame:
    data: bytes
    patience_s: float
    limits: base.Limits


def cell_config(packages: Sequence[str], level: str) -> dict[str, Any]:
    """Return what a keeper needs to know: installed ``packages``, interpreter, ``level`` of isolation."""
    found: dict[str, list[str]] = {}
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            directory = Path(next(iter(spec.submodule_search_locations))).resolve()
            libraries = directory.with_name(f"{name}.libs")  # those that a wheel brings
            found[name] = [str(path) for path in (directory, libraries) if path.is_dir()]
    layout = {
        "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
        "prefix": os.path.realpath(sys.base_prefix),
        "packages": [path for paths in found.values() for path in paths],
        "bwrap": shutil.which("bwrap") or "",
    }
    names = [name for name, paths in found.items() if paths]
    return {"layout": layout, "package_names": names, "level": level}


class Worker:
    """A keeper process and the connection to it. One thread uses it; any may ``cancel`` and ``interrupt``.

    ``config`` comes from ``cell_config``. The cell gets a cgroup below ``cgroup_parent``, if that is given.
    It runs on the CPU ``cpu``; None = on any. Methods raise ``WorkerLostError`` when the keeper is gone, or
    silent for longer than the program can take.
    """

    def __init__(
        self, index: int, config: dict[str, Any], cgroup_parent: Path | None = None, cpu: int | None = None
    ) -> None:
        self.index = index
        self._config = {**config, "cpu": cpu}
        self._cgroup_parent = cgroup_parent
        self._cgroup: CellCgroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._inbox: Inbox | None = None
        self._cancel_fd = -1
        self._cancel_lock = threading.Lock()
        self._sent: deque[_Frame] = deque()
        self._unsent: deque[_Frame] = deque()
        self.restarts = -1
        self.cell_pid = 0

    @property
    def pid(self) -> int:
        """Process id of the keeper; 0 before the start and while another takes its place."""
        process = self._process  # another thread may replace it
        return process.pid if process else 0

    def start(self) -> None:
        """Start the keeper, wait for its cell and run a program of our own there; else ``SandboxError``."""
        if not linux.is_supported():
            raise SandboxError("the sandbox needs Linux on x86_64: run the code rewards on such a machine")
        self.stop()
        self.restarts += 1
        try:
            try:
                self._launch()
            except OSError as error:
                raise SandboxError(
                    f"the sandbox's keeper cannot be started: {error}. Where it is too many open files or "
                    "processes, raise the limit before the start (ulimit -n, ulimit -u)"
                ) from error
            if self._connection is None:  # another thread closed the sandbox
                raise SandboxError("the sandbox's keeper was stopped")
            self._inbox = Inbox(self._connection)
            try:
                self._connection.sendall(pack_frame(self._config))
                header, _ = self._inbox.receive(_START_TIMEOUT_S)
            except (OSError, EOFError) as error:
                reason = error or type(error).__name__
                raise SandboxError(f"the sandbox's keeper did not start: {reason}") from error
            if "error" in header:
                raise SandboxError(f"this machine cannot build a sandbox cell: {header['error']}")
            self.cell_pid = header["cell"]
            if self._cgroup_parent is not None:
                self._cgroup = CellCgroup(self._cgroup_parent, self.index)
                self._cgroup.take([self.cell_pid, *descendants(self.cell_pid)])
            try:
                outcome = self.run(_PROBE)
            except WorkerLostError as error:
                raise SandboxError(f"the sandbox cell ended at once: {error}") from error
            if outcome.ending is not base.Ending.completed or outcome.stdout != b"42\n":
                found = f"{outcome.ending}: {outcome.message} {outcome.stderr_text[:200]}"
                raise SandboxError(f"the sandbox cell cannot run a program: {found}")
        except SandboxError:
            self.stop()
            raise

    def _launch(self) -> None:
        """Start the process and connect to it."""
        ours, theirs = socket.socketpair()
        self._connection = ours
        cancelled, cancel = os.pipe()
        with self._cancel_lock:
            self._cancel_fd = cancel
        os.set_blocking(cancel, False)
        starter = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from cell.keeper import main; "
            f"main({theirs.fileno()}, {cancelled}, {os.getpid()})"
        )
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "1"}
        layout = self._config["layout"]
        if (prefix := layout["prefix"]) != "/usr":
            environment["LD_LIBRARY_PATH"] = f"{prefix}/lib"
        try:
            self._process = subprocess.Popen(
                [layout["executable"], "-I", "-S", "-X", "utf8", "-c", starter],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), cancelled],
                cwd="/",
                env=environment,
            )
        finally:
            theirs.close()
            os.close(cancelled)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_TIMEOUT_S, 0))

    def run(self, program: base.Program) -> base.Outcome:
        """Run ``program`` and wait for its outcome. The worker must hold no other program."""
        self.hand_over(0, program)
        self.send()
        outcome = self.receive()[1]
        if outcome is None:
            raise WorkerLostError("the program was cancelled")
        return outcome

    def hand_over(self, identity: int, program: base.Program) -> None:
        """Queue ``program`` for ``send`` under ``identity``; answers come in the order of queueing.

        Raises:
            ValueError: program and tests are larger than ``MAX_FRAME``.
        """
        header, blobs = to_job(program)
        frame = pack_frame({**header, "id": identity}, blobs)
        if len(frame) > MAX_FRAME:
            raise ValueError(
                f"a program and its tests take {len(frame) >> 20} MiB; at most {MAX_FRAME >> 20} MiB can be "
                "judged: give the row fewer or smaller tests"
            )
        task = program.task
        executions = len(task.tests) if isinstance(task, base.StdioTask) else 1
        patience_s = LONGEST_WAIT * program.limits.wall_s * executions + _GRACE_S
        self._unsent.append(_Frame(frame, patience_s, program.limits))

    def send(self) -> None:
        """Send queued programs, ``_SENT_AHEAD`` bytes without an answer at most: more could block both."""
        ready: list[bytes] = []
        size = sum(len(frame.data) for frame in self._sent)
        while self._unsent and (not self._sent or size + len(self._unsent[0].data) <= _SENT_AHEAD):
            frame = self._unsent.popleft()
            if self._cgroup is not None:
                self._cgroup.allow(frame.limits)
            ready.append(frame.data)
            size += len(frame.data)
            self._sent.append(frame)
        if ready:
            if self._connection is None:
                raise WorkerLostError("not started")
            try:
                self._connection.sendall(b"".join(ready))
            except OSError as error:
                raise WorkerLostError(f"{type(error).__name__}: {error}") from error

    def outcomes(self) -> Iterator[tuple[int, base.Outcome | None]]:
        """Wait for the next outcome; yield it and all that arrived with it, as ``receive`` returns them."""
        while self._sent or self._unsent:
            yield self.receive()
            if self._inbox is None or not self._inbox.has_message():
                return

    def receive(self) -> tuple[int, base.Outcome | None]:
        """Return identity and outcome of the next program that ended; no outcome if it was cancelled."""
        if self._connection is None or self._inbox is None or not self._sent:
            raise WorkerLostError("not started")
        try:
            header, outputs = self._inbox.receive(self._sent[0].patience_s)
            identity: int = header["id"]
            outcome = None if "cancelled" in header else outcome_of(header, outputs, self.index)
        except (OSError, EOFError, LookupError, TypeError, ValueError) as error:
            raise WorkerLostError(f"{type(error).__name__}: {error}") from error
        self._sent.popleft()
        self.send()
        return identity, outcome

    def cancel(self, identity: int) -> None:
        """Give up the program ``identity``; ``receive`` returns no outcome for it unless it ended before."""
        with self._cancel_lock, contextlib.suppress(OSError):
            if self._cancel_fd >= 0:
                os.write(self._cancel_fd, IDENTITY.pack(identity))

    def stop(self) -> None:
        """End the keeper; its cell and every program in it die with it."""
        connection, process = self._connection, self._process
        self._connection = self._process = self._inbox = None
        self._sent.clear()
        self._unsent.clear()
        with self._cancel_lock:
            cancel_fd, self._cancel_fd = self._cancel_fd, -1
        if cancel_fd >= 0:
            os.close(cancel_fd)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if process is not None:
            process.kill()
            process.wait()
        if self._cgroup is not None:
            self._cgroup.close()
            self._cgroup = None

    def interrupt(self) -> None:
        """Kill the keeper from another thread; ``receive`` then raises ``WorkerLostError`` in its own."""
        process = self._process
        if process is not None:
            process.kill()


def to_job(program: base.Program) -> tuple[dict[str, Any], list[bytes]]:
    """Return header and byte strings of the message that runs ``program``."""
    header: dict[str, Any] = {"limits": _limits(program.limits)}
    texts: list[str | bytes] = [program.source]
    match program.task:
        case base.ScriptTask(stdin=stdin):
            header["kind"] = "script"
            texts.append(stdin)
        case base.StdioTask(tests=tests, float_tolerance=tolerance):
            header.update(kind="stdio", float_tolerance=tolerance)
            for test in tests:
                texts += [test.stdin, test.stdout]
        case base.AssertsTask(entry_point=entry, exported=exported, allow_dunder=allow_dunder) as task:
            asserts = tuple(task.asserts)
            header.update(kind="asserts", num_tests=len(asserts))
            texts.append(_tester_task("asserts", entry, exported, task.setup, asserts, allow_dunder))
            if not task.setup.strip() and not allow_dunder:
                header["literals"] = _literal_tests(entry, asserts)
        case base.UnittestTask(entry_point=entry, exported=exported, allow_dunder=allow_dunder) as task:
            header.update(kind="unittest", num_tests=base.count_test_methods(task.test_code))
            texts.append(_tester_task("unittest", entry, exported, "", (task.test_code,), allow_dunder))
    return header, [t if isinstance(t, bytes) else t.encode("utf-8", "surrogatepass") for t in texts]


def outcome_of(header: dict[str, Any], blobs: list[bytes], worker: int) -> base.Outcome:
    """Return the outcome in a keeper's answer, whose header is a record of ``cell.endings.result``."""
    stdout, stderr = blobs
    tests = tuple(
        base.TestResult(ending=base.Ending(v), message=m, wall_s=w, cpu_s=c) for v, m, w, c in header["tests"]
    )
    fields = {**header, "ending": base.Ending(header["ending"]), "tests": tests}
    del fields["id"]
    return base.Outcome(**fields, stdout=stdout, stderr=stderr, worker=worker)


@functools.lru_cache(maxsize=1024)
def _tester_task(
    kind: str, entry: str, exported: tuple[str, ...], setup: str, tests: tuple[str, ...], allow_dunder: bool
) -> bytes:
    """Return what the tester reads; cached, because all answers to one prompt have the same tests."""
    task = {
        "kind": kind,
        "entry_point": entry,
        "exports": exported,
        "modules": base.imported_modules([setup, *tests], exported),
        "setup": setup,
        "tests": tests,
        "allow_dunder": allow_dunder,
    }
    return json.dumps(task).encode()


@functools.lru_cache(maxsize=1024)
def _literal_tests(entry_point: str, tests: tuple[str, ...]) -> list[list[Any]] | None:
    """Return the tests as ``cell.literals`` takes them; None unless all are of its shape."""

    def refuse(value: Any) -> tuple[str, Any]:
        raise CodecError(f"{type(value).__name__} is no literal")

    found: list[list[Any]] = []
    for test in tests:
        match parse_python(test.strip()).body:
            case [
                ast.Assert(
                    test=ast.Compare(
                        left=ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords),
                        ops=[ast.Eq() | ast.Is() as operator],
                        comparators=[expected],
                    )
                )
            ] if name == entry_point:
                try:
                    wanted = ast.literal_eval(expected)
                    given = [ast.literal_eval(argument) for argument in arguments]
                    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
                    encoder = Encoder(refuse)
                    request = encoder.dumps(["call", name, encoder.encode(given), encoder.encode(named)])
                    answer = encoder.dumps(encoder.encode(wanted))
                except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                    return None
                is_identity = isinstance(operator, ast.Is)
                # ``**mapping``; identity of other literals is the interpreter's choice
                if None in named or (is_identity and not (wanted is None or isinstance(wanted, bool))):
                    return None
                found.append([request, "is" if is_identity else "==", answer])
            case _:
                return None
    return found
