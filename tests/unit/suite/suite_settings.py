"""Settings small enough for tests: models that learn nothing, made in a second."""

from multitask_rl_tasks.suite.settings import (
    JudgeSettings,
    ModelSize,
    RewardModelSettings,
    WarmStartSettings,
    WarmTask,
)

SIZE = ModelSize(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)


def warm_start_settings(**changes: object) -> WarmStartSettings:
    settings: dict[str, object] = {
        "tasks": {
            "arithmetic": WarmTask(share=1.0, corruption=0.5),
            "code": WarmTask(share=1.0, corruption=0.5, control_levels=3, control_signal=0.5),
        },
        "size": SIZE,
        "steps": 12,
        "batch_size": 8,
    }
    return WarmStartSettings(**(settings | changes))


def reward_model_settings() -> RewardModelSettings:
    return RewardModelSettings(size=SIZE, num_examples=64, noise=0.25, epochs=1)


def classifier_settings(**changes: object) -> JudgeSettings:
    settings: dict[str, object] = {"size": SIZE, "num_examples": 64, "noise": 0.05, "epochs": 1}
    return JudgeSettings(**(settings | changes))
