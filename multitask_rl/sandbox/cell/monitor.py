"""One worker outside the cell: owns a zygote, knows the answers, computes every verdict.

A clean interpreter started by exec. It hands the zygote descriptors and reads back exit statuses, what the
kernel counted, what was written, and the judge's lines; nothing a program says is executed here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

from . import linux, verdicts
from .channel import Channel
from .frames import receive_frame, send_frame
from .launch import Layout, become_nobody, launch
from .literals import NeedsJudgeError, judge_literals
from .verdicts import Execution
from .wire import Exit, Mode, Spawn, pack_kill, pack_spawn, pack_variant, unpack_exit

__all__ = ["CellLostError", "Monitor", "main"]

_GRACE_S = 5.0
"""How much later than a limit the zygote may report before the cell is given up."""
_KEPT_OUTPUT = 1 << 16
_JUDGE_EXTRA_S = 1
_JUDGE_MEM_MB = 512
_LAST_BREATH_S = 0.5
_MAX_LINES = 1 << 24
_NO_JUDGE = Exit(0, 0, 0.0, 0.0, 0, 0.0, False, "")
_LOST_TIME_FACTOR = 1.5
_F_ADD_SEALS, _ALL_SEALS = 1033, 15


class CellLostError(RuntimeError):
    """The zygote is dead or does not answer; the worker must be replaced."""


def main(connection_fd: int, parent: int) -> NoReturn:
    """Serve one trainer thread until it closes the connection."""
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    connection = socket.socket(fileno=connection_fd)
    config, _ = receive_frame(connection)
    layout = Layout(
        executable=config["executable"],
        prefix=config["prefix"],
        packages=tuple(config["packages"]),
        bwrap=config["bwrap"],
    )
    try:
        monitor = Monitor(layout, config["variants"], config["level"])
        become_nobody()
    except OSError as error:
        send_frame(connection, {"error": str(error)})
        os._exit(1)
    send_frame(connection, {"pid": os.getpid(), "cell": monitor.cell_pid})
    while True:
        try:
            job, blobs = receive_frame(connection)
        except (EOFError, OSError):
            os._exit(0)
        try:
            result, outputs = monitor.run(job, blobs)
        except CellLostError as error:
            sys.stderr.write(f"sandbox cell lost: {error}\n")
            os._exit(2)
        send_frame(connection, {**result, "id": job["id"]}, outputs)


@dataclass(slots=True)
class _Zygote:
    control: socket.socket
    exits: dict[int, Exit] = field(default_factory=dict)


class Monitor:
    """Runs jobs one after the other."""

    def __init__(self, layout: Layout, variants: dict[str, list[str]], level: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cell_pid = launch(layout, theirs, level)
        theirs.close()
        self._zygotes = {"": _Zygote(ours)}
        self._variants = variants
        self._next_identity = 0

    def run(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Run one job; return the result and what the program wrote.

        Raises:
            CellLostError: the cell is gone.
        """
        try:
            match job["kind"]:
                case "script":
                    return self._run_script(job, blobs)
                case "stdio":
                    return self._run_stdio(job, blobs)
                case _:
                    return self._run_function(job, blobs)
        except (ConnectionError, EOFError, TimeoutError) as error:
            raise CellLostError(f"{type(error).__name__}: {error}") from error

    def _run_script(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        source, stdin = blobs
        with _Memory(source) as code:
            execution = self._execute(job["limits"], code, len(source), stdin, self._zygote_for(source))
        verdict, message = verdicts.of_execution(execution, job["limits"])
        if verdict == "ok":
            verdict = "completed"
        return verdicts.result(verdict, message, [], [execution]), [execution.stdout, execution.stderr]

    def _run_stdio(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        source, *texts = blobs
        limits = job["limits"]
        zygote = self._zygote_for(source)
        tests: list[list[Any]] = []
        executions: list[Execution] = []
        lost_s = 0.0
        with _Memory(source) as code:
            for index in range(len(texts) // 2):
                allowance = _LOST_TIME_FACTOR * limits["wall_s"] - lost_s
                if lost_s and allowance < 0.05:
                    tests.append(["timeout", "not run: earlier tests used up the time", 0.0, 0.0])
                    continue
                wall_s = min(limits["wall_s"], allowance) if lost_s else limits["wall_s"]
                execution = self._execute(
                    {**limits, "wall_s": wall_s}, code, len(source), texts[2 * index], zygote
                )
                verdict, message = verdicts.of_stdio_test(
                    execution, limits, texts[2 * index + 1], job["float_tolerance"]
                )
                if verdict == "timeout":
                    lost_s += execution.exit.wall_s
                tests.append([verdict, message, execution.exit.wall_s, execution.exit.cpu_s])
                executions.append(execution)
        bad = [i for i, test in enumerate(tests) if test[0] != "passed"]
        broken = [i for i in bad if tests[i][0] == "infrastructure_error"]
        verdict, message = tests[(broken or bad)[0]][:2] if bad else ("passed", "")
        shown = executions[bad[0] if bad else -1]
        return verdicts.result(verdict, message, tests, executions, shown), [
            shown.stdout[:_KEPT_OUTPUT],
            shown.stderr[:_KEPT_OUTPUT],
        ]

    def _run_function(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        source, tests_text = blobs
        zygote = self._zygote_for(source + tests_text)
        with _Memory(source) as code:
            lines, judge_exit, execution = b"", _NO_JUDGE, None
            if job.get("literals"):
                lines, execution = self._ask_literals(job, code, len(source), zygote)
            if execution is None:
                lines, judge_exit, execution = self._ask_judge(job, code, len(source), tests_text, zygote)
        verdict, message, outcomes = verdicts.of_function(job, lines, judge_exit, execution)
        return verdicts.result(verdict, message, outcomes, [execution]), [
            execution.stdout[:_KEPT_OUTPUT],
            execution.stderr[:_KEPT_OUTPUT],
        ]

    def _ask_judge(
        self, job: dict[str, Any], code: int, source_bytes: int, tests_text: bytes, zygote: _Zygote
    ) -> tuple[bytes, Exit, Execution]:
        """Let program and judge talk; return the judge's lines and both ends."""
        limits = job["limits"]
        ours, theirs = socket.socketpair()
        with _Memory(tests_text) as tests, _Memory() as results, _Memory() as stdout, _Memory() as stderr:
            descriptors = [code, stdout, stderr, theirs.fileno()]
            program = self._spawn(zygote, Mode.candidate, limits, source_bytes, descriptors)
            given = [tests, ours.fileno(), results]
            judge_limits = _judge_limits(limits)
            judge = self._spawn(zygote, Mode.judge, judge_limits, len(tests_text), given, has_output=False)
            ours.close()
            theirs.close()
            judge_exit = self._wait(zygote, judge, judge_limits["wall_s"])
            lines = os.pread(results, _MAX_LINES, 0)
            execution = self._end(zygote, program, limits, stdout, stderr, is_gone=b'"gone"' in lines)
        return lines, judge_exit, execution

    def _ask_literals(
        self, job: dict[str, Any], code: int, source_bytes: int, zygote: _Zygote
    ) -> tuple[bytes, Execution | None]:
        """Ask the program here; return lines as the judge's, and no execution when the judge is needed."""
        limits = job["limits"]
        ours, theirs = socket.socketpair()
        with ours, _Memory() as stdout, _Memory() as stderr:
            descriptors = [code, stdout, stderr, theirs.fileno()]
            program = self._spawn(zygote, Mode.candidate, limits, source_bytes, descriptors)
            theirs.close()
            try:
                lines = judge_literals(Channel(ours.fileno()), job["literals"])
            except NeedsJudgeError:
                self._end(zygote, program, limits, stdout, stderr, is_gone=False)
                return b"", None
            is_gone = lines[-1][:2] == ["load", "gone"]
            execution = self._end(zygote, program, limits, stdout, stderr, is_gone=is_gone)
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines), execution

    def _end(
        self,
        zygote: _Zygote,
        program: int,
        limits: dict[str, Any],
        stdout: int,
        stderr: int,
        *,
        is_gone: bool,
    ) -> Execution:
        """End a program whose tests are over; one that is gone is given a moment to end by itself."""
        if is_gone and program not in zygote.exits:
            with contextlib.suppress(TimeoutError):
                self._receive_exit(zygote, _LAST_BREATH_S)
        is_killed_by_us = program not in zygote.exits
        if is_killed_by_us:
            zygote.control.send(pack_kill(program))
        execution = _collect(self._wait(zygote, program, limits["wall_s"]), stdout, stderr, limits)
        execution.is_killed_by_us = is_killed_by_us
        return execution

    def _execute(
        self, limits: dict[str, Any], code: int, source_bytes: int, stdin: bytes, zygote: _Zygote
    ) -> Execution:
        """Run the program once on real descriptors."""
        with _Memory() as stdout, _Memory() as stderr:
            if stdin:
                with _Memory(stdin, seal=True) as given:
                    identity = self._spawn(
                        zygote,
                        Mode.script,
                        limits,
                        source_bytes,
                        [code, given, stdout, stderr],
                        has_stdin=True,
                    )
            else:
                identity = self._spawn(zygote, Mode.script, limits, source_bytes, [code, stdout, stderr])
            ended = self._wait(zygote, identity, limits["wall_s"])
            return _collect(ended, stdout, stderr, limits)

    def _spawn(
        self,
        zygote: _Zygote,
        mode: Mode,
        limits: dict[str, Any],
        source_bytes: int,
        descriptors: list[int],
        *,
        has_stdin: bool = False,
        has_output: bool = True,
    ) -> int:
        self._next_identity = (self._next_identity + 1) % (1 << 32)
        spawn = Spawn(
            self._next_identity,
            mode,
            has_stdin,
            has_output,
            source_bytes,
            limits["wall_s"],
            max(1, -int(-limits["cpu_s"] // 1)),
            limits["mem_mb"],
            limits["disk_mb"] << 20,
            limits["inodes"],
            limits["nproc"],
            limits["nofile"],
            _largest_file(limits),
        )
        socket.send_fds(zygote.control, [pack_spawn(spawn)], descriptors)
        return self._next_identity

    def _wait(self, zygote: _Zygote, identity: int, wall_s: float) -> Exit:
        """Return the end of an execution.

        Raises:
            TimeoutError: the zygote is silent long after the limit (twice it, for a starved program).
        """
        deadline = time.monotonic() + 2 * wall_s + _GRACE_S
        while identity not in zygote.exits:
            self._receive_exit(zygote, max(0.01, deadline - time.monotonic()))
        return zygote.exits.pop(identity)

    def _receive_exit(self, zygote: _Zygote, patience_s: float) -> None:
        zygote.control.settimeout(patience_s)
        data = zygote.control.recv(4096)
        zygote.control.settimeout(_GRACE_S)
        if not data:
            raise EOFError("the zygote ended")
        ended = unpack_exit(data)
        zygote.exits[ended.identity] = ended

    def _zygote_for(self, text: bytes) -> _Zygote:
        """Return the zygote that has the modules the text names; made when first needed."""
        name = next((name for name in self._variants if name.encode() in text), "")
        if name not in self._zygotes:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            request = pack_variant(self._variants[name])
            socket.send_fds(self._zygotes[""].control, [request], [theirs.fileno()])
            theirs.close()
            self._zygotes[name] = _Zygote(ours)
        return self._zygotes[name]


class _Memory:
    """An anonymous file, open while in use."""

    def __init__(self, content: bytes = b"", *, seal: bool = False) -> None:
        self._descriptor = os.memfd_create("io", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if seal else 0))
        if content:
            view = memoryview(content)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        if seal:
            fcntl.fcntl(self._descriptor, _F_ADD_SEALS, _ALL_SEALS)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def _collect(ended: Exit, stdout: int, stderr: int, limits: dict[str, Any]) -> Execution:
    stdout_length, stderr_length = os.fstat(stdout).st_size, os.fstat(stderr).st_size
    return Execution(
        exit=ended,
        stdout=os.pread(stdout, min(stdout_length, limits["stdout_bytes"]), 0) if stdout_length else b"",
        stderr=os.pread(stderr, min(stderr_length, limits["stderr_bytes"]), 0) if stderr_length else b"",
        stderr_end=os.pread(stderr, 512, max(0, stderr_length - 512)) if stderr_length else b"",
        stdout_length=stdout_length,
        stderr_length=stderr_length,
        is_full=max(stdout_length, stderr_length) >= _largest_file(limits),
    )


def _largest_file(limits: dict[str, Any]) -> int:
    return int(max(limits["stdout_bytes"], limits["stderr_bytes"], limits["disk_mb"] << 20)) + 1


def _judge_limits(limits: dict[str, Any]) -> dict[str, Any]:
    return {
        **limits,
        "wall_s": limits["wall_s"] + _JUDGE_EXTRA_S,
        "cpu_s": limits["cpu_s"] + _JUDGE_EXTRA_S,
        "mem_mb": max(limits["mem_mb"], _JUDGE_MEM_MB),
    }
