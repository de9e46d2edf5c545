"""Checks of the host while hostile programs run: canaries, a victim, memory, leftovers."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox

_CANARY = Path("/tmp/mtrl_canary")  # the programs of a corpus name this place
_SECRET = "CANARY-7f3a91"
_ENDED_WITHIN_S = 1.0
_TCP, _UDP, _ABSTRACT_STREAM, _ABSTRACT_DATAGRAM = 47831, 47832, "sbx_canary_47833", "sbx_canary_47834"
_OTHER_RUN_S = 600.0


class HostChecks:
    """Baits and gauges of one corpus run. It waits for another run to end; ``SandboxError`` after 10 min."""

    victim: subprocess.Popen[bytes]
    _thread: threading.Thread

    def __init__(self) -> None:
        self._known: dict[int, set[int]] = {}
        self.touched: Counter[str] = Counter()
        """How often each canary listener was reached."""
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        # Two runs share the baits' names. The first address is the lock: without it a second run would empty
        # the canary directory of the first, and take connections that are meant for the first.
        abstract = f"abstract:{_ABSTRACT_STREAM}"
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        deadline = time.monotonic() + _OTHER_RUN_S
        while True:
            try:
                lock.bind(f"\0{_ABSTRACT_STREAM}")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    lock.close()
                    what = f"another run of a corpus has {abstract}"
                    raise SandboxError(f"{what}: wait for its end or end it ({error})") from error
                time.sleep(0.1)
        self._bait(abstract, lock)
        try:
            shutil.rmtree(_CANARY, ignore_errors=True)
            _CANARY.mkdir(parents=True)
            _CANARY.chmod(0o777)
            (_CANARY / "secret.txt").write_text(_SECRET)
            os.environ["SBX_CANARY_SECRET"] = _SECRET
            kinds = (
                (f"tcp:{_TCP}", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", _TCP)),
                (f"udp:{_UDP}", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", _UDP)),
                (f"unix:{_CANARY}/c.sock", socket.AF_UNIX, socket.SOCK_STREAM, f"{_CANARY}/c.sock"),
                (abstract, socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{_ABSTRACT_DATAGRAM}"),
            )
            for name, family, kind, address in kinds:
                listener = socket.socket(family, kind)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                self._bait(name, listener)
            sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
            self.victim = subprocess.Popen(sleep, env={})
        except BaseException:
            self._remove_baits()
            raise
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def _bait(self, name: str, listener: socket.socket) -> None:
        if listener.type == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, name)

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self.victim.kill()
        self.victim.wait()
        self._remove_baits()

    def _remove_baits(self) -> None:
        os.environ.pop("SBX_CANARY_SECRET", None)
        shutil.rmtree(_CANARY, ignore_errors=True)
        for key in reversed(list(self._selector.get_map().values())):  # the lock last
            key.fileobj.close()
        self._selector.close()

    def _listen(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(timeout=0.05):
                self.touched[key.data] += 1
                listener: Any = key.fileobj
                with contextlib.suppress(OSError):
                    if listener.type == socket.SOCK_STREAM:
                        listener.accept()[0].close()
                    else:
                        listener.recv(65536)

    def remember_processes(self, sandbox: NamespaceSandbox) -> None:
        """Note the processes below a fresh sandbox: any other one is a leftover later."""
        for pid in sandbox.keeper_pids:
            self._known[pid] = descendants(pid)

    def leftovers(self, sandbox: NamespaceSandbox) -> set[int]:
        """Return processes below the sandbox that are new and do not end within a second."""
        deadline = time.monotonic() + _ENDED_WITHIN_S
        while True:
            known = self._known
            found = {p for pid in sandbox.keeper_pids for p in descendants(pid) - known.get(pid, set())}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)  # a killed process takes a moment to leave


class ProgramChecks:
    """The host before and during one program."""

    def __init__(self, host: HostChecks, sandbox: NamespaceSandbox, checks: Sequence[str]) -> None:
        self._host, self._sandbox, self._checks = host, sandbox, checks
        self._canary = _snapshot()
        self._touched = host.touched.copy()
        self._restarts = sandbox.restarts
        self._disk = shutil.disk_usage("/tmp").free
        self._memory = self._least = _available_mb()
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if any(check.startswith("host_mem_delta_mb") for check in checks):
            self._sampler.start()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self._least = min(self._least, _available_mb())

    def problems(self) -> list[str]:
        """Return what the program did to the host."""
        self._done.set()
        if self._sampler.is_alive():
            self._sampler.join()
        found = []
        if is_replaced := self._sandbox.restarts != self._restarts:
            found.append("worker_alive: the worker had to be replaced")
        for check in self._checks:
            kind, _, argument = check.partition(":")
            if is_replaced and kind == "no_leftover_procs":
                continue  # another cell runs now
            if message := self._check(kind, argument):
                found.append(f"{check}: {message}")
        return found

    def _check(self, kind: str, argument: str) -> str:
        match kind:
            case "victim_alive":
                return "" if self._host.victim.poll() is None else "the victim is dead"
            case "worker_alive":
                return ""
            case "no_leftover_procs":
                left = self._host.leftovers(self._sandbox)
                return f"processes {sorted(left)}" if left else ""
            case "canary_dir_unchanged":
                return "" if _snapshot() == self._canary else "the canary directory changed"
            case "no_connection":
                reached = self._host.touched[argument] - self._touched[argument]
                return f"{reached} connections" if reached else ""
            case "no_file":
                return "the file exists" if os.path.lexists(argument) else ""
            case "port_free":
                with socket.socket() as probe:
                    try:
                        probe.bind(("127.0.0.1", int(argument)))
                    except OSError as error:
                        return str(error)
                return ""
            case "host_mem_delta_mb":
                used = self._memory - self._least
                return f"{used:.0f} MiB" if used > float(argument) else ""
            case "host_disk_delta_mb":
                used = (self._disk - shutil.disk_usage("/tmp").free) / (1 << 20)
                return f"{used:.0f} MiB" if used > float(argument) else ""
        return "unknown check"


def _snapshot() -> dict[str, bytes]:
    return {p.name: p.read_bytes() if p.is_file() else b"" for p in sorted(_CANARY.iterdir())}


def _available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return 0.0
