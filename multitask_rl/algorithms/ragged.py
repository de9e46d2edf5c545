"""Sums, means and scans over samples laid end to end, without padding.

Axes: ``B`` samples, ``N`` tokens; sample ``b`` owns ``lengths[b]`` consecutive tokens (0 is allowed).
Every function is differentiable in its values and deterministic on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_tokens(lengths: Tensor, **tensors: Tensor | None) -> None:
    """Raise ``ValueError`` unless every given tensor is [N] with N the sum of ``lengths`` [B]."""
    num_tokens = int(lengths.sum())
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (num_tokens,):
            raise ValueError(
                f"{name} must have shape [{num_tokens}] (the sum of lengths), got {list(tensor.shape)}"
            )


def broadcast(per_sample: Tensor, lengths: Tensor) -> Tensor:
    """Return [N]: every token's value is that of its sample in ``per_sample`` [B].

    >>> broadcast(torch.tensor([5, 6, 7]), torch.tensor([2, 0, 1])).tolist()
    [5, 5, 7]
    """
    if per_sample.shape != lengths.shape:
        raise ValueError(f"per_sample {list(per_sample.shape)} and lengths {list(lengths.shape)} must be [B]")
    return per_sample.repeat_interleave(lengths)


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Return the sum of the values [N] of each segment, [num_segments]; 0 for one without values.

    ``segments`` [N] int64 are in 0 .. num_segments - 1, in any order (tokens to samples, samples to groups).

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3).tolist()
    [3.0, 0.0, 4.0]
    """
    return torch.zeros(num_segments, dtype=values.dtype, device=values.device).index_add(0, segments, values)


def segment_mean(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """Return the mean of the values of each segment, as ``segment_sum``."""
    counts = torch.bincount(segments, minlength=num_segments).clamp(min=1)
    return segment_sum(values, segments, num_segments) / counts.to(values.dtype)


def last_tokens(lengths: Tensor) -> Tensor:
    """Return the index in [N] of the last token of every sample that has one.

    >>> last_tokens(torch.tensor([2, 0, 3])).tolist()
    [1, 4]
    """
    return (lengths.cumsum(0) - 1)[lengths > 0]


def discounted_suffix_sum(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """Return ``y_t = sum_{k >= 0} decay^k x_{t+k}`` [N] of the values [N], within each sample.

    Doubling scan: after the pass with stride s, ``y_t`` holds the first 2s terms; O(N log T) work
    for the longest sample T, in place of T dependent steps.

    >>> discounted_suffix_sum(torch.ones(3), torch.tensor([2, 1]), 0.5).tolist()
    [1.5, 1.0, 1.0]
    """
    check_tokens(lengths, values=values)
    ends = broadcast(lengths.cumsum(0), lengths)
    tokens_after = ends - 1 - torch.arange(values.shape[0], device=values.device)
    longest = int(lengths.max()) if lengths.numel() else 0
    result, stride = values, 1
    while stride < longest:
        ahead = torch.cat([result[stride:], result.new_zeros(min(stride, result.shape[0]))])
        result = result + torch.where(tokens_after >= stride, ahead, 0.0) * decay**stride
        stride *= 2
    return result
