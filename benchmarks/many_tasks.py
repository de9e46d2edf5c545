"""What 1,000 tasks cost: a real run with an instant engine, its controllers, logs, plan table and pages.

    python benchmarks/many_tasks.py --tasks 1000 --steps 20 --json benchmarks/results/many_tasks.json

The run samples two answers to 64 prompts a step, and its tiny actor learns from them. ``parts_s`` are seconds
of processor time a step of the trainer's thread:

- ``quotas``: the scheduler decides the prompts of each task;
- ``scheduler``: it learns from the statistics of the step;
- ``controls``: each task's multipliers and KL coefficient, and the guard;
- ``logs``: metrics and rollouts, as JSON lines;
- ``statistics``: of the samples, for the tasks that have some.

``share`` is the sum of the first four as a share of a step of one second. ``pages`` are the seconds and size
of what a reader opens: the report, and ``compare`` of two such runs. Exit code 1 from a ``share`` of 1 %.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from multitask_rl import trainer as trainer_module
from multitask_rl.cli import main as command
from multitask_rl.config.run import BatchConfig, EvalConfig, RolloutConfig, RunConfig, TrackingConfig
from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.step.task_state import TaskState
from multitask_rl.testing import FakeEngine
from multitask_rl.tracking.base import Trackers
from multitask_rl.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

from run_builders import VOCABULARY, run_config, write_run

MOST = 0.01
WHOLE = ("step", "evaluation")
spent: dict[str, float] = defaultdict(float)
num_steps = [0]
"""Steps made so far."""
inside: list[str] = []
"""The part that is under way: calls within it belong to it."""


def clocked(owner: Any, name: str, part: str) -> None:
    """Add the processor time of each call of ``owner.name`` to ``part``."""
    method: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if inside:
            return method(*arguments, **named)
        if part not in WHOLE:
            inside.append(part)
        began = time.thread_time()
        try:
            return method(*arguments, **named)
        finally:
            spent[part] += time.thread_time() - began
            inside.clear()
            if part == "step":
                num_steps[0] += 1
                if num_steps[0] == 1:
                    spent.clear()  # what a first step makes once

    setattr(owner, name, call)


def configuration(directory: Path, output: str, steps: int) -> RunConfig:
    """Return a run that is evaluated before its first step and after its last."""
    return run_config(
        directory,
        output,
        steps,
        batch=BatchConfig(prompts_per_step=64, group_size=2),
        eval=EvalConfig(every=steps, num_prompts=2),
        rollout=RolloutConfig(max_new_tokens=4),
        tracking=TrackingConfig(trackers=["jsonl"]),
    )


def main() -> int:
    """Print the figures; 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        names = [f"task_{index:04d}" for index in range(options.tasks)]
        rewards = "rewards: [rewards.py:starts_right]"
        lines = [f"  {name}: {{type: grpo, dataset: copy.jsonl, {rewards}}}" for name in names]
        write_run(directory, "tasks:\n" + "\n".join(lines) + "\n", num_rows=8)
        document = measure(directory, options.tasks, options.steps)
    print(json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(document["share"] >= MOST)


def measure(directory: Path, tasks: int, steps: int) -> dict[str, Any]:
    """Train twice, open the pages; return the figures."""
    began = time.perf_counter()
    engine = FakeEngine(vocab_size=len(VOCABULARY), eos_id=1)
    trainer = Trainer(config=configuration(directory, "first", steps), engine=engine)
    figures: dict[str, Any] = {"start_s": round(time.perf_counter() - began, 2)}
    figures["plan_lines"] = len(trainer.plan.describe().splitlines())
    began = time.perf_counter()
    trainer.train()
    figures["run_s"] = round(time.perf_counter() - began, 2)
    made = dict(spent)
    other = replace(configuration(directory, "second", steps), seed=1)
    Trainer(config=other, engine=FakeEngine(vocab_size=len(VOCABULARY), eos_id=1)).train()
    figures["step_cpu_s"] = round(made.pop("step") / (steps - 1), 3)
    figures["evaluation_cpu_s"] = round(made.pop("evaluation"), 3)
    parts = {name: seconds / (steps - 1) for name, seconds in made.items()}
    figures["parts_s"] = {name: round(seconds, 5) for name, seconds in parts.items()}
    figures["share"] = round(sum(own for name, own in parts.items() if name != "statistics"), 4)
    pages = {}
    first, second = (str(directory / name) for name in ("first", "second"))
    for name, arguments in (("report", ["report", first]), ("compare", ["compare", first, second])):
        page, began = directory / f"{name}.html", time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()) as text:
            code = command([*arguments, "--html", str(page)])
        seconds, size = round(time.perf_counter() - began, 1), page.stat().st_size // 1000
        pages[name] = {"code": code, "s": seconds, "kB": size, "lines": text.getvalue().count("\n")}
    return {"tasks": tasks, "steps": steps, **figures, "pages": pages}


clocked(Trainer, "train_step", "step")
clocked(Evaluator, "evaluate", "evaluation")
clocked(Trackers, "log_metrics", "logs")
clocked(Trackers, "log_rollouts", "logs")
clocked(trainer_module, "step_numbers", "logs")
clocked(trainer_module, "collect_stats", "statistics")
for method in ("update", "metrics"):
    clocked(DynamicTaskWeightScheduler, method, "scheduler")
for method in ("quotas", "weights", "carry_over"):
    clocked(DynamicTaskWeightScheduler, method, "quotas")
clocked(TaskState, "control", "controls")
clocked(SafetyGuard, "record_step", "controls")

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
