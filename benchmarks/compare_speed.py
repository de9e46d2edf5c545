"""Seconds of ``compare`` on many large runs: as text, and with its page.

    python benchmarks/compare_speed.py --runs 50 --tasks 20 --steps 2000 [--json FILE]

The runs are made up: arms of five seeds with the records that a run of such steps writes. ``metrics.jsonl``
has 36 metrics a task, ``evaluations.jsonl`` 128 prompts a task every 50 steps, ``rollouts.jsonl`` the newest
2,000 samples. Seconds are those of the whole command in a process of its own, the records in the memory of
the system; the middle of ``--repeats``. ``cpu`` are seconds of the processors: on a machine that does nothing
else the command takes a tenth less, as it reads two records at a time. Exit code 1 if they are more than 10.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

MOST_S = 10.0
SEEDS = 5
COMMAND = "python benchmarks/compare_speed.py --runs {0.runs} --tasks {0.tasks} --steps {0.steps}"
METRICS = ["reward_mean", "level", "weight", "length", "entropy", "kl"] + [
    f"of_the_task/metric_{i}" for i in range(30)
]
RUN = "import sys; from multitask_rl.cli import main; sys.exit(main(sys.argv[1:]))"


def main() -> int:
    """Print the figures; 1 if the limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        runs = [str(write_run(directory, number, options)) for number in range(options.runs)]
        size = sum(file.stat().st_size for run in runs for file in Path(run).iterdir())
        page = directory / "page.html"
        figures: dict[str, float] = {"records_mb": round(size / 1e6, 1)}
        for name, more in (("text_s", []), ("page_s", ["--html", str(page)])):
            found, cpu = [], []
            for _ in range(options.repeats):
                began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                command = [sys.executable, "-c", RUN, "compare", *runs, *more]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found.append(time.perf_counter() - began)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            figures[name] = round(statistics.median(found), 2)
            figures[f"{name}_cpu"] = round(statistics.median(cpu), 2)
        figures["page_mb"] = round(page.stat().st_size / 1e6, 2)
    document = {"command": COMMAND.format(options), "figures": figures}
    print(json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(max(figures["text_s_cpu"], figures["page_s_cpu"]) > MOST_S)


def write_run(directory: Path, number: int, options: argparse.Namespace) -> Path:
    """Write the records of a run. Runs of one seed share the numbers of their steps."""
    run = directory / str(number)
    run.mkdir()
    arm, seed = divmod(number, SEEDS)
    chance = random.Random(number)
    tasks = [f"task{i}" for i in range(options.tasks)]
    settings = {
        "type": "grpo",
        "weight": 1.0,
        "sampling": {"max_new_tokens": 256},
        "rewards": [{"plugin": "exact"}],
    }
    config = {
        "seed": seed,
        "max_steps": options.steps,
        "group_size": 4 + arm,
        "tasks": dict.fromkeys(tasks, settings),
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))

    def metrics(step: int) -> dict[str, Any]:
        own = {f"task/{task}/{name}": chance.random() for task in tasks for name in METRICS}
        rates = {"time/step_s": 2 + chance.random(), "time/samples_per_s": 40.0, "time/tokens_per_s": 9000.0}
        return {"step": step, **own, "train/loss": chance.random(), **rates, "memory/peak_mb": 900.0}

    def evaluation(step: int, task: str) -> dict[str, Any]:
        rate = 0.2 + 0.5 * step / options.steps + 0.01 * arm
        values = [float(chance.random() < rate) for _ in range(128)]
        means = {name: {"mean": chance.random(), "n": 128, "error": 0.1} for name in METRICS[:6]}
        kind = {"metric": "reward", "direction": "higher", "prompts": task, "metrics": means}
        return {"step": step, "task": task, **kind, "values": values}

    def sample(index: int) -> dict[str, Any]:
        prompt = index % 400
        words = {"prompt": f"prompt {prompt} " * 20, "response": f"answer {chance.random()} " * 20}
        place = {"step": 1 + index * options.steps // 2000, "task": tasks[prompt % len(tasks)]}
        more = {
            "sample": index % 8,
            "finish_reason": "stop",
            "response_ids": [1] * 100,
            "row": {"reference": "42"},
        }
        return {**place, "prompt_id": f"p/{prompt}", **words, "reward": chance.random(), **more}

    files: dict[str, Any] = {
        "evaluations": (evaluation(s, task) for s in range(0, options.steps + 1, 50) for task in tasks),
        "rollouts": map(sample, range(2000)),
    }
    twin = directory / str(seed) / "metrics.jsonl"
    if number >= SEEDS:
        shutil.copyfile(twin, run / "metrics.jsonl")
    else:
        files["metrics"] = map(metrics, range(1, options.steps + 1))
    for name, lines in files.items():
        with (run / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return run


if __name__ == "__main__":
    sys.exit(main())
