"""PPO from settings alone."""

from multitask_rl.api.rl_trainer import PPOTrainer
from multitask_rl.config.ppo import PPOConfig, get_ppo_default_config

__all__ = ["PPOConfig", "PPOTrainer", "get_ppo_default_config"]
