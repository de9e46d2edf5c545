"""Checks of the host while hostile programs run: canaries, victims, memory, leftovers."""

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

from multitask_rl.sandbox.host_processes import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox

__all__ = ["HostWatch"]

_CANARY = Path("/tmp/mtrl_canary")  # the programs of a corpus name this place
_SECRET = "CANARY-7f3a91"
_ENDED_WITHIN_S = 1.0
_TCP, _UDP, _ABSTRACT_STREAM, _ABSTRACT_DATAGRAM = 47831, 47832, "sbx_canary_47833", "sbx_canary_47834"


class HostWatch:
    """Baits and gauges of one corpus run."""

    _victim: subprocess.Popen[bytes]
    _thread: threading.Thread

    def __init__(self) -> None:
        self._known: dict[int, set[int]] = {}
        self._touched: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        shutil.rmtree(_CANARY, ignore_errors=True)
        _CANARY.mkdir(parents=True)
        _CANARY.chmod(0o777)
        (_CANARY / "secret.txt").write_text(_SECRET)
        os.environ["SBX_CANARY_SECRET"] = _SECRET
        self._victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"], env={}
        )
        kinds = (
            (f"tcp:{_TCP}", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", _TCP)),
            (f"udp:{_UDP}", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", _UDP)),
            (f"unix:{_CANARY}/c.sock", socket.AF_UNIX, socket.SOCK_STREAM, f"{_CANARY}/c.sock"),
            (f"abstract:{_ABSTRACT_STREAM}", socket.AF_UNIX, socket.SOCK_STREAM, f"\0{_ABSTRACT_STREAM}"),
            (f"abstract:{_ABSTRACT_STREAM}", socket.AF_UNIX, socket.SOCK_DGRAM, f"\0{_ABSTRACT_DATAGRAM}"),
        )
        for name, family, kind, address in kinds:
            listener = socket.socket(family, kind)
            with contextlib.suppress(OSError):
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            if kind == socket.SOCK_STREAM:
                listener.listen()
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, name)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._victim.kill()
        self._victim.wait()
        os.environ.pop("SBX_CANARY_SECRET", None)
        shutil.rmtree(_CANARY, ignore_errors=True)

    def _listen(self) -> None:
        while not self._stop.is_set():
            for key, _ in self._selector.select(timeout=0.05):
                self._touched[key.data] += 1
                listener: Any = key.fileobj
                with contextlib.suppress(OSError):
                    if listener.type == socket.SOCK_STREAM:
                        listener.accept()[0].close()
                    else:
                        listener.recv(65536)

    def remember_processes(self, sandbox: NamespaceSandbox) -> None:
        """Take what runs below a fresh sandbox as its own: anything else later is a leftover."""
        for pid in sandbox.monitor_pids:
            self._known[pid] = descendants(pid)

    def begin(self, sandbox: NamespaceSandbox, checks: Sequence[str]) -> _Watched:
        """Note the state of the host before a program runs."""
        return _Watched(self, sandbox, checks)

    def victim_is_alive(self) -> bool:
        """The process a program might have killed still runs."""
        return self._victim.poll() is None

    def connections(self) -> Counter[str]:
        """How often each canary listener was reached."""
        return self._touched.copy()

    def leftovers(self, sandbox: NamespaceSandbox) -> set[int]:
        """Processes below the sandbox that were not there before, and are still there a moment later."""
        deadline = time.monotonic() + _ENDED_WITHIN_S
        while True:
            found = {
                p for pid in sandbox.monitor_pids for p in descendants(pid) - self._known.get(pid, set())
            }
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)  # one that was killed takes a moment to leave


class _Watched:
    """The host before and during one program."""

    def __init__(self, watch: HostWatch, sandbox: NamespaceSandbox, checks: Sequence[str]) -> None:
        self._watch, self._sandbox, self._checks = watch, sandbox, checks
        self._canary = _snapshot()
        self._connections = watch.connections()
        self._restarts = sandbox.restarts
        self._disk = shutil.disk_usage("/tmp").free
        self._memory = self._least = _available_mb()
        self._done = threading.Event()
        self._sampler: threading.Thread | None = None
        if any(check.startswith("host_mem_delta_mb") for check in checks):
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self._least = min(self._least, _available_mb())

    def problems(self) -> list[str]:
        """Return what the program did to the host."""
        self._done.set()
        if self._sampler is not None:
            self._sampler.join()
        found = []
        if is_replaced := self._sandbox.restarts != self._restarts:
            found.append("worker_alive: the worker had to be replaced")
        for check in self._checks:
            kind, _, argument = check.partition(":")
            if is_replaced and kind == "no_leftover_procs":
                continue  # what runs now is another cell
            if message := self._check(kind, argument):
                found.append(f"{check}: {message}")
        return found

    def _check(self, kind: str, argument: str) -> str:
        match kind:
            case "victim_alive":
                return "" if self._watch.victim_is_alive() else "the victim is dead"
            case "worker_alive":
                return ""
            case "no_leftover_procs":
                left = self._watch.leftovers(self._sandbox)
                return f"processes {sorted(left)}" if left else ""
            case "canary_dir_unchanged":
                return "" if _snapshot() == self._canary else "the canary directory changed"
            case "no_connection":
                reached = self._watch.connections()[argument] - self._connections[argument]
                return f"{reached} connections" if reached else ""
            case "no_file":
                return "the file exists" if os.path.lexists(argument) else ""
            case "port_free":
                return _port_problem(int(argument))
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


def _port_problem(port: int) -> str:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error)
    return ""
