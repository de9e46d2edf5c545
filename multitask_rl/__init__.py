"""multitask_rl: one shared actor, many tasks.

Public names load on first use (PEP 562), so that importing the package imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multitask_rl.curriculum.scheduler import DynamicTaskWeightScheduler
    from multitask_rl.data import get_dataloader
    from multitask_rl.guard.safety_guard import SafetyGuard
    from multitask_rl.step.flow import DataFlow, Stage
    from multitask_rl.trainer import Trainer
    from multitask_rl.training.critic import get_actor_critic

__version__ = "0.1.0"

__all__ = [
    "DataFlow",
    "DynamicTaskWeightScheduler",
    "SafetyGuard",
    "Stage",
    "Trainer",
    "__version__",
    "get_actor_critic",
    "get_dataloader",
]

_HOME = {
    "DataFlow": "multitask_rl.step.flow",
    "DynamicTaskWeightScheduler": "multitask_rl.curriculum.scheduler",
    "SafetyGuard": "multitask_rl.guard.safety_guard",
    "Stage": "multitask_rl.step.flow",
    "Trainer": "multitask_rl.trainer",
    "get_actor_critic": "multitask_rl.training.critic",
    "get_dataloader": "multitask_rl.data",
}


def __getattr__(name: str) -> Any:
    """Import the public name ``name`` from the module it lives in."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
