"""Small builders of records and batches for the algorithm tests."""

import torch

from multitask_rl.algorithms.base import CreditBatch
from multitask_rl.records import Prompt, Rollout, SamplingParams, Scored


def scored(reward, *, prompt_ids=(7, 8), response_ids=(1, 2, 3), sample=0, draw=0, **rollout_fields):
    prompt = Prompt(
        task="toy",
        prompt_id=f"toy/{draw}",
        draw=draw,
        row={"answer": object()},  # rows need not be JSON-able
        text="prompt",
        prompt_ids=list(prompt_ids),
    )
    rollout = Rollout(
        prompt=prompt,
        sample=sample,
        response_ids=list(response_ids),
        rollout_logprobs=[-1.0] * len(response_ids),
        sampling=SamplingParams(max_new_tokens=10, stop=("\n",)),
        **rollout_fields,
    )
    return Scored(rollout=rollout, reward=reward)


def credit_batch(rewards, groups=None, lengths=None, **others):
    """Return a batch of float64 rewards; by default one group of one-token responses."""
    count = len(rewards)
    return CreditBatch(
        rewards=torch.as_tensor(rewards, dtype=torch.float64),
        groups=torch.zeros(count, dtype=torch.int64)
        if groups is None
        else torch.as_tensor(groups, dtype=torch.int64),
        lengths=torch.ones(count, dtype=torch.int64)
        if lengths is None
        else torch.as_tensor(lengths, dtype=torch.int64),
        **others,
    )
