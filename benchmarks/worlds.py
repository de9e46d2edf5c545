"""Many episodes at once: worlds that wait, and worlds that die.

    python benchmarks/worlds.py --what waiting --json benchmarks/results/worlds_waiting.json
    python benchmarks/worlds.py --what waiting --episodes 2000 --alone 0 --json worlds_waiting_2000.json
    python benchmarks/worlds.py --what dying --json benchmarks/results/worlds_dying.json

The rollout stage of a run samples episodes of three turns with a tiny actor (the default engine) and worlds
in worker processes. ``waiting``: each world sleeps a second a turn (``--wait``); all episodes at once,
against some one after the other (``--alone``), taken in turns in one run: before, between and after the
whole.
``dying``: 20 % of the worlds (``--dying``) end their process, raise or hang, in ``reset`` or ``step``; each
episode must come back once, complete or as a typed failure, each world of a living process must be closed
once, and no process may be left. The exit status is 1 if that does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from multitask_rl.config.run import RolloutConfig
from multitask_rl.config.task import TaskSpec
from multitask_rl.environments.adapt import WorldSpec
from multitask_rl.environments.pool import WorldPool
from multitask_rl.records import FailureKind, Prompt, Rollout, SamplingParams
from multitask_rl.rollout.hf import HFEngine
from multitask_rl.step.episodes import Episodes
from multitask_rl.step.stages import RolloutStage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

from model_builders import build_actor

TURNS = 3
WORLDS = '''
import itertools, os, random, time
from multitask_rl.environments.base import StepResult

NUMBERS = itertools.count()


class World:
    """Sleeps, and dies in the call that it has drawn."""

    def __init__(self, log, wait, turns, dying):
        self.name, self.log, self.wait, self.turns = f"{os.getpid()}/{next(NUMBERS)}", log, wait, turns
        chance = random.Random()
        is_dying = chance.random() < dying
        self.death = chance.choice(["exit", "raise", "hang"]) if is_dying else ""
        self.call = chance.randrange(turns + 1)
        self.note("built")

    def note(self, what):
        with open(self.log, "a") as file:
            file.write(f"{what} {self.name}\\n")

    def reset(self, row):
        self.turn = 0
        self.live()
        return []

    def step(self, message):
        self.turn += 1
        self.live()
        time.sleep(self.wait)
        done = self.turn == self.turns
        reply = {"role": "user", "content": "go on"}
        return StepResult(messages=[reply], done=done, reward=1.0)

    def live(self):
        if self.death and self.turn == self.call:
            self.note(self.death)
            if self.death == "exit":
                os._exit(3)
            if self.death == "hang":
                time.sleep(1000)
            raise OSError("the world is gone")

    def close(self):
        self.note("closed")
'''


class Setup:
    """The rollout stage over worlds of a folder."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        (folder / "worlds.py").write_text(WORLDS)
        self.log = folder / "log"
        self.log.touch()
        actor = build_actor()
        spec = TaskSpec(
            name="wait", environment="worlds.py:World", max_turns=TURNS, turn_timeout_s=args.timeout
        )
        dying = args.dying if args.what == "dying" else 0.0
        config = {"log": str(self.log), "wait": args.wait, "turns": TURNS, "dying": dying}
        world = WorldSpec(
            reference=f"{folder / 'worlds.py'}:World", config=config, timeout_s=spec.turn_timeout_s
        )
        self.pool = WorldPool({"wait": world}, num_workers=args.workers, in_lockstep=args.lockstep)
        algorithm = SimpleNamespace(condition=lambda ids, *, evaluation: ids)
        task: Any = SimpleNamespace(
            spec=spec,
            sampling=SamplingParams(max_new_tokens=8),
            group_size=1,
            algorithm=algorithm,
            max_prompt_tokens=0,
        )
        engine = HFEngine.build(actor, RolloutConfig(), seed=0, output_dir=folder)
        self._stage = RolloutStage(
            engine,
            {"wait": task},
            actor.tokenizer.decode,
            seed=0,
            episodes=lambda: Episodes(self.pool, {"wait": task}, actor, evaluation=False),
        )

    def sample(self, first: int, last: int) -> list[Rollout]:
        """Return the episodes with these numbers, sampled at once."""
        prompts = [
            Prompt(
                task="wait", prompt_id=f"wait/{i}", draw=i, row={"prompt": "begin"}, text="", prompt_ids=[1]
            )
            for i in range(first, last)
        ]
        return [rollout for part in self._stage.stream([prompts]) for rollout in part]


class Watch:
    """The most memory, processes and threads of this process and those below it, until ``close``."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._before = self._process.memory_info().rss
        self.most: dict[str, int] = {"trainer_mib": 0, "workers_mib": 0, "workers": 0, "worker_threads": 0}
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            found = Counter(trainer_mib=(self._process.memory_info().rss - self._before) >> 20)
            for child in self._process.children(recursive=True):
                try:
                    found["workers_mib"] += child.memory_info().rss >> 20
                    found["worker_threads"] += child.num_threads()
                    found["workers"] += 1
                except psutil.Error:
                    continue
            self.most = {name: max(value, found[name]) for name, value in self.most.items()}

    def close(self) -> dict[str, int]:
        """Return the most of each."""
        self._ended.set()
        self._thread.join()
        return self.most


def waiting(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Return samples/s of all episodes at once and of some one after the other."""
    setup.sample(0, 1)  # starts a worker
    watch = Watch()
    alone, at_once = [], []
    number = 1
    for part in range(args.rounds + 1):
        if args.alone:
            began = time.monotonic()
            for _ in range(args.alone):
                assert setup.sample(number, number + 1)[0].earned == TURNS
                number += 1
            alone.append(args.alone / (time.monotonic() - began))
        if part < args.rounds:
            began = time.monotonic()
            rollouts = setup.sample(number, number + args.episodes)
            number += args.episodes
            at_once.append(args.episodes / (time.monotonic() - began))
            assert [rollout.earned for rollout in rollouts] == [TURNS] * args.episodes
    most = watch.close()
    found: dict[str, Any] = {"samples_per_s": [round(rate, 3) for rate in at_once], "most": most}
    if alone:
        found["alone_samples_per_s"] = [round(rate, 3) for rate in alone]
        found["ratio"] = round(min(at_once) / max(alone), 1)
    return found


def dying(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Return what became of the episodes, and what is wrong with it."""
    began = time.monotonic()
    rollouts = setup.sample(0, args.episodes)
    seconds = time.monotonic() - began
    setup.pool.close()
    lines = [line.split() for line in setup.log.read_text().splitlines()]
    names = {kind: Counter(name for what, name in lines if what == kind) for kind, _ in lines}
    closed = names.get("closed", Counter())
    # the process ended with all of its worlds, or was ended because it held a call that hangs
    dead = {name.partition("/")[0] for kind in ("exit", "hang") for name in names.get(kind, ())}
    unclosed = [n for n in names["built"] if not closed[n] and n.partition("/")[0] not in dead]
    failures = [r.failure for r in rollouts if r.failure is not None]
    whole = [r for r in rollouts if r.failure is None]
    wrong = {
        "lost": args.episodes - len({r.prompt.draw for r in rollouts}),
        "twice": len(rollouts) - len({r.prompt.draw for r in rollouts}),
        "wrong_reward": sum(r.earned != TURNS or len(r.turns) != TURNS for r in whole),
        "untyped": sum(f.kind not in (FailureKind.infra, FailureKind.timeout) for f in failures),
        "closed_twice": sum(count > 1 for count in closed.values()),
        "not_closed": len(unclosed),
        "processes_left": len(psutil.Process().children(recursive=True)),
    }
    return {
        "seconds": round(seconds, 1),
        "complete": len(whole),
        "failures": dict(Counter(f.kind.value for f in failures)),
        "worlds": {kind: sum(names[kind].values()) for kind in names},
        "wrong": wrong,
    }


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(Path(folder), args)
        try:
            found = (waiting if args.what == "waiting" else dying)(setup, args)
        finally:
            setup.pool.close()
    settings = {name: getattr(args, name) for name in ("what", "episodes", "wait", "workers", "lockstep")}
    text = json.dumps({**settings, "turns": TURNS, **found, "cores": os.cpu_count()}, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.write_text(text)
    sys.exit(1 if any(found.get("wrong", {}).values()) else 0)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=["waiting", "dying"], required=True)
    parser.add_argument("--episodes", type=int, default=200, help="sampled at once")
    parser.add_argument("--alone", type=int, default=5, help="waiting: one after the other, per part")
    parser.add_argument("--rounds", type=int, default=2, help="waiting: how often all are sampled at once")
    parser.add_argument("--wait", type=float, help="seconds that a world sleeps a turn")
    parser.add_argument("--dying", type=float, default=0.2, help="share of worlds that die")
    parser.add_argument("--timeout", type=float, default=5.0, help="turn_timeout_s")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lockstep", action="store_true", help="as rollout.lockstep")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.wait is None:
        args.wait = 1.0 if args.what == "waiting" else 0.05
    return args


if __name__ == "__main__":
    main()
