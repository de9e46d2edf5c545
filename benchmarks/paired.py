"""Speed of the sandbox, of scoring or of a step in two source trees, side by side: ratios with intervals.

    python benchmarks/paired.py OLD NEW [--what sandbox|scoring|step] [--pairs 12] [--json FILE]

One process per tree is kept up. They work in turn, never together, in an order that changes from pair to
pair, so that other work on the machine meets both. The workload is that of the scripts beside this one; only
the package differs. A ratio is new / old of a pair: CPU time of all processes involved, and wall time.
Printed are the median and its 95 % interval (order statistics).

``step``: a step of the mixed workload of ``speed.py``, on one thread; the CPU time is that of the trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scipy.stats import binom
from speed import Side as SpeedSide
from speed import make_actor

HERE = Path(__file__).resolve().parent


class Side:
    """The process of one tree."""

    def __init__(self, tree: Path, what: str) -> None:
        path = os.pathsep.join([str(tree), str(tree / "tasks"), str(tree / "rewards")])
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", what, str(tree)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases: list[str] = self._read()

    def measure(self, case: str, seconds: float) -> tuple[float, float]:
        """Return wall and CPU milliseconds per program or score."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([case, seconds]) + "\n")
        self._process.stdin.flush()
        wall, cpu = self._read()
        return wall, cpu

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class StepSide:
    """The process of one tree that trains ``model`` for at most ``steps`` steps."""

    cases = ("mixed step",)

    def __init__(self, tree: Path, model: Path, steps: int) -> None:
        path = os.pathsep.join([str(tree), str(tree / "tasks"), str(tree / "rewards")])
        arguments = ["--model", str(model), "--steps", str(steps)]
        self._side = SpeedSide(str(tree), sys.executable, "ours.py", arguments, 1, {"PYTHONPATH": path})

    def measure(self, case: str, seconds: float) -> tuple[float, float]:
        """Return wall and CPU milliseconds of the next step."""
        numbers = self._side.step()
        return 1000 * numbers["step_s"], 1000 * numbers["cpu_s"]

    def close(self) -> None:
        """End the process."""
        self._side.close()


@contextlib.contextmanager
def sandbox_cases() -> Iterator[dict[str, Any]]:
    """Yield the sandboxed methods of ``sandbox.py`` by name."""
    import sandbox as script

    stdio = script.StdioTask(tests=[script.StdioTest(stdin=i, stdout=o) for i, o in script._TESTS])
    literal = script.AssertsTask(entry_point="add", asserts=script._LITERAL)
    judged = script.AssertsTask(entry_point="add", asserts=script._JUDGED)
    with script.NamespaceSandbox(workers=1) as one:
        cases = [
            script._sandboxed(one, "trivial", script.Program(source=script._TRIVIAL), 0.0),
            script._sandboxed(
                one, "trivial, queued", script.Program(source=script._TRIVIAL), 0.0, batch=True
            ),
            script._sandboxed(one, "imports", script.Program(source=script._IMPORTS), 0.0),
            script._sandboxed(one, "literals", script.Program(source=script._FUNCTION, task=literal), 1.0),
            script._sandboxed(one, "judge", script.Program(source=script._FUNCTION, task=judged), 1.0),
            script._sandboxed(one, "10 tests", script.Program(source=script._STDIO, task=stdio), 1.0),
        ]
        yield {case.name: case for case in cases}


@contextlib.contextmanager
def scoring_cases() -> Iterator[dict[str, Any]]:
    """Yield the trivial reward of ``scoring.py`` through the pool."""
    import sandbox as clock
    import scoring as script

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(script.REWARD)
        task = script.TaskSpec(
            name="t", rewards=[script.RewardSpec(plugin=f"{folder}/reward.py:exact", name="exact")]
        )
        records = script.rollouts()
        with script.RewardPool({"t": task}, script.ScoringConfig(), seed=0, devices={}) as pool:
            case = clock.Case(
                "scores",
                lambda: None,
                lambda: [*clock.descendants(os.getpid())],
                lambda count: [*pool.score(records[:count])],
            )
            yield {"scores": case}


def serve(what: str, tree: str) -> None:
    """Answer the driver until it closes the pipe."""
    import multitask_rl

    if not Path(str(multitask_rl.__file__)).is_relative_to(tree):
        raise SystemExit(f"{multitask_rl.__file__} is not in {tree}")
    with {"sandbox": sandbox_cases, "scoring": scoring_cases}[what]() as cases:
        sys.stdout.write(json.dumps(list(cases)) + "\n")
        sys.stdout.flush()
        for line in sys.stdin:
            name, seconds = json.loads(line)
            case = cases[name]
            case.measure(seconds)
            sys.stdout.write(json.dumps([1000 / case.rates[-1], case.cpu_ms[-1]]) + "\n")
            sys.stdout.flush()


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median and the 95 % interval of the median."""
    ordered, count = sorted(values), len(values)
    low = max(0, int(binom.ppf(0.025, count, 0.5)) - 1)
    return statistics.median(ordered), ordered[low], ordered[count - 1 - low]


def main() -> None:
    """Measure and print a line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--what", choices=("sandbox", "scoring", "step"), default="sandbox")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--json", type=Path, dest="json_file")
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in (arguments.old, arguments.new)]
    folder = tempfile.TemporaryDirectory()
    sides: Sequence[Side | StepSide]
    if arguments.what == "step":
        model = Path(folder.name) / "actor"
        make_actor(model, "0.45M", seed=0)
        sides = [StepSide(tree, model, arguments.pairs + 1) for tree in trees]
    else:
        sides = [Side(tree, arguments.what) for tree in trees]
    table = {}
    try:
        for name in sides[0].cases:
            for side in sides:
                side.measure(name, 0.01)
        pairs: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in sides[0].cases}
        for number in range(arguments.pairs):
            for name, own in pairs.items():
                order = (0, 1) if number % 2 else (1, 0)
                seen = {i: sides[i].measure(name, arguments.seconds) for i in order}
                own.append([seen[0], seen[1]])
    finally:
        for side in sides:
            side.close()
        folder.cleanup()
    for name, own in pairs.items():
        row: dict[str, Any] = {"pairs": len(own)}
        for at, kind in enumerate(("wall", "cpu")):
            row[f"{kind}_ms_old"], row[f"{kind}_ms_new"] = (min(p[i][at] for p in own) for i in (0, 1))
            row[f"{kind}_ratio"] = median_interval([p[1][at] / p[0][at] for p in own])
        table[name] = row
        text = "; ".join(
            "{} {:.3f} ({:.3f} to {:.3f})".format(k, *row[f"{k}_ratio"]) for k in ("cpu", "wall")
        )
        sys.stdout.write(f"{name:16} new / old: {text}\n")
    if arguments.json_file is not None:
        arguments.json_file.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:4])
    else:
        main()
