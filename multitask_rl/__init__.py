"""multitask_rl: one shared actor, many tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitask_rl.lazy import lazy_names

if TYPE_CHECKING:
    from multitask_rl.api.adapters import HfModelAdapter, VLLMActorModel, get_actor_critic, vLLMAdapter
    from multitask_rl.api.chunked_generator import ChunkedGenerator
    from multitask_rl.api.rl_trainer import PPOTrainer, RLTrainer
    from multitask_rl.api.role_updater import PPORoleUpdater
    from multitask_rl.config.ppo import PPOConfig
    from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
    from multitask_rl.data import get_dataloader
    from multitask_rl.guard.safety_guard import SafetyGuard
    from multitask_rl.step.flow import DataFlow, Stage
    from multitask_rl.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "ChunkedGenerator",
    "DataFlow",
    "DynamicTaskWeightScheduler",
    "HfModelAdapter",
    "PPOConfig",
    "PPORoleUpdater",
    "PPOTrainer",
    "RLTrainer",
    "SafetyGuard",
    "Stage",
    "Trainer",
    "VLLMActorModel",
    "__version__",
    "get_actor_critic",
    "get_dataloader",
    "vLLMAdapter",
]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "ChunkedGenerator": "multitask_rl.api.chunked_generator",
        "DataFlow": "multitask_rl.step.flow",
        "DynamicTaskWeightScheduler": "multitask_rl.curriculum.scheduler",
        "HfModelAdapter": "multitask_rl.api.adapters",
        "PPOConfig": "multitask_rl.config.ppo",
        "PPORoleUpdater": "multitask_rl.api.role_updater",
        "PPOTrainer": "multitask_rl.api.rl_trainer",
        "RLTrainer": "multitask_rl.api.rl_trainer",
        "SafetyGuard": "multitask_rl.guard.safety_guard",
        "Stage": "multitask_rl.step.flow",
        "Trainer": "multitask_rl.trainer",
        "VLLMActorModel": "multitask_rl.api.adapters",
        "get_actor_critic": "multitask_rl.api.adapters",
        "get_dataloader": "multitask_rl.data",
        "vLLMAdapter": "multitask_rl.api.adapters",
    },
)
