"""Our side: the ordinary ``Trainer``, one task per kind of prompt; timers around its parts."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from workload import (
    GROUP,
    KINDS,
    LEARNING_RATE,
    PROMPTS,
    arguments,
    new_tokens,
    now,
    prompts,
    serve,
)

from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
    TrackingConfig,
)
from multitask_rl.models.actor import Actor, compile_blocks
from multitask_rl.trainer import Trainer

REWARD = """
from workload import reward


def mixed(prompt, response, **_):
    return reward(prompt, response, "mixed")


def fixed(prompt, response, **_):
    return reward(prompt, response, "uniform")
"""


def write_run(folder: Path, texts: list[str], workload: str) -> Path:
    """Write rows, reward and tasks file; return the tasks file."""
    (folder / "rewards.py").write_text(REWARD)
    (folder / "workload.py").write_text(Path(__file__).with_name("workload.py").read_text())
    tasks = {}
    for kind in KINDS if workload == "mixed" else ["u"]:
        rows = [t for t in texts if workload != "mixed" or t[0] == kind]
        (folder / f"{kind}.jsonl").write_text("".join(json.dumps({"prompt": t}) + "\n" for t in rows))
        tasks[kind] = {
            "dataset": f"{kind}.jsonl",
            "eval_dataset": f"{kind}.jsonl",
            "rewards": ["rewards.py:mixed" if workload == "mixed" else "rewards.py:fixed"],
        }
    path = folder / "tasks.yaml"
    path.write_text(json.dumps({"tasks": tasks}))
    return path


def build(folder: Path) -> Trainer:
    """Return the trainer; its settings are those of the other sides, the rest are the defaults."""
    mixed = args.workload == "mixed"
    bf16 = args.dtype == "bfloat16"
    tasks = write_run(folder, prompts(PROMPTS * args.steps, args.seed, args.workload), args.workload)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(args.device)
    if args.compile:
        compile_blocks(model)
    settings = ModelConfig(name_or_path=str(args.model), autocast=bf16)
    actor = Actor(model, PreTrainedTokenizerFast.from_pretrained(args.model), settings)
    if not mixed:
        actor.eos_token_ids = ()
    return Trainer(
        actor,
        config_path=tasks,
        config=RunConfig(
            output_dir=str(folder / "run"),
            seed=args.seed,
            executor=args.executor,
            model=settings,
            max_steps=args.steps,
            rollout=RolloutConfig(
                engine=args.engine,
                # the sides share the device
                engine_config={}
                if args.engine == "hf"
                else {"dtype": args.dtype, "gpu_memory_utilization": 0.2},
                max_new_tokens=new_tokens(args.workload),
            ),
            batch=BatchConfig(prompts_per_step=PROMPTS, group_size=GROUP, refill_rounds=0),
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
            scheduler=SchedulerConfig(policy="uniform"),
            guard=GuardConfig(enabled=False),
            eval=EvalConfig(every=0),
            checkpoint=CheckpointConfig(every=0),
            tracking=TrackingConfig(trackers=["jsonl"]),
        ),
    )


class Clock:
    """Seconds spent inside methods of the trainer's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of ``owner.method`` under ``name``."""
        call: Callable[..., Any] = getattr(owner, method)

        def timed(*given: Any, **named: Any) -> Any:
            began = now()
            try:
                return call(*given, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + now() - began

        setattr(owner, method, timed)


def device_memory(run: Path) -> dict[str, float]:
    """Return the last step's peak, which the trainer reads and resets; empty without a GPU."""
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return {"peak_cuda_mib": last["memory/peak_mb"]} if "memory/peak_mb" in last else {}


def main() -> None:
    """Serve steps."""
    torch.set_num_threads(args.threads)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(Path(folder))
        trainer._open()
        clock = Clock()
        clock.watch(trainer.parts.learner, "update", "train_s")
        clock.watch(trainer, "push_weights", "weights_s")

        def step(_: int) -> dict[str, float]:
            clock.seconds.clear()
            began, cpu = now(), time.process_time()
            report = trainer.train_step()
            seconds = now() - began
            clock.seconds["gen_s"] = report.seconds["rollout"]
            clock.seconds["reward_s"] = report.seconds["wait/rewards"]
            return {
                "step_s": seconds,
                "cpu_s": time.process_time() - cpu,
                **clock.seconds,
                "overhead_share": 1.0 - sum(clock.seconds.values()) / seconds,
                "new_tokens": sum(len(s.rollout.response_ids) for s in report.drawn),
                "padding_share": report.train["padding_share"],
                **device_memory(Path(folder) / "run"),
            }

        serve(step)
        trainer._close("finished")


if __name__ == "__main__":
    args = arguments(__doc__)
    main()
