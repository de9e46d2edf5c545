"""Counts the bytes that a step sends to each receiver, with 1, 2 and 4 ranks and engines (docs/scale.md).

    python benchmarks/traffic.py --json benchmarks/results/traffic.json

A tiny actor trains in this process and in processes forked for the ranks. Collectives are counted as the
metric ``train/ranks/sent_mb`` does, messages by the size of their pickle. Engines stand in this process,
behind a group of actors that pickles what Ray would send. ``model`` is what ``docs/simulate_scale.py``
foretells from the number of parameters, samples and tokens; exit code 1 if one line is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray

from multitask_rl.boundary.channel import Channel
from multitask_rl.config.run import (
    BatchConfig,
    EvalConfig,
    LoraConfig,
    ModelConfig,
    RayConfig,
    RolloutConfig,
    TrackingConfig,
)
from multitask_rl.executor import engine as ray_engine
from multitask_rl.models.actor import Actor
from multitask_rl.models.lora import MergedWeights, add_adapters
from multitask_rl.records import SamplingParams
from multitask_rl.rollout.base import GenerationRequest, collect
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.trainer import Trainer
from multitask_rl.training.backends import build

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

from simulate_scale import Run, traffic

from forked import ForkedRank
from model_builders import build_actor
from run_builders import TASKS, run_config, write_run

STEPS, PROMPTS, GROUP = 3, 16, 8
CASES = ((1, 32), (2, 32), (2, 128), (4, 32))
"""Number of ranks or engines, and most tokens of a response."""
WITHIN = 0.15
LORA = 16
"""Rank of the adapters that travel alone."""
sent: Counter[str] = Counter()
ONE_TASK = TASKS[: TASKS.index("  digit:")].replace("      - {plugin: rewards.py:is_short, weight: 0}\n", "")


def count(name: str, message: Any) -> None:
    """Add the bytes of ``message``."""
    sent[name] += len(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def sending(channel: Channel, message: Any, original: Callable[..., None] = Channel.send) -> None:
    """Count a message to a rank by the method it calls, to a reward worker as ``rewards``."""
    if isinstance(message, tuple) and len(message) == 2 and isinstance(message[0], str):
        count(f"ranks {message[0]}", message)
    elif isinstance(message, tuple) and len(message) == 3:
        count("rewards", message)
    original(channel, message)


def receiving(channel: Channel, deadline: float | None = None, original: Any = Channel.receive) -> Any:
    """Count an answer."""
    message = original(channel, deadline)
    count(
        "ranks answers" if threading.current_thread().name.startswith("learner-rank") else "scores", message
    )
    return message


class Stored:
    """Stands in for a reference to ``value`` in the object store; each engine fetches the value once."""

    def __init__(self, value: Any) -> None:
        self.value = value
        count("stored", value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as a few bytes: pickles are counted here, and never read."""
        return (Stored, (None,))


class Group:
    """Stands in for ``ActorGroup``: the objects live here, calls and answers are pickled."""

    def __init__(self, _name: str, make: Callable[[int], Any], size: int, **_: Any) -> None:
        self._objects = [make(index) for index in range(size)]
        self._answers: dict[int, Any] = {}
        self.causes: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def submit(self, index: int, method: str, *arguments: Any) -> int:
        """Call at once; return the number of the answer."""
        count(f"engines {method}", arguments)
        given = [value.value if isinstance(value, Stored) else value for value in arguments]
        self._answers[len(self._answers)] = getattr(self._objects[index], method)(*given)
        return len(self._answers) - 1

    def poll(self, calls: Mapping[int, Any], _within: float) -> tuple[int, Any, bool]:
        """Return the oldest answer."""
        call = next(iter(calls))
        count("engines answers", self._answers[call])
        return call, self._answers[call], False

    def is_placed(self, _index: int) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing."""


def ranks(directory: Path, number: int, most: int) -> dict[str, Any]:
    """Return what a step of ``number`` ranks sends, in bytes, and the shape of the step."""
    sent.clear()
    output = directory / f"ranks_{number}_{most}"
    config = run_config(
        directory,
        output.name,
        STEPS,
        device_map={"actor": f"cpu:0-{number - 1}"},
        batch=BatchConfig(prompts_per_step=PROMPTS, group_size=GROUP),
        rollout=RolloutConfig(max_new_tokens=most),
        eval=EvalConfig(every=0),
        tracking=TrackingConfig(trackers=["jsonl"], store_rollouts=-1),
    )
    with Trainer.from_config(config) as trainer:
        reports = [trainer.train_step() for _ in range(STEPS)]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    drawn = [scored.rollout for report in reports for scored in report.drawn]
    found = {
        "collectives": sum(line.get("train/ranks/sent_mb", 0.0) for line in lines) * 2**20 / STEPS,
        "samples to ranks": sent["ranks step"] / STEPS,
        "rewards": (sent["rewards"] + sent["scores"]) / STEPS,
        "stored rollouts": (output / "rollouts.jsonl").stat().st_size / STEPS,
    }
    return {
        "measured": found,
        "parameters": sum(p.numel() for p in trainer.actor.model.parameters()),
        "samples": len(drawn) / STEPS,
        "learned": sum(len(report.kept) for report in reports) / STEPS,
        "tokens": sum(len(r.prompt.prompt_ids) + len(r.response_ids) for r in drawn) / len(drawn),
    }


def engines(directory: Path, number: int, most: int, rank: int = 0) -> dict[str, Any]:
    """Return what a step of ``number`` engines sends, in bytes, and the shape of the step."""
    actor: Actor = build_actor()
    parameters = sum(p.numel() for p in actor.model.parameters())
    if rank:
        lora = LoraConfig(rank=rank)
        actor = Actor(add_adapters(actor.model, lora), actor.tokenizer, ModelConfig(lora=lora))
    settings, sampling = RolloutConfig(max_new_tokens=most), SamplingParams(max_new_tokens=most)
    replicas = RayConfig(num_engines=number)
    engine = ray_engine.RayEngine(HFEngine, actor, settings, seed=0, output_dir=directory, ray=replicas)
    sent.clear()
    engine.update_weights(actor.state_dict(), 1)
    requests = [
        GenerationRequest(
            prompt_ids=[5 + i % 8] * 4, seeds=[i * GROUP + j for j in range(GROUP)], sampling=sampling
        )
        for i in range(PROMPTS)
    ]
    groups = collect(requests, engine.generate_stream(requests))
    found = {
        "weights": sent["engines update_weights"] + number * sent["stored"],
        "samples from engines": sent["engines begin"] + sent["engines answers"],
    }
    samples = PROMPTS * GROUP
    return {
        "measured": found,
        "parameters": parameters,
        "adapters": sum(p.numel() for p in actor.trainable_parameters()) if rank else 0,
        "adapted": len(weights.adapters) if isinstance(weights := actor.state_dict(), MergedWeights) else 0,
        "samples": samples,
        "learned": samples,
        "tokens": 4 + sum(len(one.response_ids) for group in groups for one in group) / samples,
    }


def main() -> int:
    """Print measured and foretold bytes; 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    stands_in: list[tuple[Any, str, Any]] = [
        (build, "LocalRank", ForkedRank),
        (ray_engine, "ActorGroup", Group),
        (ray, "put", Stored),
        (ray, "get", lambda stored: stored.value),
        (Channel, "send", sending),
        (Channel, "receive", receiving),
    ]
    for owner, name, instead in stands_in:
        setattr(owner, name, instead)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        write_run(directory, ONE_TASK)
        for measure in (ranks, engines, partial(engines, rank=LORA)):
            of = "ranks" if measure is ranks else "engines"
            for number, most in CASES:
                found = measure(directory, number, most)
                names = ("parameters", "samples", "learned", "tokens", "adapters", "adapted")
                shape = {name: found[name] for name in names if name in found}
                model = traffic(Run(**shape, **{of: number}, weight_bytes=4, stored=found["samples"]))
                for line, size in found["measured"].items():
                    row = {"of": of, "number": number, "line": line, "bytes": round(size)}
                    rows.append(row | {"model": round(model[line])} | shape)
    off = [r for r in rows if abs(r["bytes"] - r["model"]) > WITHIN * max(r["bytes"], 2000)]
    document = {"command": "python benchmarks/traffic.py", "rows": rows, "off": off}
    print(json.dumps(document, indent=1))
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(bool(off))


if __name__ == "__main__":
    sys.exit(main())
