"""The models of a run, for sampling and learning alike: the actor, its tokens, the sampled distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitask_rl.lazy import lazy_names

if TYPE_CHECKING:
    from multitask_rl.models.actor import Actor
    from multitask_rl.models.rope import scale_rope

__all__ = ["Actor", "get_actor_critic", "scale_rope"]

__getattr__, __dir__ = lazy_names(
    globals(),
    {
        "Actor": "multitask_rl.models.actor",
        "get_actor_critic": "multitask_rl.api.adapters",
        "scale_rope": "multitask_rl.models.rope",
    },
)
