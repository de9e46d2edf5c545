"""How much MLflow's database takes: ``python benchmarks/mlflow_size.py --steps 1000 --tasks 2``.

A metric has a name as a run of ``--tasks`` tasks gives it (``--names`` per task and for the run) and a value
that moves; the numbers are those of the database file after the last step.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from multitask_rl.config.run import TrackingConfig
from multitask_rl.tracking.mlflow import MLflowTracker


def main() -> None:
    """Log, print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=2)
    parser.add_argument("--names", type=int, default=50, help="metrics per task, and of the run")
    options = parser.parse_args()
    areas = [f"task/task_{index}" for index in range(options.tasks)] + ["train"]
    names = [f"{area}/some_metric_{index:02d}" for area in areas for index in range(options.names)]
    with tempfile.TemporaryDirectory() as directory:
        tracker = MLflowTracker(Path(directory) / "run", TrackingConfig(), None)
        tracker.start({})
        for step in range(1, options.steps + 1):
            tracker.log_metrics({name: random.random() for name in names}, step)
        tracker.finish("finished")
        size = (Path(directory) / "mlflow.db").stat().st_size
    print(json.dumps({"steps": options.steps, "metrics": len(names), "MB": round(size / 1e6, 1)}))


if __name__ == "__main__":
    main()
