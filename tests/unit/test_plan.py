"""What a plan tells about tasks that fit together badly."""

from __future__ import annotations

import pytest

from multitask_rl.config.task import TaskSpec
from multitask_rl.plan import scale_warning
from multitask_rl.task_run import build_algorithms


def _warning(**types: tuple[str, dict[str, str]]) -> str:
    specs = {
        name: TaskSpec(name=name, type=kind, algorithm_config=config)
        for name, (kind, config) in types.items()
    }
    return scale_warning(build_algorithms(specs))


def test_algorithms_with_gradients_of_another_size_are_named() -> None:
    warning = _warning(hard=("dr_grpo", {}), easy=("grpo", {}), voice=("reinforce_pp", {}))
    assert "tasks hard have unscaled" in warning
    assert "than easy, voice;" in warning


@pytest.mark.parametrize(
    "types",
    [
        {"a": ("dr_grpo", {}), "b": ("dr_grpo", {})},
        {"a": ("grpo", {}), "b": ("ppo", {}), "c": ("reward_conditioned", {})},
        {"a": ("dr_grpo", {"normalisation": "task", "aggregation": "token"}), "b": ("grpo", {})},
    ],
)
def test_tasks_of_one_kind_are_not_warned_of(types: dict[str, tuple[str, dict[str, str]]]) -> None:
    assert _warning(**types) == ""
