"""One worker outside the cell: it owns the zygotes, knows the answers and decides how each program ended.

It is a clean interpreter that exec starts. It hands descriptors to a zygote and gets back exit statuses, the
kernel's counts, output and the tester's lines. No text of a program is executed here.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

from . import endings, linux
from .channel import CellChannel
from .endings import Execution
from .executions import ZygoteProcess, collect, memory
from .launch import Layout, confine, launch, prefer_as_victim
from .literals import NeedsTesterError, compare_literals
from .trainer import JobCancelled, TrainerConversation, pack_frame
from .wire import Exit, Mode

_KEPT_OUTPUT = 1 << 16
_KEEPER_SCORE = 500
"""When memory runs out, the kernel ends a keeper after the programs (1000), before the trainer (0)."""
_DESCRIPTORS = 256
_TESTER_EXTRA_S = 1
_TESTER_MEM_MB = 512
_NO_TESTER = Exit(0, 0, 0.0, 0.0, 0, 0.0, False, "")
_LOST_TIME_FACTOR = 1.5
_LONG_SHARE = 0.1
"""Below this share of the wall limit, the idle time of a test does not count."""


class CellLostError(RuntimeError):
    """The zygote is dead or does not answer; the worker must be replaced."""


def main(connection_fd: int, cancel_fd: int, parent: int) -> NoReturn:
    """Serve one trainer thread until it closes the connection.

    Jobs and results pass on ``connection_fd``, identities of jobs to give up on ``cancel_fd``; ``parent`` is
    the process id of the trainer.
    """
    linux.set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    prefer_as_victim(os.getpid(), _KEEPER_SCORE)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # a reward worker's limit is not the programs'
    connection = socket.socket(fileno=connection_fd)
    trainer = TrainerConversation(connection, cancel_fd)
    config, _ = trainer.receive()
    if config["cpu"] is not None:
        os.sched_setaffinity(0, [config["cpu"]])
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < _DESCRIPTORS:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, max(hard, _DESCRIPTORS)))
            except (OSError, ValueError) as error:
                advice = f"raise it before the start with ulimit -n {_DESCRIPTORS} or more"
                needs = f"it needs {_DESCRIPTORS} open files and the limit is {hard}"
                raise OSError(f"{needs}; {advice}") from error
        keeper = CellKeeper(config, trainer)
        confine()
    except OSError as error:
        connection.sendall(pack_frame({"error": str(error)}))
        os._exit(1)
    trainer.answer({"pid": os.getpid(), "cell": keeper.cell_pid}, [], at_once=True)
    try:
        while True:
            job, blobs = trainer.receive()
            result, outputs = keeper.run(job, blobs)
            trainer.answer({**result, "id": job["id"]}, outputs)
    except CellLostError as error:
        sys.stderr.write(f"sandbox cell lost: {error}\n")
        os._exit(2)
    except (EOFError, OSError):
        os._exit(0)


class CellKeeper:
    """Builds a cell, else ``OSError``, and runs jobs there, one after the other."""

    def __init__(self, config: dict[str, Any], trainer: TrainerConversation) -> None:
        self._trainer = trainer
        # the zygotes know how long a program waits for a CPU, hence also how long it is idle
        self._counts_idle = config["level"] == "namespaces"
        self._packages: list[str] = config["package_names"]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.cell_pid = launch(Layout(**config["layout"]), theirs, config["level"])
        theirs.close()
        self._zygotes = {"": ZygoteProcess(ours, trainer)}
        """Package that the zygote has loaded ("" = none) -> zygote."""

    def run(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Run one job; return result and output: ``cancelled`` alone for a cancelled job."""
        try:
            try:
                self._trainer.begin(job["id"])
                runs = {"script": self._run_script, "stdio": self._run_stdio}
                return runs.get(job["kind"], self._run_function)(job, blobs)
            except JobCancelled:
                for zygote in self._zygotes.values():
                    zygote.end_all()
                return {"cancelled": True}, []
        except (ConnectionError, EOFError, TimeoutError) as error:
            raise CellLostError(f"{type(error).__name__}: {error}") from error

    def _find_zygote(self, text: bytes) -> ZygoteProcess:
        """Return the zygote with the package that the text names; the first request makes it."""
        name = next((name for name in self._packages if name.encode() in text), "")
        if name not in self._zygotes:
            self._zygotes[name] = self._zygotes[""].become(name)
        return self._zygotes[name]

    def _run_script(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        source, stdin = blobs
        with memory(source) as code:
            execution = self._execute(job["limits"], code, len(source), stdin, self._find_zygote(source))
        ending, message = endings.of_execution(execution, job["limits"])
        ending = "completed" if ending == "ok" else ending
        return endings.result(ending, message, [], [execution]), [execution.stdout, execution.stderr]

    def _run_stdio(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        source, *texts = blobs
        limits = job["limits"]
        zygote = self._find_zygote(source)
        tests: list[list[Any]] = []
        executions: list[Execution] = []
        lost_s = 0.0
        with memory(source) as code:
            for index in range(len(texts) // 2):
                allowance = _LOST_TIME_FACTOR * limits["wall_s"] - lost_s
                if lost_s and allowance < 0.05:
                    tests.append(["timeout", "not run: earlier tests used up the time", 0.0, 0.0])
                    continue
                wall_s = min(limits["wall_s"], allowance) if lost_s else limits["wall_s"]
                stdin, expected = texts[2 * index : 2 * index + 2]
                execution = self._execute({**limits, "wall_s": wall_s}, code, len(source), stdin, zygote)
                ending, message = endings.of_stdio_test(execution, limits, expected, job["float_tolerance"])
                ended = execution.exit
                if ending == "timeout":
                    lost_s += ended.wall_s - ended.starved_s
                elif self._counts_idle and ended.wall_s > _LONG_SHARE * limits["wall_s"]:
                    lost_s += max(0.0, ended.wall_s - ended.starved_s - ended.cpu_s)
                tests.append([ending, message, ended.wall_s, ended.cpu_s])
                executions.append(execution)
        bad = [i for i, test in enumerate(tests) if test[0] != "passed"]
        broken = [i for i in bad if tests[i][0] == "infrastructure_error"]
        ending, message = tests[(broken or bad)[0]][:2] if bad else ("passed", "")
        shown = executions[bad[0] if bad else -1]
        outputs = [shown.stdout[:_KEPT_OUTPUT], shown.stderr[:_KEPT_OUTPUT]]
        return endings.result(ending, message, tests, executions, shown), outputs

    def _run_function(self, job: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        """Compare literal answers here; where that is not possible, let program and tester talk."""
        source, tests_text = blobs
        limits = job["limits"]
        zygote = self._find_zygote(source + tests_text)
        lines, tester_exit, execution = b"", _NO_TESTER, None
        if job.get("literals"):
            ours, theirs = socket.socketpair()
            with ours, memory(source) as code, memory() as stdout, memory() as stderr:
                given = [code, stdout, stderr, theirs.fileno()]
                program = zygote.spawn(Mode.candidate, limits, len(source), given)
                theirs.close()
                channel = CellChannel(ours.fileno(), self._trainer.reader(ours.fileno()))
                try:
                    told = compare_literals(channel, job["literals"])
                except NeedsTesterError:
                    zygote.end(program, limits, stdout, stderr, is_gone=False)
                else:
                    is_gone = told[-1][:2] == ["load", "gone"]
                    execution = zygote.end(program, limits, stdout, stderr, is_gone=is_gone)
                    lines = b"".join(json.dumps(line).encode() + b"\n" for line in told)
        if execution is None:
            tester_limits = {
                **limits,
                "wall_s": limits["wall_s"] + _TESTER_EXTRA_S,
                "cpu_s": limits["cpu_s"] + _TESTER_EXTRA_S,
                "mem_mb": max(limits["mem_mb"], _TESTER_MEM_MB),
            }
            ours, theirs = socket.socketpair()
            with (
                memory(source) as code, memory(tests_text) as tests, memory() as results,
                memory() as stdout, memory() as stderr,
            ):  # fmt: skip
                given = [code, stdout, stderr, theirs.fileno()]
                program = zygote.spawn(Mode.candidate, limits, len(source), given)
                given = [tests, ours.fileno(), results]
                tester = zygote.spawn(Mode.tester, tester_limits, len(tests_text), given, has_output=False)
                ours.close()
                theirs.close()
                tester_exit = zygote.wait(tester, tester_limits["wall_s"])
                lines = os.pread(results, endings.MAX_LINES, 0)
                execution = zygote.end(program, limits, stdout, stderr, is_gone=b'"gone"' in lines)
        ending, message, outcomes = endings.of_function(job, lines, tester_exit, execution)
        outputs = [execution.stdout[:_KEPT_OUTPUT], execution.stderr[:_KEPT_OUTPUT]]
        return endings.result(ending, message, outcomes, [execution]), outputs

    def _execute(
        self, limits: dict[str, Any], code: int, source_bytes: int, stdin: bytes, zygote: ZygoteProcess
    ) -> Execution:
        """Run the program once on real descriptors."""
        with memory() as stdout, memory() as stderr, contextlib.ExitStack() as inputs:
            given = [inputs.enter_context(memory(stdin, seal=True))] if stdin else []
            descriptors = [code, *given, stdout, stderr]
            identity = zygote.spawn(Mode.script, limits, source_bytes, descriptors, has_stdin=bool(stdin))
            return collect(zygote.wait(identity, limits["wall_s"]), stdout, stderr, limits)
