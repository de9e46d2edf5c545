"""Write a project that runs: tasks, data, rewards with tests, a run fitted to this machine, a README."""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

import multitask_rl
from multitask_rl.boundary.allowance import usable_cores
from multitask_rl.config.devices import count_cuda_devices, parse_devices
from multitask_rl.config.editor_schemas import run_schema, tasks_schema
from multitask_rl.config.run import ModelConfig
from multitask_rl.config.schema.ranges import unknown_name
from multitask_rl.errors import ConfigError, MultitaskRLError, is_installed, path_errors
from multitask_rl.plugins import TASKS, list_plugins, load_plugin

OWN = "own"
"""Stands for two tasks with data and rewards in the project."""
SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LARGER_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
"""Defaults on a CPU and on a GPU."""
_TEMPLATES = Path(multitask_rl.__file__).parent / "testing/templates"
_ROWS = 240
_OWN_TASKS = """\
  sums:
    dataset: data/sums.jsonl             # rows: prompt, reference
    rewards: [rewards.py:right_number]   # a function of this project; names of `plugins list` work too
    type: grpo                           # how rewards become a gradient: grpo, ppo, rloo, dapo, ...
    weight: 1                            # share of the prompts, in proportion
  letters:
    dataset: data/letters.jsonl
    rewards: [rewards.py:letters_in_place]
    weight: 1
    # prompt: "{prompt} Answer with one word."   # a template of the row's columns; default: "{prompt}"
    # sampling: {max_new_tokens: 16}             # overrides rollout.* for this task
    # constraints: [{plugin: refusal, mode: penalty}]
"""


def main(arguments: Sequence[str]) -> int:
    """Ask for what is not given, write the project and print the next commands."""
    parser = argparse.ArgumentParser(prog="multitask-rl init", description=__doc__, allow_abbrev=False)
    parser.add_argument("directory", nargs="?", help="of the project (default: my-project)")
    parser.add_argument("--model", help=f"directory or Hugging Face id (default: {SMALL_MODEL} on a CPU)")
    parser.add_argument("--tasks", help=f"{OWN} and names of bundled tasks, by commas (default: {OWN})")
    parser.add_argument("--device", help="cpu, cuda, cuda:0-3 (default: cuda if there is one)")
    parser.add_argument("--yes", action="store_true", help="ask nothing, take the defaults")
    parser.add_argument("--overwrite", action="store_true", help="replace files of a project that is there")
    options = parser.parse_args(arguments)
    asks = not options.yes and sys.stdin.isatty()
    has_gpu = count_cuda_devices() > 0
    directory = Path(_choose(options.directory, "directory", "my-project", asks, str))
    device = _choose(options.device, "device", "cuda" if has_gpu else "cpu", asks, _device)
    usual = SMALL_MODEL if device == "cpu" else LARGER_MODEL
    model = _choose(options.model, "model (directory or Hugging Face id)", usual, asks, str)
    if Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
    known = sorted({info.name for info in list_plugins(TASKS)})
    if asks:
        print(f"bundled tasks: {', '.join(known)}")
    tasks = _choose(options.tasks, f"tasks, by commas ({OWN} = two of the project)", OWN, asks, _tasks)
    run, notes = fit_run(model, device)
    files = project_files(directory.resolve().name, tasks, run)
    there = [name for name in files if (directory / name).exists()]
    if there and not options.overwrite:
        raise ConfigError(
            f"{str(directory)!r} holds {', '.join(there)} already, and nothing was written; choose another "
            "directory, or replace them with --overwrite"
        )
    with path_errors("the project", directory, "a directory that can be written"):
        for name, text in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
    print(f"wrote {directory}: {', '.join(files)}")
    if fetched := _fetched(model, tasks):
        notes.append(
            f"the first run fetches {', '.join(fetched)} from the Hugging Face hub. Without a network: make "
            "the first run on a machine that has one, copy its folder ~/.cache/huggingface and set "
            "HF_HUB_OFFLINE=1; or name files: dataset_config: {source: PATH} in tasks.yaml, --model FOLDER"
        )
    for note in notes:
        print(f"note: {note}")
    print(f"next: cd {shlex.quote(str(directory))}")
    for command in ("doctor", "train"):
        print(f"      multitask-rl {command} --config-dir configs +experiment=first")
    print("      multitask-rl report runs/first --html report.html")
    return 0


def _choose(given: str | None, what: str, usual: str, asks: bool, read: Callable[[str], Any]) -> Any:
    """Return what was given, or what is answered; an answer that cannot be read is asked for again."""
    if given is not None or not asks:
        return read(given or usual)
    while True:
        answer = input(f"{what} [{usual}]: ").strip()
        try:
            return read(answer or usual)
        except MultitaskRLError as error:
            print(error)


def _device(text: str) -> str:
    devices = parse_devices(text, "--device")
    if devices.kind == "cuda" and count_cuda_devices() <= max(devices.indices, default=0):
        raise ConfigError(
            f"--device: {text} is not on this machine, which has {count_cuda_devices()} CUDA devices"
        )
    return text


def _tasks(text: str) -> list[str]:
    names, known = [name.strip() for name in text.split(",") if name.strip()], [OWN]
    known += sorted({info.name for info in list_plugins(TASKS)})
    for name in names:
        if name not in known:
            raise ConfigError(f"--tasks: {unknown_name('task', name, known)}")
    if not names:
        raise ConfigError(f"--tasks: give at least one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def fit_run(model: str, device: str) -> tuple[dict[str, Any], list[str]]:
    """Return settings of a run of ``model`` that fit the memory of ``device``, and notes on them.

    A model whose configuration cannot be read here gets settings for a small one.
    """
    from multitask_rl.run import estimate  # heavy: torch, transformers

    on_gpu = device != "cpu"
    cores = usable_cores()
    run: dict[str, Any] = {
        "model": {"name_or_path": model},
        "rollout": {"engine": "hf", "max_new_tokens": 256 if on_gpu else 32},
        "batch": {
            "prompts_per_step": 32 if on_gpu else 8,
            "group_size": 8,
            "tokens_per_microbatch": 16384 if on_gpu else 4096,
        },
        "optimizer": {"learning_rate": 1e-6},
        "eval": {"every": 10, "num_prompts": 128 if on_gpu else 32},
        "checkpoint": {"every": 10, "keep": 2},
        "scoring": {"num_workers": min(4, max(1, cores // 2))},
        "device_map": {"actor": device},
    }
    notes = list[str]()
    if on_gpu and is_installed("vllm"):
        run["rollout"] |= {"engine": "vllm", "engine_config": {"gpu_memory_utilization": 0.4}}
    if not on_gpu:
        run["num_threads"] = cores
    config = ModelConfig(name_or_path=model)
    try:
        shape = estimate.read_shape(config)
    except MultitaskRLError as error:
        return run, [f"the settings are for a small model, because {error}"]
    if shape.parameters < 500e6:  # SmolLM2-135M: sums from 0.07 to 0.75 in 10 steps
        run["optimizer"]["learning_rate"] = 2e-5
    room = 0.8 * estimate.free_memory(device) * (0.6 if run["rollout"]["engine"] == "vllm" else 1.0)
    width = 2 if on_gpu else 4
    whole = estimate.learner_bytes(shape.parameters, shape.parameters, width)
    left = room - whole
    if left < estimate.activation_bytes(shape, 1024, width, is_checkpointed=True):
        run["model"]["lora"] = {"rank": 16}
        run["optimizer"]["learning_rate"] *= 10
        left = room - shape.parameters * width
        notes.append(
            f"adapters are trained (model.lora.rank=16): all weights would need {estimate.in_units(whole)}, "
            f"and {device} has {estimate.in_units(room)}"
        )
    tokens = run["batch"]["tokens_per_microbatch"]
    if estimate.activation_bytes(shape, tokens, width) > left:
        run["model"]["gradient_checkpointing"] = True
    is_checkpointed = "gradient_checkpointing" in run["model"]
    while (
        tokens > 1024
        and estimate.activation_bytes(shape, tokens, width, is_checkpointed=is_checkpointed) > left
    ):
        tokens //= 2
    run["batch"]["tokens_per_microbatch"] = tokens
    if left < 0:
        notes.append(f"{model} has {shape.parameters / 1e9:.1f} G parameters: too many for {device}")
    return run, notes


def project_files(name: str, tasks: Sequence[str], run: dict[str, Any]) -> dict[str, str]:
    """Return the text of each file of a project, by its path."""
    import yaml

    text = (
        "# yaml-language-server: $schema=tasks.schema.json\n"
        "# Every key with its meaning: tasks.schema.json, which editors of YAML show.\ntasks:\n"
    )
    for task in tasks:
        text += _OWN_TASKS if task == OWN else _bundled(task)
    head = (
        "# @package _global_\n# yaml-language-server: $schema=../../run.schema.json\n"
        "# Settings of the run; keys on the command line override them. What is not here has its default:\n"
        "# run.schema.json has every key with its meaning, `multitask-rl train --cfg job` the values.\n"
    )
    settings = {"tasks_file": "tasks.yaml", "output_dir": "runs/first", "max_steps": 50, "seed": 0, **run}
    files = {
        "tasks.yaml": text,
        "configs/experiment/first.yaml": head + yaml.safe_dump(settings, sort_keys=False),
        "tasks.schema.json": json.dumps(tasks_schema(), indent=1) + "\n",
        "run.schema.json": json.dumps(run_schema(), indent=1) + "\n",
    }
    own = ""
    if OWN in tasks:
        rng = random.Random(0)
        files |= {
            "rewards.py": _template("project_rewards"),
            "test_rewards.py": _template("project_test"),
            "data/sums.jsonl": _rows(_sum(rng) for _ in range(_ROWS)),
            "data/letters.jsonl": _rows(_letters(rng) for _ in range(_ROWS)),
        }
        own = (
            "| `rewards.py`, `test_rewards.py` | the rewards and their tests (`pytest`) |\n"
            "| `data/` | rows: `prompt`, `reference`. Put your own there; a tenth is held out |\n"
        )
    files["README.md"] = Template(_template("project_readme")).substitute(name=name, own=own)
    return files


def _bundled(name: str) -> str:
    told = (load_plugin(TASKS, name).__doc__ or "").strip().splitlines()[0]
    lines = [f"  {name}:", f"    dataset: plugin:{name}   # {told}", "    weight: 1"]
    if sources := _hub_sources(name):
        own = "a file with a column split, or a directory"
        lines.append(f"    # dataset_config: {{source: PATH}}   # {own}; else the hub's {', '.join(sources)}")
    return "".join(f"{line}\n" for line in lines)


def _hub_sources(task: str) -> list[str]:
    """Return the data sets of the hub that a bundled task reads by default."""
    config = getattr(load_plugin(TASKS, task), "Config", None)
    keys = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return [str(key.default) for key in keys if key.name in ("source", "train_source") and key.default]


def _fetched(model: str, tasks: Sequence[str]) -> list[str]:
    """Return what a run fetches from the hub."""
    found = [] if Path(model).is_dir() else [f"the model {model}"]
    sources = {task: _hub_sources(task) for task in tasks if task != OWN}
    return found + [f"{' and '.join(own)} (task {task})" for task, own in sources.items() if own]


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.txt").read_text(encoding="utf-8")


def _rows(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _sum(rng: random.Random) -> dict[str, str]:
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    return {"prompt": f"What is {a} + {b}? Answer with the number.", "reference": str(a + b)}


def _letters(rng: random.Random) -> dict[str, str]:
    letters = rng.sample("abcdefghijklmnop", 4)
    prompt = f"Write these letters in the order of the alphabet, as one word: {' '.join(letters)}"
    return {"prompt": prompt, "reference": "".join(sorted(letters))}
