"""What a run uses of its machine: numbers of each step; with ``profile: torch`` a trace and a memory report.

``<output_dir>/profile/trace.json.gz`` holds the trainer's thread, for Perfetto (ui.perfetto.dev) or
chrome://tracing. ``memory.json`` beside it is written when the run closes. Traced steps are slower.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from multitask_rl.records import Event
from multitask_rl.training.learner import Learner

logger = logging.getLogger(__name__)

WARM_UP, TRACED = 2, 3
"""Steps before the trace begins (the profiler itself warms up in the last of them), steps in it."""
MIB = 2.0**20


class StepProfiler:
    """Traces steps ``WARM_UP`` to ``WARM_UP + TRACED - 1`` of the process; files go to ``directory``."""

    def __init__(self, directory: Path, parameters: Iterable[nn.Parameter], learner: Learner) -> None:
        self._directory = directory
        self._trace = directory / "trace.json.gz"
        self._parameters = list(parameters)
        self._learner = learner
        directory.mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile: Any = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=WARM_UP - 1, warmup=1, active=TRACED, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
        )
        self._profile.start()

    def _write(self, profile: Any) -> None:
        profile.export_chrome_trace(str(self._trace))
        logger.info("profile: %d steps traced in %s", TRACED, self._trace)

    def step(self) -> None:
        """Count a training step that has ended."""
        self._profile.step()

    def close(self) -> None:
        """Write what was traced if the run was shorter, and the memory report."""
        memory = memory_report(self._parameters, self._learner.backend.optimizer_bytes)
        self._profile.stop()
        if not self._trace.exists():
            logger.warning("profile: no trace, the run made fewer than %d steps", WARM_UP + 1)
        (self._directory / "memory.json").write_text(json.dumps(memory, indent=1) + "\n")


def memory_report(parameters: Iterable[nn.Parameter], optimizer_bytes: int) -> dict[str, float]:
    """Return MiB of the process (now and peak), of the weights, the gradients and the optimizer state."""
    weights = list(parameters)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {
        "rss_mb": psutil.Process().memory_info().rss / MIB,
        "rss_peak_mb": peak / (MIB if sys.platform == "darwin" else 1024.0),
        "weights_mb": _num_bytes(weights) / MIB,
        "gradients_mb": _num_bytes(w.grad for w in weights if w.grad is not None) / MIB,
        "optimizer_mb": optimizer_bytes / MIB,
    }
    return {**report, **memory_numbers()}


def memory_numbers() -> dict[str, float]:
    """Return the sum of this process's peaks on all GPUs in the step, and the largest share of one.

    Both begin anew. {} without a GPU.
    """
    if not torch.cuda.is_available():
        return {}
    peak, share = 0, 0.0
    for device in range(torch.cuda.device_count()):
        peak += torch.cuda.max_memory_allocated(device)
        total = torch.cuda.get_device_properties(device).total_memory
        share = max(share, torch.cuda.max_memory_reserved(device) / total)
        torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_mb": peak / MIB, "memory/device_share": share}


class MemoryWatch:
    """Warns when a device's memory is nearly full.

    Args:
        read: returns ``memory_numbers``.
    """

    NEARLY_FULL = 0.9
    """Share of a device's memory, held by torch at its peak in a step."""

    def __init__(self, read: Callable[[], dict[str, float]] = memory_numbers) -> None:
        self._read = read
        self._is_full = False

    def observe(self, step: int) -> tuple[dict[str, float], list[Event]]:
        """Return the numbers of ``step``, and a warning at the first step of each time above the share."""
        numbers = self._read()
        share = numbers.get("memory/device_share", 0.0)
        was_full, self._is_full = self._is_full, share > self.NEARLY_FULL
        if was_full or not self._is_full:
            return numbers, []
        reason = (
            f"torch holds {share:.0%} of a device's memory: a longer batch may fail; lower "
            "batch.tokens_per_microbatch or rollout.engine_config.gpu_memory_utilization, or set "
            "model.gradient_checkpointing=true"
        )
        return numbers, [Event(step=step, source="run", kind="warn", reason=reason, data={"share": share})]


class SystemUse:
    """Processors, memory and GPUs in use, under the names that MLflow's tab "System metrics" shows.

    ``measure`` takes milliseconds, so ``numbers`` repeats its result for ``every_s`` seconds.
    """

    def __init__(self, every_s: float = 10.0) -> None:
        self._every_s = every_s
        self._measured_s = -math.inf
        self._numbers: dict[str, float] = {}
        psutil.cpu_percent()  # the first call begins the time that the next one describes

    def numbers(self) -> dict[str, float]:
        """Return the newest numbers, at most ``every_s`` seconds old."""
        if time.monotonic() - self._measured_s >= self._every_s:
            self._numbers, self._measured_s = self.measure(), time.monotonic()
        return self._numbers

    def measure(self) -> dict[str, float]:
        """Return percentages and megabytes (10^6 bytes); processors since the last call, the rest as of now.

        Memory of the run is the resident memory of this process and all below it. Memory that processes share
        counts in each of them. GPUs are those on which this process computes. Their utilization (of the last
        second, as the driver tells it) needs the package ``nvidia-ml-py``.
        """
        memory, run_bytes = psutil.virtual_memory(), 0
        here = psutil.Process()
        for process in (here, *here.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended meanwhile
                run_bytes += process.memory_info().rss
        found = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / 1e6,
            "system_memory_usage_percentage": 100.0 * memory.used / memory.total,
            "run_memory_usage_megabytes": run_bytes / 1e6,
        }
        for device in range(torch.cuda.device_count()):
            if not torch.cuda.memory_reserved(device):
                continue  # to ask a device that this process does not use takes some hundred MB of it
            free, total = torch.cuda.mem_get_info(device)
            found[f"gpu_{device}_memory_usage_megabytes"] = (total - free) / 1e6
            found[f"gpu_{device}_memory_usage_percentage"] = 100.0 * (total - free) / total
            with suppress(ImportError, RuntimeError):  # no package, or no driver that tells
                found[f"gpu_{device}_utilization_percentage"] = float(torch.cuda.utilization(device))
        return {f"system/{name}": value for name, value in found.items()}


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
