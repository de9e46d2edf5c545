"""``profile: torch``: a trace of a few steps, and where the memory goes.

``<output_dir>/profile/trace.json.gz`` opens in Perfetto (ui.perfetto.dev) or chrome://tracing; it holds the
trainer's own thread. ``<output_dir>/profile/memory.json`` is written when the run closes. The traced steps
are slower than others; stage timers (``timeline.jsonl``) are always on.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multitask_rl.training.learner import Learner

__all__ = ["StepProfiler", "memory_numbers", "memory_report"]

logger = logging.getLogger(__name__)

WARM_UP, TRACED = 2, 3
"""Steps before the trace begins (the profiler itself warms up in the last of them), steps in it."""
MIB = 2.0**20


class StepProfiler:
    """Traces steps ``WARM_UP`` to ``WARM_UP + TRACED - 1`` of the process.

    Args:
        directory: where the files go.
        parameters: of the actor, for the memory report.
        learner: for the same.
    """

    def __init__(self, directory: Path, parameters: Iterable[nn.Parameter], learner: Learner) -> None:
        self._directory = directory
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

    @property
    def trace(self) -> Path:
        """The trace's file."""
        return self._directory / "trace.json.gz"

    def _write(self, profile: Any) -> None:
        profile.export_chrome_trace(str(self.trace))
        logger.info("profile: %d steps traced in %s", TRACED, self.trace)

    def step(self) -> None:
        """A training step ended."""
        self._profile.step()

    def close(self) -> None:
        """Write what was traced if the run was shorter, and the memory report."""
        memory = memory_report(self._parameters, self._learner.backend.optimizer_bytes)
        self._profile.stop()
        if not self.trace.exists():
            logger.warning("profile: no trace, the run made fewer than %d steps", WARM_UP + 1)
        (self._directory / "memory.json").write_text(json.dumps(memory, indent=1) + "\n")


def memory_report(parameters: Iterable[nn.Parameter], optimizer_bytes: int) -> dict[str, float]:
    """Return MiB by what holds them: the process now and at most, weights, gradients, optimizer state."""
    weights = list(parameters)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = {
        "rss_mb": _rss_bytes() / MIB,
        "rss_peak_mb": peak / (MIB if sys.platform == "darwin" else 1024.0),
        "weights_mb": _num_bytes(weights) / MIB,
        "gradients_mb": _num_bytes(w.grad for w in weights if w.grad is not None) / MIB,
        "optimizer_mb": optimizer_bytes / MIB,
    }
    return {**report, **memory_numbers()}


def memory_numbers() -> dict[str, float]:
    """Return the step's ``memory/peak_mb`` over all GPUs, and begin a new peak; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    peak = 0
    for device in range(torch.cuda.device_count()):
        peak += torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_mb": peak / MIB}


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _rss_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0
