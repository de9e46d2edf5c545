"""Forked processes that run cases: what hangs is killed, what eats memory is noticed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuzzing.actions import Outcome, run_case
from fuzzing.cases import Case

HANG_S = 5.0
"""Time after which a case is late: on the clock, less what its process waited for a processor."""
MEMORY_MIB = 1024
"""Peak of resident memory of a process after which a case counts as a memory failure."""
_REPLAYS = 2
"""Times that a late case is played again, alone: a hang is late each time, a stall of the machine is not."""


@dataclass(slots=True)
class _Child:
    pid: int
    cases: int
    """Descriptor that takes cases."""
    outcomes: int
    """Descriptor that gives outcomes."""
    index: int = -1
    began: float = 0.0
    cpu: float = 0.0
    """Seconds of the processor when the case began."""
    queued: float = 0.0
    """Seconds spent waiting for a processor when the case began."""


class Pool:
    """``size`` forked processes, each with a folder of its own below ``directory``."""

    def __init__(self, size: int, directory: Path, run: Path | None) -> None:
        self._directory, self._run = directory, run
        self._made = 0
        self.late: list[int] = []
        """Index of each case that had to be played again."""
        self._children = [self._fork() for _ in range(size)]

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            self._end(child)

    def map(
        self, cases: Sequence[Case] | Callable[[int], Case], number: int
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield index and outcome of cases 0 to ``number`` - 1 as they end, of late ones after all others."""
        make = cases if callable(cases) else cases.__getitem__
        late = []
        for index, outcome in self._play(make, range(number), list(self._children)):
            if outcome.verdict == "late":
                late.append(index)
            else:
                yield index, outcome
        self.late += late
        for index in late:
            for _ in range(_REPLAYS):
                ((_, outcome),) = self._play(make, [index], self._children[:1])
                if outcome.verdict != "late":
                    break
            yield index, replace(outcome, verdict="crash") if outcome.verdict == "late" else outcome

    def _play(
        self, make: Callable[[int], Case], indices: Sequence[int], waiting: list[_Child]
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield index and outcome of the cases, played by the children ``waiting``, in the order they end."""
        left = list(reversed(indices))
        busy: dict[int, _Child] = {}
        while busy or left:
            while waiting and left:
                child, index = waiting.pop(), left.pop()
                data = pickle.dumps(make(index))
                child.index, child.began = index, time.monotonic()
                child.cpu, child.queued = _cpu(child.pid), _queued(child.pid)
                _send(child.cases, data)
                busy[child.outcomes] = child
            ready, _, _ = select.select(list(busy), [], [], 0.25)
            for descriptor in ready:
                child = busy.pop(descriptor)
                data_back = _receive(descriptor)
                if data_back is None:
                    yield child.index, self._dead(child)
                    child = self._replace(child)
                else:
                    outcome = Outcome(**json.loads(data_back))
                    yield child.index, outcome
                    if "memory" in outcome.signature:
                        child = self._replace(child)
                waiting.append(child)
            for descriptor, child in list(busy.items()):
                if verdict := _overdue(child):
                    del busy[descriptor]
                    yield child.index, Outcome(verdict, f"hang over {HANG_S:g} s", _where(child.pid))
                    waiting.append(self._replace(child))

    def _replace(self, child: _Child) -> _Child:
        self._end(child)
        self._children.remove(child)
        self._children.append(new := self._fork())
        return new

    def _end(self, child: _Child) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, 0)
        os.close(child.cases)
        os.close(child.outcomes)

    def _dead(self, child: _Child) -> Outcome:
        try:
            _, status = os.waitpid(child.pid, 0)
            code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            code = 0
        return Outcome("crash", f"the process ended with {code}", "")

    def _fork(self) -> _Child:
        self._made += 1
        room = self._directory / f"room{self._made}" / "a" / "b"  # deep: "../.." stays inside
        cases_in, cases_out = os.pipe()
        outcomes_in, outcomes_out = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(cases_out)
            os.close(outcomes_in)
            for other in getattr(self, "_children", ()):
                os.close(other.cases)
            try:
                _serve(cases_in, outcomes_out, room, self._run)
            finally:
                os._exit(0)
        os.close(cases_in)
        os.close(outcomes_out)
        return _Child(pid, cases_out, outcomes_in)


def _serve(cases: int, outcomes: int, room: Path, run: Path | None) -> None:
    """Run what comes in; the peak of memory is looked at after each case."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (8 * MEMORY_MIB << 20, 8 * MEMORY_MIB << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MEMORY_MIB << 20, MEMORY_MIB << 20))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    while (data := _receive(cases)) is not None:
        before = _peak_mib()
        outcome = run_case(pickle.loads(data), room, run)
        peak = _peak_mib()
        if peak > MEMORY_MIB and peak > before:
            outcome = Outcome(
                "crash", f"memory over {MEMORY_MIB} MiB", f"peak {peak:.0f} MiB; {outcome.text}"
            )
        _send(outcomes, json.dumps({s: getattr(outcome, s) for s in Outcome.__slots__}).encode())


def _send(descriptor: int, data: bytes) -> None:
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        view = view[os.write(descriptor, view) :]


def _receive(descriptor: int) -> bytes | None:
    head = _read(descriptor, 8)
    return None if head is None else _read(descriptor, struct.unpack("<Q", head)[0])


def _read(descriptor: int, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = os.read(descriptor, size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _overdue(child: _Child) -> str:
    """Return ``crash`` for a case that computes too long, ``late`` for one that otherwise takes too long."""
    if _cpu(child.pid) - child.cpu > HANG_S:
        return "crash"
    waited = _queued(child.pid) - child.queued
    return "late" if time.monotonic() - child.began - waited > HANG_S else ""


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _queued(pid: int) -> float:
    """Return the seconds that the process was ready to run without a processor; 0 where that is unknown."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def _where(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"waits in {Path(f'/proc/{pid}/wchan').read_text() or 'user space'}"
    return ""
