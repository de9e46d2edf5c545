"""Test of the isolation layers on this machine, with what each layer stops."""

from __future__ import annotations

import json
from typing import Any

from multitask_rl.errors import SandboxError
from multitask_rl.sandbox.base import Program
from multitask_rl.sandbox.cell import landlock, linux
from multitask_rl.sandbox.cgroups import delegated_cgroup
from multitask_rl.sandbox.worker import LEVELS, Worker, WorkerLostError, cell_config

_PROBE = """
import ctypes, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def refused(f):
    try: f()
    except OSError: return True
    return False
def clone_user():
    if libc.unshare(0x10000000): raise OSError(ctypes.get_errno(), "refused")
status = ctypes.create_string_buffer(24)
libc.syscall(125, ctypes.create_string_buffer(b"\\x22\\x05\\x08\\x20" + bytes(4)), status)
print(json.dumps({
    "processes": os.getpid() == 1,
    "files": sorted(os.listdir("/")) if not refused(lambda: os.listdir("/")) else [],
    "writes": refused(lambda: open("/usr/lib/mtrl-probe", "w").close()),
    "private": not refused(lambda: open("probe", "w").close()),
    "sockets": refused(socket.socket),
    "fork": refused(lambda: os.fork() or os._exit(0)),
    "exec": refused(lambda: os.execv("/bin/true", ["true"])),
    "user_ns": refused(clone_user),
    "capabilities": status.raw == bytes(24),
    "no_new_privs": libc.prctl(39, 0, 0, 0, 0) == 1,
    "seccomp": libc.prctl(21, 0, 0, 0, 0) == 2,
    "cpu": resource.getrlimit(resource.RLIMIT_CPU)[1] != resource.RLIM_INFINITY,
    "memory": resource.getrlimit(resource.RLIMIT_AS)[1] != resource.RLIM_INFINITY,
    "proc": refused(lambda: open("/proc/self/maps").close()),
}))
"""

_LAYERS = (
    ("processes", "process namespace per program", "seeing or signalling others, outliving the run"),
    ("private", "private file system per program", "leaving files for others (else no writing at all)"),
    ("root", "own root directory", "reading the files of this machine"),
    ("writes", "read-only system directories", "changing the interpreter for later programs"),
    ("sockets", "no sockets", "the network, local services, abstract sockets, kernel socket families"),
    ("fork", "no new processes", "fork bombs, memory beyond the limit by many processes"),
    ("exec", "no execution of files", "shells, other interpreters, set-user-id programs"),
    ("user_ns", "no nested namespaces", "regaining capabilities inside a namespace of its own"),
    ("capabilities", "no capabilities", "mounts, raw devices, tracing"),
    ("no_new_privs", "no new privileges", "set-user-id files"),
    ("seccomp", "system call filter", "io_uring, keyrings, bpf, perf, ptrace and other kernel surface"),
    ("cpu", "CPU limit", "endless loops that ignore signals"),
    ("memory", "memory limit", "exhausting the machine's memory"),
    ("proc", "no /proc", "environments, memory and descriptors of other processes"),
)


def report() -> list[tuple[str, bool, str]]:
    """Return (layer, is it active, what it stops) for every layer; levels first.

    Starts a sandbox of each level for a moment and asks a program inside. Never raises for a missing layer.
    """
    if not linux.is_supported():
        return [("sandbox", False, "needs Linux on x86_64: no program can be run on this machine")]
    rows: list[tuple[str, bool, str]] = []
    facts: dict[str, Any] = {}
    for level in LEVELS:
        worker = Worker(0, cell_config((), level))
        found: dict[str, Any] = {}
        told = "works; strongest level that works is used"
        try:
            worker.start()
            outcome = worker.run(Program(source=_PROBE))
            found = json.loads(outcome.stdout)
            found["root"] = "root" not in found["files"] and "home" not in found["files"]
        except (SandboxError, WorkerLostError) as error:
            told = str(error)
        except ValueError:
            told = f"the probe ended as {outcome.ending}: {outcome.message}"
        finally:
            worker.stop()
        facts = facts or found
        rows.append((f"level {level}", bool(found), told))
    for key, layer, stops in _LAYERS:
        rows.append((layer, bool(facts.get(key)), f"stops: {stops}"))
    cgroup, missing = delegated_cgroup()
    stops = "kernel memory, pipes and both halves of a function task beyond one limit per cell"
    rows.append(("cgroup limits", cgroup is not None, f"stops: {stops}" if cgroup else missing))
    version = landlock.abi_version()
    known = f"version {version}: " if version else ""
    rows.append(("Landlock", version > 0, f"{known}confines files where namespaces are refused"))
    return rows
