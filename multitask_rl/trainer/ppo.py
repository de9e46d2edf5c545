"""PPO from settings alone."""

from multitask_rl.config.ppo import PPOConfig, get_ppo_default_config
from multitask_rl.lazy import lazy_names

__all__ = ["PPOConfig", "PPOTrainer", "get_ppo_default_config"]  # noqa: F822 - loaded on first use

# a name, not an import: what opens a trainer lies above it
__getattr__, __dir__ = lazy_names(globals(), {"PPOTrainer": "multitask_rl.api.rl_trainer"})
