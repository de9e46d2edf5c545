"""Run a corpus of hostile and benign programs and compare every outcome with its manifest.

The manifest is JSON: {default_limits, programs: [...]}. A program has name, file, task, limits and expect.
Optional keys: sequence and order (programs of a sequence run in order on one worker), requires (packages),
soft (an escape is no failure). After every program a trivial one must run normally on its worker.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from multitask_rl.errors import DataError, check_output_file, path_errors
from multitask_rl.sandbox import base
from multitask_rl.sandbox.host_checks import HostChecks, ProgramChecks
from multitask_rl.sandbox.pool import NamespaceSandbox
from multitask_rl.sandbox.worker import LEVELS

_TRIVIAL = base.Program(source="print(6 * 7)")
_NOISY_CHECKS = ("host_mem_delta_mb", "host_disk_delta_mb", "wall")
"""Other work on the machine can disturb these checks: a problem counts if two of three tries find it."""
_TRIES = 3
_EXPRESSION_NAMES = {kind.__name__: kind for kind in (range, map, str, len, sum, list, sorted)}


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusFinding:
    """One program of the corpus after it ran."""

    name: str
    verdict: str = ""
    """The program's ending, in the word of the manifest."""
    pass_fraction: float | None = None
    wall_s: float = 0.0
    problems: tuple[str, ...] = ()
    """What differs from the manifest; empty when nothing does."""
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
                    missing = [n for n in raw.get("requires", []) if importlib.util.find_spec(n) is None]
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
    """Return a finding; one that other work on the machine may cause counts when a repetition has it, too."""

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
