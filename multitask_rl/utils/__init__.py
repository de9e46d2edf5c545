"""Tools for training loops of one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitask_rl.lazy import lazy_names

if TYPE_CHECKING:
    from multitask_rl.api.batch_sampler import DynamicBatchSampler
    from multitask_rl.api.chunked_generator import ChunkedGenerator
    from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler

__all__ = ["ChunkedGenerator", "DynamicBatchSampler", "DynamicTaskWeightScheduler"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "ChunkedGenerator": "multitask_rl.api.chunked_generator",
        "DynamicBatchSampler": "multitask_rl.api.batch_sampler",
        "DynamicTaskWeightScheduler": "multitask_rl.curriculum.scheduler",
    },
)
