"""Speed of a whole step against a peer and against the limit, on the same machine at the same time.

    python benchmarks/speed.py --workload mixed --peer trl --json results.json

Every side is a process of its own and all make their steps in turn, so that other load on the machine falls
on each alike. Figures are medians over the measured steps; ratios are medians of the ratios turn by turn.
``trl`` is installed into an environment of its own below the cache directory; where that cannot be done the
peer is left out with a message.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flops import peak_flops, step_flops

SIDES = Path(__file__).with_name("sides")
sys.path.insert(0, str(SIDES))

from workload import ACTORS, FIXED, GROUP, KINDS, PROMPTS, WORKLOADS, make_actor  # noqa: E402

TRL = "trl==1.16.0"
PEERS = {"trl": "trl_grpo.py", "generate": "generate.py"}
WARMUP = 2
ROLLOUTS = PROMPTS * GROUP


class Side:
    """A side's process."""

    def __init__(
        self,
        name: str,
        python: str,
        script: str,
        arguments: list[str],
        threads: int,
        environment: dict[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        environment = {
            **os.environ,
            **(environment or {}),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        else:  # TRL would take all
            environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in ``close``
        self._process = subprocess.Popen(
            [python, str(SIDES / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    @property
    def process_id(self) -> int:
        """The id of its process."""
        return self._process.pid

    def step(self) -> dict[str, float]:
        """Let the side make one step; return what it measured."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        for line in self._process.stdout:
            if line.startswith('{"step_s"'):
                result: dict[str, float] = json.loads(line)
                return result
        self._fail()
        raise AssertionError

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def _fail(self) -> None:
        self._process.wait(10)
        self._log.seek(0)
        raise SystemExit(f"the side {self.name!r} ended early:\n{self._log.read()[-3000:]}")

    def medians(self) -> dict[str, float]:
        """Return the median of each number over the measured steps, and the rates that follow."""
        keys = dict.fromkeys(k for s in self.steps for k in s)
        result = {k: statistics.median(s[k] for s in self.steps if k in s) for k in keys}
        result["samples_per_s"] = ROLLOUTS / result["step_s"]
        if "gen_s" in result:
            result["gen_tokens_per_s"] = result["new_tokens"] / result["gen_s"]
        return {k: float(f"{v:.4g}") for k, v in result.items()}


def main() -> None:
    """Measure and write."""
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "actor"
        make_actor(model, args.actor, args.seed)
        sides = start_sides(args, model)
        try:
            take_turns(sides, args.steps)
        finally:
            for side in sides.values():
                side.close()
    result = summary(sides, args)
    text = json.dumps(result, indent=1) + "\n"
    sys.stdout.write(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="mixed")
    parser.add_argument("--peer", choices=["none", *PEERS], default="none")
    parser.add_argument("--actor", choices=list(ACTORS), default="0.45M")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--engine", default="hf", help="rollout.engine of our run")
    parser.add_argument("--peak-tflops", type=float, help="of the device; some are known: flops.py")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: autocast everywhere"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each side")
    parser.add_argument("--compile", action="store_true", help="model.compile in our run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer-python", help="interpreter that has trl; default: an environment made here")
    return parser.parse_args()


def start_sides(args: argparse.Namespace, model: Path) -> dict[str, Side]:
    """Start ours, the limit's and, if it can be had, the peer's process."""
    arguments = [
        *("--workload", args.workload, "--dtype", args.dtype, "--model", str(model)),
        *("--steps", str(args.steps + WARMUP), "--seed", str(args.seed), "--threads", str(args.threads)),
        *("--device", args.device, "--engine", args.engine),
    ]
    if args.compile:
        arguments.append("--compile")
    scripts = {"ours": (sys.executable, "ours.py"), "limit": (sys.executable, "bare.py")}
    if args.peer != "none":
        python = sys.executable if args.peer != "trl" else args.peer_python or trl_python()
        if python is not None:
            scripts[args.peer] = (python, PEERS[args.peer])
    return {
        name: Side(name, python, script, arguments, args.threads, device=args.device)
        for name, (python, script) in scripts.items()
    }


def take_turns(sides: dict[str, Side], steps: int) -> None:
    """Warm up, then let every side make one step in each turn."""
    for turn in range(WARMUP + steps):
        order = list(sides.values())
        for side in order if turn % 2 else reversed(order):
            measured = side.step()
            if turn >= WARMUP:
                side.steps.append(measured)


def trl_python() -> str | None:
    """Return the interpreter of an environment with TRL, made on first use; None if it cannot be made."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "multitask-rl-bench"
    folder = cache / TRL.replace("==", "-")
    python = folder / "bin" / "python"
    torch_version = importlib.metadata.version("torch").partition("+")[0]
    done = folder / "complete"
    if not done.exists():
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", f"torch=={torch_version}"],
            [
                str(python),
                "-m",
                "pip",
                "install",
                "-q",
                TRL,
                f"torch=={torch_version}",
                _TRANSFORMERS,
                "datasets",
            ],
        ]
        for command in commands:
            if subprocess.run(command, check=False).returncode:
                sys.stderr.write(f"the peer is left out: {' '.join(command)} failed\n")
                return None
        done.touch()
    return str(python)


_TRANSFORMERS = "transformers>=5.16,<5.20"


def summary(sides: dict[str, Side], args: argparse.Namespace) -> dict[str, Any]:
    """Return figures, ratios and what they were measured on."""
    ours = sides["ours"]
    medians = {name: side.medians() for name, side in sides.items()}
    ratios: dict[str, float] = {}
    stage_ratios: dict[str, float] = {}
    for name, side in sides.items():
        if side is ours:
            continue
        for key in ("step_s", "cpu_s", "gen_s", "train_s"):
            pairs = list(zip(side.steps, ours.steps, strict=True))
            if all(key in a and key in b for a, b in pairs):
                # per token: each side samples its own answers, some runs have longer ones
                ratio = statistics.median(
                    a[key] / b[key] * (b["new_tokens"] / a["new_tokens"] if key == "gen_s" else 1.0)
                    for a, b in pairs
                )
                if key == "step_s" and name != "generate":
                    ratios[name] = round(ratio, 3)
                elif key != "step_s" and not (name == "generate" and key == "cpu_s"):
                    stage_ratios[f"{key.removesuffix('_s')}_{name}"] = round(ratio, 3)
    return {
        "workload": args.workload,
        "actor": args.actor,
        "dtype": args.dtype,
        "compile": args.compile,
        "device": args.device,
        "engine": args.engine,
        "threads": args.threads,
        "rollouts": ROLLOUTS,
        "measured_steps": args.steps,
        "ratios": ratios,
        "stage_ratios": stage_ratios,
        **utilisation(medians, args),
        "sides": medians,
        "machine": machine(args.device),
    }


def utilisation(medians: Mapping[str, Mapping[str, float]], args: argparse.Namespace) -> dict[str, Any]:
    """Return each side's share of the device's peak, by stage; empty where the peak is not known."""
    peak = peak_flops(args.peak_tflops, gpu() if args.device == "cuda" else None)
    if peak is None:
        return {}
    prompt = FIXED[args.workload][0] if args.workload in FIXED else statistics.mean(KINDS.values())
    shares: dict[str, dict[str, float]] = {}
    for name, own in medians.items():
        sampling, learning = step_flops(
            ACTORS[args.actor], PROMPTS, GROUP, prompt, own["new_tokens"] / ROLLOUTS
        )
        seconds = {"sampling": own.get("gen_s"), "learning": own.get("train_s")}
        work = {"sampling": sampling, "learning": learning}
        if name != "generate":
            seconds["step"], work["step"] = own["step_s"], sampling + learning
        shares[name] = {k: float(f"{work[k] / (s * peak):.4g}") for k, s in seconds.items() if s}
    return {"peak_tflops": peak / 1e12, "utilisation": shares}


def gpu() -> str:
    """Return name, driver and memory of the first CUDA device as ``nvidia-smi`` tells them; empty: none."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return told.partition("\n")[0].strip()


def machine(device: str = "cpu") -> dict[str, Any]:
    """Describe where the figures come from."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.partition(":")[2].strip() for x in info.read_text().splitlines() if x.startswith("model name")
        ]
        model = names[0] if names else model
    return {
        **({"gpu": gpu()} if device == "cuda" else {}),
        "cpu": model,
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        **{p: importlib.metadata.version(p) for p in ("torch", "transformers")},
        "trl": TRL.partition("==")[2],
    }


if __name__ == "__main__":
    main()
