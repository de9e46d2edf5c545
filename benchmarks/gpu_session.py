"""All that a machine with a GPU should be asked, safest first: ``make gpu``.

    python benchmarks/gpu_session.py                       # about 40 minutes
    python benchmarks/gpu_session.py --only doctor tests   # some parts
    python benchmarks/gpu_session.py --tiny                # the same parts on a CPU with tiny actors, minutes

The interpreter needs the package and pytest: ``pip install -e '.[mlflow,vllm]' trl pytest pytest-timeout``.
``HF_HUB_OFFLINE=0`` lets the example fetch its model. Where a command may take some minutes only, run some
parts at a time (``--minutes 9 --only doctor tests nccl``), each time with a ``--directory`` of its own.

Each part is a process of its own with a time limit. What it printed and measured is kept when a later part
fails or the machine goes away: ``<directory>/<part>.log``, ``<directory>/<part>.json``, and ``summary.json``
after every part. A part for which the time left is too short is left out and named. The exit status is 1 if a
part failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from speed import machine

HERE = Path(__file__).parent
ROOT = HERE.parent
ENGINES = "tests/gpu/test_gpu_engines.py"
FOLLOWS = "tests/gpu/test_gpu_run.py::test_vllm_on_the_device_follows_the_actor"

NCCL = """
import os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
def rank(index, backend):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK=str(index), WORLD_SIZE="2")
    dist.init_process_group(backend)
    value = torch.full((4,), float(index + 1), device="cuda:0" if backend == "nccl" else "cpu")
    try:
        dist.all_reduce(value)
    except dist.DistBackendError as error:
        if "Duplicate GPU" not in str(error):
            raise
        print("NCCL refuses two processes on one device", flush=True)
        time.sleep(3)  # the other is told, too
        os._exit(0)
    assert value.tolist() == [3.0] * 4, value
    print("rank", index, "of two on one device summed a tensor over", backend, flush=True)
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), nprocs=2)
"""
"""NCCL may refuse two processes on one device ("Duplicate GPU detected"): either answer passes."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process of the session."""

    name: str
    minutes: float
    """Its time limit; it is ended then."""
    command: list[str]
    needs: str = ""
    """A package without which the part is left out."""


@dataclass(slots=True)
class Outcome:
    """What became of a part."""

    name: str
    state: str
    """``passed``, ``failed``, ``timed out``, ``skipped: ...`` or ``left out: ...``."""
    seconds: float = 0.0
    exit_code: int | None = None
    command: str = ""
    last_lines: str = ""


def parts(directory: Path, *, tiny: bool) -> list[Part]:
    """Return the parts in their order; ``tiny``: for a CPU."""
    python = sys.executable
    device = ["--device", "cpu" if tiny else "cuda"]
    work = ["--actor", "tiny", "--workload", "uniform", "--dtype", "float32"] if tiny else []
    peak = ["--peak-tflops", "0.1"] if tiny else []
    steps = ["--steps", "1" if tiny else "3"]
    overlap = ["--delays", "0", "--block", "2", "--overlap-tokens", "8"]
    if not tiny:
        overlap = ["--delays", "1", "--block", "4"]

    def tests(*arguments: str) -> list[str]:
        # a warning of a CUDA build is told; elsewhere it fails the test
        told = ["-W", "default", "-rs", "-m", "gpu", "-p", "no:cacheprovider"]
        return [python, "-m", "pytest", *told, *arguments]

    def figures(name: str, engine: str, peer: str) -> list[str]:
        command = [python, str(HERE / "gpu.py"), *device, *work, *peak, *steps, *overlap]
        return [*command, "--engines", engine, "--peer", peer, "--json", str(directory / f"{name}.json")]

    # the peer in this interpreter: a machine without a net cannot make it one of its own
    large = ["--actor", "0.5B", "--workload", "long", "--dtype", "bfloat16"]
    beside = [python, str(HERE / "speed.py"), *device, *(work or large)]
    beside += [*peak, *steps, "--peer", "trl", "--peer-python", python, "--json", str(directory / "trl.json")]
    real = [python, str(ROOT / "examples/smollm2/run.py"), "--directory", str(directory / "smollm2")]
    real += [
        "--max-steps",
        "1" if tiny else "20",
        "--test-prompts",
        "6" if tiny else "64",
        "--effort",
        "0.05",
    ]
    if tiny:
        real += [
            "--warm-start-steps",
            "1",
            "--prompts-per-step",
            "8",
            "--eval-prompts",
            "6",
            "--threads",
            "1",
        ]
    return [
        Part("doctor", 2, [python, "-m", "multitask_rl", "doctor"]),
        Part(
            "tests",
            6,
            tests(
                ENGINES,
                "tests/gpu/test_gpu_run.py",
                "tests/integration/test_gpu_benchmark.py",
                "-k",
                "not vllm",
            ),
        ),
        Part("nccl", 2, [python, "-c", NCCL, "gloo" if tiny else "nccl"]),
        Part("hf", 7, figures("hf", "hf", "none")),
        # an engine in a process is the only one there: vLLM's memory for sleep and its settings are global
        *(Part(f"vllm_sleep_{level}", 3, tests(f"{FOLLOWS}[{level}]"), needs="vllm") for level in (0, 1, 2)),
        Part("vllm_contract", 3, tests(f"{ENGINES}::test_vllm_keeps_the_contract"), needs="vllm"),
        Part("vllm_handles", 3, tests("tests/gpu/test_gpu_vllm.py"), needs="vllm"),
        Part("vllm", 8, figures("vllm", "vllm", "none"), needs="vllm"),
        Part("tests_ranks", 3, tests("tests/gpu/test_gpu_ranks.py")),
        Part("trl", 8, beside, needs="trl"),
        Part("smollm2", 12, real),
    ]


def run_part(part: Part, directory: Path, limit_s: float) -> Outcome:
    """Run the part until it ends or ``limit_s`` is over; then end it with all its processes."""
    began, log = time.monotonic(), directory / f"{part.name}.log"
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    environment["PYTHONUNBUFFERED"] = "1"  # what a part printed before its limit is in its log
    if part.name == "nccl":  # a spawned process reads its code from a file
        script = directory / "nccl.py"
        script.write_text(NCCL)
        part = Part(part.name, part.minutes, [sys.executable, str(script), part.command[-1]])
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            part.command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, number)
                    time.sleep(3.0 if code is None and number == signal.SIGTERM else 0.0)
                except ProcessLookupError:
                    break
            child.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    state = "timed out" if code is None else "failed" if code else "passed"
    if state == "passed" and "pytest" in part.command and " passed" not in text[-2000:]:
        state = "skipped: the log has the reasons"
    return Outcome(
        name=part.name,
        state=state,
        seconds=round(time.monotonic() - began, 1),
        exit_code=code,
        command=" ".join(a if len(a) < 200 else "..." for a in part.command[1:]),
        last_lines="\n".join(text.splitlines()[-12:]),
    )


def main() -> int:
    """Run the parts, keep what each gave, return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=HERE / "results" / "gpu")
    parser.add_argument("--minutes", type=float, default=39.0, help="for all parts together")
    parser.add_argument("--only", nargs="+", help="names of parts")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with tiny actors")
    args = parser.parse_args()
    missing = []
    for name in ("multitask-rl", "pytest", "pytest-timeout"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        parser.error(
            f"{sys.executable} has no {', '.join(missing)}; in this directory: "
            f"{sys.executable} -m pip install -e '.[mlflow,vllm]' trl pytest pytest-timeout"
        )
    directory = args.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    chosen = parts(directory, tiny=args.tiny)
    if unknown := set(args.only or []) - {part.name for part in chosen}:
        parser.error(f"no part {sorted(unknown)[0]!r}; parts: {', '.join(part.name for part in chosen)}")
    ends = time.monotonic() + 60.0 * args.minutes
    outcomes: list[Outcome] = []
    for part in chosen:
        left = ends - time.monotonic()
        if args.only and part.name not in args.only:
            continue
        if part.needs and not importlib.util.find_spec(part.needs):
            outcomes.append(Outcome(part.name, f"left out: {part.needs} is not installed"))
        elif left < 60.0:
            outcomes.append(
                Outcome(part.name, f"left out: {max(left, 0.0):.0f} s of {args.minutes:g} min are left")
            )
        else:
            outcomes.append(run_part(part, directory, min(left, 60.0 * part.minutes)))
        print(f"{part.name:12} {outcomes[-1].state}  {outcomes[-1].seconds:.0f} s", flush=True)
        summary = {"machine": machine("cpu" if args.tiny else "cuda"), "parts": [asdict(o) for o in outcomes]}
        (directory / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(any(outcome.state in ("failed", "timed out") for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
