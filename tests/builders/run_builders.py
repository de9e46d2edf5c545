"""A complete small run: three tasks, three algorithms, rewards in a file, a tiny actor."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

from model_builders import VOCABULARY, build_actor, build_tokenizer
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    ScoringConfig,
    TrackingConfig,
)
from multitask_rl.guard.base import Guard
from multitask_rl.guard.decision import GuardDecision
from multitask_rl.trainer import Trainer

__all__ = [
    "ECHO",
    "ECHO_WORLD",
    "TASKS",
    "VOCABULARY",
    "JudgesAllGood",
    "assert_episodes_keep_their_limits",
    "build_actor",
    "build_tokenizer",
    "lines",
    "run_config",
    "train",
    "undocumented",
    "weights_hash",
    "write_run",
]


class JudgesAllGood(Guard):
    """Judges all weights good, and knows the steps of those it has judged."""

    def __init__(self):
        self.judged = []

    def observe(self, step, evaluations, confirm=None):
        self.judged.append(step)
        return GuardDecision(judged_good=True)

    def state_dict(self):
        return {"judged": list(self.judged)}

    def load_state_dict(self, state, renamed=None):
        self.judged = list(state["judged"])


REWARDS = """
from multitask_rl.scoring.shapes import with_traits


@with_traits(isolate=False)
def starts_right(response, reference):
    return float(response[:1] == reference[:1]) if response else 0.0


def is_short(response):
    return 1.0 / (1.0 + len(response))


@with_traits(isolate=False)
def has_no_digit(response):
    return float(any(c.isdigit() for c in response))
"""
"""``is_short`` runs in a worker process, the others in the trainer's: both ways, for one start."""

ECHO = """
  echo:
    type: grpo
    dataset: digit.jsonl
    environment: worlds.py:Echo
    max_turns: 4
"""
"""A task of many turns, below others; its world is in ``worlds.py``."""

ECHO_WORLD = """
import itertools, os, random, time
from multitask_rl.environments.base import StepResult


class Echo:
    '''Says the actor's letter back three times, then gives 1 for a letter that it has said before.'''

    def __init__(self, dies_at="", log="", is_slow=False):
        self.dies_at, self.log, self.is_slow = dies_at, log, is_slow

    def reset(self, row):
        self.note("reset")
        self.heard = []
        return []

    def step(self, message):
        text = message["content"]
        if self.is_slow:
            time.sleep(random.SystemRandom().random() / 10)
        if self.dies_at and not os.path.exists(self.dies_at):
            open(self.dies_at, "w").close()
            os._exit(9)
        repeats = float(bool(text) and text[:1] in self.heard)
        self.heard.append(text[:1])
        if len(self.heard) == 3:
            return StepResult(done=True, reward=repeats, info={"heard": len(self.heard)})
        reply = {"role": "user", "content": text[:1] * 3}
        return StepResult(messages=[reply], reward=repeats, info={"heard": len(self.heard)})

    def close(self):
        self.note("close")

    def note(self, what):
        if self.log:
            with open(self.log, "a") as file:
                file.write(what + "\\n")
"""

TASKS = """
tasks:
  copy:
    type: grpo
    dataset: copy.jsonl
    weight: 2
    rewards:
      - plugin: rewards.py:starts_right
      - {plugin: rewards.py:is_short, weight: 0}
  digit:
    type: ppo
    dataset: digit.jsonl
    rewards: [rewards.py:starts_right]
    kl: {coefficient: 0.01, target: 0.5}
  quark:
    type: reward_conditioned
    dataset: copy.jsonl
    rewards: [rewards.py:is_short]
    kl: {coefficient: 0.01}
    algorithm_config: {quantiles: 3}
  clean:
    type: constrained_decoding
    dataset: digit.jsonl
    rewards: [rewards.py:is_short]
    constraints:
      - {plugin: rewards.py:has_no_digit, mode: reject, max_attempts: 3}
"""


def write_run(directory: Path, tasks: str = TASKS, *, num_rows: int = 120) -> Path:
    """Write actor, data, rewards and tasks file; return the tasks file."""
    rng = random.Random(0)
    for name, letters in (("copy", "abc"), ("digit", "012")):
        rows = [
            {"id": i, "prompt": f"{(w := rng.choice(letters))}{w}{rng.choice(letters)}>", "reference": w}
            for i in range(num_rows)
        ]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (directory / "rewards.py").write_text(REWARDS)
    (directory / "tasks.yaml").write_text(tasks)
    if not (directory / "actor").exists():
        build_actor().save(directory / "actor")
    return directory / "tasks.yaml"


def run_config(directory: Path, output: str, max_steps: int, **changes: object) -> RunConfig:
    """Return a small configuration writing to ``directory/output``."""
    settings: dict[str, object] = {
        "tasks_file": str(directory / "tasks.yaml"),
        "output_dir": str(directory / output),
        "max_steps": max_steps,
        "num_threads": 1,
        "model": ModelConfig(name_or_path=str(directory / "actor")),
        "rollout": RolloutConfig(max_new_tokens=4),
        "batch": BatchConfig(prompts_per_step=12, group_size=4),
        "optimizer": OptimizerConfig(learning_rate=1e-3),
        "eval": EvalConfig(every=2, num_prompts=12),
        "checkpoint": CheckpointConfig(every=2),
        "guard": GuardConfig(),
        "scoring": ScoringConfig(num_workers=1),
        "tracking": TrackingConfig(trackers=["jsonl"], store_rollouts=-1),
    }
    return RunConfig(**(settings | changes))


def train(config: RunConfig) -> Trainer:
    """Train and return the trainer."""
    trainer = Trainer.from_config(config)
    trainer.train()
    return trainer


def undocumented(directory: Path) -> set[str]:
    """Return the metrics of the run in ``directory`` that no row of docs/metrics.md names."""
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    patterns = []
    for name in (name for cell in cells for name in re.findall("`([^`]+)`", cell)):
        parts = re.split(r"(<\w+>)", name)
        kinds = {"<metric>": "(?P<metric>.+)", "<watched>": ".+"}
        patterns.append("".join(kinds.get(p, "[^/]+") if p[:1] == "<" else re.escape(p) for p in parts))

    def is_covered(name: str) -> bool:
        found = [match for pattern in patterns if (match := re.fullmatch(pattern, name))]
        inner = [match["metric"] for match in found if "metric" in match.groupdict()]
        return len(found) > len(inner) or any(is_covered(f"task/any/{metric}") for metric in inner)

    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row if name not in ("step", "time") and not is_covered(name)}


def weights_hash(trainer: Trainer) -> str:
    """Return a hash of the actor's weights and the critic's."""
    digest = hashlib.blake2b()
    for parameter in [*trainer.actor.model.parameters(), *trainer.critic.parameters()]:
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


IS_CLOCKED = re.compile(
    r"(time|system|memory|utilisation|waits_for|train/ranks)/|(time|seconds)$|.*(_s|/seconds_per_step)(/|$)"
)
"""Names, matched from their beginning, of what the clock or the machine decides."""


def lines(directory: Path, name: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """Return the lines of a JSONL file without what the clock decides and names that end in ``without``."""

    def kept(row: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in row.items() if not IS_CLOCKED.match(k) and not k.endswith(without)}

    rows = [kept(json.loads(line)) for line in (directory / name).read_text().splitlines()]
    for row in rows:
        if "metrics" in row:  # of an evaluation
            row["metrics"] = kept(row["metrics"])
    return [json.dumps(row, sort_keys=True) for row in rows]


def assert_episodes_keep_their_limits(rows, tokenizer):
    """Hold stored episodes of ``ECHO`` with 4 tokens a turn and 6 in all: tokens, texts, ends and rewards."""
    cut = 0
    for row in rows:
        turns, ids = row["turns"], list(row["response_ids"])
        assert sum(turn["num_tokens"] for turn in turns) == len(ids) <= 6
        assert all(0 < turn["num_tokens"] <= 4 for turn in turns)
        for turn in turns:
            own, ids = ids[: turn["num_tokens"]], ids[turn["num_tokens"] :]
            assert tokenizer.decode(own, skip_special_tokens=True) == turn["response"]
        is_full = len(row["response_ids"]) == 6 and len(turns) < 3
        cut += is_full
        assert not is_full or row["finish_reason"] == "length"
        assert row["reward"] == row["earned"] == sum(turn["reward"] for turn in turns)
    assert cut
