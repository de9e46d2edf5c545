"""Whether a task can teach its algorithm anything: one that cannot is refused, not run in vain."""

from __future__ import annotations

from multitask_rl.algorithms.base import Algorithm
from multitask_rl.config.task import TaskSpec
from multitask_rl.errors import ConfigError

__all__ = ["check_learnable"]


def check_learnable(spec: TaskSpec, algorithm: Algorithm, group_size: int | None) -> None:
    """Refuse a trained task whose advantages are 0 whatever is sampled.

    Args:
        spec: the task.
        algorithm: its algorithm.
        group_size: rollouts per prompt; None = not known yet.

    Raises:
        ConfigError: groups too small for the algorithm, or nothing that a response could earn or lose.
    """
    if spec.evaluation_only:
        return
    where = f"{spec.source or 'tasks'}: tasks.{spec.name}"
    # Refused attempts stand beside the accepted one, so that a group of one may hold several.
    has_attempts = algorithm.trains_rejected and any(c.mode == "reject" for c in spec.judged)
    if group_size is not None and group_size < algorithm.min_group_size and not has_attempts:
        raise ConfigError(
            f"{where}.group_size: {spec.type} compares the responses to a prompt with each other, so nothing "
            f"could be learnt with group_size {group_size}; set at least {algorithm.min_group_size} (here or "
            "as batch.group_size), or take another type, e.g. ppo"
        )
    if (spec.rewards or spec.judged) and not _pays(spec) and not algorithm.adds_reward:
        raise ConfigError(
            f"{where}: everything that judges a response has weight 0 (is only measured), so nothing could "
            "be learnt; give a reward another weight, or set evaluation_only: true"
        )


def _pays(spec: TaskSpec) -> bool:
    if any(reward.weight for reward in spec.rewards):
        return True
    costs = [c for c in spec.judged if c.mode != "penalty" or c.weight]
    # Beside rewards, what a constraint refuses is left out and costs nothing; alone it is 1 - cost.
    return any(c.mode != "reject" for c in costs) if spec.rewards else bool(costs)
