"""What a run is: dataclasses that hold every default, and the tasks file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitask_rl.lazy import lazy_names

if TYPE_CHECKING:
    from multitask_rl.config.ppo import PPOConfig, get_ppo_default_config

__all__ = ["PPOConfig", "get_ppo_default_config"]

__getattr__, __dir__ = lazy_names(globals(), dict.fromkeys(__all__, "multitask_rl.config.ppo"))
