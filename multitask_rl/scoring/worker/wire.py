"""Rollouts without their tokens, for functions that read text only: sending is mostly the cost of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from multitask_rl.records import Prompt, Rollout

__all__ = ["without_tokens"]


def without_tokens(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return copies with empty ``prompt_ids``, ``response_ids``, ``rollout_logprobs``; prompts stay one."""
    prompts: dict[int, Prompt] = {}
    slim = []
    for rollout in rollouts:
        prompt = prompts.get(id(rollout.prompt))
        if prompt is None:
            prompt = prompts[id(rollout.prompt)] = replace(rollout.prompt, prompt_ids=[])
        slim.append(
            Rollout(
                prompt=prompt,
                sample=rollout.sample,
                attempt=rollout.attempt,
                response=rollout.response,
                finish_reason=rollout.finish_reason,
                policy_version=rollout.policy_version,
                sampling=rollout.sampling,
                verdicts=rollout.verdicts,
            )
        )
    return slim
