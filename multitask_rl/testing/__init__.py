"""Contract suites and public fakes for plugin authors (``testing.engine`` needs torch)."""

from __future__ import annotations

from multitask_rl.testing.builders import make_evaluation, make_prompt, make_rollout
from multitask_rl.testing.check import (
    assert_algorithm_contract,
    assert_contract,
    assert_guard_contract,
    assert_scheduler_contract,
    assert_task_contract,
)
from multitask_rl.testing.contract import assert_constraint_contract, assert_reward_contract
from multitask_rl.testing.environment import assert_environment_contract
from multitask_rl.testing.fakes import FakeEngine

__all__ = [
    "FakeEngine",
    "assert_algorithm_contract",
    "assert_constraint_contract",
    "assert_contract",
    "assert_environment_contract",
    "assert_guard_contract",
    "assert_reward_contract",
    "assert_scheduler_contract",
    "assert_task_contract",
    "make_evaluation",
    "make_prompt",
    "make_rollout",
]
