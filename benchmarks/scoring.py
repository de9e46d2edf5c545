"""Cost of a trivial reward through the pool, per score, against a direct call. Prints one JSON line.

    python benchmarks/scoring.py [rounds]

Best and median of the rounds: on a shared machine the best is the pool, the median the neighbours.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from multitask_rl.config.run import ScoringConfig
from multitask_rl.config.task import RewardSpec, TaskSpec
from multitask_rl.records import Rollout
from multitask_rl.scoring.adapt import resolve_reward
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.testing import make_rollout

SCORES = 1000
LIMIT_US = 60.0
REWARD = "def exact(response, reference, **row):\n    return float(response == reference)\n"


def rollouts() -> list[Rollout]:
    """Return 125 groups of 8 responses of 256 tokens."""
    return [
        make_rollout("x" * 255 + str(i % 10), task="t", row={"reference": "4"}, draw=i // 8, sample=i % 8)
        for i in range(SCORES)
    ]


def main() -> int:
    """Measure; 1 if the best round costs more than the limit."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "reward.py").write_text(REWARD)
        spec = RewardSpec(plugin=f"{folder}/reward.py:exact", name="exact")
        records = rollouts()
        direct = resolve_reward(spec, "benchmark")
        began = time.perf_counter()
        direct.score(records)
        direct_us = (time.perf_counter() - began) / SCORES * 1e6
        times = []
        task = TaskSpec(name="t", rewards=[spec])
        with RewardPool({"t": task}, ScoringConfig(), seed=0, devices={}) as pool:
            pool.score(records[:64])
            for _ in range(rounds):
                began = time.perf_counter()
                scored = pool.score(records)
                times.append((time.perf_counter() - began) / SCORES * 1e6)
        assert all(record.reward == 0.0 for record in scored), "a wrong score"
    result = {
        "scores": SCORES,
        "direct_us": round(direct_us, 1),
        "pool_best_us": round(min(times), 1),
        "pool_median_us": round(statistics.median(times), 1),
        "limit_us": LIMIT_US,
    }
    print(json.dumps(result))
    return int(result["pool_best_us"] > LIMIT_US)


if __name__ == "__main__":
    sys.exit(main())
