"""Kills and damages tiny runs at random and compares what they become with an undisturbed run.

    python benchmarks/chaos.py --executor local --kills 50 --seed 1 --json kills.json
    python benchmarks/chaos.py --executor ranks --kills 50 --seed 1  # two ranks on the CPU
    python benchmarks/chaos.py --executor ray --kills 50 --seed 1    # two engines, a reward pool, two ranks
    python benchmarks/chaos.py --executor ray --kills 50 --steps 200 # all of them in one run
    python benchmarks/chaos.py --damage 1000 --seed 1 --json damage.json

Kills: SIGKILL, SIGTERM or SIGINT for the trainer, SIGKILL for one of the processes below it (reward workers,
ranks, engines, processes of Ray) or for a keeper or cell of the sandbox in which a reward runs, at a random
moment of a random part of a run (see ``PARTS``). The same command is started again until it ends with 0. Then
weights, every record and the MLflow store must equal those of the undisturbed run, each point once, and no
process, temporary file, shared memory or session of Ray may be left.
This process imports everything once and forks an attempt from itself: an attempt takes as long as its run.

Damage: a file below ``checkpoints/`` or ``reference/`` gets a byte flipped, is cut off, deleted or filled
with zeros. What a run then reads must be a whole checkpoint and the true reference, or a refusal.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import json
import math
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multitask_rl.boundary.interrupts import Terminated, stopping_on_signals
from multitask_rl.config.run import (
    BatchConfig,
    CheckpointConfig,
    EvalConfig,
    RayConfig,
    RunConfig,
    TrackingConfig,
)
from multitask_rl.errors import CheckpointError, MultitaskRLError
from multitask_rl.executor.group import ActorGroup
from multitask_rl.guard.safety_guard import SafetyGuard
from multitask_rl.run.checkpoint import CheckpointStore
from multitask_rl.run.store import RunStore
from multitask_rl.sandbox.cgroups import descendants
from multitask_rl.scoring.pool import RewardPool
from multitask_rl.step.evaluation import Evaluator
from multitask_rl.tracking.base import Trackers
from multitask_rl.trainer import Trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "builders"))

from run_builders import IS_CLOCKED, build_actor, lines, run_config, write_run

STEPS = 4
"""Of a run, unless ``--steps`` says otherwise."""
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PARTS: dict[str, tuple[type, str, float]] = {
    "start": (RewardPool, "start", 2.0),
    "cluster": (ActorGroup, "__init__", 15.0),
    "tracker": (Trackers, "start", 1.5),
    "resume": (RunStore, "resume", 0.05),
    "step": (Trainer, "train_step", 0.3),
    "save": (CheckpointStore, "save", 0.05),
    "evaluation": (Evaluator, "evaluate", 0.2),
    "judging": (SafetyGuard, "observe", 0.02),
    "end": (Trackers, "finish", 0.3),
}
"""Part of a run -> the method it begins with, and the seconds after its beginning in which a signal comes."""
OF_RAY, NOT_OF_RAY = ("cluster",), ("start",)
"""Parts of a run on Ray alone; the reward pools start in Ray's actors."""
AGENTS = (b"ray::DashboardAgent", b"ray::RuntimeEnvAgent")
"""They tell a dead server of their end first, and give up after a minute: a constant of Ray 2.60."""
REPEATED = ("step", "save", "evaluation", "judging")
CACHED = ("/reward_cache_hits",)
"""Endings of names that a kill changes: the cache keeps what the killed attempt scored."""
RECORDS = ("metrics.jsonl", "events.jsonl", "evaluations.jsonl", "rollouts.jsonl")
KINDS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT", "child", "sandbox", "sandbox")
"""What is sent to the trainer, or the kind of process below it that is killed."""
AT_ONCE = {"local": 1, "ranks": 1, "ray": 3}
"""Kills that an attempt meets at most, if it lives so long: with Ray most of its time is its start."""
LITTER = (".writing_*", ".making_*", ".removed_*", ".replaced_*", "previous-*", "*.tmp", "*-journal")
TASKS = """
tasks:
  copy: {type: grpo, dataset: copy.jsonl, rewards: [rewards.py:starts_right], kl: {coefficient: 0.01}}
  clean:
    type: ppo
    dataset: digit.jsonl
    rewards: [rewards.py:IsShortByProgram]
    constraints: [{plugin: rewards.py:has_no_digit, mode: reject, max_attempts: 2}]
"""
REWARD = """

class IsShortByProgram:
    def warm_up(self):
        from multitask_rl.sandbox import shared_sandbox

        self.sandbox = shared_sandbox()

    def score(self, rollouts):
        from multitask_rl.sandbox import Program

        programs = [Program(source=f"print(1.0 / (1.0 + {len(r.response)}))") for r in rollouts]
        return [float(outcome.stdout) for outcome in self.sandbox.map(programs)]
"""
"""A program's output is the reward: the sandbox must run it again where a kill ended it."""


def write_inputs(directory: Path) -> None:
    """Write what the runs train on."""
    write_run(directory, TASKS, num_rows=24)
    with (directory / "rewards.py").open("a") as file:
        file.write(REWARD)


def tiny_config(
    directory: Path, output: str, executor: str = "local", *, steps: int = STEPS, mlflow: bool = True
) -> RunConfig:
    """Return a run of ``steps`` steps that is evaluated and saved after every second one."""
    changes: dict[str, Any] = {} if executor == "local" else {"device_map": {"actor": "cpu:0-1"}}
    if executor == "ray":
        changes |= {"executor": "ray", "ray": RayConfig(num_engines=2)}
    return run_config(
        directory,
        output,
        steps,
        batch=BatchConfig(prompts_per_step=4, group_size=2),
        eval=EvalConfig(every=2, num_prompts=4),
        tracking=TrackingConfig(trackers=["jsonl", "mlflow"] if mlflow else ["jsonl"], store_rollouts=-1),
        **changes,
    )


# ---------------------------------------------------------------------------------------------- one attempt


Plan = tuple[str, int, float, str]
"""A kill: part of the run, which time it begins, seconds after its beginning, what is killed (``KINDS``)."""


def attempt(config: RunConfig, log: Path, plans: Sequence[Plan] = ()) -> tuple[int, int]:
    """Fork a process that trains; return its id and a pipe with the numbers of ``plans`` as they begin."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    code = 70
    try:
        atexit._clear()  # what ends this process does not end the campaign's
        os.close(reader)
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for i, (part, nth, _, _) in enumerate(plans):
            _tell(part, nth, writer, i)
        code = _train(config)
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _train(config: RunConfig) -> int:
    try:
        with stopping_on_signals():
            Trainer.from_config(config).train()
    except Terminated as error:
        return error.exit_code
    except MultitaskRLError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException:  # noqa: BLE001 - a traceback is a finding
        traceback.print_exc()
        return 70
    return 0


def _tell(part: str, nth: int, writer: int, number: int) -> None:
    owner, name, _ = PARTS[part]
    method: Callable[..., Any] = getattr(owner, name)
    left = [nth]

    def telling(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.write(writer, bytes([number]))
        return method(*args, **kwargs)

    setattr(owner, name, telling)


def disturb(child: int, pipe: int, plans: Sequence[Plan]) -> list[tuple[str, str]]:
    """Carry the ``plans`` out as ``pipe`` says that they begin; return what was killed in which part."""
    done: list[tuple[str, str]] = []
    while len(done) < len(plans):
        ready, _, _ = select.select([pipe], [], [], 300.0)
        if not ready or not (told := os.read(pipe, 1)):
            break
        part, nth, after_s, kind = plans[told[0]]
        time.sleep(after_s)
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        victim, number = child, getattr(signal, kind, signal.SIGKILL)
        if kind in ("child", "sandbox"):
            victims = _victims(child, kind)
            if not victims:
                continue
            victim = random.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
            done.append((f"{kind} in {part}", f"{kind} {after_s:.2f} s into {part} {nth}"))
    return done


def _victims(trainer: int, kind: str) -> list[int]:
    """Return the keepers and cells of sandboxes below ``trainer``, or the processes outside of sandboxes."""
    below = descendants(trainer)
    keepers = {pid for pid in below if b"cell.keeper" in _read_proc(pid, "cmdline")}
    inside = {pid: keeper for keeper in keepers for pid in descendants(keeper)}
    if kind == "child":
        return sorted(below - keepers - inside.keys())
    # the program that a cell runs is no victim: SIGKILL is how a program that uses too much memory ends
    cells = {pid for pid, keeper in inside.items() if _parent(pid) == keeper}
    return sorted(keepers | cells)


def _read_proc(pid: int, name: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _parent(pid: int) -> int:
    return int((_read_proc(pid, "stat").rpartition(b")")[2].split() or [b"", b"0"])[1])


def left_over(but: tuple[bytes, ...] = (), within_s: float = 10.0) -> list[int]:
    """Return processes that outlive their trainer by so many seconds: they became children of this one."""
    until = time.monotonic() + within_s
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = sorted(
            pid for pid in descendants(os.getpid()) if not _read_proc(pid, "cmdline").startswith(but)
        )
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def _used_elsewhere() -> set[str]:
    """Return the shared memory that living processes use: the runs have none."""
    maps = b"".join(_read_proc(int(pid), "maps") for pid in os.listdir("/proc") if pid.isdigit())
    return {line.rpartition(b"/")[2].decode() for line in maps.splitlines() if b" /dev/shm/" in line}


# ---------------------------------------------------------------------------------------------- comparing


def contents(output: Path, steps: int) -> dict[str, Any]:
    """Return all that two runs of a seed and of ``steps`` steps have in common."""
    last = output / "checkpoints" / f"step_{steps:08d}"
    found: dict[str, Any] = {
        "weights": (last / "actor" / "model.safetensors").read_bytes(),
        "tensors": (last / "tensors.safetensors").read_bytes(),
    }
    found.update({name: lines(output, name, without=CACHED) for name in RECORDS if (output / name).exists()})
    # a replica that was lost or joined is not part of what the run makes
    events = [line for line in found.get("events.jsonl", ()) if json.loads(line)["source"] != "engine"]
    found["events.jsonl"] = events
    spans = [json.loads(line) for line in (output / "timeline.jsonl").read_text().splitlines()]
    found["timeline.jsonl"] = [span["step"] for span in spans if span["stage"] == "step"]
    found["litter"] = sorted(str(p.relative_to(output)) for name in LITTER for p in output.rglob(name))
    return found | _mlflow(output)


def _mlflow(output: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{(output.parent / 'mlflow.db').resolve()}")
    experiments = [e.experiment_id for e in client.search_experiments() if e.name != "Default"]
    runs = [
        run
        for run in client.search_runs(experiments)
        if run.data.tags["multitask_rl.output_dir"].endswith(f":{output.resolve()}")
    ]
    if len(runs) != 1:
        return {"mlflow runs": [run.info.status for run in runs]}
    (run,) = runs
    points: Counter[tuple[str, int, float]] = Counter()
    for name in run.data.metrics:
        # absent when the clock saw no time, as it is for cached results; named by the rank that was last
        if name.endswith("/rewards_per_s") or "wait" in name:
            continue
        for point in client.get_metric_history(run.info.run_id, name):
            is_left_out = IS_CLOCKED.match(name) or name.endswith(CACHED)
            points[name, point.step, 0.0 if is_left_out else point.value] += 1
    parameters = {k: v for k, v in run.data.params.items() if "output_dir" not in k}
    left_out = ("mlflow.", "multitask_rl.", "event.engine.")
    tags = {k: v for k, v in run.data.tags.items() if not k.startswith(left_out)}
    return {
        "mlflow runs": [run.info.status],
        "mlflow parameters": parameters,
        "mlflow points": points,
        "mlflow tags": tags,
        "mlflow artifacts": sorted(entry.path for entry in client.list_artifacts(run.info.run_id)),
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return a line per thing that differs, with the first difference of it."""
    said = []
    for name in sorted({*found, *expected}):
        one, other = found.get(name), expected.get(name)
        if one == other:
            continue
        detail = ""
        if isinstance(one, Counter) and isinstance(other, Counter):
            detail = f": more {list((one - other).items())[:3]}, fewer {list((other - one).items())[:3]}"
        elif isinstance(one, list) and isinstance(other, list):
            pair = next(((a, b) for a, b in zip(one, other, strict=False) if a != b), ())
            if len(pair) == 2 and all(isinstance(line, str) for line in pair):
                here, there = (set(map(repr, json.loads(line).items())) for line in pair)
                pair = (sorted(here - there)[:5], sorted(there - here)[:5])
            detail = f": {len(one)} and {len(other)} lines, first {str(pair)[:600]}"
        elif isinstance(one, dict) and isinstance(other, dict):
            keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
            detail = f": {str({key: (one.get(key), other.get(key)) for key in keys})[:600]}"
        elif not isinstance(one, bytes):
            detail = f": {str(one)[:300]} and {str(other)[:300]}"
        said.append(f"{name}{detail}")
    return said


# ---------------------------------------------------------------------------------------------- campaigns


def kill_runs(
    directory: Path, executor: str, kills: int, steps: int, minutes: float, seed: int
) -> dict[str, Any]:
    """Disturb runs of ``steps`` steps until ``kills`` signals were sent, or for so many minutes.

    A run of ``STEPS`` steps meets up to 6 of them, a longer one up to all.
    """
    rng = random.Random(seed)
    random.seed(seed)
    temporary = directory / "tmp"
    temporary.mkdir()
    os.environ["TMPDIR"] = str(temporary)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    tempfile.tempdir = None
    write_inputs(directory)
    # the machine may have fewer CPUs; Ray's own kills answer what other programs need, and its actors would
    # wait for other programs
    os.environ |= {"RAY_OVERRIDE_RESOURCES": '{"CPU": 8}', "RAY_memory_monitor_refresh_ms": "0"}
    os.environ |= {"RAY_worker_niceness": "0"}
    shared = set(os.listdir("/dev/shm"))
    others = NOT_OF_RAY if executor == "ray" else OF_RAY
    parts = [part for part in PARTS if part not in others]
    if executor == "ray":
        import ray  # noqa: F401 - before attempts are forked
    began = time.monotonic()
    for turn in reversed(range(5)):  # a busy machine can be too slow for the limits of Ray's start
        config = tiny_config(directory, "whole", executor, steps=steps)
        child, pipe = attempt(config, directory / "whole.log")
        os.close(pipe)
        if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) == 0:
            break
        if executor != "ray" or not turn:
            raise SystemExit(
                f"the undisturbed run ended with {code}: {(directory / 'whole.log').read_text()}"
            )
    expected = contents(directory / "whole", steps)
    done: Counter[str] = Counter()
    wrong: list[str] = []
    codes: Counter[int] = Counter()
    number = 0

    def is_enough() -> bool:
        return sum(done.values()) >= kills or time.monotonic() - began > 60 * minutes

    while not is_enough():
        number += 1
        name, log = f"run_{number}", directory / f"run_{number}.log"
        config = tiny_config(directory, name, executor, steps=steps)
        story = []
        # what comes after every second step begins half as often in an attempt
        most = 6 if steps == STEPS else 4 * kills
        last = 2 if steps == STEPS else max(2, steps // kills)
        for turn in range(most + 100):
            plans: list[Plan] = []
            if turn < most and not is_enough():
                for part in rng.sample(parts, AT_ONCE[executor] if steps == STEPS else 3):
                    nth = rng.randint(1, last * (2 if part == "step" else 1)) if part in REPEATED else 1
                    plans.append((part, nth, rng.uniform(0.0, PARTS[part][2]), rng.choice(KINDS)))
            child, pipe = attempt(config, log, plans)
            for what, told in disturb(child, pipe, plans):
                done[what] += 1
                story.append(told)
                print(f"  {sum(done.values())}: {told}", flush=True)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.close(pipe)
            codes[code] += 1
            # with Ray the next attempt meets what the former one left
            if (executor != "ray" or code == 0) and (left := left_over(AGENTS)):
                wrong.append(f"{name}: processes {left} outlive their trainer ({story})")
                break
            # a rank that is killed ends the run with an error that names it
            if code not in (
                (0, -9, -2, -15, 130, 143) if executor == "local" else (0, 1, -9, -2, -15, 130, 143)
            ):
                wrong.append(f"{name}: exit {code} ({story}): {log.read_text()[-1500:]}")
            if code == 0:
                break
        else:
            wrong.append(f"{name}: never ended ({story})")
            continue
        try:
            said = differences(contents(directory / name, steps), expected)
        except (OSError, ValueError) as error:
            said = [repr(error)]
        events = lines(directory / name, "events.jsonl") if said else []
        replicas = [e for e in map(json.loads, events) if e["source"] == "engine"]
        said += [f"step {event['step']}: {event['reason']}" for event in replicas]  # a likely cause
        wrong += [f"{name}: {line} ({story})" for line in said]
        if not said:
            shutil.rmtree(directory / name)
        print(f"{name}: {time.monotonic() - began:.0f} s {story} {said or 'equal'}", flush=True)
    if left := left_over(within_s=90.0):
        wrong.append(f"processes {left} are left at the end")
    return {
        "executor": executor,
        "kills": sum(done.values()),
        "runs": number,
        "steps of a run": steps,
        "seed": seed,
        "by": dict(sorted(done.items())),
        "exit codes": {str(code): n for code, n in sorted(codes.items())},
        "wrong": wrong,
        "temporary files left": sorted(p.name for p in temporary.iterdir()),
        "shared memory left": sorted(set(os.listdir("/dev/shm")) - shared - _used_elsewhere()),
        "seconds": round(time.monotonic() - began, 1),
    }


def damage_runs(directory: Path, count: int, seed: int) -> dict[str, Any]:
    """Damage copies of a run ``count`` times; return what became of them."""
    rng = random.Random(seed)
    write_inputs(directory)
    Trainer.from_config(tiny_config(directory, "whole", mlflow=False)).train()
    whole = directory / "whole"
    files = sorted(p for place in ("checkpoints", "reference") for p in (whole / place).rglob("*"))
    files = [p for p in files if p.is_file()]
    pristine = CheckpointStore(whole / "checkpoints", 4, is_writer=False)
    weights = {step: pristine.load(pristine.path(step)) for step in pristine.entries}
    outcomes: Counter[str] = Counter()
    wrong = []
    began = time.monotonic()
    for _ in range(count):
        file = rng.choice(files).relative_to(whole)
        for place in ("checkpoints", "reference"):
            shutil.rmtree(directory / "damaged" / place, ignore_errors=True)
            shutil.copytree(whole / place, directory / "damaged" / place)
        said = f"{file}: {_damage(directory / 'damaged' / file, rng)}"
        try:
            outcome = _read(directory / "damaged", weights, pristine)
        except CheckpointError:
            outcome = "refused"
        except Exception as error:  # noqa: BLE001 - a traceback is a finding
            outcome = f"traceback {type(error).__name__}"
        if outcome.startswith(("silent", "traceback")):
            wrong.append(f"{said}: {outcome}")
        outcomes[outcome] += 1
    return {
        "damages": count,
        "seed": seed,
        "outcomes": dict(outcomes),
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }


def _damage(file: Path, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "flip", "cut", "zero", "delete"])
    place = rng.randrange(len(data))
    if kind == "delete":
        file.unlink()
        return "deleted"
    if kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    else:
        data[place : place + 64] = bytes(len(data[place : place + 64]))
    file.write_bytes(data)
    return f"{kind} at {place}"


def _read(output: Path, weights: dict[int, Any], pristine: CheckpointStore) -> str:
    """Return what a run goes on from: ``newest``, ``previous``; ``silent...`` if it is not what was saved."""
    store = RunStore(output, CheckpointConfig())
    try:
        actor = build_actor(3)  # other weights than the run began with: they would be seen
        reference: Any = store.reference(actor)
        found = store.checkpoints.newest()
        if found is None:
            return "a new run"
        step = int(found.state["counters"]["step"])
        good = weights[step]
        for path in pristine.path(step).rglob("*"):
            is_manifest = path.name == "manifest.json"  # one that says the same
            other = store.checkpoints.path(step) / path.relative_to(pristine.path(step))
            if path.is_file() and not is_manifest and path.read_bytes() != other.read_bytes():
                return f"silent use of {path.name}"
        if found.state != good.state or store.checkpoints.entries[step] != pristine.entries[step]:
            return "silent change of state"
        for one, other in zip(reference.parameters(), build_actor().model.parameters(), strict=True):
            if not torch.equal(one, other):
                return "silent change of the reference"
        return "newest" if step == max(weights) else "previous"
    finally:
        store.close()


def main() -> None:
    """Run what the arguments say; exit 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--executor", choices=["local", "ray", "ranks"], default="local")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run, an even number")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no kill after them")
    parser.add_argument("--damage", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="chaos_") as place:
        results = []
        for number, name, campaign in (
            # before this process has a trainer of its own: an attempt is forked from it
            (
                options.kills,
                "killed",
                partial(
                    kill_runs,
                    executor=options.executor,
                    kills=options.kills,
                    steps=options.steps,
                    minutes=options.minutes,
                ),
            ),
            (options.damage, "damaged", partial(damage_runs, count=options.damage)),
        ):
            if number:
                (Path(place) / name).mkdir()
                results.append(campaign(Path(place) / name, seed=options.seed))
    text = json.dumps(results[0] if len(results) == 1 else results, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    is_clean = not any(
        result.get(name)
        for result in results
        for name in ("wrong", "temporary files left", "shared memory left")
    )
    raise SystemExit(0 if is_clean else 1)


if __name__ == "__main__":
    main()
