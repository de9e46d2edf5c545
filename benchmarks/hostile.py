"""Honest and hostile responses mixed through the whole scoring path: a JSON line per check, and a summary.

    python benchmarks/hostile.py --n 64 --seed 1

For each bundled check of text ``n`` honest responses are scored alone, then the same ones among ``n`` hostile
ones. Reported: honest verdicts that changed, results without a type, seconds of the mixture, by how many
seconds one hostile response delays its step (the step less the same without it: that shall be less than the
time limit of its check), growth of this process's memory, and processes, threads and descriptors
left. Exit code 1 if a verdict changed, a process is left, memory grew by 200 MiB or a delay passed its limit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import ConstraintSpec, RewardSpec, TaskSpec
from multitask_rl.records import Failure, NotApplicable, Rollout, Score, Verdict
from multitask_rl.scoring.adapt import resolve_constraint, resolve_reward
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing import make_rollout
from multitask_rl.testing.hostile import hostile_texts

LIMIT_MIB = 200
ROOT = Path(__file__).parents[1]
PROGRAMS = (
    "import time\ndef f(x):\n    time.sleep(100)\n",
    "def f(x):\n    while True: pass\n",
    "def f(x):\n    return 'x' * 10**10\n",
    "import os\nos._exit(0)\n",
    "def f(x):\n    print('x' * 10**8)\n",
    "x = [0]\nfor _ in range(40): x = [x, x]\ndef f(n): return x\n",
    "".join(f"{' ' * d}try: x\n{' ' * d}finally:\n" for d in range(18)) + " " * 18 + "x\n",
)


@dataclass(frozen=True, slots=True)
class Check:
    """A plugin with rows, honest responses and hostile ones of its own."""

    plugin: str
    row: Mapping[str, Any]
    honest: Callable[[int], str]
    own: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    is_constraint: bool = False


def checks() -> list[Check]:
    """Return every bundled check that reads text and needs no model."""
    instructions = [
        {
            "instruction_id": "length_constraints:number_sentences",
            "kwargs": {"num_sentences": 2, "relation": "at least"},
        },
        {"instruction_id": "detectable_format:title", "kwargs": {}},
        {"instruction_id": "detectable_format:number_bullet_lists", "kwargs": {"num_bullets": 1}},
    ]
    number = lambda i: f"The answer is {i % 3}."  # noqa: E731
    word = lambda i: ("Paris", "Rome", "It is Paris.")[i % 3]  # noqa: E731
    code = lambda i: f"```python\ndef f(x):\n    return x + {i % 3}\n```"  # noqa: E731
    fenced = tuple(f"```python\n{program}```" for program in PROGRAMS)
    return [
        Check("math_answer", {"reference": "1"}, number, ("10**10**10", "\\boxed{9^{9^{9^{9}}}}")),
        Check("exact_match", {"reference": "Paris"}, word),
        Check("f1", {"reference": "Paris"}, word),
        Check("rouge", {"reference": "Paris is the capital " * 50}, word),
        Check("label_match", {"reference": "Paris", "labels": ["Paris", "Rome"]}, word),
        Check(
            "ifeval",
            {"tests": instructions},
            lambda i: f"<<Title {i}>> One. Two.\n- three",
            ("Word. " * 6000,),
        ),
        Check("length", {}, word),
        Check("repetition", {}, word),
        Check(
            "regex",
            {},
            lambda i: "aaa" * (1 + i % 2),
            ("a" * 40 + "b",),
            {"pattern": "(a|a)+$", "full": True},
        ),
        Check("format", {}, lambda i: f"<think>{i}</think><answer>{i}</answer>"),
        Check("json_schema", {"schema": {"type": "object"}}, lambda i: "{}" if i % 2 else "[1]"),
        Check(
            "refusal", {"reference": "refuse"}, lambda i: ("I can't help with that.", "Sure: 1. Take")[i % 2]
        ),
        Check("over_refusal", {"reference": "comply"}, lambda i: ("I can't help.", "Sure.")[i % 2]),
        Check(
            "over_refusal",
            {"reference": "comply"},
            lambda i: ("I can't.", "Sure.")[i % 2],
            is_constraint=True,
        ),
        Check(
            "code_evaluator",
            {"prompt": "Write f.", "entry_point": "f", "tests": ["assert f(1) == 2", "assert f(2) == 3"]},
            code,
            fenced,
            {"timeout": 1.0},
        ),
    ]


def run(check: Check, number: int, stream: random.Random, step: int) -> dict[str, Any]:
    """Score honest responses alone and in mixtures; return what was seen.

    Args:
        check: what scores them.
        number: honest ones, and hostile ones, of the mixture.
        stream: draws the hostile ones and their places.
        step: responses of the step with one hostile one.
    """
    kind, name = ("constraint" if check.is_constraint else "reward"), "check"
    spec = TaskSpec(name="t")
    if check.is_constraint:
        spec.constraints = [ConstraintSpec(plugin=check.plugin, name=name, config=check.config or {})]
        limit_s = resolve_constraint(spec.constraints[0], check.plugin).traits.timeout_s
    else:
        spec.rewards = [RewardSpec(plugin=check.plugin, name=name, config=check.config or {})]
        limit_s = resolve_reward(spec.rewards[0], check.plugin).traits.timeout_s

    def rollouts(texts: list[str]) -> list[Rollout]:
        return [
            make_rollout(text, task="t", row={**check.row, "i": i}, draw=i) for i, text in enumerate(texts)
        ]

    honest = [check.honest(i) for i in range(number)]
    pool_of_hostile = [text for _, text in hostile_texts(10_000, stream.randrange(1 << 30))]
    stream.shuffle(pool_of_hostile)
    hostile = [*itertools.islice(itertools.cycle([*check.own, *pool_of_hostile]), number)]
    with RewardPool({"t": spec}, ScoringConfig(max_failure_rate=1.0), seed=0, devices={}) as pool:

        def score(texts: list[str]) -> tuple[list[Any], float]:
            began = time.monotonic()
            if check.is_constraint:
                results: list[Any] = [v[name] for v in pool.judge(rollouts(texts))]
            else:
                results = [s.breakdown[name] for s in pool.score(rollouts(texts))]
            return results, time.monotonic() - began

        memory = resident_mib()
        expected, alone_s = score(honest)
        one, delay_s, worst = [], 0.0, ""
        for i, text in enumerate(check.own or ("(" * 10_000,)):
            # Other texts each time: nothing comes from the cache.
            without = [f"{check.honest(k)}{' ' * (2 * i + 1)}" for k in range(step - 1)]
            _, without_s = score(without)
            results, with_s = score([*(f"{text} " for text in without), text])
            one += results
            if with_s - without_s > delay_s:
                delay_s, worst = with_s - without_s, text
        places = [(0, i) for i in range(number)] + [(1, i) for i in range(len(hostile))]
        stream.shuffle(places)
        mixed, mixed_s = score([(honest, hostile)[side][i] for side, i in places])
        grown = resident_mib() - memory
    changed = sum(mixed[at] != expected[i] for at, (side, i) in enumerate(places) if side == 0)
    given = [mixed[at] for at, (side, _) in enumerate(places) if side == 1]
    return {
        "check": f"{kind} {check.plugin}",
        "honest_changed": changed,
        "failures": sum(isinstance(r, Failure) for r in [*mixed, *one]),
        "untyped": sum(not isinstance(r, (Score, NotApplicable, Verdict, Failure)) for r in mixed),
        "overruns": sum(isinstance(r, Score) and "overrun" in r.components for r in given),
        "full_scores_of_hostile": sum(isinstance(r, Score) and r.value >= 1.0 for r in given),
        "grown_mib": round(grown, 1),
        "alone_s": round(alone_s, 2),
        "one_hostile_delays_s": round(delay_s, 2),
        "limit_s": limit_s,
        "worst": worst[:32],
        "mixed_s": round(mixed_s, 2),
    }


def resident_mib() -> float:
    """Return this process's resident memory, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def left() -> dict[str, int]:
    """Return what this process holds: children, threads, descriptors."""
    children = sum(
        len((task / "children").read_text().split()) for task in Path(f"/proc/{os.getpid()}/task").iterdir()
    )
    return {
        "children": children,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def main() -> int:
    """Run all checks; 1 if something must not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=64, help="honest responses, and hostile ones, per check")
    parser.add_argument("--step", type=int, default=256, help="responses of a step with one hostile one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="name of one plugin")
    arguments = parser.parse_args()
    stream = random.Random(arguments.seed)
    wanted = [check for check in checks() if arguments.only in ("", check.plugin)]
    import evaluate  # noqa: F401 - its imports are no growth

    before, memory = left(), resident_mib()
    found = []
    for check in wanted:
        found.append(run(check, arguments.n, stream, arguments.step))
        sys.stdout.write(json.dumps(found[-1]) + "\n")
        sys.stdout.flush()
    gc.collect()
    time.sleep(1.0)
    grown = max(resident_mib() - memory, *(f["grown_mib"] for f in found), 0.0)
    leftovers = {name: count - before[name] for name, count in left().items()}
    summary = {
        "checks": len(found),
        "honest_changed": sum(f["honest_changed"] for f in found),
        "untyped": sum(f["untyped"] for f in found),
        "memory_grown_mib": round(grown, 1),
        "left": leftovers,
        "passed_limits": [f["check"] for f in found if f["one_hostile_delays_s"] >= f["limit_s"]],
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    bad = summary["honest_changed"] or summary["untyped"] or summary["passed_limits"]
    return 1 if bad or grown >= LIMIT_MIB or leftovers["children"] > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
