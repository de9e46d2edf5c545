"""Throughput of the sandbox beside what people use instead, interleaved in one run.

    python benchmarks/sandbox.py [--rounds 5] [--seconds 1.0] [--json FILE] [--only SUBSTRING]

Every method gets ``--seconds`` in turn, ``--rounds`` times; rates are of the best round (other work on the
machine only slows down), CPU is what the kernel charged to all processes involved. Ratios are between methods
of the same program: the median over the rounds, each round paired with itself, and that of the best rounds.
"2 sandboxes apart" are two processes with a sandbox of one worker each, which share nothing but the kernel
and may run on any CPU; two workers of one sandbox, on two CPUs, keep to one each. The "training parent" of
the fork checker is a process that holds torch, transformers and a small model with its optimizer, after one
step.
All hostile work stays inside: the programs here are harmless.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from multitask_rl.sandbox import AssertsTask, Program, StdioTask, StdioTest
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.sandbox.pool import NamespaceSandbox

_TRIVIAL = "print(1 + 1)\nassert 1 + 1 == 2\nassert 2 + 2 == 4\nassert 3 + 3 == 6\n"
_IMPORTS = "import math, collections, itertools, heapq, re, json\n" + _TRIVIAL
_NUMPY = "import numpy as np\nprint(np.arange(3).sum())\n"
_STDIO = "n = int(input())\nprint(sum(int(x) for x in input().split()[:n]))\n"
_TESTS = [(f"{n}\n{' '.join(map(str, range(n)))}\n", f"{n * (n - 1) // 2}\n") for n in range(5, 15)]
_FUNCTION = "def add(a, b):\n    return a + b\n"
_LITERAL = ("assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'")
_JUDGED = (*_LITERAL[:2], "assert sorted(add([2], [1])) == [1, 2]")
_TICKS = os.sysconf("SC_CLK_TCK")
_BATCH = 256
"""Programs queued at once: enough that the end of a batch, when one worker waits for the other, is small."""
_TRAINING = """import torch, transformers
torch.set_num_threads(1)
config = transformers.LlamaConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8)
model = transformers.LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(8192, (2, 32))
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
"""


@dataclass(slots=True)
class Case:
    """One method on one program."""

    name: str
    run: Callable[[], None]
    roots: Callable[[], list[int]] = list
    """Long-lived processes whose CPU counts (with their descendants, reaped or not)."""
    batch: Callable[[int], object] | None = None
    """Runs that many at once; for methods that work on several at a time."""
    rates: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def measure(self, seconds: float) -> None:
        """Run for about ``seconds`` and note rate, CPU and latencies."""
        cpu, started, count = self._cpu_s(), time.perf_counter(), 0
        while (now := time.perf_counter()) - started < seconds:
            if self.batch is not None:
                self.batch(_BATCH)
                count += _BATCH
            else:
                self.run()
                self.latencies.append(time.perf_counter() - now)
                count += 1
        self.rates.append(count / (time.perf_counter() - started))
        self.cpu_ms.append(1000 * (self._cpu_s() - cpu) / count)

    def _cpu_s(self) -> float:
        own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        total = sum(usage.ru_utime + usage.ru_stime for usage in own)
        for pid in {p for root in self.roots() for p in (root, *descendants(root))}:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / _TICKS
        return total


def _fresh(source: str, *flags: str) -> Callable[[], None]:
    command = [sys.executable, "-I", *flags, "-c", source]

    def run() -> None:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    return run


def _fresh_tests() -> None:
    for stdin, stdout in _TESTS:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _STDIO],
            input=stdin,
            text=True,
            capture_output=True,
            check=True,
        )
        if done.stdout != stdout:
            raise RuntimeError("wrong answer")


def _bubblewrap() -> Callable[[], None]:
    prefix = sys.base_prefix
    binds = [a for p in ("/usr", "/lib", "/lib64", prefix) if os.path.exists(p) for a in ("--ro-bind", p, p)]
    base = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    command = ["bwrap", "--unshare-all", *binds, "--tmpfs", "/tmp", base, "-I", "-S", "-c", _TRIVIAL]

    def run() -> None:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)

    return run


def _unsafe_execute(source: str, endings: list[str]) -> None:
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        try:
            exec(source, {})
            endings.append("passed")
        except BaseException as error:  # noqa: BLE001 - the style of checker that is measured
            endings.append(type(error).__name__)


def _fork_checker() -> None:
    """Check a program the way the HumanEval family does: a manager, a forked process, exec."""
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        endings = manager.list()
        process = context.Process(target=_unsafe_execute, args=(_TRIVIAL, endings))
        process.start()
        process.join(timeout=5)
        if list(endings) != ["passed"]:
            raise RuntimeError("the checker failed")


class _Helper:
    """Another process that runs the fork checker, or a sandbox of its own, when told to."""

    def __init__(self, preload: str = "", role: str = "fork_checker") -> None:
        code = f"{preload}\nimport runpy, sys\nrunpy.run_path({__file__!r}, run_name={role!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.run()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self) -> None:
        self.begin()
        self.end()

    def begin(self) -> None:
        if self._process.stdin is None:
            raise RuntimeError("the helper has no pipes")
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def end(self) -> None:
        if self._process.stdout is None or self._process.stdout.readline() != b"done\n":
            raise RuntimeError("the helper failed")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def _apart(helpers: list[_Helper]) -> Case:
    """Sandboxes of one worker each in processes that share nothing: what the kernel itself allows."""

    def run_batch(count: int) -> None:
        for helper in helpers:
            helper.begin()
        for helper in helpers:
            helper.end()

    return Case(
        "trivial: 2 sandboxes apart",
        lambda: run_batch(_BATCH),
        lambda: [helper.pid for helper in helpers],
        run_batch,
    )


def _sandboxed(
    sandbox: NamespaceSandbox, name: str, program: Program, want: float, *, batch: bool = False
) -> Case:
    def check(endings: set[str], fractions: set[float | None]) -> None:
        if not endings <= {"passed", "completed"} or fractions != {want}:
            raise RuntimeError(f"{name}: {endings} {fractions}")

    def run() -> None:
        outcome = sandbox.run(program)
        check({outcome.ending.value}, {outcome.pass_fraction})

    def run_batch(count: int) -> None:
        outcomes = sandbox.map([program] * count)
        check({o.ending.value for o in outcomes}, {o.pass_fraction for o in outcomes})

    return Case(name, run, lambda: sandbox.keeper_pids, run_batch if batch else None)


@contextlib.contextmanager
def _cases() -> Iterator[list[Case]]:
    stdio = StdioTask(tests=[StdioTest(stdin=stdin, stdout=stdout) for stdin, stdout in _TESTS])
    literal = AssertsTask(entry_point="add", asserts=_LITERAL)
    judged = AssertsTask(entry_point="add", asserts=_JUDGED)
    with (
        NamespaceSandbox(workers=1) as one,
        NamespaceSandbox(workers=2) as two,
        contextlib.ExitStack() as stack,
    ):
        small, big, training = _Helper(), _Helper("import torch"), _Helper(_TRAINING)
        apart = [_Helper(role="own_sandbox") for _ in range(2)]
        for helper in (small, big, training, *apart):
            stack.callback(helper.close)
        cases = [
            _sandboxed(one, "trivial: sandbox", Program(source=_TRIVIAL), 0.0),
            _sandboxed(one, "trivial: sandbox, queued", Program(source=_TRIVIAL), 0.0, batch=True),
            _sandboxed(two, "trivial: sandbox, queued, 2 workers", Program(source=_TRIVIAL), 0.0, batch=True),
            _apart(apart),
            Case("trivial: fresh python -I -S", _fresh(_TRIVIAL, "-S")),
            Case("trivial: fresh python -I", _fresh(_TRIVIAL)),
            Case("trivial: fork checker, small parent", small.run, lambda: [small.pid]),
            Case("trivial: fork checker, torch parent", big.run, lambda: [big.pid]),
            Case("trivial: fork checker, training parent", training.run, lambda: [training.pid]),
            _sandboxed(one, "imports: sandbox", Program(source=_IMPORTS), 0.0),
            Case("imports: fresh python -I -S", _fresh(_IMPORTS, "-S")),
            _sandboxed(one, "numpy: sandbox", Program(source=_NUMPY), 0.0),
            Case("numpy: fresh python -I", _fresh(_NUMPY)),
            _sandboxed(one, "function: literals", Program(source=_FUNCTION, task=literal), 1.0),
            _sandboxed(one, "function: judge", Program(source=_FUNCTION, task=judged), 1.0),
            _sandboxed(one, "10 tests: sandbox", Program(source=_STDIO, task=stdio), 1.0),
            Case("10 tests: fresh python -I -S", _fresh_tests),
        ]
        if shutil.which("bwrap"):
            cases.insert(9, Case("trivial: bwrap + fresh python", _bubblewrap()))
        yield cases


_RATIOS: list[tuple[str, str, float | None]] = [
    ("trivial: sandbox, queued", "trivial: fresh python -I -S", 2.3),
    ("trivial: sandbox, queued", "trivial: bwrap + fresh python", 3.0),
    ("trivial: sandbox, queued", "trivial: fork checker, small parent", 4.2),
    ("trivial: sandbox, queued", "trivial: fork checker, torch parent", 12.0),
    ("trivial: sandbox, queued", "trivial: fork checker, training parent", None),
    ("trivial: sandbox, queued, 2 workers", "trivial: sandbox, queued", 1.85),
    ("trivial: 2 sandboxes apart", "trivial: sandbox, queued", None),
    ("imports: sandbox", "imports: fresh python -I -S", 3.5),
    ("numpy: sandbox", "numpy: fresh python -I", 15.0),
    ("10 tests: sandbox", "10 tests: fresh python -I -S", 1.8),
]


def _report(cases: list[Case]) -> dict[str, dict[str, float]]:
    table = {}
    print(f"{'method':40} {'per s':>8} {'CPU ms':>7} {'p50 ms':>7} {'p99 ms':>7}")
    for case in cases:
        latencies = sorted(case.latencies) or [float("nan")]
        row = {
            "per_s": max(case.rates),
            "cpu_ms": min(case.cpu_ms),
            "p50_ms": 1000 * latencies[len(latencies) // 2],
            "p99_ms": 1000 * latencies[int(len(latencies) * 0.99)],
        }
        table[case.name] = row
        numbers = f"{row['per_s']:8.1f} {row['cpu_ms']:7.2f} {row['p50_ms']:7.2f} {row['p99_ms']:7.2f}"
        print(f"{case.name:40} {numbers}")
    rates = {case.name: case.rates for case in cases}
    for ours, theirs, target in _RATIOS:
        if ours in table and theirs in table:
            ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[theirs], strict=True))
            best = table[ours]["per_s"] / table[theirs]["per_s"]
            cpu = table[theirs]["cpu_ms"] / table[ours]["cpu_ms"]
            # bubblewrap does not wait for its child, so the kernel charges us for the set-up alone
            share = "" if "bwrap" in theirs else f"CPU {cpu:5.2f}x; "
            asked = f"asked {target}x" if target is not None else "for comparison"
            text = f"{ratio:5.2f}x (best {best:5.2f}x; {share}{asked})"
            print(f"{ours:38} / {theirs:38} {text}")
    return table


def _slow_down(rounds: int) -> None:
    """Print how much a training step with torch takes longer while one worker is kept busy beside it."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
    batch = torch.randn(64, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step_s() -> float:
        started = time.perf_counter()
        for _ in range(10):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return time.perf_counter() - started

    alone: list[float] = []
    beside: list[float] = []
    with NamespaceSandbox(workers=1) as sandbox:
        for _ in range(3 * rounds):
            alone.append(min(step_s() for _ in range(5)))
            futures = [sandbox.submit(Program(source=_TRIVIAL)) for _ in range(60)]
            beside.append(min(step_s() for _ in range(5)))
            for future in futures:
                future.result()
    middle = len(alone) // 2
    ratio = sorted(beside)[middle] / sorted(alone)[middle] - 1
    print(f"training step beside a busy sandbox: {100 * ratio:+.1f}% (median)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default="", help="only methods whose name holds this")
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    with _cases() as cases:
        chosen = [case for case in cases if arguments.only in case.name]
        for case in chosen:
            case.run()
        for _ in range(arguments.rounds):
            for case in chosen:
                case.measure(arguments.seconds)
        table = _report(chosen)
    if not arguments.only:
        _slow_down(arguments.rounds)
    if arguments.json_file is not None:
        rows = {name: {k: v for k, v in row.items() if math.isfinite(v)} for name, row in table.items()}
        arguments.json_file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
elif __name__ == "own_sandbox":
    with NamespaceSandbox(workers=1) as _own:
        for _ in sys.stdin:
            _own.map([Program(source=_TRIVIAL)] * (_BATCH // 2))
            sys.stdout.write("done\n")
            sys.stdout.flush()
elif __name__ == "fork_checker":
    for _ in sys.stdin:
        _fork_checker()
        sys.stdout.write("done\n")
        sys.stdout.flush()
