"""Batches under a token budget."""

from multitask_rl.api.batch_sampler import DynamicBatchSampler

__all__ = ["DynamicBatchSampler"]
