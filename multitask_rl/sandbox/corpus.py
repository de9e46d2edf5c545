"""Run a corpus of hostile and benign programs and compare every outcome with its manifest.

The manifest is JSON: {default_limits, programs: [...]}. A program has name, file, task, limits and expect.
Optional keys: sequence and order (programs of a sequence run in order on one worker), requires (packages),
soft (an escape is no failure). After every program a trivial one must run normally on its worker.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil

from multitask_rl.errors import DataError, SandboxError, check_output_file, is_installed, path_errors
from multitask_rl.sandbox import base
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox
from multitask_rl.sandbox.worker import LEVELS

_TRIVIAL = base.Program(source="print(6 * 7)")
_NOISY_CHECKS = ("host_mem_delta_mb", "host_disk_delta_mb", "wall")
"""Other work on the machine can disturb these checks: a problem counts if two of three tries find it."""
_TRIES = 3
_EXPRESSION_NAMES = {kind.__name__: kind for kind in (range, map, str, len, sum, list, sorted)}


_CANARY = Path("/tmp/mtrl_canary")  # the programs of a corpus name this place
_SECRET = "CANARY-7f3a91"
_ENDED_WITHIN_S = 1.0
_TCP, _UDP, _ABSTRACT_STREAM, _ABSTRACT_DATAGRAM = 47831, 47832, "sbx_canary_47833", "sbx_canary_47834"
_OTHER_RUN_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFinding:
    """One program of the corpus after it ran."""

    name: str
    verdict: str = ""
    """The program's ending, in the word of the manifest."""
    pass_fraction: float | None = None
    wall_s: float = 0.0
    problems: tuple[str, ...] = ()
    """Differences from the manifest."""
    skipped: str = ""
    """Why it did not run."""
    note: str = ""
    """What differed in one of several tries, by other work on the machine or by a rare effect."""
    stdout: str = ""


_Entry = tuple[dict[str, Any], base.Program]
"""A program of a manifest: its entry there, and what the sandbox runs."""


def load_manifest(path: Path) -> list[_Entry]:
    """Return the programs of a manifest.

    Raises:
        DataError: the manifest or a program is missing or malformed; names the place.
    """
    with path_errors("the manifest", path, "a JSON file, in UTF-8", DataError):
        text = path.read_text(encoding="utf-8")
    try:
        manifest = json.loads(text)
        defaults, programs = manifest["default_limits"], manifest["programs"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a corpus manifest ({type(error).__name__}: {error})") from error
    entries = []
    for position, raw in enumerate(programs):
        try:
            file = path.parent / raw["file"]
            what = f"{path}: program {raw['name']!r}: the file"
            with path_errors(what, file, "one beside the manifest", DataError):
                source = file.read_bytes()
            limits = base.Limits(**{**defaults, **raw.get("limits", {})})
            entries.append((raw, base.Program(source=source, task=_task(raw["task"]), limits=limits)))
        except DataError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            name = raw.get("name", position) if isinstance(raw, dict) else position
            raise DataError(f"{path}: program {name!r}: {type(error).__name__}: {error}") from error
    return entries


def _task(raw: dict[str, Any]) -> base.Task:
    kind = raw["type"]
    if kind == "script":
        return base.ScriptTask()
    if kind == "stdio":
        tests = []
        for test in raw["tests"]:
            text, times = test.get("stdin_repeat", (test.get("stdin", ""), 1))
            if "stdout_expr" in test:
                # an expression of the corpus, which is trusted; text of a program never gets here
                wanted = eval(test["stdout_expr"], {"__builtins__": _EXPRESSION_NAMES})
            else:
                wanted = test["stdout"]
            tests.append(base.StdioTest(stdin=str(text) * int(times), stdout=str(wanted)))
        return base.StdioTask(tests=tests, float_tolerance=raw.get("float_tolerance"))
    options = {"exports": raw.get("exports", ()), "allow_dunder": raw.get("allow_dunder", False)}
    if kind == "asserts":
        options.update(entry_point=raw["entry_point"], setup=raw.get("setup", ""))
        return base.AssertsTask(asserts=raw["asserts"], **options)
    if kind == "unittest":
        return base.UnittestTask(entry_point=raw["entry_point"], test_code=raw["test_code"], **options)
    raise ValueError(f"unknown task type {kind!r}; allowed: script, stdio, asserts, unittest")


class HostChecks:
    """What a corpus run watches on this machine: baits (files, listeners, a process) no program may reach.

    A context manager. It waits until no other corpus run is on this machine; ``SandboxError`` after 10 min.
    """

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
        """Record the processes of a fresh ``sandbox``; ``leftovers`` reports any other."""
        for pid in sandbox.keeper_pids:
            self._known[pid] = descendants(pid)

    def leftovers(self, sandbox: NamespaceSandbox) -> set[int]:
        """Return the ids of processes of ``sandbox`` that are not recorded and do not end within a second."""
        deadline = time.monotonic() + _ENDED_WITHIN_S
        while True:
            known = self._known
            found = {p for pid in sandbox.keeper_pids for p in descendants(pid) - known.get(pid, set())}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)  # a killed process takes a moment to leave


class ProgramChecks:
    """The checks of one program: records the state of this machine before it and compares afterwards."""

    def __init__(self, host: HostChecks, sandbox: NamespaceSandbox, checks: Sequence[str]) -> None:
        self._host, self._sandbox, self._checks = host, sandbox, checks
        self._canary = _snapshot()
        self._touched = host.touched.copy()
        self._restarts = sandbox.restarts
        self._disk = shutil.disk_usage("/tmp").free
        self._memory = self._least = psutil.virtual_memory().available
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        if any(check.startswith("host_mem_delta_mb") for check in checks):
            self._sampler.start()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self._least = min(self._least, psutil.virtual_memory().available)

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
                used = (self._memory - self._least) / (1 << 20)
                return f"{used:.0f} MiB" if used > float(argument) else ""
            case "host_disk_delta_mb":
                used = (self._disk - shutil.disk_usage("/tmp").free) / (1 << 20)
                return f"{used:.0f} MiB" if used > float(argument) else ""
        return "unknown check"


def _snapshot() -> dict[str, bytes]:
    return {p.name: p.read_bytes() if p.is_file() else b"" for p in sorted(_CANARY.iterdir())}


def run_corpus(
    entries: Sequence[_Entry], *, level: str | None = None, workers: int = 1, seed: int | None = None
) -> list[CorpusFinding]:
    """Run every program and return one finding each, in the order of ``entries``.

    A sequence stays on one of the ``workers`` cells. ``seed`` shuffles the order; None = as in the manifest.

    Raises:
        SandboxError: this machine cannot give the level.
    """
    units: dict[str, list[int]] = {}
    for index, (raw, _) in enumerate(entries):
        units.setdefault(raw.get("sequence") or f"#{index}", []).append(index)
    ordered = [sorted(unit, key=lambda i: entries[i][0].get("order", 0)) for unit in units.values()]
    if seed is not None:
        random.Random(seed).shuffle(ordered)
    findings: dict[int, CorpusFinding] = {}
    waiting, lock = list(reversed(ordered)), threading.Lock()

    def serve(host: HostChecks) -> None:
        with NamespaceSandbox(workers=1, level=level) as sandbox:
            _warm_up(sandbox)
            host.remember_processes(sandbox)
            while True:
                with lock:
                    if not waiting:
                        return
                    unit = waiting.pop()
                for index in unit:
                    raw, program = entries[index]
                    missing = [n for n in raw.get("requires", []) if not is_installed(n)]
                    if missing:
                        skipped = f"needs {', '.join(missing)}"
                        findings[index] = CorpusFinding(name=raw["name"], skipped=skipped)
                    else:
                        examine = functools.partial(_examine, raw, program, sandbox, host)
                        findings[index] = repeat_noise(examine)

    with HostChecks() as host, ThreadPoolExecutor(workers) as pool:
        for served in [pool.submit(serve, host) for _ in range(workers)]:
            served.result()
    return [findings[index] for index in range(len(entries))]


def _warm_up(sandbox: base.Sandbox) -> None:
    for source in ("print(6 * 7)", "import numpy"):
        sandbox.run(base.Program(source=source))


def repeat_noise(examine: Callable[[], CorpusFinding]) -> CorpusFinding:
    """Return the finding of ``examine``; a problem that other load may cause counts if it comes again."""

    def is_noise(finding: CorpusFinding) -> bool:
        return all(problem.startswith(_NOISY_CHECKS) for problem in finding.problems)

    finding = examine()
    if not finding.problems or not is_noise(finding):
        return finding
    tries = [finding, *(examine() for _ in range(_TRIES - 1))]
    found = [attempt for attempt in tries if attempt.problems]
    if len(found) > 1:
        return next((attempt for attempt in found if not is_noise(attempt)), found[0])
    return replace(tries[-1], note=f"once in {_TRIES} tries: {'; '.join(finding.problems)}")


def _examine(
    raw: dict[str, Any], program: base.Program, sandbox: NamespaceSandbox, host: HostChecks
) -> CorpusFinding:
    """Run one program and compare the outcome with its entry in the manifest."""
    expect = raw["expect"]
    checked = ProgramChecks(host, sandbox, expect.get("host_checks", []))
    started, restarts = time.monotonic(), sandbox.restarts
    outcome = sandbox.run(program)
    wall_s = time.monotonic() - started
    problems = []
    if outcome.ending.value not in expect["verdict_any_of"]:
        problems.append(f"verdict {outcome.ending} ({outcome.message!r}), want {expect['verdict_any_of']}")
    wanted = expect.get("pass_fraction")
    if wanted is not None and (outcome.pass_fraction is None or abs(outcome.pass_fraction - wanted) > 1e-9):
        problems.append(f"pass_fraction {outcome.pass_fraction}, want {wanted}")
    text = outcome.stdout_text
    lacks = [part for part in expect.get("stdout_must_contain", []) if part not in text]
    problems += [f"stdout lacks {part!r}" for part in lacks]
    for part in expect.get("stdout_must_not_contain", []):
        if part in text and not (part == "ESCAPED" and raw.get("soft")):
            line = next(line for line in text.splitlines() if part in line)
            problems.append(f"stdout holds {part!r}: {line[:120]!r}")
    if "max_wall_s" in expect and wall_s - outcome.starved_s > expect["max_wall_s"]:
        problems.append(f"wall {wall_s:.2f} s, want at most {expect['max_wall_s']}")
    for key, value in (("wall_s", outcome.wall_s), ("mem_mb", outcome.peak_mb)):
        least = expect.get(f"min_reported_{key}", raw.get(f"min_reported_{key}"))
        if least is not None and value < least:
            problems.append(f"reported {key} {value:.2f}, want at least {least}")
    problems += checked.problems()
    if sandbox.restarts != restarts:
        _warm_up(sandbox)  # the new worker's zygotes are no leftovers of a program
        host.remember_processes(sandbox)
    after = sandbox.run(_TRIVIAL)
    if after.ending is not base.Ending.completed or after.stdout != b"42\n":
        problems.append(f"next program: {after.ending} {after.message!r}")
    return CorpusFinding(
        name=raw["name"],
        verdict=outcome.ending.value,
        pass_fraction=outcome.pass_fraction,
        wall_s=wall_s,
        problems=tuple(problems),
        stdout=text[:2000],
    )


def main(argv: Sequence[str]) -> int:
    """Run a corpus; print what differs. Return 0 when nothing does, 1 when something does."""
    parser = argparse.ArgumentParser(prog="multitask-rl sandbox corpus", description=__doc__)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--level", choices=LEVELS, help="isolation level (default: the strongest here)")
    parser.add_argument("--workers", type=int, default=1, help="cells (default: 1)")
    parser.add_argument("--seed", type=int, help="shuffle the order")
    parser.add_argument("--folder", action="append", help="only programs of this folder (repeatable)")
    parser.add_argument("--json", type=Path, dest="json_file", help="write all findings to this file")
    arguments = parser.parse_args(argv)
    check_output_file("--json", arguments.json_file)
    entries = load_manifest(arguments.manifest)
    if arguments.folder:
        entries = [entry for entry in entries if entry[0].get("folder") in arguments.folder]
    started = time.monotonic()
    findings = run_corpus(entries, level=arguments.level, workers=arguments.workers, seed=arguments.seed)
    different, skipped = [f for f in findings if f.problems], [f for f in findings if f.skipped]
    lines = [f"{f.name}: {'; '.join(f.problems)}" for f in different]
    lines += [f"{f.name}: no difference, but {f.note}" for f in findings if f.note]
    lines += [f"{f.name}: skipped, {f.skipped}" for f in skipped]
    counts = f"{len(findings)} programs, {len(different)} differ, {len(skipped)} skipped"
    sys.stdout.write("\n".join([*lines, f"{counts}, {time.monotonic() - started:.1f} s\n"]))
    if arguments.json_file is not None:
        records = json.dumps([asdict(finding) for finding in findings], indent=1)
        arguments.json_file.write_text(records, encoding="utf-8")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
