"""Checks before a run that every trained task can have advantages other than 0. Does not import torch."""

from __future__ import annotations

from multitask_rl.algorithms.base import Algorithm
from multitask_rl.config.task import TaskSpec
from multitask_rl.errors import ConfigError


def check_learnable(spec: TaskSpec, algorithm: Algorithm, group_size: int | None) -> None:
    """Refuse a trained task whose advantages are always 0; without ``group_size`` groups are not checked.

    Raises:
        ConfigError: the type trains nothing, ``group_size`` is too small for it, or all weights are 0.
    """
    if spec.evaluation_only:
        return
    where = spec.where
    if not algorithm.trains:
        raise ConfigError(f"{where}.type: {spec.type} trains nothing; set evaluation_only: true")
    # Rejected attempts stand beside the accepted one, so that a group of one may hold several.
    has_attempts = algorithm.trains_rejected and any(c.mode == "reject" for c in spec.judged)
    if group_size is not None and group_size < algorithm.min_group_size and not has_attempts:
        raise ConfigError(
            f"{where}.group_size: {spec.type} compares the responses to a prompt with each other, so nothing "
            f"could be learnt with group_size {group_size}; set at least {algorithm.min_group_size} (here or "
            "as batch.group_size), or take another type, e.g. ppo"
        )
    if not algorithm.needs_reward:
        return
    costs = [c for c in spec.judged if c.mode != "penalty" or c.weight]
    # With rewards, mode reject changes no reward: the response is left out. Without, the reward is 1 - cost.
    pays = any(c.mode != "reject" for c in costs) if spec.rewards else bool(costs)
    pays = pays or any(reward.weight for reward in spec.rewards)
    if (spec.rewards or spec.judged) and not pays and not algorithm.adds_reward:
        raise ConfigError(
            f"{where}: everything that judges a response has weight 0 (is only measured), so nothing could "
            "be learnt; give a reward another weight, or set evaluation_only: true"
        )


def learnable_warnings(spec: TaskSpec, algorithm: Algorithm) -> list[str]:
    """Warn of a trained task that can learn only if its constraint grades responses that it accepts."""
    is_judged_alone = bool(spec.judged) and not spec.rewards and algorithm.needs_reward
    only_rejects = all(c.mode == "reject" for c in spec.judged) and not algorithm.trains_rejected
    if spec.evaluation_only or not (is_judged_alone and only_rejects):
        return []
    return [
        "rejected responses are not trained on, and without rewards all accepted ones are worth the same "
        "unless the constraint grades them; take type constrained_decoding, which learns from rejected "
        "responses, or mode: penalty"
    ]
